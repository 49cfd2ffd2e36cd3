"""Greedy evaluation on the test split, before and after training."""

from sologrpo.evaluation.evaluate import evaluate, evaluate_greedily, evaluate_precisions
from sologrpo.evaluation.precisions import add_adapter, load_untrained

__all__ = ["add_adapter", "evaluate", "evaluate_greedily", "evaluate_precisions", "load_untrained"]
