"""Rewards for a correct answer. All of them call `rewards.grading`, the only judge."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.completions import Completion, Scores, formats_of, texts_of
from rewards.grading import (
    GoldError,
    Verdict,
    answer_boxes,
    answers_in,
    format_of,
    judge,
    parse_gold,
    visible_text,
)
from sologrpo.prompts import MARK

FORMAT_WEIGHT, ANSWER_WEIGHT = 0.2, 0.8
NO_GOLD = "the gold answer is not an integer after ####"
LogMetric = Callable[[str, float], None]
LogExtra = Callable[[str, list[str]], None]


def answer_correctness(
    completions: list[Completion],
    answer: Sequence[str],
    prompt_format: str | Sequence[str] = "xml",
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> Scores:
    """Score 1 if the answer equals the gold answer, else 0.

    The score is None without a valid gold answer in `answer`, the raw GSM8K answers.

    >>> answer_correctness(["<answer>18</answer>", "<answer>18</answer>"], ["#### 18", "?"])
    [1.0, None]
    """
    formats = formats_of(prompt_format, len(completions))
    rows = zip(texts_of(completions), answer, formats, strict=True)
    verdicts = [_verdict(*row) for row in rows]
    if log_extra:
        reasons = [NO_GOLD if verdict is None else verdict.reason for verdict in verdicts]
        log_extra("answer_correctness/reason", reasons)
    return [None if verdict is None else float(verdict.correct) for verdict in verdicts]


def gsm8k_weighted(
    completions: list[Completion],
    answer: Sequence[str],
    prompt_format: str | Sequence[str] = "xml",
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> Scores:
    """Score 0.2 * format + 0.8 * answer, the reward of the CS336 GSM8K recipe.

    Format is 1 for an answer element, a box or the ``####`` line of ``lm_eval`` outside the
    reasoning, 0.5 for a number without any, else 0. Answer is the strict verdict on what was found.
    The original recipe also pays for a bare number if it is correct, which does not teach the model
    to commit to an answer. The score is None without a valid gold answer.

    >>> gsm8k_weighted(["<answer>18</answer>", "<answer>19</answer>", "18"], ["#### 18"] * 3)
    [1.0, 0.2, 0.1]
    """
    formats = formats_of(prompt_format, len(completions))
    rows = zip(texts_of(completions), answer, formats, strict=True)
    parts = [_format_and_answer(text, gold, name) for text, gold, name in rows]
    judged = [part for part in parts if part is not None]
    if log_extra:
        reasons = [NO_GOLD if part is None else part[2] for part in parts]
        log_extra("gsm8k_weighted/reason", reasons)
    if log_metric and judged:
        log_metric("gsm8k_weighted/format", sum(part[0] for part in judged) / len(judged))
        log_metric("gsm8k_weighted/answer", sum(part[1] for part in judged) / len(judged))
    return [
        None if part is None else FORMAT_WEIGHT * part[0] + ANSWER_WEIGHT * part[1]
        for part in parts
    ]


def _verdict(text: str, gold: str, prompt_format: str) -> Verdict | None:
    try:
        return judge(text, gold, prompt_format)
    except GoldError:
        return None


def _format_and_answer(text: str, gold: str, prompt_format: str) -> tuple[float, float, str] | None:
    """Return both parts, and the reason of the verdict; None without a valid gold answer."""
    try:
        parse_gold(gold)
    except GoldError:
        return None
    visible = visible_text(text, prompt_format)
    if answers_in(visible, prompt_format):
        verdict = judge(text, gold, prompt_format)
    elif answer_boxes(visible):
        verdict = judge(text, gold, "boxed")
    else:
        place = "line" if format_of(prompt_format).mark == MARK else "element"
        return (0.5 if re.search("[0-9]", text) else 0.0), 0.0, f"no answer {place} and no box"
    return 1.0, float(verdict.correct), verdict.reason
