"""The start and the end of a process: no noise of libraries, signals, output that nobody reads."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import run_script, script_environment
from server import Server, catches
from sologrpo.base.errors import InputError, RunError, one_line_errors, printable

# The quickstart as it is shipped, but for its sizes, and the number format, which it measures. The
# tiny model is as wrong as any other.
SHORT = (
    "--num_generations", "2", "--per_device_train_batch_size", "4", "--max_completion_length", "6",
    "--max_steps", "2", "--save_steps", "1", "--warmup_steps", "1", "--dtype", "float32",
)  # fmt: skip
OUR_LINES = (
    "device", "model", "adapter", "data", "rewards", "batch", "tokens", "memory", "run", "disk",
    "follow", "warning", "step", "report", "next",
)  # fmt: skip
NF4 = ("--load_in_4bit", "true")
BF16 = ("--dtype", "bfloat16", "--gradient_checkpointing", "true")


def quickstart(model: Path, run: Path, *more: str) -> list[str]:
    """Return the arguments of a short quickstart on the tiny model."""
    options = ["--config", "quickstart", "--model_name_or_path", str(model)]
    return [*options, "--output_dir", str(run), *SHORT, *more]


def assert_only_our_lines(out: str, err: str, run: Path) -> None:
    others = [line for line in err.splitlines() if not line.startswith("sampling engine")]
    assert others == []
    lines = [line for line in out.splitlines() if not line.startswith(str(run))]
    assert {line.split()[0] for line in lines} <= set(OUR_LINES)  # paths may be lines of their own


# In four bits, as that loads bitsandbytes too.
def test_a_start_prints_only_our_lines(tiny_llama: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = run_script("train", *quickstart(tiny_llama, run, *NF4), cwd=tmp_path)
    assert trained.returncode == 0
    assert_only_our_lines(trained.stdout, trained.stderr, run)
    command = ("--run", str(run), "--limit", "2", "--no_baseline")
    assert run_script("evaluate", *command, cwd=tmp_path).stderr == ""


@pytest.mark.parametrize("more", [(), BF16], ids=["fp32", "bf16"])
def test_training_prints_only_our_lines(
    more: tuple[str, ...], server: Server, tiny_llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained = server.run_command("train", *quickstart(tiny_llama, run, *more), cwd=tmp_path)
    assert trained.code == 0
    assert_only_our_lines(trained.out, trained.err, run)


def test_the_plan_is_of_the_passes_that_are_computed(
    server: Server, tiny_llama: Path, tmp_path: Path
) -> None:
    dry = quickstart(tiny_llama, tmp_path / "run", "--dry_run", "--max_steps", "200")
    packed, in_trl = (
        server.run_command("train", *dry, *more, cwd=tmp_path).out
        for more in ((), ("--entropy_coef", "0.01"))
    )
    (longest,) = re.findall(r"max ([\d,]+) tokens$", in_trl, re.MULTILINE)
    padded = 4 * (int(longest.replace(",", "")) + 6)
    assert f"in passes of up to {padded:,} tokens" in in_trl
    assert f"of {padded:,} in the rows of a step" in packed
    assert f"in passes of up to {padded:,} tokens" not in packed


# Of `doctor`, below.
@pytest.mark.parametrize(
    "command", [["rewards"], ["rewards", "check", "--config", "quickstart"], ["recipes"]],
    ids=" ".join,
)  # fmt: skip
def test_a_command_prints_nothing_on_stderr(command: list[str], tmp_path: Path) -> None:
    done = sologrpo(*command, cwd=tmp_path)
    assert done.communicate()[1] == ""


def sologrpo(*arguments: str, cwd: Path, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    # A shell starts background jobs with Ctrl-C ignored, and they inherit that.
    return subprocess.Popen(
        [sys.executable, "-m", "sologrpo", *arguments], stdout=stdout, stderr=subprocess.PIPE,
        stdin=subprocess.PIPE, text=True, cwd=cwd, env=script_environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def wait_for_handlers(process: "subprocess.Popen[str]") -> None:
    """Wait until Python has started: before, nothing of ours runs. It catches no SIGTERM itself."""
    while process.poll() is None and not catches(process.pid, signal.SIGTERM):
        time.sleep(0.01)


def stop(process: "subprocess.Popen[str]", number: signal.Signals) -> tuple[int, list[str]]:
    """Send a signal; return the exit code and the lines of stderr."""
    process.send_signal(number)
    errors = process.communicate(timeout=120)[1].splitlines()
    return process.returncode, errors


def test_ctrl_c_at_any_moment_of_the_imports_ends_in_one_line(
    tiny_llama: Path, tmp_path: Path
) -> None:
    command = ("train", *quickstart(tiny_llama, tmp_path / "first"))
    process, started = sologrpo(*command, cwd=tmp_path), time.monotonic()
    assert process.stdout is not None
    process.stdout.readline()  # they are over
    seconds = time.monotonic() - started
    assert stop(process, signal.SIGINT) == (130, ["error: stopped by Ctrl-C"])
    ends = []
    for share in (0.0, 0.4, 0.8):
        command = ("train", *quickstart(tiny_llama, tmp_path / f"run-{share}"))
        process = sologrpo(*command, cwd=tmp_path)
        wait_for_handlers(process)
        time.sleep(seconds * share)
        ends.append(stop(process, signal.SIGINT))
    stopped = (130, ["error: stopped by Ctrl-C"])
    assert ends[0] == stopped
    # 0: it was faster than the first time.
    assert [end for end in ends if end not in (stopped, (0, []))] == []


def test_ctrl_c_at_any_moment_after_the_imports_ends_in_one_line(
    server: Server, tiny_llama: Path, tmp_path: Path
) -> None:
    command = ("train", *quickstart(tiny_llama, tmp_path / "whole"))
    whole = server.run_command(*command, cwd=tmp_path)
    assert whole.code == 0, whole
    codes = []
    for tenth in range(0, 10, 2):
        command = ("train", *quickstart(tiny_llama, tmp_path / f"run-{tenth}"))
        with server.running_command(*command, cwd=tmp_path) as process:
            process.wait_until_started()
            time.sleep(whole.seconds * tenth / 10)
            process.send_signal(signal.SIGINT)
        assert process.ended is not None
        codes.append(process.ended.code)
        # While training, two lines precede it.
        errors = process.ended.err.splitlines()
        others = [line for line in errors if not line.startswith(("SIGINT: this step", "stopped"))]
        assert others == (["error: stopped by Ctrl-C"] if codes[-1] else [])
    assert set(codes) <= {0, 130}  # 0: it was faster than the first time
    assert codes.count(130) >= 2  # on a machine that was busy at the first time only


@pytest.mark.parametrize(
    ("command", "seconds", "number"),
    [
        (["evaluate", "--model", "x"], 1.0, signal.SIGINT),
        (["export", "--model", "x"], 1.0, signal.SIGTERM),
        (["report", "x"], 0.2, signal.SIGINT),
        (["doctor"], 1.0, signal.SIGTERM),
        (["rewards", "check", "--config", "quickstart"], 1.0, signal.SIGINT),
        (["model", "--out", "m"], 0.1, signal.SIGTERM),
        # It waits for its standard input.
        (["rewards", "score", "--gold", "1"], 0.2, signal.SIGINT),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_command_stops_in_one_line(
    command: list[str], seconds: float, number: signal.Signals, tmp_path: Path
) -> None:
    process = sologrpo(*command, cwd=tmp_path)
    wait_for_handlers(process)
    time.sleep(seconds)
    code, errors = stop(process, number)
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert errors == [f"error: stopped by {name}"]
    assert code == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["recipes"], ["rewards"], ["doctor"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(command: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = sologrpo(*command, cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert process.communicate()[1] == ""
    assert process.returncode == 0


# -- errors ---------------------------------------------------------------------------------------


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("no model"), 2, "error: no model"),
        (InputError("a\x1b[2Jb\nc\u202e"), 2, "error: a\\x1b[2Jb c\\u202e"),
        (RunError("no signal"), 1, "error: no signal"),
        (PermissionError(13, "Permission denied", "/etc/x"), 2, "error: cannot use /etc/x: Permi"),
        (IsADirectoryError(21, "Is a directory", b"/tmp"), 2, "error: cannot use /tmp: Is a dire"),
        (OSError(28, "No space left on device"), 1, "error: cannot write: [Errno 28]"),
        (MemoryError(), 1, "error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "error: stopped by Ctrl-C"),
        (SystemExit(130), 130, "error: stopped by Ctrl-C"),
    ],
    ids=repr,
)
def test_a_known_error_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = one_line_errors(one_line_errors(raises))  # a script, called by `sologrpo`
    with pytest.raises(SystemExit) as exit_info:
        nested(error)
    assert exit_info.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(line)
    assert printed.count("\n") == 1


@pytest.mark.parametrize("error", [KeyError("x"), AssertionError(), SystemExit(3)], ids=repr)
def test_other_exceptions_pass(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)):
        one_line_errors(raises)(error)
    assert capsys.readouterr().err == ""


def test_one_process_prints_the_error_of_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        one_line_errors(raises)(InputError("no model"))
    assert capsys.readouterr().err == "process 1: no model\n"


def test_printable_keeps_what_can_be_read() -> None:
    assert printable("«runs/ä  日本» 18½") == "«runs/ä  日本» 18½"
