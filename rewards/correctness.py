"""Rewards for a correct answer. All of them call `rewards.grading`, the only judge."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.completions import Completion, Scores, formats_of, texts_of
from rewards.grading import (
    GoldError,
    answer_boxes,
    answer_elements,
    is_correct,
    parse_gold,
    visible_text,
)

FORMAT_WEIGHT, ANSWER_WEIGHT = 0.2, 0.8
LogMetric = Callable[[str, float], None]


def answer_correctness(
    completions: list[Completion],
    answer: Sequence[str],
    prompt_format: str | Sequence[str] = "xml",
    **kwargs: Any,
) -> Scores:
    """Score 1 if the answer equals the gold answer, else 0.

    Source: `rewards.grading.is_correct`, with the rules of `prompt_format`.

    Args:
        completions: B completions.
        answer: B raw GSM8K answers. Without a valid gold answer, the score is None.
        prompt_format: one name for all, or B names.

    >>> answer_correctness(["<answer>18</answer>", "<answer>18</answer>"], ["#### 18", "?"])
    [1.0, None]
    """
    formats = formats_of(prompt_format, len(completions))
    rows = zip(texts_of(completions), answer, formats, strict=True)
    return [_correctness(text, gold, name) for text, gold, name in rows]


def boxed_correctness(
    completions: list[Completion], answer: Sequence[str], **kwargs: Any
) -> Scores:
    r"""Score 1 if the last ``\boxed{...}`` equals the gold answer, else 0.

    Source: `rewards.grading.is_correct`, with the rules of the ``boxed`` format.

    Args:
        completions: B completions.
        answer: B raw GSM8K answers. Without a valid gold answer, the score is None.

    >>> boxed_correctness([r"9 * 2 = \boxed{18}", "18"], ["#### 18", "#### 18"])
    [1.0, 0.0]
    """
    rows = zip(texts_of(completions), answer, strict=True)
    return [_correctness(text, gold, "boxed") for text, gold in rows]


def gsm8k_weighted(
    completions: list[Completion],
    answer: Sequence[str],
    prompt_format: str | Sequence[str] = "xml",
    log_metric: LogMetric | None = None,
    **kwargs: Any,
) -> Scores:
    """Score 0.2 * format + 0.8 * answer, the reward of the CS336 GSM8K recipe.

    Format is 1 for an answer element or a box outside the reasoning, 0.5 for a number without
    either, else 0. Answer is the strict verdict on that element or box. So a bare number earns half
    of the format part and nothing else. The original recipe also pays for a bare number if it is
    correct, which does not teach the model to commit to an answer.

    Args:
        completions: B completions.
        answer: B raw GSM8K answers. Without a valid gold answer, the score is None.
        prompt_format: one name for all, or B names.
        log_metric: logs the mean of each part.

    >>> gsm8k_weighted(["<answer>18</answer>", "<answer>19</answer>", "18"], ["#### 18"] * 3)
    [1.0, 0.2, 0.1]
    """
    formats = formats_of(prompt_format, len(completions))
    rows = zip(texts_of(completions), answer, formats, strict=True)
    parts = [_format_and_answer(text, gold, name) for text, gold, name in rows]
    judged = [part for part in parts if part is not None]
    if log_metric and judged:
        log_metric("gsm8k_weighted/format", sum(part[0] for part in judged) / len(judged))
        log_metric("gsm8k_weighted/answer", sum(part[1] for part in judged) / len(judged))
    return [
        None if part is None else FORMAT_WEIGHT * part[0] + ANSWER_WEIGHT * part[1]
        for part in parts
    ]


def _correctness(text: str, gold: str, prompt_format: str) -> float | None:
    try:
        return float(is_correct(text, gold, prompt_format))
    except GoldError:
        return None


def _format_and_answer(text: str, gold: str, prompt_format: str) -> tuple[float, float] | None:
    if not _is_gold(gold):
        return None
    visible = visible_text(text, prompt_format)
    if prompt_format != "boxed" and answer_elements(visible):
        return 1.0, float(is_correct(text, gold, prompt_format))
    if answer_boxes(visible):
        return 1.0, float(is_correct(text, gold, "boxed"))
    return (0.5 if re.search("[0-9]", text) else 0.0), 0.0


def _is_gold(gold: str) -> bool:
    try:
        parse_gold(gold)
    except GoldError:
        return False
    return True
