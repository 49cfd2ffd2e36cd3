"""Convert prompts and completions to plain text: TRL passes strings or lists of chat messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
Prompt = Completion
Scores = list[float | None]


def text_of(completion: Completion) -> str:
    """Return the text of a completion: the string itself, or the content of its last message.

    >>> text_of([{"role": "assistant", "content": [{"type": "text", "text": "18"}]}])
    '18'
    """
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    return _content(completion[-1])


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    # A list of parts. A message that only calls a tool has no content.
    return "".join(part.get("text") or "" for part in content or [])


def prompt_text(prompt: Prompt) -> str:
    """Return the text of a prompt: the string itself, or the contents of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(map(_content, prompt))


def texts_of(completions: Iterable[Completion]) -> list[str]:
    """Return the text of each completion."""
    return [text_of(completion) for completion in completions]


def formats_of(prompt_format: str | Sequence[str], count: int) -> Sequence[str]:
    """Return one prompt format per completion, from one name for all or a data set column."""
    return [prompt_format] * count if isinstance(prompt_format, str) else prompt_format
