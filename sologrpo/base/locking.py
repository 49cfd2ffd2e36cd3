"""Lock a folder, so that two processes never write to it at once."""

import fcntl
import os
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from sologrpo.base.errors import InputError, printable
from sologrpo.base.files import LOCK


def lock_folder(folder: Path, other: str) -> FileLock | None:
    """Keep other processes from writing to a folder; `other` tells the error what they do.

    The lock lasts until it is released or forgotten; None where the file system has no locks.
    """
    lock = FileLock(folder / LOCK, is_singleton=True)
    try:
        lock.acquire(timeout=0.5)  # `report --follow` takes a look at it, for an instant
    except Timeout as error:
        raise InputError(
            f"{folder} is in use: another process {other} there; wait for it, or give another "
            "--output_dir"
        ) from error
    except PermissionError as error:
        raise InputError(f"cannot write into output_dir {folder}: {error.strerror}") from error
    except (OSError, NotImplementedError) as error:  # some network file systems
        line = f"cannot lock {folder} ({error}): start no second command there"
        print(printable(line), file=sys.stderr)
        return None
    return lock


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a folder; None if that cannot be known."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not meet
    except BlockingIOError:
        return True
    except OSError:  # some network file systems
        return None
    finally:
        os.close(file)
    return False
