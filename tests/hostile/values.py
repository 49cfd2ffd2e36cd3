"""Bad values, by the type of the setting that they are given to.

Each value says for which types it is known to be bad: accepting it there is a failure. Of the other
values only the manner is checked: taken, or refused in one line.
"""

import argparse
import datetime
import math
import random
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
BIDI = "\u202eabc\u2066"
TRAVERSAL = "../../outside/made-by-a-name"
FILE_NAMES = {"label"}  # settings that become the name of a file or folder
TRUE_OR_FALSE = {"yes", "no", "true", "false", "t", "f", "y", "n", "1", "0"}


@dataclass(frozen=True)
class Setting:
    """A setting of a command, as its parser declares it.

    Attributes:
        name: without dashes.
        flag: with dashes; empty for a positional argument.
        kind: int, float, bool, choice or text.
        choices: for kind choice.
        default: None if there is none.
        plain: text that may be nothing but text, not a list or a mapping.
        many: takes several values.
        switch: takes none.
    """

    name: str
    flag: str
    kind: str = "text"
    choices: tuple[str, ...] = ()
    default: Any = None
    plain: bool = False
    many: bool = False
    switch: bool = False


def setting_of(action: argparse.Action, annotations: dict[str, Any]) -> Setting:
    """Describe an option of a real parser."""
    named: dict[Any, str] = {int: "int", float: "float"}
    kind = named.get(action.type, "text")
    if action.choices is not None:
        kind = "choice"
    elif getattr(action.type, "__name__", "") == "string_to_bool":
        kind = "bool"
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    annotation = annotations.get(action.dest)
    return Setting(
        name=action.dest, flag=flags[0] if flags else "", kind=kind,
        choices=tuple(map(str, action.choices or ())), default=action.default,
        plain=_alternatives(annotation) <= {str, types.NoneType},
        many=action.nargs in ("+", "*"), switch=action.nargs == 0,
    )  # fmt: skip


def _alternatives(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {typing.get_origin(part) or part for part in typing.get_args(annotation)}
    return {typing.get_origin(annotation) or annotation}


# -- on the command line -------------------------------------------------------------------------


def texts(rng: random.Random) -> dict[str, str]:
    """Draw one value of each sort that a command line can hold."""
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 12)))
    return {
        "nan": rng.choice(["nan", "NaN", "-nan"]),
        "infinity": rng.choice(["inf", "-inf", "Infinity", "1e999"]),
        "negative": str(-rng.choice([1, 2, 7, 10**6])),
        "zero": rng.choice(["0", "0.0", "-0"]),
        "huge": rng.choice([str(2**32), str(2**63), "1" + "0" * 40, "1e38", "9" * 5000]),
        "tiny": rng.choice(["1e-320", "1e-45", "0.0000001"]),
        "fraction": f"{rng.uniform(0, 3):.3f}",
        "number": str(rng.randint(0, 12)),
        "boolean": rng.choice(["true", "True", "no"]),
        "word": word,
        "near a number": rng.choice(["1_0", "0x10", "٣", "1,5", "5 %", "1e", "--5", "1e-6x"]),
        "empty": "",
        "blank": rng.choice([" ", "\t", "\n", "\u00a0"]),
        "null": rng.choice(["null", "None", "~"]),
        "list": rng.choice(["[]", "[1, 2]", "['a']", "a,b"]),
        "mapping": rng.choice(["{}", '{"a": 1}', "{a: 1}", '{"a": NaN}', "{" * 3000]),
        "escape": ESCAPE,
        "bidi": BIDI,
        "lines": f"{word}\n{word}",
        "markup": rng.choice(["[/y]", "[bold red]x", "[link=file:///]x[/link]", "x[/y]z"]),
        "format": rng.choice(["%s%n", "{0.__class__}", "$(touch owned)", "`id`", "{}"]),
        "not UTF-8": "\udcff\udc80",
        "long": word * rng.choice([30, 300, 3000]),
        "traversal": TRAVERSAL,
        "a folder": rng.choice(["quickstart", ".", "..", "/", "runs/quickstart"]),
        "a file": rng.choice(["quickstart/train.jsonl", "my_rewards.py", "/dev/null", "/dev/zero"]),
        "a URL": rng.choice(["https://me:hidden@127.0.0.1:9/x", "file:///etc/passwd", "s3://a/b"]),
        "an option": rng.choice(["--run", "-h", "--", "-"]),
        "a name in use": rng.choice(["baseline", "trained", ".", "..", "config.yaml"]),
        "a code spec": rng.choice(["os:system", "my_rewards", "my_rewards:", ":fair", "a.b:c"]),
    }


