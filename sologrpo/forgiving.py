"""Understand command lines with a forgotten flag; refuse a wrong path before libraries load."""

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from sologrpo.errors import InputError
from sologrpo.files import RUN_CONFIG, find_config

# What a first argument without a flag is.
_FIRST = {"train": "--config", "evaluate": "--run", "chat": "--run", "export": "--run"}


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
    check = find_config if command == "train" else _check_run
    for value in take_option(_FIRST[command], words)[0]:
        check(value)
    return words


def take_option(flag: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the values of one option, and the other words.

    >>> take_option("--run", ["--run=runs/x", "--seed", "3"])
    (['runs/x'], ['--seed', '3'])
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="values", nargs="?", const="", action="append", default=[])
    taken, rest = parser.parse_known_args(words)
    return taken.values, rest


def _check_run(value: str) -> Path:
    if not value or not os.path.isdir(value):
        near = Path("runs", value)
        hint = f"did you mean {near}?" if (near / RUN_CONFIG).is_file() else "give --run runs/NAME"
        raise InputError(f"no run directory {value!r} in {os.getcwd()}: {hint}")
    return Path(value)
