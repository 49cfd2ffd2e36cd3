"""Rewards for length, in tokens. TRL passes the sampled token ids to every reward."""

from collections.abc import Sequence
from typing import Any

from rewards.completions import Completion, Scores, formats_of, texts_of
from rewards.grading import BOX, reasoning_text


def completion_length(
    completions: list[Completion],
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int = 100,
    penalty: float = 0.5,
    **kwargs: Any,
) -> Scores:
    """Score 0 up to `max_tokens` tokens, ``-penalty`` above.

    Source: the length reward of the notebook recipe, counted in tokens.

    Args:
        completions: B completions.
        completion_ids: the token ids of each.
        max_tokens: the longest completion without a penalty, in tokens.
        penalty: subtracted from longer ones.

    >>> completion_length(["", ""], completion_ids=[[7] * 100, [7] * 101])
    [0.0, -0.5]
    """
    rows = zip(completions, completion_ids, strict=True)
    return [0.0 if len(ids) <= max_tokens else -penalty for _, ids in rows]


def reasoning_length(
    completions: list[Completion],
    completion_ids: Sequence[Sequence[int]],
    prompt_format: str | Sequence[str] = "xml",
    min_tokens: int = 20,
    penalty: float = 0.5,
    **kwargs: Any,
) -> Scores:
    """Score 0 for at least `min_tokens` tokens of reasoning, else ``-penalty``.

    Source: ours. It keeps guessing from paying where other rewards favor short completions.

    Reasoning tokens are the completion's tokens times the share of its characters that are part of
    the reasoning (before the answer, for ``boxed``). White space does not count.

    Args:
        completions: B completions.
        completion_ids: the token ids of each.
        prompt_format: one name for all, or B names.
        min_tokens: the shortest reasoning without a penalty, in tokens.
        penalty: subtracted from shorter ones.

    >>> guess = "<answer>18</answer>"
    >>> thought = "<thinking>She sells 9 eggs for $2 each.</thinking>" + guess
    >>> reasoning_length([guess, thought], completion_ids=[[7] * 8, [7] * 60])
    [-0.5, 0.0]
    """
    formats = formats_of(prompt_format, len(completions))
    rows = zip(texts_of(completions), completion_ids, formats, strict=True)
    return [
        0.0 if len(ids) * _reasoning_share(text, name) >= min_tokens else -penalty
        for text, ids, name in rows
    ]


def _reasoning_share(text: str, prompt_format: str) -> float:
    if prompt_format == "boxed":
        reasoning = text[: max(text.rfind(BOX), 0)]
    else:
        reasoning = reasoning_text(text, prompt_format)
    return _written(reasoning) / max(_written(text), 1)


def _written(text: str) -> int:
    """Count the characters that are not white space."""
    return sum(map(len, text.split()))
