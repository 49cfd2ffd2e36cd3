"""Two processes, each with half of the rows, do what one process does with all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fixed_rollouts import relative_gap
from sologrpo.files import METRICS
from sologrpo.training.packed_loss import MicroBatchLog, metrics_of_one_batch
from tiny import ROOT
from two_processes import CASES, sample_and_validate, train

SCRIPT = Path(__file__).parents[1] / "two_processes.py"
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
# What a process measures of itself.
OWN_FIGURES = ("time/", "tokens_per_second/", "memory/", "step_time")


@pytest.fixture(scope="module")
def output(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both processes ran."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, *LAUNCH, "--main_process_port", "0"]  # any free port
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(SCRIPT), str(tiny_llama), str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def both(output: Path) -> list[dict[str, Any]]:
    """Load the output of each process."""
    return [torch.load(output / f"{process}.pt") for process in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(
    name: str, both: list[dict[str, Any]], tiny_llama: Path, tmp_path: Path
) -> None:
    first, second = (seen[name] for seen in both)
    for parameter, value in first["adapter"].items():
        assert torch.equal(value, second["adapter"][parameter]), parameter

    alone = train(CASES[name], tiny_llama, tmp_path)
    assert len(alone["gradients"]) == len(first["gradients"]) == 2
    for expected, got in zip(alone["gradients"], first["gradients"], strict=True):
        if name == "no-signal":
            assert not any(torch.count_nonzero(gradient) for gradient in got.values())
        else:
            assert min(float(gradient.norm()) for gradient in expected.values()) > 1e-6
            assert relative_gap(expected, got) < 1e-5
    assert relative_gap(alone["adapter"], first["adapter"]) < 1e-6
    for expected, got in zip(alone["logs"], first["logs"], strict=True):
        assert global_figures(got) == pytest.approx(global_figures(expected), rel=1e-4, abs=1e-6)


def global_figures(logs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if not name.startswith(OWN_FIGURES)}


def test_processes_draw_different_completions(both: list[dict[str, Any]]) -> None:
    completions = both[0]["sampled"]["completions"]
    assert completions == both[1]["sampled"]["completions"]  # gathered from both
    here, there = completions[:8], completions[8:]
    assert len(there) == 8
    assert not any(a == b for a, b in zip(here, there, strict=True))


def test_validation_is_that_of_one_process_and_logged_once(
    both: list[dict[str, Any]], output: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    first, second = (seen["sampled"]["validation"] for seen in both)
    assert first == second == sample_and_validate(tiny_llama, tmp_path)["validation"]
    assert first["eval_n"] == 5
    lines = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
    assert [line["eval_n"] for line in lines if "eval_n" in line] == [5]
    assert sum("reward" in line for line in lines) == 1


def test_metrics_of_masked_micro_batches_do_not_count() -> None:
    nan = float("nan")
    masked = MicroBatchLog(1, 0, {"ratio/mean": nan, "ratio/min": nan, "clip_ratio/high_max": nan})
    known = MicroBatchLog(1, 5, {"ratio/mean": 1.5, "ratio/min": 0.5, "clip_ratio/high_max": 0.2})
    assert metrics_of_one_batch([masked, known, masked]) == known.metrics
    assert metrics_of_one_batch([masked])["ratio/min"] != 0.0
    assert metrics_of_one_batch([]) == {}
