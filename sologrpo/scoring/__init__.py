"""Scoring without a model: records, statistics, the table of results. Imports no torch."""

from sologrpo.scoring.records import Record, compare, judge_answer, read_records, summarise
from sologrpo.scoring.regrade import regrade
from sologrpo.scoring.table import print_samples, print_table

__all__ = [
    "Record",
    "compare",
    "judge_answer",
    "print_samples",
    "print_table",
    "read_records",
    "regrade",
    "summarise",
]
