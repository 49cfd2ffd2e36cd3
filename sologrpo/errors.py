"""Bad input ends in one clear line that says what to write instead, never in a traceback."""

import sys
from collections.abc import Callable
from functools import wraps

from rewards import RewardError, RewardSpecError


class InputError(ValueError):
    """The user's input cannot work; the message is one line and names the mend."""


class RunError(RuntimeError):
    """A run cannot go on; the message is one line, with what is saved and the mend."""


def first_line(error: BaseException) -> str:
    """What an error says, as far as one line goes; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line_errors(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a script's `main`: an `InputError` prints its line and exits with 2.

    So does a `RunError`, with 1. A reward that breaks off the run is shown with its own traceback,
    without the trainer's; exit 1.
    Any other exception is a defect or the machine's failure and keeps its traceback.
    `--traceback` on the command line keeps all tracebacks.
    """

    @wraps(main)
    def wrapped() -> None:
        try:
            main()
        except (InputError, RewardSpecError, RewardError, RunError) as error:
            if "--traceback" in sys.argv:
                raise
            if isinstance(error, RewardError):
                print(error.own_traceback(), file=sys.stderr, end="")
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1 if isinstance(error, RewardError | RunError) else 2)

    return wrapped
