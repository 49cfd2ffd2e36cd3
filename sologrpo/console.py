"""Printing on the console: lines, warnings, durations, and less noise from libraries."""

import logging
import math
import warnings

from rich.console import Console


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """One line as it is: not wrapped, so that a log file can be searched for it, nor coloured."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def quiet_libraries() -> None:
    """Show warnings, but no progress bars of loading and no deprecation that is TRL's to mend."""
    import datasets  # `--regrade` and the report load neither
    import transformers

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    # TRL 1.16 still sets the old name of activation_checkpointing.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")


def print_warning(console: Console, text: str) -> None:
    """One line that begins with `warning`."""
    print_line(console, f"warning  {text}", "yellow")


def duration(seconds: float) -> str:
    """Minutes, begun ones counted, or hours.

    >>> duration(61), duration(30_000)
    ('2 min', '8.3 h')
    """
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
