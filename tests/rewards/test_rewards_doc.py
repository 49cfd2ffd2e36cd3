"""docs/rewards.md: its example works as written, and its tables are complete."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from test_reward_cli import run

from rewards import REWARDS, hacking_signs, load_rewards
from rewards.checking import PASSED_BY_TRL
from sologrpo.config.parsing import parse_config

DOC = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
SPEC = {"my_rewards:shows_its_work": {"max_sums": 2}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the document's `my_rewards.py`; nothing else makes it importable."""
    (code,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    yield tmp_path
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize("where", ["next to the config", "current directory"])
def test_the_example_is_found(folder, where, monkeypatch):
    if where == "current directory":
        monkeypatch.chdir(folder)
        specs = [SPEC]
    else:
        config = folder / "my_config.yaml"
        settings = {"model_name_or_path": "m", "bf16": False, "rewards": [SPEC]}
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        specs = parse_config(["--config", str(config)])[0].rewards
    (reward,) = load_rewards(specs, ["prompt", "question", "answer", "prompt_format"])
    chat = [[{"role": "assistant", "content": text}] for text in ("9 * 2 = 18", "18")]
    assert reward(completions=chat, answer=["#### 18"] * 2) == [0.5, 0.0]


def test_the_example_on_the_command_line(folder):
    arguments = ["score", "--gold", "18", "--reward", "my_rewards:shows_its_work", "9 * 2 = 18"]
    assert re.search(rb"shows_its_work +\+0.333333\n", run(*arguments, cwd=folder).stdout)


def test_tables_are_complete():
    named = set(re.findall(r"^\| `([a-z0-9_/<>]+)`", DOC, re.MULTILINE))
    named |= set(re.findall(r"`([a-z_]+)(?:\([a-z, ]+\))?`", DOC))
    assert set(REWARDS) <= named
    assert set(PASSED_BY_TRL) <= named
    assert {f"hacking/{name}" for name in hacking_signs("")} <= named
