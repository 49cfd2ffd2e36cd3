"""Shipped recipes that are killed resume to the same adapter, also through `accelerate launch`."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_resume import adapter_of, assert_equal_weights

from scripts import exit_code, train_without_report
from server import Server
from tiny import ROOT

RECIPES = ["quickstart", *sorted(path.stem for path in (ROOT / "configs").glob("smoke-*.yaml"))]
STEPS = 4
# Nothing but sizes and steps: a test that pins what a recipe leaves open hides bugs.
# But for the rewards, because random weights earn nothing of a recipe's and would not be trained;
# and the number format, because two runs may measure different ones.
EARNED = ["--rewards", "strict_format", "digits:digit_share", "--reward_weights", "0.2", "1.0"]
SHORT = {
    "max_steps": STEPS, "save_steps": 1, "max_completion_length": 8, "lora_r": 2,
    "dtype": "float32",
}  # fmt: skip
TIMEOUT = 120  # seconds


def arguments(recipe: str, model: Path, output: Path, *more: str) -> list[str]:
    short = [text for key, value in SHORT.items() for text in (f"--{key}", str(value))]
    return [
        "--config", f"configs/{recipe}.yaml", "--model_name_or_path", str(model),
        "--output_dir", str(output), *short, *EARNED, *more,
    ]  # fmt: skip


def wait_for_checkpoint(run: Path, ended: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (run / "checkpoint-1" / "manifest.json").exists():
        assert not ended()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def train_whole(recipe: str, model: Path, run: Path) -> dict[str, torch.Tensor]:
    """Train without a kill; return the adapter."""
    assert exit_code(train_without_report(), *arguments(recipe, model, run)) == 0
    trained = adapter_of(run / "adapter")
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    return trained


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_recipe_resumes_to_the_same_adapter(
    recipe: str, server: Server, tiny_llama: Path, tmp_path: Path
) -> None:
    trained = train_whole(recipe, tiny_llama, tmp_path / "whole")
    killed = tmp_path / "killed"
    command = ("train", *arguments(recipe, tiny_llama, killed))
    with server.running_command(*command, cwd=ROOT) as process:
        wait_for_checkpoint(killed, process.has_ended)
        process.send_signal(signal.SIGKILL)
    assert not (killed / "adapter").exists()
    resumed = server.run_command(*command, "--resume", cwd=ROOT)
    assert resumed.code == 0, resumed
    assert "resuming from" in resumed.out + resumed.err
    assert_equal_weights(adapter_of(killed / "adapter"), trained)
