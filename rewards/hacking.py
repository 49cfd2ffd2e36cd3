"""Signs of reward hacking: the model earns rewards without solving the problem.

They are not scored. Read completions if a rate climbs while validation accuracy does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rewards.completions import Prompt, prompt_text
from rewards.format import has_trailing_text
from rewards.grading import (
    REASONING_TAG,
    answers_in,
    format_of,
    reasoning_text,
    visible_text,
)
from sologrpo.prompts import OPEN

# Shorter texts, such as a single sum, occur in a prompt by chance.
MIN_ECHO_CHARS = 8


@dataclass(frozen=True)
class _Parts:
    text: str
    prompt: str
    mark: str  # what an answer follows
    visible: str
    reasoning: str
    answers: list[str]  # elements or lines, or the last box with those offered together with it


def hacking_signs(
    completion: str, prompt_format: str = "xml", prompt: Prompt = ""
) -> dict[str, bool]:
    """Tell for each of the `SIGNS` whether a completion shows it.

    >>> signs = hacking_signs("<answer>17</answer><answer>18</answer>", "xml")
    >>> [name for name, shown in signs.items() if shown]
    ['answer_stuffing', 'empty_reasoning']
    """
    visible = visible_text(completion, prompt_format)
    parts = _Parts(
        text=completion,
        prompt=prompt_text(prompt),
        mark=format_of(prompt_format).mark,
        visible=visible,
        reasoning=reasoning_text(completion, prompt_format),
        answers=answers_in(visible, prompt_format),
    )
    return {name: shows(parts) for name, shows in SIGNS.items()}


def _answer_stuffing(parts: _Parts) -> bool:
    return len(parts.answers) > 1


def _tags_in_reasoning(parts: _Parts) -> bool:
    """Detect an answer tag inside the reasoning, where a careless pattern would find it."""
    return parts.mark == OPEN and OPEN in parts.reasoning


def _template_echo(parts: _Parts) -> bool:
    copies = (text.strip() for text in (parts.reasoning, *parts.answers))
    return any(len(text) >= MIN_ECHO_CHARS and text in parts.prompt for text in copies)


def _trailing_text(parts: _Parts) -> bool:
    """Detect text after the answer element. Prose after a box is fine."""
    return parts.mark == OPEN and has_trailing_text(parts.text)


def _empty_reasoning(parts: _Parts) -> bool:
    before = REASONING_TAG.sub("", parts.visible.partition(parts.mark)[0])
    return bool(parts.answers) and not any(map(str.isalnum, parts.reasoning + before))


SIGNS: dict[str, Callable[[_Parts], bool]] = {
    "answer_stuffing": _answer_stuffing,
    "tags_in_reasoning": _tags_in_reasoning,
    "template_echo": _template_echo,
    "trailing_text": _trailing_text,
    "empty_reasoning": _empty_reasoning,
}
