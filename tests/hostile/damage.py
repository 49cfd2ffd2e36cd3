"""Damage to files, and rows and rewards that misbehave."""

import json
import os
import random
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from values import BIDI, ESCAPE, objects

Damage = Callable[[Path, random.Random], None]


class Unfit(Exception):
    """Raised if something cannot be done to a file; another case is drawn then."""


# -- any file ------------------------------------------------------------------------------------


def _missing(path: Path, rng: random.Random) -> None:
    path.unlink()


def _empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def _truncated(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def _zeroed(path: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _half_zeroed(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def _flipped(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def _longer(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 99)))


def _other_encoding(path: Path, rng: random.Random) -> None:
    text = path.read_bytes().decode("latin-1")
    path.write_bytes(text.encode(rng.choice(["utf-16", "utf-32"])))


def _folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link_out(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(_home(path).parent / "outside" / "secret.txt")


def _dangling(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _unreadable(path: Path, rng: random.Random) -> None:
    path.chmod(0)


def _swapped(path: Path, rng: random.Random) -> None:
    """Put another file of the same name or the same folder in its place."""
    own = path.read_bytes()
    same_name = [other for other in _home(path).rglob(path.name) if other.is_file()]
    others = same_name + [other for other in path.parent.iterdir() if other.is_file()]
    others = sorted(other for other in others if other.read_bytes() != own)
    if not others:
        raise Unfit("nothing to swap with")
    shutil.copyfile(rng.choice(others), path)


def _mistyped(path: Path, rng: random.Random) -> None:
    """Replace one value of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(_with_junk(json.loads(lines[at]), rng), default=str)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(_with_junk(json.loads(text), rng), default=str))
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(_with_junk(yaml.safe_load(text), rng)), encoding="utf-8")
    else:
        raise Unfit("neither JSON nor YAML")


def _names_code(path: Path, rng: random.Random) -> None:
    """Let a file of a model, an adapter or a run ask for code next to it."""
    if path.suffix not in (".json", ".yaml"):
        raise Unfit("neither JSON nor YAML")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise Unfit("no mapping")
    classes = {"AutoConfig": "payload.C", "AutoModelForCausalLM": "payload.M"}
    asked = {
        "trust_remote_code": True, "auto_map": classes | {"AutoTokenizer": ["payload.T", None]},
        "rewards": ["payload:reward"], "model_type": "payload", "tokenizer_class": "T",
        "model_name_or_path": str(path.parent), "base_model_name_or_path": str(path.parent),
    }  # fmt: skip
    chosen = rng.sample(list(asked), rng.randint(1, len(asked)))
    kept = content | {key: asked[key] for key in chosen}
    dump = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(dump(kept), encoding="utf-8")
    outside = _home(path).parent / "outside" / "owned"
    path.with_name("payload.py").write_text(f"open({str(outside)!r}, 'w').close()\n")


def _home(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "home")


def _with_junk(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=str))
        return value | {key: _with_junk(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], _with_junk(value[at], rng), *value[at + 1 :]]
    return rng.choice(list(objects(rng).values()))


DAMAGES: dict[str, Damage] = {
    "missing": _missing, "empty": _empty, "truncated": _truncated, "zeroed": _zeroed,
    "half zeroed": _half_zeroed, "flipped": _flipped, "noise": _noise, "longer": _longer,
    "other encoding": _other_encoding, "folder": _folder, "link out": _link_out,
    "dangling link": _dangling, "pipe": _pipe, "swapped": _swapped, "mistyped": _mistyped,
    "names code": _names_code,
}  # fmt: skip
if os.geteuid() != 0:  # root may read everything
    DAMAGES["unreadable"] = _unreadable
# Nothing is left of the content, or it cannot be told from no content.
LOST = {"missing", "empty", "zeroed", "noise", "folder", "link out", "dangling link", "unreadable",
        "other encoding", "pipe"}  # fmt: skip


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one way, and return its name."""
    name = rng.choice(list(DAMAGES))
    if name in ("truncated", "flipped") and path.stat().st_size == 0:
        raise Unfit("empty")
    try:
        DAMAGES[name](path, rng)
    except UnicodeDecodeError as error:
        raise Unfit("not a text") from error
    return name


# -- a config ------------------------------------------------------------------------------------

KEYS = ("1", "yes", "null", "1.5", "[a]", "{a: 1}", "2020-01-01")  # not text in YAML
UNKNOWN = ("lerning_rate", "x", "π", "__class__", "model name")
# What to do to the text of a mapping; all of these are known to be bad.
TEXTS: dict[str, Callable[[str, random.Random], str | bytes]] = {
    "duplicate key": lambda text, rng: text + rng.choice(_top_level(text)),
    "unknown key": lambda text, rng: f"{text}{rng.choice(UNKNOWN)}: 1\n",
    "key that is not text": lambda text, rng: f"{text}{rng.choice(KEYS)}: 1\n",
    "UTF-16": lambda text, rng: text.encode("utf-16"),
    "Latin-1": lambda text, rng: text.encode() + b"# caf\xe9\n",
    "NUL": lambda text, rng: text + "\x00",
    "control characters": lambda text, rng: f"{text}system_prompt: {ESCAPE}\n",
    "tab": lambda text, rng: text + "\tx: 1\n",
    "two documents": lambda text, rng: f"{text}---\n{text}",
    "a list": lambda text, rng: "".join(f"- {line}" for line in _top_level(text)),
    "a scalar": lambda text, rng: rng.choice(["5", "text", "null", "~", "[]", "''"]),
    "deep": lambda text, rng: text + "x: " + "[" * rng.choice([200, 5000]),
    "aliases": lambda text, rng: text + _billion_laughs(),
    "a tag": lambda text, rng: text + "x: !!python/object/apply:os.system ['touch owned']\n",
    "an anchor in itself": lambda text, rng: text + "rewards: &a [*a]\n",
    "a merge key": lambda text, rng: text + "<<: 5\n",
    "trust_remote_code": lambda text, rng: text + "trust_remote_code: true\n",
}


def _top_level(text: str) -> list[str]:
    return [f"{line}\n" for line in text.splitlines() if line[:1].isalpha() and line[-1] != ":"]


def _billion_laughs() -> str:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9)]
    return "\n".join(lines) + "\n"


# -- rows ----------------------------------------------------------------------------------------

COLUMNS = (
    "question", "answer", "prompt", "prompts", "completion", "completions", "completion_ids",
    "trainer_state", "log_metric", "self", "kwargs", "image", "images", "tools", "kind", "step",
    "advantage", "reward", "", "a b", ESCAPE, BIDI, "x" * 500,
)  # fmt: skip


def spoil_rows(path: Path, rng: random.Random) -> tuple[str, bool]:
    """Spoil a column of some rows; name what, and tell whether it is known to be bad."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    column = rng.choice(COLUMNS)
    sort, value = rng.choice(sorted(objects(rng).items()))
    spoiled = rows if rng.random() < 0.5 else [rng.choice(rows)]
    for row in spoiled:
        row[column] = value
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    no_text = column in ("question", "answer") and not isinstance(value, str | bytes | date | set)
    no_gold = column == "answer" and "####" not in str(value)
    return f"{column!r} of {len(spoiled)} rows is {sort}", no_text or no_gold


# -- rewards -------------------------------------------------------------------------------------

# Code, and whether a reward that runs it is known to be bad. The others must do no harm.
ACTS: dict[str, tuple[str, bool]] = {
    "nothing": ("pass", False),
    "hangs with the GIL held": ("import re; re.match('(x+x+)+y', 'x' * 64)", True),
    "sleeps": ("import time; time.sleep(3600)", True),
    "raises": ("raise ValueError('of mine')", True),
    "raises without a message": ("raise KeyError", True),
    "raises many lines": ("raise RuntimeError('a' + chr(10) + 'b')", True),
    "interrupts": ("raise KeyboardInterrupt", True),
    "exits with 0": ("import sys; sys.exit(0)", True),
    "exits with a text": ("import sys; sys.exit('bye')", True),
    "leaves": ("import os; os._exit(0)", True),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", True),
    "recurses": ("f = lambda: f(); f()", True),
    "forks": ("import os; child = os.fork() or os._exit(0); os.waitpid(child, 0)", False),
    "starts a pool": ("import multiprocessing as m; p = m.get_context('fork').Pool(1); "
                      "p.map(abs, [1]); p.terminate()", False),
    "starts a program": ("import subprocess; subprocess.run(['true'], check=True)", False),
    "prints": ("print('{', end='', flush=True)", False),
    "writes to descriptors": ("import os; os.write(1, b'abc'); os.write(2, b'abc')", False),
    "closes stdout": ("import sys; sys.stdout.close()", False),
    "changes its inputs": ("completions.clear(); [v.clear() for v in kwargs.values() if v]", False),
    "ignores signals": ("import signal as s; s.signal(2, s.SIG_IGN); s.signal(15, s.SIG_IGN)",
                        False),
    "changes the folder": ("import os; os.chdir('/')", False),
    "empties the environment": ("import os; os.environ.clear()", False),
    "warns": ("import warnings; warnings.warn('mine')", False),
}  # fmt: skip
RETURNS: dict[str, tuple[str, bool]] = {
    "floats": ("[0.5] * n", False), "ints": ("[1] * n", False), "None": ("[None] * n", False),
    "booleans": ("[True] * n", False), "a tuple": ("(0.5,) * n", False),
    "an array": ("__import__('numpy').ones(n)", False),
    "a generator": ("(0.5 for _ in range(n))", False),
    "a mapping": ("{i: 0.5 for i in range(n)}", True), "a set": ("set(range(n))", True),
    "bytes": ("bytes(n)", True), "a text": ("'1' * n", True), "texts": ("['0.5'] * n", True),
    "nan": ("[float('nan')] * n", True), "infinity": ("[float('inf')] * n", True),
    "one nan": ("[0.5] * (n - 1) + [float('nan')]", True), "too many": ("[0.5] * (n + 1)", True),
    "too few": ("[0.5] * (n - 1)", True), "nothing": ("None", True), "a number": ("0.5", True),
    "nested": ("[[0.5]] * n", True), "complex numbers": ("[1j] * n", True),
    "a huge int": ("[10**400] * n", True), "objects": ("[object()] * n", True),
}  # fmt: skip
WHEN = {"always": "True", "at the second call": "len(calls) == 2", "for a whole batch": "n >= 8"}
MODULE = """
calls = []
{imported}


{define} mine(completions, **kwargs):
    n = len(completions)
    calls.append(n)
    if {condition}:
        {code}
        return {value}
    return [0.25] * n
"""


def write_reward(path: Path, rng: random.Random) -> tuple[str, bool]:
    """Write a module whose reward `mine` misbehaves in one way.

    Returns:
        What it does, and whether every command that calls it must refuse it.
    """
    act, result, on_import = "nothing", "floats", False
    if rng.random() < 0.5:
        result = rng.choice(list(RETURNS))
    else:
        act = rng.choice(list(ACTS))
        on_import = rng.random() < 0.2
    if on_import and act == "changes its inputs":
        raise Unfit("no inputs yet")
    when, define = rng.choice(list(WHEN)), rng.choice(["def", "def", "def", "async def"])
    (code, bad_act), (value, bad_value) = ACTS[act], RETURNS[result]
    path.write_text(
        MODULE.format(
            imported=code if on_import else "", define=define, condition=WHEN[when],
            code="pass" if on_import else code, value=value,
        ),
        encoding="utf-8",
    )  # fmt: skip
    where = "on import" if on_import else f"{define}, {when}"
    return f"{act}, returns {result}, {where}", (bad_act or bad_value) and (
        on_import or when == "always"
    )
