"""Rewards for length, counted in tokens: TRL hands every reward the sampled ids."""

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
    """0 up to `max_tokens` tokens, ``-penalty`` beyond.

    Source: the notebook recipe's length reward, here counted in tokens.

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
    """0 from `min_tokens` tokens of reasoning on, ``-penalty`` below: guessing must not pay.

    Source: none of the recipes; a guard for rewards that make short completions pay.

    Tokens of reasoning are the completion's tokens times the share of its characters that stands
    in the reasoning (before the answer, for ``boxed``). White space is no reasoning.

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
    """The number of characters that are not white space."""
    return sum(map(len, text.split()))
