"""Console and `metrics.jsonl`: the output of a run on a terminal and in a file."""

import io
import json
import os
import pty
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerCallback

from server import Server
from sologrpo.base.console import Terminal
from sologrpo.training.callbacks import (
    ConsoleLog,
    MetricsFile,
    seconds_left,
    shorten,
    step_line,
    validation_line,
)
from tiny import tiny_config

LOGS: dict[str, Any] = {
    "loss": -0.01,
    "grad_norm": 0.5,
    "completions/mean_length": 120.4,
    "completions/clipped_ratio": 0.05,
    "rewards/strict_format/mean": 0.5,
    "rewards/strict_format/std": 0.1,
    "rewards/answer_correctness/mean": 0.25,
    "rewards/never_judged/mean": None,
    "reward": 1.2345,
    "frac_reward_zero_std": 0.25,
    "trained_completions": 48.0,
    "entropy": 0.512,
    "step_time": 9.0,
    "time/sampling": 8.0,
    "time/training": 2.25,
}
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


# -- one line per step ----------------------------------------------------------------------------


def test_a_step_in_one_line() -> None:
    assert step_line(3, 60, LOGS) == (
        "step  3/60  reward  1.234  strict_format 0.50  answer_correctness 0.25  no signal 25%  "
        "trained 48  tokens 120  cut off 5%  entropy 0.51  s 10.2"
    )


def test_a_step_on_old_completions_in_one_line() -> None:
    logs = {"loss": 0.1, "entropy": 0.5, "kl": 0.0123, "trained_completions": 8.0}
    line = "step 2/4  same completions again  trained 8  entropy 0.50  kl 0.0123"
    assert step_line(2, 4, logs) == line


# -- what a model wrote, on one line --------------------------------------------------------------


def test_shortened_text() -> None:
    assert shorten("<thinking>\n 1 +\t1\n</thinking>", 100) == "<thinking> 1 + 1 </thinking>"
    assert shorten("0123456789" * 10, 23) == "0123456789 … 0123456789"


@given(st.text(st.characters(), max_size=60), st.integers(9, 40))
def test_shortened_text_is_one_short_line(text: str, limit: int) -> None:
    shown = shorten(text, limit)
    assert len(shown) <= limit
    assert len(shown.splitlines()) <= 1


# -- a run, event by event ------------------------------------------------------------------------

ATTACK = "[bold red]18[/bold red] [/x] \x1b[2J\x1b]0;title\x07 \r\n<answer>18</answer>"


def write_completions(run: Path, step: int) -> None:
    """Write a file as TRL does: six unordered completions, one score missing."""
    advantages = [0.5, -1.0, 2.0, 0.0, 1.0, -2.0]
    count = len(advantages)
    table = pd.DataFrame(
        {
            "step": [step] * count,
            "prompt": [[{"role": "user", "content": f"What is {i}?"}] for i in range(count)],
            "completion": [
                [{"role": "assistant", "content": f"{ATTACK} number {i}"}] for i in range(count)
            ],
            "strict_format": [1.0, -1.0, 1.0, None, 1.0, -1.0],
            "unit": ["km"] * count,
            "advantage": advantages,
        }
    )
    (run / "completions").mkdir(parents=True, exist_ok=True)
    table.to_parquet(run / "completions" / f"completions_{step:05d}.parquet")


def play(
    console: Terminal, run: Path, count: int | None = 3, steps: int = 4, samples_every: int = 2
) -> None:
    """Call `ConsoleLog` as the trainer does: TRL writes the completions after the log."""
    log = ConsoleLog(console, samples_every)
    args: Any = SimpleNamespace(output_dir=str(run), num_completions_to_print=count)
    state: Any = SimpleNamespace(global_step=0, max_steps=steps, is_world_process_zero=True)
    log.on_train_begin(args, state, None)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        log.on_step_begin(args, state, None)  # type: ignore[arg-type]
        state.global_step = step
        log.on_step_end(args, state, None)  # type: ignore[arg-type]
        log.on_log(args, state, None, LOGS)  # type: ignore[arg-type]
        write_completions(run, step)
    log.on_log(args, state, None, {"train_runtime": 1.0})  # type: ignore[arg-type]
    log.on_train_end(args, state, None)  # type: ignore[arg-type]


def played(run: Path, terminal: bool, **settings: Any) -> str:
    console = Terminal(
        file=io.StringIO(), force_terminal=terminal, width=120, legacy_windows=False,
        _environ={"TERM": "xterm"},
    )  # fmt: skip
    play(console, run, **settings)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(printed, str)
    return printed


def ends_of(seconds: list[float]) -> list[float]:
    return [100.0 + sum(seconds[: i + 1]) for i in range(len(seconds))]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([300], 0),  # too early: the first step tests the sampling engines
        ([300, 10], 10),
        ([300, 10, 10, 10], 10),
        ([300, 50, 30, 20, 10, 10, 10, 10], 10),
        ([300, 2, 2, 2, 40, 2, 2, 2], 11.5),  # every fourth step samples
        ([300, 2, 2, 2, 40, 2, 2, 2, 40, 2, 2, 2, 40, 2, 2, 2], 11.5),
    ],
)
def test_time_left_is_robust_to_slow_first_steps(seconds: list[float], expected: float) -> None:
    assert seconds_left(ends_of(seconds), 6) == pytest.approx(6 * expected)
    assert seconds_left(ends_of(seconds), 0) == 0


