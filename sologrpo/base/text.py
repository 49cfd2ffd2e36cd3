"""Put text from anywhere on one line, shorten it, and escape what a terminal would act on."""


def one_line(text: str) -> str:
    """Put a text on one line, with single spaces."""
    return " ".join(text.split())


def shortened(text: str, width: int) -> str:
    """Cut a text to this many characters, with an ellipsis at the end if it is longer.

    >>> shortened("completion", 5)
    'comp…'
    """
    return text if len(text) <= width else f"{text[: width - 1]}…"


def escaped(text: str) -> str:
    """Escape what a terminal would act on, other than line breaks.

    >>> escaped("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
