"""Understand command lines with a forgotten flag; refuse a wrong path before libraries load."""

import os
from collections.abc import Sequence
from pathlib import Path

from sologrpo.errors import InputError
from sologrpo.files import RUN_CONFIG, recipes

# What a first argument without a flag is.
_FIRST = {"train": "--config", "evaluate": "--run", "export": "--run"}


def understand(command: str, given: Sequence[str]) -> list[str]:
    """Write a command line in the form that its parser expects.

    Args:
        command: of `sologrpo`.
        given: its arguments.

    Raises:
        InputError: if the config or run that they name does not exist.

    >>> understand("train", ["quickstart", "--seed", "3"])
    ['--config', 'quickstart', '--seed', '3']
    """
    if command == "report":
        return [word for word in given if word != "--run"]
    if command not in _FIRST:
        return list(given)
    if {"-h", "--help"} & set(given):
        return ["--help"]
    is_bare = bool(given) and not given[0].startswith("-")
    words = [_FIRST[command], *given] if is_bare else list(given)
    _check_path(_FIRST[command], words)
    return words


def _check_path(flag: str, words: list[str]) -> None:
    """Refuse a config or run that does not exist: the parsers do too, after several seconds."""
    flags = [word.partition("=")[0] for word in words]
    if flag not in flags:
        return
    index = flags.index(flag)
    value = words[index].partition("=")[2] or (words[index + 1 :] or [""])[0]
    path = Path(value)
    if flag == "--config" and value not in recipes() and not (value and path.exists()):
        names = ", ".join(recipes())
        raise InputError(f"no config {value!r} in {os.getcwd()}: give a file or a recipe: {names}")
    if flag == "--run" and not (value and path.is_dir()):
        near = Path("runs", value)
        hint = f"did you mean {near}?" if (near / RUN_CONFIG).is_file() else "give --run runs/NAME"
        raise InputError(f"no run directory {value!r} in {os.getcwd()}: {hint}")
