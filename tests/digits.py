"""Rewards of a user, in a module that imports nothing heavy: each worker process imports it."""

from itertools import count
from typing import Any

from rewards.completions import text_of


def digit_share(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that random weights can earn: the share of digits among the characters."""
    texts = map(text_of, completions)
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def share_in_additions(completions: list[Any], kind: list[str], **kwargs: Any) -> list[float]:
    """Give no signal to groups of subtractions, which are every second problem."""
    scores = zip(digit_share(completions), kind, strict=True)
    return [score if name == "add" else 0.0 for score, name in scores]


_CALLS = count(1)


def raises_at_the_second_step(completions: list[Any], **kwargs: Any) -> list[float]:
    if next(_CALLS) == 2:
        raise KeyError("no such unit")
    return digit_share(completions)
