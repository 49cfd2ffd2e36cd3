"""The wheel holds all that the command needs: built, installed, and run from an empty folder."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts import steps_of
from tiny import ROOT

# Not among the packages of the tests' environment, where the checkout may be installed too.
REWARD = '''
import sys
from pathlib import Path

OURS = ("sologrpo", "rewards", "quickstart", "tiny")


def length(completions, **kwargs):
    """Score a completion by its length, and note where our modules were imported from."""
    modules = [(n, m) for n, m in sys.modules.items() if n.partition(".")[0] in OURS]
    Path("imported.txt").write_text("\\n".join(str(m.__file__) for _, m in modules))
    return [float(len(completion[0]["content"])) for completion in completions]
'''


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    pip, flags = ("-m", "pip", "--disable-pip-version-check"), ("--no-deps", "--no-index")
    run(*pip, "wheel", *flags, "--no-build-isolation", "-w", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", *flags, "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def test_the_installed_command_trains_from_an_empty_folder(
    installed: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(installed)}}
    train = (str(installed / "bin" / "sologrpo"), "train", "--config", "quickstart")
    train += ("--model_name_or_path", str(tiny_llama), "--max_train_examples", "16")

    (tmp_path / "my_rewards.py").write_text(REWARD)
    small = ("--num_generations", "2", "--per_device_train_batch_size", "4", "--max_steps", "3")
    small += ("--max_completion_length", "8")
    small += ("--rewards", "my_rewards:length", "--reward_weights", "1.0", "--reward_workers", "0")
    printed = run(*train, *small, **options)
    assert "quickstart: 16 prompts" in printed
    assert "adapter  runs/quickstart/adapter" in printed
    assert steps_of(tmp_path / "runs" / "quickstart") == [1, 2, 3]
    imported = (tmp_path / "imported.txt").read_text().splitlines()
    assert len(imported) > 20
    assert [file for file in imported if not Path(file).is_relative_to(installed)] == []
    assert json.loads((tmp_path / "runs/quickstart/environment.json").read_text())["dtype"]


def test_the_wheel_holds_every_split_of_the_quickstart(installed: Path) -> None:
    for split in ("train", "test", "test_unseen"):
        packed = installed / "sologrpo/bundled/quickstart" / f"{split}.jsonl"
        assert packed.read_bytes() == (ROOT / "quickstart" / packed.name).read_bytes()


def test_the_dockerfile_copies_what_a_wheel_is_made_of() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    copied = {
        word.rstrip("/").removeprefix("./")
        for line in text.splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["project"]["readme"], *wheel["packages"], *wheel["force-include"]}
    missing = [name for name in needed if not {name, name.partition("/")[0]} & copied]
    assert missing == []
