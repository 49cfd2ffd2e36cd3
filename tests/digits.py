"""A reward of a user, in a module that imports nothing heavy: each worker process imports it."""

from typing import Any

from rewards.completions import text_of


def digit_share(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that random weights can earn: the share of digits among the characters."""
    texts = map(text_of, completions)
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]
