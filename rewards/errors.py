"""Errors of rewards, each with a message of one line."""

import traceback

from sologrpo.base import text as texts
from sologrpo.base.errors import InputError, RunError
from sologrpo.base.redact import redact_text

MAX_LINE_CHARS = 400


class RewardSpecError(InputError):
    """The rewards of a config cannot be loaded. The message is one line that says how to fix it."""


class RewardError(RunError):
    """A reward broke its contract; `details` has its traceback and the completion, or is empty."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def one_line(problem: BaseException | str) -> str:
    """Describe an exception, or shorten a text, in one printable line.

    >>> one_line(ValueError("two\\nlines"))
    'ValueError: two lines'
    """
    lines = [problem] if isinstance(problem, str) else traceback.format_exception_only(problem)
    text = redact_text(texts.one_line("".join(lines)))
    return texts.escaped(texts.shortened(text, MAX_LINE_CHARS))
