"""What a user sees and keeps of a run: one line a step, and `metrics.jsonl`."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sologrpo.run import METRICS


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Append every log of the trainer to `metrics.jsonl`, one JSON object a line.

    A value that is not a finite number is written as null: JSON has no NaN.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if not state.is_world_process_zero or logs is None:
            return
        row = {"step": state.global_step, **{key: _finite(value) for key, value in logs.items()}}
        with (Path(args.output_dir) / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ConsoleLog(TrainerCallback):  # type: ignore[misc]
    """Print one readable line a logged step, and the validation scores."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print one line."""
        if not state.is_world_process_zero or logs is None:
            return
        if "reward" in logs:
            self._print(step_line(state.global_step, state.max_steps, logs))
        elif "eval_accuracy" in logs:
            self._print(validation_line(state.global_step, logs))

    def _print(self, line: str) -> None:
        # Not wrapped: in a log file, where rich knows no width, a step stays one line.
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def step_line(step: int, max_steps: int, logs: dict[str, Any]) -> str:
    """One training step in one line: what is learned from first, then how, then the time."""
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}", f"reward {logs['reward']:6.3f}"]
    for key, value in logs.items():
        if key.startswith("rewards/") and key.endswith("/mean") and value is not None:
            parts.append(f"{key.split('/')[1]} {value:.2f}")
    for key, label, spec in (
        ("frac_reward_zero_std", "no signal", ".0%"),
        ("completions/mean_length", "tokens", ".0f"),
        ("completions/clipped_ratio", "cut off", ".0%"),
        ("entropy", "entropy", ".2f"),
        ("kl", "kl", ".4f"),
        ("step_time", "s", ".1f"),
    ):
        if logs.get(key) is not None:
            parts.append(f"{label} {logs[key]:{spec}}")
    return "  ".join(parts)


def validation_line(step: int, logs: dict[str, Any]) -> str:
    """One greedy validation in one line."""
    return (
        f"validation at step {step}: accuracy {logs['eval_accuracy']:.1%} "
        f"(lenient {logs['eval_accuracy_lenient']:.1%}), format {logs['eval_format_rate']:.1%}, "
        f"cut off {logs['eval_truncated_rate']:.1%}, n = {logs['eval_n']}"
    )
