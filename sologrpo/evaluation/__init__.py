"""Greedy evaluation on the test split, before and after training."""

from sologrpo.evaluation.answer import evaluate_greedily
from sologrpo.evaluation.evaluate import evaluate_formats, evaluate_models

__all__ = ["evaluate_formats", "evaluate_greedily", "evaluate_models"]
