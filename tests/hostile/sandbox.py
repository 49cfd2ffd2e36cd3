"""A folder as a user has it: recipes, a model, problems, rewards, and a run that was finished.

Recipes are the shipped ones, with smaller sizes and with the tiny model in the model's place.
"""

import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quickstart.get_model import write_manifest
from server import ROOT, Job, Server
from tiny import save_model, short_recipe

MODEL = "models/SmolLM2-135M-Instruct"
RUN = "runs/quickstart"
MERGED, FOUR_BIT = "out/merged", "out/4bit"
QUESTIONS = "questions.txt"
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
RESUME = [
    "--config",
    "configs/quickstart.yaml",
    "--output_dir",
    RUN,
    "--max_steps",
    "3",
    "--resume",
]
PROBLEMS = {"train": 40, "test": 8}

REWARDS = '''
"""Rewards of a user."""


def fair(completions, **kwargs):
    """Return the share of digits."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]
'''
EXAMPLES = [{"question": "1 + 1?", "thinking": "1 + 1 = 2", "answer": "2"}]

# The commands that make the finished run, in order.
HISTORY = (
    ["train", "--config", "configs/quickstart.yaml"],
    ["evaluate", "--run", RUN, "--limit", "3"],
    ["export", "--run", RUN, "--save_merged", MERGED, "--save_4bit", FOUR_BIT],
)  # fmt: skip


def shortened(recipe: str) -> dict[str, Any]:
    """Return the settings of a shipped recipe, shortened, with what the folder has."""
    # A recipe that names no number of steps is of one pass over thousands of problems.
    return {"max_steps": 2} | short_recipe(recipe) | {
        "model_name_or_path": MODEL, "dataset_name": "quickstart", "save_total_limit": 9,
    }  # fmt: skip


def build(folder: Path, server: Server) -> Path:
    """Make the folder, with a run that the commands of `HISTORY` have made."""
    home = folder / "home"
    (home / "configs").mkdir(parents=True)
    for recipe in RECIPES:
        text = yaml.safe_dump(shortened(recipe), sort_keys=False)
        (home / "configs" / f"{recipe}.yaml").write_text(text, encoding="utf-8")
    write_manifest(save_model(home / MODEL, "llama", tied=True))
    (home / "quickstart").mkdir()
    for split, count in PROBLEMS.items():
        lines = (ROOT / "quickstart" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        text = "".join(f"{line}\n" for line in lines[:count])
        (home / "quickstart" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    (home / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    (home / "examples.yaml").write_text(yaml.safe_dump(EXAMPLES), encoding="utf-8")
    (home / QUESTIONS).write_text(
        "Ana has 6 eggs and 2 more. How many?\n2 + 3?\n", encoding="utf-8"
    )
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text("not yours\n", encoding="utf-8")
    for number, argv in enumerate(HISTORY):
        ended = server.run(Job([*argv], str(home), str(folder.parent / f"history-{number}"), 240.0))
        assert ended.code == 0, f"{argv}: {ended}"
    return folder


def resumed_adapter(original: Path, folder: Path, server: Server) -> str:
    """Return the hash of the adapter that the finished run ends with when it is continued."""
    home = copy(original, folder) / "home"
    ended = server.run(Job(["train", *RESUME], str(home), str(folder), 240.0))
    assert ended.code == 0, ended
    return _entry(home / RUN / "adapter" / "adapter_model.safetensors").content


def copy(original: Path, to: Path) -> Path:
    return Path(shutil.copytree(original, to, symlinks=True))


@dataclass(frozen=True)
class Entry:
    """Describe a file, folder or link: its kind, and a hash of its content."""

    kind: str
    content: str


def snapshot(folder: Path) -> dict[str, Entry]:
    """Describe everything below a folder, by path relative to it."""
    found = {}
    for where, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(where, name)
            if name != "__pycache__" and "__pycache__" not in where:
                found[str(path.relative_to(folder))] = _entry(path)
    return found


def _entry(path: Path) -> Entry:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return Entry("link", os.readlink(path))
    if stat.S_ISREG(mode):
        return Entry("file", hashlib.sha256(path.read_bytes()).hexdigest())
    return Entry("folder" if stat.S_ISDIR(mode) else "other", "")
