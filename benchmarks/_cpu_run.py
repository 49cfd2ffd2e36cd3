"""Complete runs of the quickstart until they reach a given reward, with either trainer."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from _measure import Row
from _sizes import Bench
from _trainers import CONFIG, ROOT

SMOOTH = 3  # steps of the moving average
POLL = 0.2  # seconds


def part_run(bench: Bench) -> None:
    """Measure `train.py` with our trainer, then with `--trainer stock`, which takes longer."""
    for trainer, share in (("solo", 0.4), ("stock", 1.0)):
        seconds = bench.report.time_left() * share
        measure = partial(train_until, bench.model, trainer, bench.sizes.run_reward, seconds)
        bench.variant("run", measure, trainer=trainer)


def train_until(model: Path, trainer: str, reward: float, seconds: float, row: Row) -> None:
    """Train until the moving average of the mean reward reaches a value, then end the process.

    Args:
        model: folder of the policy.
        trainer: value of `--trainer`.
        reward: the value to reach.
        seconds: after which the run is given up.
        row: gets the seconds since the first step began, the steps and the rewards.
    """
    with tempfile.TemporaryDirectory(prefix="sologrpo-bench-") as folder:
        # 64 completions per step as in the config, in micro-batches that stock TRL can hold.
        command = [
            sys.executable, "train.py", "--config", str(CONFIG), "--output_dir", folder,
            "--model_name_or_path", str(model), "--dtype", "float32", "--trainer", trainer,
            "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "8",
        ]  # fmt: skip
        log = Path(folder) / "console.txt"
        with log.open("w") as console:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT, env=os.environ
            )
            try:
                _watch(process, Path(folder) / "metrics.jsonl", reward, seconds, row)
            finally:
                process.kill()  # not SIGTERM, on which a run finishes its step and saves
                process.wait()
        if not row["reward"]:
            raise RuntimeError(f"train.py ended without a step: {log.read_text()[-400:]}")


def _watch(
    process: subprocess.Popen[bytes], metrics: Path, reward: float, seconds: float, row: Row
) -> None:
    deadline = time.perf_counter() + seconds
    row |= {"reached": False, "reward": []}
    began = 0.0
    while time.perf_counter() < deadline:
        ended = process.poll() is not None
        steps = _steps(metrics)
        now = time.perf_counter()
        if steps and not row["reward"]:
            began = now - steps[0]["step_time"]
        if len(steps) > len(row["reward"]):
            rewards = [round(step["reward"], 4) for step in steps]
            reached = len(rewards) >= SMOOTH and statistics.mean(rewards[-SMOOTH:]) >= reward
            row |= {"reward": rewards, "steps": len(steps), "reached": reached}
            row["seconds"] = round(now - began, 1)
        if row["reached"] or ended:
            return
        time.sleep(POLL)


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """Read the steps logged so far; an incomplete last line is left for later."""
    if not metrics.exists():
        return []
    whole, _, _ = metrics.read_text(encoding="utf-8").rpartition("\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if "reward" in row]
