"""Scoring without a model: verdicts, statistics, tables. Does not import torch."""

from sologrpo.scoring.regrade import regrade
from sologrpo.scoring.table import print_precisions, print_results

__all__ = ["print_precisions", "print_results", "regrade"]
