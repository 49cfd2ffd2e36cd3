"""Rewards for the format of a completion; only `strict_format` works with every prompt format."""

import re
from collections.abc import Sequence
from typing import Any

from rewards.completions import Completion, Scores, formats_of, texts_of
from rewards.grading import answer_elements, answers_in, format_of, visible_text
from sologrpo.prompts import BOX, CLOSE, MARK, OPEN, XML

_START, _MIDDLE, _END = XML.completion.format(thinking="\0", answer="\0").split("\0")
_TAGS = tuple(re.findall("<.*?>", XML.completion))
_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")


def has_strict_format(text: str) -> bool:
    """Check that the text is one thinking and one answer block, with each tag on its own line.

    >>> has_strict_format("<thinking>\\n9 * 2\\n</thinking>\\n<answer>\\n18\\n</answer>")
    True
    >>> has_strict_format("<thinking>9 * 2</thinking>\\n<answer>18</answer>")
    False
    """
    thinking, middle, answer = text.partition(_MIDDLE)
    return (
        bool(middle)
        and thinking.startswith(_START)
        and answer.endswith(_END)
        and all(text.count(tag) == 1 for tag in _TAGS)
    )


def has_asked_format(text: str, prompt_format: str) -> bool:
    r"""Check that the text has the format that its prompt asks for.

    ``xml``: `has_strict_format`. ``r1_zero``: reasoning, ``</think>``, one answer element, nothing
    else. ``boxed``: one box outside the reasoning. ``lm_eval``: one ``####``, in the last line.

    >>> has_asked_format("9 * 2 = 18 </think> <answer> 18 </answer>", "r1_zero")
    True
    >>> has_asked_format(r"9 * 2 = \boxed{18}", "boxed")
    True
    """
    asked = format_of(prompt_format)
    if asked.mark == MARK:
        return text.count(MARK) == 1 and text.strip().rpartition("\n")[2].startswith(MARK)
    if asked.mark == BOX:
        return len(answers_in(visible_text(text, prompt_format), prompt_format)) == 1
    if asked.opens_reasoning:
        answer = text.partition("</think>")[2].strip()
        return (
            answer.startswith(OPEN)
            and answer.endswith(CLOSE)
            and all(text.count(tag) == 1 for tag in ("</think>", OPEN, CLOSE))
            and "<think>" not in text
        )
    return has_strict_format(text)


def has_trailing_text(text: str) -> bool:
    """Check whether anything but white space follows the last ``</answer>``.

    >>> has_trailing_text("<answer>18</answer> I hope this helps!")
    True
    >>> has_trailing_text("no tag, so nothing can follow it")
    False
    """
    _, tag, tail = text.rpartition(CLOSE)
    return bool(tag and tail.strip())


def is_integer_answer(text: str) -> bool:
    """Check that the only answer element outside the reasoning holds just an integer.

    >>> is_integer_answer("<answer> 1,200 </answer>")
    True
    >>> is_integer_answer("<answer>18.0</answer>")
    False
    """
    elements = answer_elements(visible_text(text, "xml"))
    return len(elements) == 1 and bool(_INTEGER.fullmatch(elements[0].strip()))


def strict_format(
    completions: list[Completion], prompt_format: str | Sequence[str] = "xml", **kwargs: Any
) -> Scores:
    r"""Score +1 if the completion has the format that its prompt asks for, else -1.

    >>> strict_format(["<thinking>\n9 * 2\n</thinking>\n<answer>\n18\n</answer>", "18"])
    [1.0, -1.0]
    >>> strict_format([r"9 * 2 = \boxed{18}", "9 * 2 = 18\n#### 18"], ["boxed", "boxed"])
    [1.0, -1.0]
    """
    formats = formats_of(prompt_format, len(completions))
    rows = zip(texts_of(completions), formats, strict=True)
    return [1.0 if has_asked_format(text, name) else -1.0 for text, name in rows]


def trailing_text(completions: list[Completion], **kwargs: Any) -> Scores:
    """Score 0 if the completion ends with its answer element, else -0.5.

    A missing ``</answer>`` scores -0.5 too, so that leaving it out does not pay.

    >>> trailing_text(["<answer>18</answer>", "<answer>18</answer> Done.", "18"])
    [0.0, -0.5, -0.5]
    """
    return [
        0.0 if CLOSE in text and not has_trailing_text(text) else -0.5
        for text in texts_of(completions)
    ]


def integer_answer(completions: list[Completion], **kwargs: Any) -> Scores:
    """Score +1 if the only answer element holds just an integer, else -1.

    >>> integer_answer(["<answer>18</answer>", "<answer>$18</answer>"])
    [1.0, -1.0]
    """
    return [1.0 if is_integer_answer(text) else -1.0 for text in texts_of(completions)]
