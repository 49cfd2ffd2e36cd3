"""Understand command lines with a forgotten flag; refuse a wrong path before libraries load."""

import os
import re
from pathlib import Path

from sologrpo.errors import InputError
from sologrpo.files import RUN_CONFIG, recipes

# What a first argument without a flag is.
_FIRST = {"train": "--config", "evaluate": "--run", "export": "--run"}
_ONE_DASH = re.compile(r"-(?!inf$|nan$)[a-z]\w+(=.*)?", re.DOTALL)
_NO_DASH = re.compile(r"[a-z]\w*=.*", re.DOTALL)


def understand(command: str, given: list[str]) -> list[str]:
    """Write a command line in the form that its parser expects.

    Args:
        command: of `sologrpo`.
        given: its arguments.

    Raises:
        InputError: if the config or run that they name does not exist.

    >>> understand("train", ["quickstart", "-seed", "=", "3", "max_steps=2"])
    ['--config', 'quickstart', '--seed', '3', '--max_steps=2']
    """
    if command == "report":
        return [arg for arg in given if arg != "--run"]
    if command not in _FIRST:
        return given
    if {"-h", "--help"} & set(given):
        return ["--help"]
    words: list[str] = []
    for arg in given:
        follows_flag = bool(words) and words[-1].startswith("--") and "=" not in words[-1]
        if _ONE_DASH.fullmatch(arg):
            words.append("-" + arg)
        elif _NO_DASH.fullmatch(arg) and not follows_flag:
            words.append("--" + arg)
        elif arg != "=":  # of "--seed = 3"
            words.append(arg)
    if words and not words[0].startswith("-"):
        words.insert(0, _FIRST[command])
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
