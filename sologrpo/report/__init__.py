"""Write the report of a run directory. Reads files only, and imports no torch."""

from sologrpo.report.report import write_report

__all__ = ["write_report"]
