"""Callbacks that show and log a run: the console, and `metrics.jsonl`."""

import atexit
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from transformers import (
    IntervalStrategy,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from rewards.completions import text_of
from sologrpo.base.console import Terminal, print_line, time_left
from sologrpo.base.files import COMPLETIONS, COMPLETIONS_FILE
from sologrpo.base.logs import append_metrics, read_completions
from sologrpo.training.progress import PARTS

SAMPLES_EVERY = 10  # steps
PROMPT_CHARS, COMPLETION_CHARS = 120, 300  # of a shown sample: it stays readable


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Append every log of the trainer to `metrics.jsonl`."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs is not None:
            append_metrics(Path(args.output_dir), state.global_step, logs)


class ValidateAtEnd(TrainerCallback):  # type: ignore[misc]
    """Validate after the last step too, whatever `eval_steps` is."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for a validation, if the run has any and this step is the last."""
        if args.eval_strategy != IntervalStrategy.NO and state.global_step >= state.max_steps:
            control.should_evaluate = True


class ConsoleLog(TrainerCallback):  # type: ignore[misc]
    """Print one line per logged step, validation scores, and a few completions every N steps.

    A terminal has a progress bar too; elsewhere lines have no control characters. Completions are
    read from the files that `log_completions` writes: without these none are shown.
    """

    def __init__(self, console: Terminal, samples_every: int = SAMPLES_EVERY) -> None:
        self.console = console
        self.samples_every = samples_every
        self._samples_of: int | None = None  # the step whose completions are still to be shown
        self._bar: Progress | None = None
        self._ends: list[float] = []  # of all steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the bar, at the step where the run starts or resumes."""
        if not self.console.is_interactive or self.console.quiet:
            return
        self._bar = _bar(self.console)
        done, total = state.global_step, state.max_steps
        self._bar.add_task("training", total=total, completed=done, left="")
        atexit.register(self._bar.stop)  # a run that fails must not leave the cursor hidden
        self._bar.start()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the completions of the previous step: TRL writes them after its log."""
        self._print_samples(args)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar, and estimate the end."""
        self._ends.append(time.perf_counter())
        if self._bar is not None:
            done, left = state.global_step, self._left(state)
            self._bar.update(self._bar.task_ids[0], completed=done, left=left)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the last completions and leave the bar as it is."""
        self._print_samples(args)
        if self._bar is not None:
            self._bar.stop()
            atexit.unregister(self._bar.stop)

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
        if "loss" in logs:
            line = step_line(state.global_step, state.max_steps, logs)
            left = self._left(state)
            self._print(f"{line}  {left}" if left else line)
            if state.global_step % self.samples_every == 0:
                self._samples_of = state.global_step
        elif "eval_accuracy" in logs:
            self._print(validation_line(state.global_step, logs))

    def _left(self, state: TrainerState) -> str:
        seconds = seconds_left(self._ends, state.max_steps - state.global_step)
        return time_left(seconds) if seconds else ""

    def _print(self, line: str) -> None:
        print_line(self.console, line)

    def _print_samples(self, args: TrainingArguments) -> None:
        step, self._samples_of = self._samples_of, None
        samples = [] if step is None else _read_samples(args, step)
        if not samples:
            return
        if self.console.is_terminal:
            self.console.print(_samples_table(samples, f"step {step}"))
            return
        for sample in samples:
            self._print(_sample_line(sample))


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        # An error in a run whose stderr goes to a file belongs there.
        redirect_stderr=sys.stderr.isatty(),
    )


def seconds_left(ends: Sequence[float], steps: int) -> float:
    """Estimate the seconds of the remaining steps from the ends of past ones; 0 if it is too early.

    Only the later half of the steps counts: never the first, which warms up and tests the engines.
    Those that sample and those that do not, validations and checkpoints are averaged.

    >>> seconds_left([100.0, 110.0, 120.0], 6)
    60.0
    """
    if len(ends) < 2:
        return 0.0
    later = ends[(len(ends) - 1) // 2 :]
    return steps * (later[-1] - later[0]) / (len(later) - 1)


def step_line(step: int, max_steps: int, logs: dict[str, Any]) -> str:
    """Describe a training step in one line, without the metrics that `logs` lacks."""
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}"]
    if "reward" not in logs:
        parts.append("same completions again")
    elif logs["reward"] is None:
        parts.append("reward    n/a")
    else:
        parts.append(f"reward {logs['reward']:6.3f}")
    for key, value in logs.items():
        if key.startswith("rewards/") and key.endswith("/mean") and value is not None:
            parts.append(f"{key.split('/')[1]} {value:.2f}")
    for key, label, spec in (
        ("frac_reward_zero_std", "no signal", ".0%"),
        ("trained_completions", "trained", ".0f"),
        ("completions/mean_length", "tokens", ".0f"),
        ("completions/clipped_ratio", "cut off", ".0%"),
        ("entropy", "entropy", ".2f"),
        ("kl", "kl", ".4f"),
    ):
        if logs.get(key) is not None:
            parts.append(f"{label} {logs[key]:{spec}}")
    seconds = step_seconds(logs)
    return "  ".join(parts if seconds is None else [*parts, f"s {seconds:.1f}"])


def step_seconds(logs: dict[str, Any]) -> float | None:
    """Add up the seconds of a step; TRL's figure, without the update, where parts are missing."""
    parts = [logs[f"time/{name}"] for name in PARTS if f"time/{name}" in logs]
    return sum(parts) if parts else logs.get("step_time")


def validation_line(step: int, logs: dict[str, Any]) -> str:
    """Describe a greedy validation in one line."""
    return (
        f"validation at step {step}: accuracy {logs['eval_accuracy']:.1%} "
        f"(lenient {logs['eval_accuracy_lenient']:.1%}), format {logs['eval_format_rate']:.1%}, "
        f"cut off {logs['eval_truncated_rate']:.1%}, n = {logs['eval_n']}"
    )


# -- sample completions ---------------------------------------------------------------------------

Sample = dict[str, Any]


def _read_samples(args: TrainingArguments, step: int) -> list[Sample]:
    """Read a few rows that TRL wrote of this step, evenly spread from best to worst advantage."""
    path = Path(args.output_dir) / COMPLETIONS / COMPLETIONS_FILE.format(step)
    if not path.is_file():
        return []
    rows = read_completions(path)
    rows.sort(key=lambda row: -row["advantage"])
    wanted = args.num_completions_to_print
    count = len(rows) if wanted is None else min(wanted, len(rows))
    return [rows[i * (len(rows) - 1) // max(count - 1, 1)] for i in range(count)]


def _scores(sample: Sample) -> list[str]:
    """List the rewards of a sample, and what else a reward logged of it, each with its name."""
    told = {"step", "prompt", "completion", "advantage"}
    scores = (
        f"{name.rpartition('/')[2]} {_score(value)}"  # "reason" of answer_correctness/reason
        for name, value in sample.items()
        if name not in told
    )
    return [shorten(score, PROMPT_CHARS) for score in scores]


def _score(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "n/a"  # a reward that could not judge
    return f"{value:.2f}" if isinstance(value, int | float) else str(value)


def _samples_table(samples: list[Sample], title: str) -> Table:
    table = Table("advantage", "scores", "prompt", "completion", title=title, show_lines=True)
    for sample in samples:
        table.add_row(
            f"{sample['advantage']:+.2f}",
            "\n".join(_scores(sample)),
            shorten(text_of(sample["prompt"]), PROMPT_CHARS),
            shorten(text_of(sample["completion"]), COMPLETION_CHARS),
        )
    return table


def _sample_line(sample: Sample) -> str:
    advantage = f"advantage {sample['advantage']:+.2f}"
    completion = shorten(text_of(sample["completion"]), COMPLETION_CHARS)
    return "  ".join(["  sample", advantage, *_scores(sample), completion])


def shorten(text: str, limit: int) -> str:
    """Shorten a model's text to one line of `limit` characters (at least 4), without its middle.

    >>> shorten("<thinking>\\n1 + 1\\n</thinking>", 20)
    '<thinkin … thinking>'
    """
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    head = (limit - 3) // 2
    return f"{line[:head]} … {line[len(line) - (limit - 3 - head) :]}"