def test_a_step_line_says_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step takes 600 s and the others 30, with a validation of 70 s after every fifth."""
    log = ConsoleLog(console := Terminal(file=io.StringIO()))
    args: Any = SimpleNamespace(output_dir=str(tmp_path), num_completions_to_print=0)
    state: Any = SimpleNamespace(global_step=0, max_steps=40, is_world_process_zero=True)
    now = 0.0
    monkeypatch.setattr("sologrpo.training.callbacks.time.perf_counter", lambda: now)
    for step in range(1, 41):
        state.global_step = step
        now += 600 if step == 1 else 30
        log.on_step_end(args, state, None)  # type: ignore[arg-type]
        log.on_log(args, state, None, LOGS)  # type: ignore[arg-type]
        now += 70 * (step % 5 == 0)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].endswith("s 10.2")
    assert re.search(r"s 10\.2  19 min left, until (\w+ )?\d\d:\d\d$", lines[1])
    assert "  15 min left, until " in lines[19]  # 20 x 44 s; 4 of 5 to 2 of 10 in the half
    assert lines[39].endswith("s 10.2")


def test_without_a_terminal_all_is_plain_lines(tmp_path: Path) -> None:
    lines = played(tmp_path, terminal=False).splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line[:8] for line in lines] == [
        "step 1/4", "step 2/4", *["  sample"] * 3, "step 3/4", "step 4/4", *["  sample"] * 3,
    ]  # fmt: skip
    best, middle, worst = lines[2:5]
    assert best.startswith("  sample  advantage +2.00  strict_format 1.00  unit km  [bold red]18")
    assert best.endswith("<answer>18</answer> number 2")
    assert middle.startswith("  sample  advantage +0.50  ")
    assert worst.startswith("  sample  advantage -2.00  strict_format -1.00  ")


def test_other_processes_print_nothing(tmp_path: Path) -> None:
    console = Terminal(file=io.StringIO(), force_terminal=True, quiet=True)
    play(console, tmp_path)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_shows_a_bar_and_tables(tmp_path: Path) -> None:
    printed = played(tmp_path, terminal=True)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)
    assert "training" in text
    assert "4/4" in text
    assert re.search(r"3/4 .* 1 min left, until ", text)
    for part in ("step 1/4  reward", "step 4/4  reward", "step 2", "What is 2?", "+2.00", "-2.00"):
        assert part in text
    # What the model wrote is neither markup nor a command to the terminal.
    assert "[bold red]18[/bold red] [/x]" in text
    assert "\x1b[2J" not in printed
    assert "\x1b]0;" not in printed
    assert printed.count(HIDE_CURSOR) == printed.count(SHOW_CURSOR) == 1


def test_the_bar_of_a_resumed_run_starts_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("sologrpo.training.callbacks.time.perf_counter", lambda: now[0])
    console = Terminal(
        file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"}
    )
    log = ConsoleLog(console)
    args: Any = SimpleNamespace(output_dir=str(tmp_path), num_completions_to_print=0)
    state: Any = SimpleNamespace(global_step=10, max_steps=20, is_world_process_zero=True)
    log.on_train_begin(args, state, None)  # type: ignore[arg-type]
    assert log._bar is not None
    (task,) = log._bar.tasks
    assert (task.completed, task.total) == (10, 20)
    for _ in range(3):
        now[0] += 90
        state.global_step += 1
        log.on_step_end(args, state, None)  # type: ignore[arg-type]
    assert task.fields["left"].startswith("11 min left, until ")  # 7 x 90 s
    log.on_train_end(args, state, None)  # type: ignore[arg-type]


# -- a run, in a terminal -------------------------------------------------------------------------


def in_a_terminal(server: Server, *arguments: object, cwd: Path) -> tuple[int, str]:
    """Run `train.py` on a pseudo terminal: return its exit code and output."""
    ours, theirs = pty.openpty()
    options: dict[str, Any] = {"terminal": os.ttyname(theirs), "environment": {"TERM": "xterm"}}
    with server.running_command("train", *arguments, cwd=cwd, **options) as running:
        running.wait_until_started()  # it has opened the terminal
        os.close(theirs)
        written = b""
        while chunk := read_chunk(ours):
            written += chunk
    os.close(ours)
    assert running.ended is not None
    return running.ended.code, written.decode()


def read_chunk(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""


def test_a_run_that_fails_leaves_the_terminal_usable(
    server: Server, tiny_llama: Path, tiny_data: Path, tmp_path: Path
) -> None:
    settings = tiny_config(tiny_llama, tiny_data, tmp_path / "run") | {"max_steps": 9}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = ("--config", "tiny.yaml", "--rewards", "digits:raises_at_the_second_step")
    code, written = in_a_terminal(server, *command, cwd=tmp_path)
    assert code == 1
    assert "step 1/9  reward" in written
    assert "1/9 0:" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)  # the bar
    assert "no such unit" in written
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)


# -- the file -------------------------------------------------------------------------------------


def test_metrics_file_holds_json_only(tmp_path: Path) -> None:
    callback: TrainerCallback = MetricsFile()
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=7, is_world_process_zero=True)
    logs = {"reward": float("nan"), "loss": float("inf"), "kl": None, "entropy": 0.5}
    callback.on_log(args, state, None, logs)
    callback.on_log(args, SimpleNamespace(is_world_process_zero=False), None, logs)
    (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row == {"step": 7, "reward": None, "loss": None, "kl": None, "entropy": 0.5}


def test_validation_in_one_line() -> None:
    logs = {
        "eval_n": 200, "eval_accuracy": 0.405, "eval_accuracy_lenient": 0.5,
        "eval_format_rate": 0.9, "eval_truncated_rate": 0.02,
    }  # fmt: skip
    assert validation_line(50, logs) == (
        "validation at step 50: accuracy 40.5% (lenient 50.0%), format 90.0%, cut off 2.0%, n = 200"
    )
