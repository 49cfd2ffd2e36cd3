"""docs/rewards.md: its own reward works as written, and its tables are complete."""

import re
import sys
from pathlib import Path

import pytest
from test_reward_cli import run

from rewards import REWARDS, hacking_signs, load_rewards
from rewards.checking import PASSED_BY_TRL

DOC = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


@pytest.fixture
def own_reward(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


def test_the_own_reward(own_reward):
    spec = {"my_rewards:shows_its_work": {"max_sums": 2}}
    (reward,) = load_rewards([spec], ["prompt", "question", "answer", "prompt_format"])
    chat = [[{"role": "assistant", "content": text}] for text in ("9 * 2 = 18", "18")]
    assert reward(completions=chat, answer=["#### 18"] * 2) == [0.5, 0.0]


def test_the_own_reward_on_the_command_line(own_reward):
    result = run("score", "--gold", "18", "--reward", "my_rewards:shows_its_work", "9 * 2 = 18")
    assert b"shows_its_work  +0.333333" in result.stdout


def test_tables_are_complete():
    named = set(re.findall(r"^\| `([a-z0-9_/<>]+)`", DOC, re.MULTILINE))
    named |= set(re.findall(r"`([a-z_]+)(?:\([a-z, ]+\))?`", DOC))
    assert set(REWARDS) <= named
    assert set(PASSED_BY_TRL) <= named
    assert {f"hacking/{name}" for name in hacking_signs("")} <= named
