"""Errors of rewards, each with a message of one line."""

MAX_LINE_CHARS = 400


class RewardSpecError(ValueError):
    """The rewards of a config cannot be loaded. The message is one line that says how to fix it."""


class RewardError(Exception):
    """A reward raised or hung, or returned or logged something that it must not.

    Args:
        message: one line.
        details: the reward's own traceback, and the completion.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def own_traceback(self) -> str:
        """Return the reward's own traceback and the completion, or an empty string."""
        return self.details


def one_line(problem: BaseException | str) -> str:
    """Describe an exception, or shorten a text, in one printable line.

    >>> one_line(ValueError("two\\nlines"))
    'ValueError: two lines'
    """
    text = problem if isinstance(problem, str) else _describe(problem)
    text = " ".join(text.split())
    text = text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}..."
    return escaped(text)


def escaped(text: str) -> str:
    """Escape what a terminal would act on, other than line breaks.

    >>> escaped("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # the exception's own code
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
