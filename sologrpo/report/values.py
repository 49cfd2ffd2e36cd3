"""Read what is there, choose what fits on a page, and format values for it."""

import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sologrpo.base.errors import InputError
from sologrpo.base.redact import redact

T = TypeVar("T")
Record = dict[str, Any]
Rows = list[tuple[str, str]]

MAX_TEXT_CHARS = 20_000  # of one prompt or completion, so that a runaway one stays readable


def read_or_note(read: Callable[[Path], T], path: Path, missing: T, notes: list[str]) -> T:
    """Read a file that may be missing or, which adds a note, damaged or unfinished."""
    try:
        return read(path) if path.exists() else missing
    except InputError as error:
        notes.append(str(error))
        return missing


def spread(items: Sequence[T], count: int) -> list[T]:
    """Choose at most `count` evenly spaced items, the first and the last among them.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= count:
        return [*items]
    gap = (len(items) - 1) / max(count - 1, 1)
    return [items[round(i * gap)] for i in range(count)]


def flatten(record: Record, prefix: str = "") -> Rows:
    """List a nested mapping as dotted names and printable values, with secrets hidden.

    >>> flatten({"packages": {"trl": "1.16.0"}, "hub_token": "hf_x"})
    [('packages.trl', '1.16.0'), ('hub_token', '***')]
    """
    rows: Rows = []
    for key, value in redact(record).items():
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            rows.append((f"{prefix}{key}", shorten(text)))
    return rows


# --- text of the page: the templates escape it ------------------------------------------------


def shorten(text: str) -> str:
    """Cut a text to `MAX_TEXT_CHARS`, and append how many characters were cut."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}\n[… {len(text) - MAX_TEXT_CHARS:,} more characters]"


def line(value: Any, limit: int = 110) -> str:
    """Put a text, or what else a reward logged, on one line, cut with an ellipsis."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def label(text: str) -> str:
    """Escape a text for Plotly, which reads tags such as `<b>` and `<a>` in labels."""
    return html.escape(text)


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands commas."""
    return "n/a" if value is None else f"{value:,.{digits}f}"
