"""Whole processes, as users start them: a few steps of either trainer, and complete runs."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _by_position import SIGNAL
from _measure import Row, resident_gib
from _sizes import Bench
from _trainers import CONFIG, ROOT

SMOOTH = 3  # steps of the moving average
POLL = 0.2  # seconds
STEP_SECONDS = 400.0  # of one step, at most, start-up included


def measure_user(bench: Bench, row: Row, contender: str, signal: float) -> None:
    """Time whole steps at the quickstart's shapes, as someone gets them who sets nothing.

    Args:
        bench: names the policy, and how many steps.
        row: gets the seconds of each step but the first, and the peak memory of the process.
        contender: stock, TRL's own defaults in a plain script, or solo: `train.py`.
        signal: share of the groups with signal; TRL computes all of them anyway.
    """
    steps = bench.sizes.user_steps + 1
    reward = "all_groups" if signal == 1.0 else "a_quarter"

    def command(folder: str) -> list[str]:
        if contender == "stock":
            script = str(ROOT / "benchmarks/stock_trl.py")
            return [sys.executable, script, str(bench.model), folder, str(steps)]
        return train_command(
            bench.model, folder, "--max_steps", str(steps), "--learning_rate", "0",
            "--lr_scheduler_type", "constant", "--rewards", f"_by_position:{reward}",
            "--reward_weights", "1", "--reward_workers", "0",
            "--per_device_train_batch_size", str(4 * len(SIGNAL)),
        )  # fmt: skip

    watch(command, lambda row: len(row["step_s"]) == steps, steps * STEP_SECONDS, row)
    row["step_s"] = row["step_s"][1:]
    if len(row["step_s"]) < steps - 1:
        raise RuntimeError(f"only {len(row['step_s'])} steps in {row['seconds']} s")
    row["median"] = statistics.median(row["step_s"])
    del row["reward"], row["seconds"]


def measure_run(bench: Bench, row: Row, trainer: str) -> None:
    """Run the quickstart: ours to its end, stock TRL until the reward is high enough.

    Args:
        bench: names the policy, and the reward.
        row: gets seconds since the first step began, and those until the reward was reached.
        trainer: value of `--trainer`.
    """
    sizes = bench.sizes

    def command(folder: str) -> list[str]:
        settings = ["--max_steps", str(sizes.run_steps)]
        if trainer == "stock":  # the same 64 completions, in micro-batches that it can hold
            settings += ["--trainer", "stock", "--per_device_train_batch_size", "8"]
            settings += ["--gradient_accumulation_steps", "8"]
        return train_command(bench.model, folder, *settings)

    def is_over(row: Row) -> bool:
        latest = row["reward"][-SMOOTH:]
        if len(latest) == SMOOTH and statistics.mean(latest) >= sizes.run_reward:
            row.setdefault("reached_s", row["seconds"])
        if trainer == "stock" and "reached_s" in row:
            return True
        return len(row["reward"]) == sizes.run_steps

    watch(command, is_over, sizes.run_seconds, row)
    del row["step_s"]


def train_command(model: Path, folder: str, *settings: str) -> list[str]:
    """Build the command line of the quickstart; its run directory is in the folder."""
    return [
        sys.executable, "train.py", "--config", str(CONFIG), "--output_dir", f"{folder}/run",
        "--model_name_or_path", str(model), "--dataset_name", "quickstart", *settings,
    ]  # fmt: skip


def watch(
    command: Callable[[str], list[str]], is_over: Callable[[Row], bool], seconds: float, row: Row
) -> None:
    """Run a training process, and end it when it has done enough.

    Args:
        command: builds the command line for a folder, where the process writes `metrics.jsonl`.
        is_over: asked after each step.
        seconds: after which the process is ended anyway.
        row: gets the rewards and seconds of the steps, the seconds since the first step began, and
            the peak memory of the process.

    Raises:
        RuntimeError: if the process ended without a step.
    """
    with tempfile.TemporaryDirectory(prefix="sologrpo-bench-") as folder:
        log = Path(folder) / "console.txt"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        with log.open("w") as console:
            process = subprocess.Popen(
                command(folder), cwd=ROOT, stdout=console, stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": paths},
            )  # fmt: skip
            try:
                _watch(process, Path(folder), is_over, seconds, row)
            finally:
                process.kill()  # not SIGTERM, on which a run finishes its step and saves
                process.wait()
        if not row["reward"]:
            raise RuntimeError(f"the process ended without a step: {log.read_text()[-400:]}")


def _watch(
    process: subprocess.Popen[bytes],
    folder: Path,
    is_over: Callable[[Row], bool],
    seconds: float,
    row: Row,
) -> None:
    deadline = time.perf_counter() + seconds
    row |= {"reward": [], "step_s": [], "seconds": 0.0, "peak_gib": 0.0}
    began = 0.0
    while time.perf_counter() < deadline:
        ended = process.poll() is not None
        if not ended:
            row["peak_gib"] = max(row["peak_gib"], round(resident_gib("VmHWM", process.pid), 3))
        steps = _steps(folder)
        now = time.perf_counter()
        if steps and not row["reward"]:
            began = now - steps[0]["step_time"]
        if len(steps) > len(row["reward"]):
            row["reward"] = [round(step["reward"], 4) for step in steps]
            row["step_s"] = [round(step["step_time"], 2) for step in steps]
            row["seconds"] = round(now - began, 1)
            if is_over(row):
                return
        if ended:
            return
        time.sleep(POLL)


def _steps(folder: Path) -> list[dict[str, Any]]:
    """Read the steps logged so far; an incomplete last line is left for later."""
    metrics = next(folder.glob("**/metrics.jsonl"), None)
    if metrics is None:
        return []
    whole, _, _ = metrics.read_text(encoding="utf-8").rpartition("\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if "reward" in row]
