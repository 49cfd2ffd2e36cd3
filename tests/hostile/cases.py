"""Hostile command lines, drawn by a seed from commands x settings x bad values and damages."""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

import yaml

import damage
import values
from sandbox import FOUR_BIT, MERGED, MODEL, RECIPES, RESUME, RUN
from server import ROOT
from values import Setting, setting_of

CONFIG = "configs/RECIPE.yaml"  # of any recipe
HERE = ["--dataset_name", "quickstart", "--limit", "2", "--output_dir", "runs/new",
        "--max_completion_length", "8"]  # fmt: skip
# How each command is called when nothing is wrong.
CALLS: dict[str, list[list[str]]] = {
    "train": [
        ["--config", CONFIG, "--output_dir", "runs/new"],
        ["--config", CONFIG, "--output_dir", "runs/new", "--worked_examples", "examples.yaml"],
        RESUME,
    ],
    "evaluate": [
        ["--run", RUN, "--limit", "2", "--label", "new"],
        ["--run", RUN, "--limit", "3", "--resume"],
        ["--model", MODEL, *HERE],
        ["--model", MODEL, "--adapter", f"{RUN}/adapter", *HERE],
    ],
    "export": [
        ["--run", RUN, "--save_merged", "out/new", "--parity_problems", "2"],
        ["--run", RUN, "--save_merged", MERGED, "--save_4bit", FOUR_BIT, "--parity_problems", "2"],
        ["--run", RUN, "--push_to_hub", "me/x", "--dry_run"],
    ],
    "chat": [["--run", RUN], ["--run", RUN, "--prompt_format", "lm_eval"]],
    "report": [[RUN]],
    "doctor": [[]],
    "rewards list": [[]],
    "rewards score": [
        ["--gold", "42", "<answer>42</answer>"],
        ["--gold", "42", "--reward", "my_rewards:fair", "<answer>42</answer>"],
    ],
    "rewards check": [["--config", CONFIG]],
    "recipes list": [[]],
    "recipes copy": [["quickstart", "mine.yaml"]],
    "model": [[]],
}
# How many cases of each kind a command gets in a round of all.
SHARES: dict[str, dict[str, int]] = {
    "train": {"flag": 12, "shape": 2, "yaml": 12, "text": 4, "file": 12, "rows": 6, "reward": 6},
    "evaluate": {"flag": 6, "shape": 1, "file": 10, "rows": 2},
    "export": {"flag": 5, "shape": 1, "file": 8},
    "chat": {"flag": 3, "shape": 1, "file": 5},
    "report": {"flag": 1, "shape": 1, "file": 6},
    "doctor": {"shape": 1},
    "rewards list": {"shape": 1},
    "rewards score": {"flag": 2, "shape": 1, "file": 1, "reward": 4},
    "rewards check": {"flag": 3, "shape": 1, "yaml": 3, "text": 2, "file": 3, "rows": 2,
                      "reward": 5},
    "recipes list": {"shape": 1},
    "recipes copy": {"flag": 2, "shape": 1},
    "model": {"flag": 1, "shape": 1, "file": 1},
}  # fmt: skip
ROUND = [
    (command, kind)
    for command, kinds in SHARES.items()
    for kind, share in kinds.items()
    for _ in range(share)
]
random.Random(0).shuffle(ROUND)  # so that a part of a round has something of everything
REAL = 20  # every 20th case is typed as in the README, and runs as a separate process

WRITTEN = ("output_dir", "save_merged", "save_4bit")  # paths that need not exist
# Files that a call cannot do without, below the folders that it reads.
ADAPTER_FILES = {f"{RUN}/adapter/{name}" for name in ("adapter_config.json",
                                                     "adapter_model.safetensors")}  # fmt: skip
MODEL_FILES = {f"{MODEL}/{name}" for name in ("config.json", "tokenizer.json")}
READS = {
    "train": ["models", "quickstart", "configs"],
    "chat": ["models", RUN, RUN],
    "rewards check": ["configs", "models", "quickstart"],
    "rewards score": ["."],
    "model": ["models"],
}


@dataclass
class Case:
    """A command line, in a folder that something was done to.

    Attributes:
        number: with the seed, all that is needed to draw it again.
        command: of `sologrpo`.
        kind: the dimension that it was drawn from.
        argv: with the command's name.
        what: what is unusual, in words.
        bad: why it has to be refused; None if it may be taken.
        chosen: the value drawn, which may name a place to write to.
        named: what the output has to name if the command succeeds.
        resumes: whether success must give the adapter of an undisturbed run.
    """

    number: int
    command: str
    kind: str
    argv: list[str]
    what: str = ""
    bad: str | None = None
    chosen: str = ""
    named: str = ""
    resumes: bool = False

    @property
    def real(self) -> bool:
        """Return whether it runs in its own process, typed as in the README."""
        return self.number > 0 and self.number % REAL == 0


