"""Scoring without a model: verdicts, statistics, tables. Does not import torch."""

from sologrpo.scoring.table import print_ending, print_formats, print_results

__all__ = ["print_ending", "print_formats", "print_results"]