def bad_text(setting: Setting, text: str, must_exist: bool) -> str | None:
    """Return the reason that a text is wrong for a setting on the command line, or None."""
    if setting.switch or text == "-h":
        return None
    if setting.kind in ("int", "float"):
        number = _number(text)
        if number is None:
            return f"{setting.kind}: no number"
        return _bad_number(setting, number)
    if setting.kind == "bool" and text.lower() not in TRUE_OR_FALSE:
        return "bool: neither true nor false"
    if setting.kind == "choice" and text not in setting.choices:
        return "choice: unknown"
    if setting.name in FILE_NAMES and not _safe_name(text):
        return "name: no safe file name"
    return "nothing there" if must_exist else None


def _safe_name(text: str) -> bool:
    return bool(re.fullmatch(r"\w[\w.+=@ -]{0,200}", text)) and text != "baseline"


def _number(text: str) -> float | int | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _bad_number(setting: Setting, number: float | int) -> str | None:
    if isinstance(number, float) and not math.isfinite(number):
        return f"{setting.kind}: not finite"
    if setting.kind == "int" and number != int(number):
        return "int: a fraction"
    default = setting.default
    usual = default if isinstance(default, int | float) else -1  # a default below 0 means something
    return f"{setting.kind}: negative" if usual >= 0 > number else None


# -- in YAML -------------------------------------------------------------------------------------


def objects(rng: random.Random) -> dict[str, Any]:
    """Draw one value of each sort that YAML can hold."""
    drawn: dict[str, Any] = dict(texts(rng))
    del drawn["not UTF-8"]  # cannot be written
    return drawn | {
        "a real nan": math.nan,
        "a real infinity": rng.choice([math.inf, -math.inf]),
        "a real boolean": rng.choice([True, False]),
        "a real negative": -rng.choice([1, 5, 10**9]),
        "a real zero": rng.choice([0, 0.0, -0.0]),
        "a real huge": rng.choice([2**32, 2**63, 10**40, 1e38, 1e300]),
        "a real fraction": rng.uniform(0, 3),
        "a real number": rng.randint(0, 12),
        "a real null": None,
        "a real list": rng.choice([[], [1], [None], ["a", "b"], [[1]], [{"a": 1}], [math.nan]]),
        "a real mapping": rng.choice([{}, {"a": 1}, {1: 2}, {"a": {"b": []}}, {None: None}]),
        "a date": rng.choice([datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 1, 1)]),
        "bytes": b"\x00\xff",
        "a set": {1, 2},
        "NUL": "a\x00b",
    }


def bad_object(setting: Setting, value: Any, must_exist: bool) -> str | None:
    """Return the reason that a value is wrong for a setting in YAML, or None."""
    if value is None:
        return None
    if isinstance(value, str):
        return bad_text(setting, value, must_exist)
    if setting.kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return (
                None if setting.many and isinstance(value, list) else f"{setting.kind}: no number"
            )
        return _bad_number(setting, value)
    if setting.kind == "bool":
        return None if value in (0, 1) else "bool: neither true nor false"
    if setting.kind == "choice" and not setting.many:
        return None if str(value) in setting.choices else "choice: unknown"
    return "text: something else" if setting.plain and not setting.many else None