def draw(seed: int, number: int, home: Path) -> Case:
    """Draw a case, and do to the folder what it says."""
    rng = random.Random(f"{seed} {number}")
    command, kind = ROUND[(number + seed * 80) % len(ROUND)]
    while True:
        call = _with_recipe(rng.choice(CALLS[command]), rng.choice(RECIPES))
        case = Case(number, command, kind, [*command.split(), *call])
        try:
            DRAWERS[kind](case, call, home, rng)
        except damage.Unfit:
            continue
        return case


def controls() -> Iterator[Case]:
    """Yield every call with nothing wrong; each has to succeed, or the others prove nothing."""
    for command, calls in CALLS.items():
        for call in calls:
            for recipe in RECIPES if call == CALLS["train"][0] else ["quickstart"]:
                argv = [*command.split(), *_with_recipe(call, recipe)]
                yield Case(-1, command, "control", argv)


def _with_recipe(call: list[str], recipe: str) -> list[str]:
    return [word.replace("RECIPE", recipe) for word in call]


# -- the settings, as the parsers declare them ---------------------------------------------------


class _Captured(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@cache
def settings_of(command: str) -> tuple[Setting, ...]:
    """Return every setting of a command, from the parser that the command itself uses."""
    parser = _parser_of(command)
    hints: dict[str, Any] = {}
    for cls in getattr(parser, "dataclass_types", ()):
        hints |= get_type_hints(cls)
    found = [setting_of(action, hints) for action in parser._actions if action.dest != "help"]
    return tuple(found)


def _parser_of(command: str) -> argparse.ArgumentParser:
    from sologrpo import cli

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(parser)

    name, *words = [*command.split(), *CALLS[command][0]]
    words = [word.replace(CONFIG, str(ROOT / "configs" / "quickstart.yaml")) for word in words]
    with (
        patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        patch.object(sys, "argv", [f"sologrpo {name}", *words]),
    ):
        try:
            cli.COMMANDS[name][0](words)
        except _Captured as captured:
            parser = captured.parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[command.split()[1]]
    return parser


# -- the dimensions ------------------------------------------------------------------------------


def _flag(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Give one setting a bad value on the command line."""
    settings = settings_of(case.command)
    setting = rng.choice(settings)
    sort, text = rng.choice(list(values.texts(rng).items()))
    given = [value for flag, value in pairwise(call) if flag == setting.flag]
    reads = setting.name not in WRITTEN and any(_exists(home, value) for value in given)
    case.bad = values.bad_text(setting, text, must_exist=reads and not _exists(home, text))
    case.what, case.chosen = f"{setting.name} ({setting.kind}): {sort}", text
    if setting.switch:
        case.bad = "a value for a switch"
    if setting.flag:
        joined = text.startswith("-") or rng.random() < 0.5
        case.argv += [f"{setting.flag}={text}"] if joined else [setting.flag, text]
    else:
        position = [other.name for other in settings if not other.flag].index(setting.name)
        places = [i for i, word in enumerate(call) if _is_positional(call, i)]
        at = (places + [len(call)] * len(settings))[position] + len(case.command.split())
        case.argv[at : at + 1] = [text]


def _is_positional(call: list[str], at: int) -> bool:
    return not call[at].startswith("--") and (at == 0 or not call[at - 1].startswith("--"))


def _exists(home: Path, text: str) -> bool:
    try:
        return bool(text) and (home / text).exists()
    except (OSError, ValueError):
        return False


def _shape(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Spoil the command line itself."""
    options = [setting for setting in settings_of(case.command) if setting.flag]
    setting = rng.choice(options or [Setting("x", "--x")])
    needs_value = setting.kind in ("int", "float", "choice") and not setting.switch
    spoiled: dict[str, tuple[list[str], str | None]] = {
        "unknown flag": ([*case.argv, f"{setting.flag}x", "1"], "unknown flag"),
        "one dash": ([*case.argv, f"-{setting.name}", "1"], "unknown flag"),
        "no value": ([*case.argv, setting.flag], "no value" if needs_value else None),
        "prefix of a flag": ([*case.argv, setting.flag[:-1], "1"], None),
        "dashes for underscores": ([*case.argv, setting.flag.replace("_", "-"), "1"], None),
        "nothing": (case.command.split(), None),
        "given twice": ([*case.argv, *call], None),
        "help": ([*case.argv, "--help"], None),
        "one word fewer": (case.argv[:-1], None),
    }
    if all(other.flag for other in settings_of(case.command)):
        words = case.command.split()
        spoiled["one word more"] = ([*words, "stray", *call], "a word without a flag")
        spoiled["empty word"] = ([*words, "", *call], "a word without a flag")
    case.what = rng.choice(list(spoiled))
    case.argv, case.bad = spoiled[case.what]


def _yaml(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Give one setting a bad value in the config file."""
    config = _config(call, home)
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    given = ["config", *(word.removeprefix("--") for word in call)]
    setting = rng.choice([s for s in settings_of(case.command) if s.name not in given])
    sort, value = rng.choice(list(values.objects(rng).items()))
    reads = setting.name not in WRITTEN and _exists(home, str(content.get(setting.name, "")))
    case.bad = values.bad_object(setting, value, reads and not _exists(home, str(value)))
    case.what, case.chosen = f"{setting.name} ({setting.kind}): {sort}", str(value)
    text = yaml.safe_dump(content | {setting.name: value}, sort_keys=False)
    config.write_text(text, encoding="utf-8")


def _text(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Spoil the text of the config file."""
    config = _config(call, home)
    case.what, spoil = rng.choice(list(damage.TEXTS.items()))
    spoiled = spoil(config.read_text(encoding="utf-8"), rng)
    config.write_bytes(spoiled.encode() if isinstance(spoiled, str) else spoiled)
    case.bad = case.what


def _config(call: list[str], home: Path) -> Path:
    return home / call[call.index("--config") + 1]


def _file(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Damage one file that the command may read."""
    folders = READS.get(case.command, ["models", "quickstart", RUN, RUN])
    if "--resume" in call:
        folders = [RUN]
    if "--save_4bit" in call:
        folders = [*folders, "out"]
    found = [path for path in sorted((home / rng.choice(folders)).rglob("*")) if path.is_file()]
    named = [home / word for word in call if (home / word).is_file()]
    path = rng.choice(named if named and rng.random() < 0.25 else found)
    case.what = damage.damage(path, rng)
    relative = str(path.relative_to(home))
    if relative in _needed(case, call) and case.what in damage.LOST:
        case.bad = f"{path.name}: {case.what}"
    if case.command == "train" and "--resume" in call:
        case.named = "checkpoint-2" if "/checkpoint-2/" in relative else ""
        case.resumes = "/checkpoint-" in relative
    case.what = f"{relative}: {case.what}"


def _needed(case: Case, call: list[str]) -> set[str]:
    """Return the files without which a call cannot succeed."""
    if case.command == "evaluate" and "--resume" in call:  # what is recorded needs no model
        return {f"{RUN}/config.yaml"}
    needed = set(call)
    if "--run" in call:
        needed |= {f"{RUN}/config.yaml", *ADAPTER_FILES}
    if "--adapter" in call:
        needed |= ADAPTER_FILES
    if case.command in ("train", "evaluate", "chat"):
        needed |= MODEL_FILES
    if case.command in ("train", "evaluate"):
        split = "train" if case.command == "train" else "test"
        needed.add(f"quickstart/{split}.jsonl")
    return needed


def _rows(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Spoil rows of the data set."""
    split = "test" if case.command == "evaluate" else "train"
    case.what, bad = damage.spoil_rows(home / "quickstart" / f"{split}.jsonl", rng)
    if bad and case.command != "evaluate":  # there the row may not be among those of --limit
        case.bad = case.what


def _reward(case: Case, call: list[str], home: Path, rng: random.Random) -> None:
    """Let a reward of the user's misbehave."""
    if "--resume" in call:
        raise damage.Unfit("the run has other rewards")
    case.what, bad = damage.write_reward(home / "my_rewards.py", rng)
    case.bad = case.what if bad else None
    if case.command == "rewards score":
        case.argv = [*case.command.split(), *CALLS[case.command][0], "--reward", "my_rewards:mine"]
    else:
        case.argv += ["--rewards", "strict_format", "my_rewards:mine", "--reward_timeout", "3",
                      "--reward_weights", "1", "1"]  # fmt: skip


DRAWERS: dict[str, Callable[[Case, list[str], Path, random.Random], None]] = {
    "flag": _flag, "shape": _shape, "yaml": _yaml, "text": _text, "file": _file, "rows": _rows,
    "reward": _reward,
}  # fmt: skip
