"""The report of a run directory. Reads files alone, and imports no torch."""

from sologrpo.report.report import write_report

__all__ = ["write_report"]
