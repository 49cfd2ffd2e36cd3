"""ZeRO-2 with the real DeepSpeed, one and two processes on a CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixed_rollouts import Gradients, relative_gap
from scripts import Printed, run_here, script_environment
from tiny import ROOT
from two_processes import CASES, Seen, assert_trained_as_one, launch

ZERO2 = ("--config_file", "configs/accelerate/zero2.yaml")
ON_CPU = {"DS_ACCELERATOR": "cpu"}  # DeepSpeed would look for a GPU, and warn that there is none
STEPS = 2
# The shipped recipe, but for its sizes. Random weights earn none of its rewards.
SHORT = (
    "--config", "configs/quickstart.yaml", "--max_steps", STEPS, "--save_steps", 1, "--lora_r", 2,
    "--max_completion_length", 8, "--per_device_train_batch_size", 16, "--bf16", "false",
    "--rewards", "strict_format", "digits:digit_share",
)  # fmt: skip


def deepspeed(processes: int, *arguments: object) -> Printed:
    """Launch `train.py` as docs/scaling.md does."""
    accelerate = Path(sys.executable).parent / "accelerate"
    launcher = [accelerate, "launch", "--quiet", *ZERO2, "--num_processes", processes]
    done = subprocess.run(
        [str(part) for part in [*launcher, "--main_process_port", 0, "train.py", *arguments]],
        env=script_environment(**ON_CPU),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = Printed(done.stderr)
    printed.code, printed.stdout = done.returncode, done.stdout
    return printed


def short(model: Path, run: Path, trainer: str) -> list[object]:
    named = ("--model_name_or_path", model, "--output_dir", run, "--trainer", trainer)
    return [*SHORT, *named]


def adapter_of(folder: Path) -> Gradients:
    weights: Gradients = load_file(str(folder / "adapter_model.safetensors"))
    return weights


def figures(run: Path, *names: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [{name: row[name] for name in names} for row in rows]


# -- gradients -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return launch(tiny_llama, tmp_path_factory.mktemp("zero2"), *ZERO2, **ON_CPU)


# Ragged rows in micro-batches of one to three: the processes differ in their number. In
# `one-sided`, all rows of a process have an advantage of zero.
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_without_deepspeed(
    name: str, both: Seen, tiny_llama: Path, tmp_path: Path
) -> None:
    assert_trained_as_one(name, both, tiny_llama, tmp_path)


# -- train.py ------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["solo", "stock"])
def test_one_process_trains_as_without_deepspeed(
    trainer: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    done = deepspeed(1, *short(tiny_llama, with_it, trainer))
    assert done.code == 0, done
    assert run_here("train", *short(tiny_llama, without, trainer)).code == 0
    # The norm is that before clipping; clipping decides the weights of the next step.
    names = ("learning_rate", "grad_norm", "loss", "reward")
    for got, expected in zip(figures(with_it, *names), figures(without, *names), strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-6)
    trained = adapter_of(without / "adapter")
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    assert relative_gap(trained, adapter_of(with_it / "adapter")) < 1e-3

    # Its checkpoints hold DeepSpeed's optimizer: without it, one line and no fresh optimizer.
    refused = run_here("train", *short(tiny_llama, with_it, trainer), "--resume")
    assert refused.code == 2
    assert "it has the optimizer of 1 DeepSpeed processes, and these are 0" in refused


def test_two_processes_resume_to_the_same_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", short(tiny_llama, tmp_path / "run", "solo")
    done = deepspeed(2, *arguments)
    assert done.code == 0, done
    whole = adapter_of(run / "adapter")
    for folder in ("adapter", "checkpoint-2"):
        shutil.rmtree(run / folder)
    done = deepspeed(2, *arguments, "--resume")
    assert done.code == 0, done
    assert f"resuming from {run / 'checkpoint-1'}" in done
    resumed = adapter_of(run / "adapter")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert figures(run, "learning_rate")[-1]["learning_rate"] > 0
