"""Run the command line: `sologrpo train --config quickstart`.

Each command is a script of the project (`train.py`, `evaluate.py`) or the `main` of a module. It is
imported when it is called, so that `sologrpo --help` is fast.
"""

import argparse
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from sologrpo.base.errors import InputError, one_line_errors
from sologrpo.base.files import BUNDLED, RUN_CONFIG, find_config, recipes
from sologrpo.base.text import escaped
from sologrpo.startup import end_imports, start_process

Command = Callable[[Sequence[str]], None]
# What a first argument without a flag is.
FIRST = {"train": "--config", "evaluate": "--run", "chat": "--run", "export": "--run"}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run one command of `sologrpo`; by default that of the process's arguments."""
    if argv is None:
        start_process()
    command, *arguments = _named_command(list(sys.argv[1:] if argv is None else argv))
    arguments = _understand(command, arguments)
    if argv is None:
        _show_help(command, arguments)
    COMMANDS[command][0](arguments)


@one_line_errors
def start_script(command: str) -> None:
    """Understand the arguments of `train.py` or `evaluate.py`, before its imports."""
    _show_help(command, _understand(command, sys.argv[1:]))


def _show_help(command: str, arguments: Sequence[str]) -> None:
    """If they ask for help, print it and exit, without libraries that only the work needs."""
    parser = {
        "train": "parse_config", "evaluate": "parse_evaluation", "export": "parse_export",
        "chat": "parse_chat",
    }.get(command)  # fmt: skip
    if parser and arguments == ["--help"]:
        # transformers would import them for a type check (trainer_utils.py:66), in seconds.
        sys.modules |= dict.fromkeys(("peft", "bitsandbytes"))  # type: ignore[arg-type]
        config = import_module("sologrpo.config")
        end_imports()
        getattr(config, parser)(arguments)


def _understand(command: str, given: Sequence[str]) -> list[str]:
    """Correct the arguments, also those of the process, which scripts and W&B read."""
    sys.argv = [f"sologrpo {command}", *given]
    sys.argv[1:] = understand(command, given)
    return sys.argv[1:]


def understand(command: str, given: Sequence[str]) -> list[str]:
    """Write a command line with a forgotten flag in the form that its parser expects.

    >>> understand("train", ["quickstart", "--seed", "3"])
    ['--config', 'quickstart', '--seed', '3']
    """
    if command == "report":
        return [word for word in given if word != "--run"]
    if command not in FIRST:
        return list(given)
    if {"-h", "--help"} & set(given):
        return ["--help"]
    is_bare = bool(given) and not given[0].startswith("-")
    flag = FIRST[command]
    words = [flag, *given] if is_bare else list(given)
    for word, following in pairwise([*words, ""]):
        name, joined, value = word.partition("=")
        if name == flag:
            (find_config if command == "train" else _check_run)(value if joined else following)
    return words


def _check_run(value: str) -> Path:
    if not value or not os.path.isdir(value):
        near = Path("runs", value)
        hint = f"did you mean {near}?" if (near / RUN_CONFIG).is_file() else "give --run runs/NAME"
        raise InputError(f"no run directory {value!r} in {os.getcwd()}: {hint}")
    return Path(value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def _named_command(argv: list[str]) -> list[str]:
    parser = _Parser(
        prog="sologrpo",
        description="Train a language model to reason with GRPO, on one GPU.",
        epilog="`sologrpo COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
    parser.parse_args(argv[:1])  # the rest is the command's
    return argv


def _version() -> str:
    try:
        return version("sologrpo")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _script(name: str) -> Command:

    def run(_: Sequence[str]) -> None:
        script = runpy.run_path(str(BUNDLED / name))
        end_imports()
        sys.exit(script["main"]())

    return run


def _main_of(module: str) -> Command:

    def run(arguments: Sequence[str]) -> None:
        imported = import_module(module)
        end_imports()
        sys.exit(imported.main(arguments))

    return run


def _rewards(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] == "check":
        _main_of("sologrpo.plan.reward_check")(arguments[1:])
    _main_of("rewards.command")(arguments)


def _recipes(arguments: Sequence[str]) -> None:
    parser = _Parser(prog="sologrpo recipes", description="List the recipes, or copy one.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    commands.add_parser("list", help="list the recipes by name (the default)")
    copy = commands.add_parser("copy", help="copy a recipe, to change it")
    copy.add_argument("name", choices=recipes(), metavar="NAME", help="name of the recipe")
    copy.add_argument(
        "to", nargs="?", type=Path, default=Path(), metavar="TO", help="file or folder (default: .)"
    )
    options = parser.parse_args(arguments)
    if options.command == "copy":
        _copy_recipe(parser, recipes()[options.name], options.to)
        return
    width = max(map(len, recipes()))
    for name, path in recipes().items():
        print(f"{name:<{width}}  {_header(path)}")


def _copy_recipe(parser: _Parser, recipe: Path, to: Path) -> None:
    target = to / recipe.name if to.is_dir() else to
    if target.exists():
        parser.error(f"{target} exists already: name another file")
    if not target.parent.is_dir():
        parser.error(f"there is no folder {target.parent}: make it, or name another")
    shutil.copyfile(recipe, target)
    print(escaped(f"{target}\nnext: sologrpo train --config {target}"))


def _header(recipe: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    comment, _, _ = recipe.read_text(encoding="utf-8").partition("\n#\n")
    text = " ".join(line.removeprefix("# ") for line in comment.splitlines())
    return re.split(r"(?<!Dr)\. ", text)[0].rstrip(".")


COMMANDS: dict[str, tuple[Command, str]] = {
    "train": (_script("train.py"), "train a LoRA adapter with GRPO"),
    "evaluate": (_script("evaluate.py"), "evaluate a run, an adapter or a model"),
    "chat": (_main_of("sologrpo.chat"), "ask the base and the trained model of a run"),
    "export": (_main_of("sologrpo.export.export"), "merge a run's adapter, save it, push it"),
    "report": (_main_of("sologrpo.report.command"), "write the report of a run, or follow it"),
    "doctor": (_main_of("sologrpo.plan.doctor"), "check whether this machine can train"),
    "rewards": (_rewards, "list the rewards, score a completion, check the rewards of a recipe"),
    "recipes": (_recipes, "list the recipes, or copy one"),
    "model": (_script("quickstart/get_model.py"), "download the quickstart model, 93 MB"),
}
