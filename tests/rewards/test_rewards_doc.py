"""docs/rewards.md: its example works as written, and its tables are complete."""

import re

import pytest
import yaml
from test_reward_cli import run

from rewards import REWARDS, hacking_signs
from rewards.contained import PASSED_BY_TRL
from sologrpo.base.files import recipes
from tiny import ROOT

DOC = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
# Nothing but sizes: the rest of the recipe is as shipped.
SHORT = {"max_steps": 1, "max_completion_length": 8, "lora_r": 2, "per_device_train_batch_size": 8}


@pytest.fixture
def folder(tmp_path):
    """A folder with the document's `my_rewards.py` and a config that has its line."""
    (code,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    (line,) = re.findall(r"^Name it in the config: `(.*)`", DOC, re.MULTILINE)
    recipe = yaml.safe_load(recipes()["quickstart"].read_text(encoding="utf-8"))
    config = yaml.safe_dump(recipe | SHORT | yaml.safe_load(line))
    (tmp_path / "my_config.yaml").write_text(config, encoding="utf-8")
    return tmp_path


def test_the_example_trains(folder, server, tiny_llama):
    paths = ["--model_name_or_path", tiny_llama, "--output_dir", folder / "run"]
    done = server.run_command("train", "--config", folder / "my_config.yaml", *paths, cwd=ROOT)
    assert done.code == 0, done
    assert "rewards/shows_its_work/mean" in (folder / "run" / "metrics.jsonl").read_text()


def test_the_example_on_the_command_line(folder):
    (text,) = re.findall(r'--reward my_rewards:shows_its_work "(.*)"', DOC)
    arguments = ["score", "--gold", "18", "--reward", "my_rewards:shows_its_work", text]
    scored = run(*arguments, cwd=folder).stdout.decode()
    assert re.search(r"^shows_its_work +\+0.333333$", scored, re.MULTILINE)


def test_tables_are_complete():
    named = set(re.findall(r"^\| `([a-z0-9_/<>]+)`", DOC, re.MULTILINE))
    named |= set(re.findall(r"`([a-z_]+)(?:\([a-z, ]+\))?`", DOC))
    assert set(REWARDS) <= named
    assert set(PASSED_BY_TRL) <= named
    assert {f"hacking/{name}" for name in hacking_signs("")} <= named
