"""Shipped recipes that are killed resume to the same adapter, through `accelerate launch`."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_resume import adapter_of, assert_equal_weights

from scripts import exit_code, launch_command, script_environment, train_without_report
from tiny import ROOT

RECIPES = ["quickstart", *sorted(path.stem for path in (ROOT / "configs").glob("smoke-*.yaml"))]
STEPS = 4
# Nothing but sizes and steps: a test that pins what a recipe leaves open hides bugs.
# But for the rewards: random weights earn nothing of a recipe's, and would not be trained.
EARNED = ["--rewards", "strict_format", "digits:digit_share", "--reward_weights", "0.2", "1.0"]
SHORT = {"max_steps": STEPS, "save_steps": 1, "max_completion_length": 8, "lora_r": 2}
TIMEOUT = 120  # seconds


def arguments(recipe: str, model: Path, output: Path, *more: str) -> list[str]:
    short = [text for key, value in SHORT.items() for text in (f"--{key}", str(value))]
    return [
        "--config", f"configs/{recipe}.yaml", "--model_name_or_path", str(model),
        "--output_dir", str(output), *short, *EARNED, *more,
    ]  # fmt: skip


def launch(*train_arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        launch_command(*train_arguments), cwd=ROOT, env=script_environment(), text=True,
        start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    return output


def kill_after_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (run / "checkpoint-1" / "manifest.json").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_recipe_resumes_to_the_same_adapter(
    recipe: str, tiny_llama: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(train_without_report(), *arguments(recipe, tiny_llama, whole)) == 0
    kill_after_checkpoint(launch(*arguments(recipe, tiny_llama, killed)), killed)
    assert not (killed / "adapter").exists()
    trained = adapter_of(whole / "adapter")
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    output = finish(launch(*arguments(recipe, tiny_llama, killed, "--resume")))
    assert "resuming from" in output
    assert_equal_weights(adapter_of(killed / "adapter"), trained)
