"""What TRL hands to a reward, as plain text: completions are strings or lists of chat messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
Prompt = Completion
Scores = list[float | None]


def text_of(completion: Completion) -> str:
    """The text that the model wrote: the completion itself, or the content of its last message.

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
    # A list of parts; a message that only calls a tool has no content at all.
    return "".join(part.get("text") or "" for part in content or [])


def prompt_text(prompt: Prompt) -> str:
    """All that the model was shown, without roles: the prompt itself, or its messages' contents."""
    return prompt if isinstance(prompt, str) else "\n".join(map(_content, prompt))


def texts_of(completions: Iterable[Completion]) -> list[str]:
    """The texts of a batch of completions."""
    return [text_of(completion) for completion in completions]


def formats_of(prompt_format: str | Sequence[str], count: int) -> Sequence[str]:
    """One prompt format a completion, from a dataset column or from one name for all."""
    return [prompt_format] * count if isinstance(prompt_format, str) else prompt_format
