"""Scoring without a model: verdicts, statistics, tables. Does not import torch."""

from sologrpo.scoring.records import Evaluated, Record, judge_answer, read_records
from sologrpo.scoring.regrade import regrade
from sologrpo.scoring.summary import compare, summarise
from sologrpo.scoring.table import print_precisions, print_results

__all__ = [
    "Evaluated",
    "Record",
    "compare",
    "judge_answer",
    "print_precisions",
    "print_results",
    "read_records",
    "regrade",
    "summarise",
]
