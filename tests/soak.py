"""Train the tiny model for long: nothing grows from step to step, and nothing is missing.

    make soak

Not part of `make test`: three hundred steps take some minutes.
"""

import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from scripts import command_of, script_environment
from sologrpo.training.checkpoint import last_complete_checkpoint, step_of
from tiny import tiny_config

STEPS, WARM_UP = 300, 50
# Steps whose mean time is one measurement: neighbours slow a machine for seconds at a time.
BLOCK = 25
SAVE_STEPS, KEPT = 25, 3
EVERY = 0.5  # seconds between two looks at the process


@dataclass(frozen=True)
class Trend:
    """Straight line through measurements of the steps between the warm-up and the last one.

    Attributes:
        slope: change per step.
        error: standard error of the slope.
        level: mean.
    """

    slope: float
    error: float
    level: float

    @property
    def growth(self) -> float:
        """Return the share by which it grows over the whole run, as far as that is certain."""
        certain = max(0.0, self.slope - 3 * self.error)
        return certain * STEPS / self.level


def trend(steps: list[int], values: list[float]) -> Trend:
    # After the last step the report is drawn, which opens fonts and takes memory.
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if WARM_UP < s < STEPS]
    xs, ys = [float(s) for s, _ in pairs], [v for _, v in pairs]
    slope, start = statistics.linear_regression(xs, ys)
    left = sum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = statistics.pvariance(xs) * len(xs)
    error = (left / (len(xs) - 2) / spread) ** 0.5
    return Trend(slope, error, statistics.fmean(ys))


def block_means(values: list[float]) -> tuple[list[int], list[float]]:
    """Means of `BLOCK` steps each, and the step in the middle of each block."""
    starts = range(WARM_UP, STEPS, BLOCK)
    return (
        [start + BLOCK // 2 for start in starts],
        [statistics.fmean(values[start : start + BLOCK]) for start in starts],
    )


def steps_done(metrics: Path) -> int:
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


@pytest.mark.timeout(3600)
def test_three_hundred_steps(
    tmp_path: Path, tiny_llama: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = tmp_path / "soak.yaml"
    settings = tiny_config(tiny_llama, tiny_data, run) | {
        "max_steps": STEPS, "save_steps": SAVE_STEPS, "save_total_limit": KEPT,
        "learning_rate": 1e-3, "num_validation_examples": 2, "eval_strategy": "steps",
        "eval_steps": 50,
    }  # fmt: skip
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = command_of("train", "--config", config)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=script_environment())
    watched = psutil.Process(process.pid)
    at_step: list[int] = []
    resident: list[float] = []
    files: list[float] = []
    threads: list[float] = []
    while process.poll() is None:
        with watched.oneshot():
            at_step.append(steps_done(run / "metrics.jsonl"))
            resident.append(watched.memory_info().rss / 2**20)
            files.append(float(watched.num_fds()))
            threads.append(float(watched.num_threads()))
        time.sleep(EVERY)
    assert process.returncode == 0

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert len(list((run / "completions").glob("*.parquet"))) == STEPS
    kept = sorted(step_of(path) for path in run.glob("checkpoint-*"))
    # The newest, and the one with the best validation, which may be older.
    assert len(kept) == KEPT
    assert kept[1 - KEPT :] == [STEPS - SAVE_STEPS, STEPS]
    last = last_complete_checkpoint(run)
    assert last is not None
    assert step_of(last) == STEPS

    trends = {
        "memory, MiB": trend(at_step, resident),
        "open files": trend(at_step, files),
        "threads": trend(at_step, threads),
        "seconds per step": trend(*block_means([row["step_time"] for row in trained])),
    }
    with capsys.disabled():
        print()
        for name, found in trends.items():
            print(f"{name:<15} {found.level:10.3f} mean, {found.slope:+.6f} "
                  f"+- {found.error:.6f} per step")  # fmt: skip
    for name, found in trends.items():
        assert found.growth < 0.05, name
