"""Rewards by position alone, so that the share of the groups with signal is known."""

from typing import Any

# Rewards of a group with signal as the quickstart gives them: 0.2 for the format, 1 for the answer.
SIGNAL = (1.2, 0.2, 0.0, 0.2, 0.0, 1.2, 0.2, 0.2)


def by_position(count: int, group: int, signal: float) -> list[float]:
    """Score `count` completions in groups; only the first groups, a share `signal`, have signal."""
    n_signal = round(signal * (count // group))
    return [
        SIGNAL[row % group % len(SIGNAL)] if row // group < n_signal else 0.0
        for row in range(count)
    ]


def all_groups(completions: list[Any], **_: Any) -> list[float]:
    """Give every group of the quickstart signal."""
    return by_position(len(completions), len(SIGNAL), 1.0)


def a_quarter(completions: list[Any], **_: Any) -> list[float]:
    """Give a quarter of the quickstart's groups signal."""
    return by_position(len(completions), len(SIGNAL), 0.25)
