"""Printing on the console: lines, warnings, durations, and less noise from libraries."""

import logging
import math
import warnings
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console
from rich.segment import Segment

from sologrpo.base.redact import redact_text
from sologrpo.base.text import escaped
from sologrpo.startup import drop_output


class Terminal(Console):
    """Print text from anywhere as it is: no markup, and control characters escaped.

    rich 15.0 removes few of these (control.py:14). Its `_render_buffer` (console.py:2132) gets all
    text that is printed, also of tables and progress bars, before the colours are added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Work on without the output."""
        drop_output()

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(escaped(part.text), part.style) for part in buffer
        )


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print one line unchanged: no wrapping, which would hide it from a search, and no markup."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def quiet_libraries() -> None:
    """Hide progress bars of loading, and a deprecation that only TRL can fix; keep warnings.

    What this project logs is formatted like what it prints: a line, or `warning` and a line.
    """
    import datasets  # slow to import, and some commands need neither
    import transformers

    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("sologrpo").setLevel(logging.INFO)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    # TRL 1.16 still sets the old name of activation_checkpointing.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if not record.name.startswith("sologrpo."):
            return super().format(record)
        prefix = "warning  " if record.levelno >= logging.WARNING else ""
        return prefix + record.getMessage()


def print_warning(console: Console, text: str) -> None:
    """Print one line that begins with `warning`."""
    print_line(console, f"warning  {redact_text(text)}", "yellow")


def duration(seconds: float) -> str:
    """Format seconds as minutes, rounded up, or as hours.

    >>> duration(61), duration(30_000)
    ('2 min', '8.3 h')
    """
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def time_left(seconds: float, now: datetime | None = None) -> str:
    """Format a remaining time, with the time of day when it is over.

    >>> time_left(800, datetime(2026, 3, 4, 9, 30)), time_left(30_000, datetime(2026, 3, 4, 18))
    ('14 min left, until 09:43', '8.3 h left, until Thu 02:20')
    """
    now = now or datetime.now()
    end = now + timedelta(seconds=seconds)
    clock = end.strftime("%H:%M" if end.date() == now.date() else "%a %H:%M")
    return f"{duration(seconds)} left, until {clock}"


def gibibytes(size: float) -> str:
    """Format a number of bytes in GiB, or in MiB below a quarter of a GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table without lines: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
