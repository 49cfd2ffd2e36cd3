"""Read values that may be missing or of the wrong type, and format them for the page."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
Rows = list[tuple[str, str]]

MAX_TEXT_CHARS = 20_000  # of one prompt or completion, so that a runaway one stays readable
MAX_NUMBER = 1e100  # sums and squares of larger ones overflow
SECRET_KEYS = {"hub_token", "push_to_hub_token"}  # reports are passed on
URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


# --- reading ---------------------------------------------------------------------------------


def finite(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else (null, NaN, true, text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None  # the comparison is false for NaN


def lookup(record: Any, *keys: str) -> Any:
    """Follow keys through nested mappings.

    Args:
        record: of any type; the result is None where it is not a mapping.
        keys: from the outside in.

    Example:
        >>> lookup({"tokens": {"p50": 87}}, "tokens", "p50")
        87
        >>> lookup({"tokens": None}, "tokens", "p50")
    """
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def mapping(value: Any) -> Record:
    """Return a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def interval(value: Any) -> tuple[float, float] | None:
    """Read a pair of numbers `[low, high]`."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (low, high)


def as_text(value: Any) -> str:
    """Return the text of a prompt or completion, cut to `MAX_TEXT_CHARS`.

    Args:
        value: a string, or a list of chat messages.

    Example:
        >>> as_text([{"role": "assistant", "content": "6 * 7 = 42"}])
        '6 * 7 = 42'
    """
    if isinstance(value, list):
        messages = [_message_text(message) for message in value]
        single = len(messages) == 1
        value = "\n\n".join(text if single else f"[{role}]\n{text}" for role, text in messages)
    return shorten("" if value is None else str(value), MAX_TEXT_CHARS)


def _message_text(message: Any) -> tuple[str, str]:
    """Return role and text of a chat message, whose content may be a list of typed parts."""
    if not isinstance(message, dict):
        return "message", str(message)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(lookup(part, "text") or "") for part in content)
    return str(message.get("role")), "" if content is None else str(content)


def shorten(text: str, limit: int) -> str:
    """Cut a text and append how many characters were cut.

    Args:
        text: of any length.
        limit: number of characters to keep.
    """
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters]"


def flatten(record: Record, prefix: str = "") -> Rows:
    """List a nested mapping as dotted names and printable values, with secrets hidden.

    Args:
        record: a config or an environment.
        prefix: put before each name.

    Example:
        >>> flatten({"packages": {"trl": "1.16.0"}, "hub_token": "hf_x"})
        [('packages.trl', '1.16.0'), ('hub_token', '(hidden)')]
    """
    rows: Rows = []
    for key, value in record.items():
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{prefix}{key}.")
        elif key in SECRET_KEYS and value:
            rows.append((f"{prefix}{key}", "(hidden)"))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            text = URL_PASSWORD.sub("(hidden)@", shorten(text, MAX_TEXT_CHARS))
            rows.append((f"{prefix}{key}", text))
    return rows


def fair_shares(counts: Iterable[int], limit: int) -> list[int]:
    """Choose how many of each count to take, without cutting the small ones.

    Args:
        counts: how many there are of each.
        limit: sum of what to take.

    Example:
        >>> fair_shares([3, 500, 20, 500], 123)
        [3, 50, 20, 50]
    """
    counts = list(counts)
    shares = [0] * len(counts)
    ascending = sorted(range(len(counts)), key=counts.__getitem__)
    for done, index in enumerate(ascending):
        shares[index] = min(counts[index], limit // (len(counts) - done))
        limit -= shares[index]
    return shares


# --- formatting: filters of the templates ----------------------------------------------------


def percent(value: float | None) -> str:
    """Format a fraction as a percentage with one decimal."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def percent_range(pair: Sequence[float]) -> str:
    """Format the two ends of an interval of fractions."""
    return f"{100 * pair[0]:.1f} to {100 * pair[1]:.1f}"


def points(value: float) -> str:
    """Format a difference of two fractions in percentage points."""
    return f"{100 * value:+.1f}"


def number(value: Any, digits: int = 0) -> str:
    """Format a number with thousands commas; return other values as they are."""
    found = finite(value)
    if found is None:
        return "n/a" if value is None else str(value)
    return f"{found:,.{digits}f}"


def p_value(value: float | None) -> str:
    """Format a p-value with two significant digits."""
    if value is None:
        return "n/a"
    return "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def first_line(text: Any, limit: int = 110) -> str:
    """Put a text on one line and cut it with an ellipsis."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
