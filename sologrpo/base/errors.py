"""Errors of users and machines end in one line that tells how to fix them, not in a traceback."""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from safetensors import SafetensorError

from sologrpo.base.redact import redact_text
from sologrpo.base.text import escaped, one_line
from sologrpo.startup import STOPPED, drop_output, has_reader, stopped_by

# A full disk raises an OSError with one of these numbers in Python, and another error with such a
# text in safetensors and torch.save.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_NO_ROOM_TEXT = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Read-only file system"
    "|PytorchStreamWriter failed|inline_container|iostream error"
)

P = ParamSpec("P")


class InputError(ValueError):
    """Raised for bad input; the message is one line and tells how to fix it."""


class RunError(RuntimeError):
    """Raised when a run has to stop; the message is one line and tells how to fix it."""

    details = ""  # lines to print before it


class _Reported(SystemExit):
    """An exit whose line is printed."""


# Libraries raise these for a setting that they do not take, or a package that is not installed.
SETTING_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, re.error)
# And these, where no code of ours runs, for a damaged file or a free dictionary: a config file with
# a list instead of a mapping, weights that end too early.
LIBRARY_ERRORS = (
    *SETTING_ERRORS, ArithmeticError, LookupError, AttributeError, AssertionError, SafetensorError,
)  # fmt: skip


@contextmanager
def refusing(
    what: str = "", errors: tuple[type[Exception], ...] = LIBRARY_ERRORS
) -> Iterator[None]:
    """Turn what a library raises into one line; `what` names the setting if it does not."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        line = one_line(str(error)) or type(error).__name__
        raise InputError(f"{what}: {line}" if what else line) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    """Put a text on one line, with secrets hidden, and control and invisible characters escaped.

    >>> printable("no file \\x1b[2J\\nin sight")
    'no file \\\\x1b[2J in sight'
    """
    return escaped(redact_text(" ".join(text.splitlines())))


def cannot_write(error: BaseException) -> str | None:
    """Explain a disk that is full or read-only in one line; None for any other error."""
    for seen in _causes(error):
        if getattr(seen, "errno", None) in _NO_ROOM or _NO_ROOM_TEXT.search(str(seen)):
            return (
                f"cannot write: {first_line(seen)}: free some space, or set another output_dir; "
                "--resume continues a run from its last complete checkpoint"
            )
    return None


def _cannot_use(error: BaseException) -> str | None:
    """Explain a path that the machine refuses in one line; None for any other error."""
    for seen in _causes(error):
        if isinstance(seen, OSError) and seen.filename and seen.errno not in (None, errno.ENOENT):
            return (
                f"cannot use {os.fsdecode(seen.filename)}: {seen.strerror}: change its permissions "
                "or set another path"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def one_line_errors(main: Callable[P, None]) -> Callable[P, None]:
    """Wrap the `main` of a script or command: a known error prints one line and sets the exit code.

    2 after an `InputError`, and for a path that cannot be used; 1 after a `RunError`, and where the
    machine has no memory or no disk; 130 after Ctrl-C. A reward that ends the run is shown with its
    own traceback, without the trainer's. Any other exception is a defect and keeps its traceback.
    `--traceback` on the command line keeps all tracebacks.
    """

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except BaseException as error:
            if isinstance(error, BrokenPipeError) and not has_reader():
                drop_output()
                raise _Reported from error
            code, line = _ending(error)
            if code == 0 or _wants_traceback():
                raise
            if isinstance(error, RunError):
                print(error.details, file=sys.stderr, end="")
            if line:
                print(f"{_prefix()}: {printable(line)}", file=sys.stderr)
            raise _Reported(code) from error

    return wrapped


def _wants_traceback() -> bool:
    after = sys.argv[sys.argv.index("--traceback") + 1 :] if "--traceback" in sys.argv else ["no"]
    return not after or after[0].startswith("-") or after[0].lower() == "true"


def _ending(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the line for an error; 0 for a defect, and for other exits."""
    if isinstance(error, _Reported):
        return 0, ""
    if isinstance(error, SystemExit):
        return (130, STOPPED[signal.SIGINT]) if error.code == 130 else (0, "")
    if isinstance(error, KeyboardInterrupt) or stopped_by() is not None:
        number = stopped_by() or signal.SIGINT
        return 128 + number, STOPPED[number]
    if isinstance(error, InputError):
        return 2, str(error)
    if isinstance(error, RunError):
        return 1, str(error)
    if line := cannot_write(error):
        return 1, line
    if line := _cannot_use(error):
        return 2, line
    # By name: torch is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return 1, (
            "out of memory: lower max_completion_length or max_prompt_tokens, set "
            "gradient_checkpointing true, or use a smaller model or data set"
        )
    return 0, ""


def _prefix() -> str:
    """Return `error`, or the number of another process than the first: all see the same input."""
    rank = os.environ.get("RANK", "0")
    return "error" if rank == "0" else f"process {rank}"
