"""Errors of users and machines end in one line that tells how to fix them, not in a traceback."""

import errno
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from safetensors import SafetensorError

from rewards import RewardError, RewardSpecError

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


# Libraries raise these for a file that is not what they expect: config files with a list instead of
# a mapping, weights that end too early.
BROKEN_FILE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SafetensorError
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def cannot_write(error: BaseException) -> str | None:
    """Explain a disk that is full or read-only in one line; None for any other error."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "errno", None) in _NO_ROOM or _NO_ROOM_TEXT.search(str(seen)):
            return (
                f"cannot write: {first_line(seen)}: free some space, or set another output_dir; "
                "--resume continues a run from its last complete checkpoint"
            )
        seen = seen.__cause__ or seen.__context__
    return None


def one_line_errors(main: Callable[P, None]) -> Callable[P, None]:
    """Wrap the `main` of a script or command: an `InputError` prints its line and exits with 2.

    A `RunError` and a full disk print theirs and exit with 1. A reward that ends the run is shown
    with its own traceback, without the trainer's; exit 1. Any other exception is a defect, or a
    failure of the machine, and keeps its traceback.
    `--traceback` on the command line keeps all tracebacks.
    """

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            main(*args, **kwargs)
        except (InputError, RewardSpecError, RewardError, RunError) as error:
            if "--traceback" in sys.argv:
                raise
            if isinstance(error, RewardError):
                print(error.own_traceback(), file=sys.stderr, end="")
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1 if isinstance(error, RewardError | RunError) else 2)
        except Exception as error:
            line = cannot_write(error)
            if line is None or "--traceback" in sys.argv:
                raise
            print(f"error: {line}", file=sys.stderr)
            sys.exit(1)

    return wrapped
