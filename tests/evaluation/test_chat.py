"""`sologrpo chat` as users call it: at a terminal, and with questions from a pipe."""

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_evaluate_cli import NEW_TOKENS, make_run

from rewards.grading import extract_answer
from scripts import exit_code, load_script, script_environment
from sologrpo import chat
from sologrpo.base.console import Terminal
from sologrpo.cli import main
from sologrpo.sampling import Completion
from tiny import SIZES

QUESTION = "Ana has 5 shells and gets 3. How many are left?"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_data: Path) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "run"
    return make_run(folder, tiny_llama, tiny_data, load_in_4bit=False)


@pytest.fixture(scope="module")
def run_4bit(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_data: Path) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "run"
    return make_run(folder, tiny_llama, tiny_data, load_in_4bit=True)


def asked(monkeypatch: pytest.MonkeyPatch, questions: bytes, *arguments: object) -> int:
    """Return the exit code of a chat in this process, whose questions come from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(questions), encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["sologrpo"])
    try:
        main(["chat", *map(str, arguments)])
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def command(run: Path) -> list[str]:
    return [sys.executable, "-m", "sologrpo", "chat", "--run", str(run)]


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "prompt_format"), [("run", "xml"), ("run_4bit", "xml"), ("run", "r1_zero")]
)
def test_both_models_answer_as_in_an_evaluation(
    kind: str, prompt_format: str, tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = request.getfixturevalue(kind)
    monkeypatch.setattr("sologrpo.report.write_report", lambda run, folder: folder / "report.html")
    options = ("--prompt_format", prompt_format, "--run", run)
    assert exit_code(load_script("evaluate"), *options, "--output_dir", tmp_path) == 0
    other = "" if prompt_format == "xml" else f"-{prompt_format}"
    expected = {
        name: read_rows(tmp_path / "eval" / f"{label}{other}" / "records.jsonl")
        for name, label in (("base", "baseline"), ("trained", "trained"))
    }
    shown = []
    monkeypatch.setattr(chat, "_show", lambda console, answers, settings: shown.append(answers))
    questions = "\n".join(row["question"] for row in expected["base"])
    assert asked(monkeypatch, questions.encode(), *options) == 0
    assert len(shown) == 6
    for name, records in expected.items():
        completions = [answers[name][0].text for answers in shown]
        assert completions == [record["completion"] for record in records]
    assert all(seconds > 0 for answers in shown for _, seconds in answers.values())
    if prompt_format == "xml":  # in the other format, the tiny models always write the same
        assert any(answers["base"][0].text != answers["trained"][0].text for answers in shown)


def test_max_completion_length_limits_an_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--run", run, "--max_completion_length", 2)
    assert asked(monkeypatch, QUESTION.encode(), *options) == 0
    assert capsys.readouterr().out.count(", 2 tokens, cut off, ") == 2


def panels(width: int, text: str, prompt_format: str, run: Path) -> list[str]:
    """The lines in which two answers with this text are shown."""
    settings = chat.parse_chat(["--run", str(run), "--prompt_format", prompt_format])
    answer = Completion(text, 7, "end_token"), 1.25
    console = Terminal(width=width, file=io.StringIO(), force_terminal=True)
    chat._show(console, {"base": answer, "trained": answer}, settings)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "per_line"), [(60, 1), (chat.WIDE, 2)])
def test_answers_are_next_to_each_other_where_they_fit(
    width: int, per_line: int, run: Path
) -> None:
    text = "5 + 3 = 8\n<answer>8</answer>"
    lines = panels(width, text, "xml", run)
    assert max(line.count("5 + 3 = 8") for line in lines) == per_line
    assert "\n".join(lines).count("answer 8, 7 tokens, 1.2 s") == 2
    none = panels(width, "eight, perhaps", "boxed", run)
    assert "\n".join(none).count("answer none, ") == 2


def test_an_answer_cannot_act_on_the_terminal(run: Path) -> None:
    text = "\x1b[2J\x1b]0;title\x07[red]x[/red] \x9b31m\r\u202e"
    assert extract_answer(text, "xml") is None
    lines = panels(60, text, "xml", run)
    shown = "".join(line.strip("│ ") for line in lines)
    assert "\\x1b[2J\\x1b]0;title\\x07[red]x[/red] \\x9b31m" in shown.replace(" │", "")
    for mark in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\r", "\u202e"):
        assert mark not in "\n".join(lines)


# -- questions -----------------------------------------------------------------------------------


def test_hostile_questions_from_a_pipe(run: Path) -> None:
    too_long = b"shells " * SIZES["max_position_embeddings"]
    questions = [
        b"", b"   ", QUESTION.encode(), b"\xff\xfe bytes [red]x[/red] \x1b[31m\x00", too_long,
        b"x" * 1_000_000, b"Max has 4 shells.", b"/quit", b"never asked",
    ]  # fmt: skip
    done = subprocess.run(
        command(run), input=b"\n".join(questions), capture_output=True, timeout=240, check=False,
        env=script_environment(),
    )  # fmt: skip
    out = done.stdout.decode()
    echoed = [line[2:40] for line in out.splitlines() if line.startswith("> ")]
    assert echoed == [
        QUESTION[:38], r"�� bytes [red]x[/red] \x1b[31m\x00", "shells " * 5 + "she", "x" * 38,
        "Max has 4 shells.",
    ]  # fmt: skip
    assert out.count("─ base ─") == out.count("─ trained ─") == 3
    warnings = [line for line in out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2
    assert all(f"context of the model {SIZES['max_position_embeddings']}" in w for w in warnings)
    assert done.stderr.decode() == "error: questions without an answer: 2\n"
    assert done.returncode == 2


def test_an_answer_ends_where_the_context_does(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [300] * (SIZES["max_position_embeddings"] - NEW_TOKENS // 2)
    monkeypatch.setattr(chat, "prompt_token_ids", lambda prompts, tokenizer: [prompt])
    assert asked(monkeypatch, QUESTION.encode(), "--run", run) == 0
    assert f", {NEW_TOKENS // 2} tokens, cut off" in capsys.readouterr().out


def test_no_questions(run: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command(run)], capture_output=True, text=True,
        timeout=240, check=False, env=script_environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# -- a terminal ----------------------------------------------------------------------------------


def _take_terminal() -> None:
    """Make stdin the terminal that sends signals; Ctrl-C is ignored in background jobs."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def terminal(run: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A chat at a terminal; yields the process and our end of the terminal."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command(run), stdin=its, stdout=its, stderr=its, start_new_session=True,
        env=script_environment(TERM="xterm"),
        preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(its)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(text: str, ours: int) -> str:
    """Return what is printed up to this text, or to the end."""
    shown, deadline = "", time.monotonic() + 120
    while text not in shown and time.monotonic() < deadline:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                shown += os.read(ours, 1).decode(errors="replace")  # not beyond the text
            except OSError:  # the process has ended
                return shown
    assert text in shown, shown
    return shown


END = "never printed"


@pytest.mark.parametrize("keys", [b"\x04", b"/quit\n"], ids=["Ctrl-D", "quit"])
def test_a_chat_at_a_terminal_ends_quietly(keys: bytes, run: Path) -> None:
    with terminal(run) as (process, ours):
        assert "Ask a question. /quit or Ctrl-D ends." in read_until("> ", ours)
        os.write(ours, b"\n" + QUESTION.encode() + b"\n")
        shown = read_until(" trained ", ours) + read_until("> ", ours)
        assert shown.count(", cut off") + shown.count(" tokens, 0.") >= 2
        os.write(ours, b"too long " * 2000 + b"\n")
        read_until("ask a shorter one", ours)
        read_until("> ", ours)
        os.write(ours, keys)
        rest = read_until(END, ours)
        assert "error" not in rest
        assert rest.endswith("\r\n")
        assert process.wait(60) == 0


def test_ctrl_c_at_a_terminal_ends_in_one_line(run: Path) -> None:
    with terminal(run) as (process, ours):
        read_until("> ", ours)
        # Python notices a Ctrl-C between its prompt and its wait for keys only with the next key
        # (CPython 3.11, Modules/readline.c, readline_until_enter_or_signal).
        for _ in range(60):
            os.write(ours, b"\x03")
            if select.select([ours], [], [], 2.0)[0]:
                break
        rest = read_until(END, ours)
        assert rest.strip().removeprefix("^C") == "error: stopped by Ctrl-C"
        assert process.wait(60) == 130


# -- runs that cannot be asked -------------------------------------------------------------------


def test_a_run_that_cannot_be_asked_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(*arguments: object) -> str:
        assert asked(monkeypatch, QUESTION.encode(), *arguments) == 2
        (shown,) = capsys.readouterr().err.splitlines()
        return str(shown)

    assert line() == "error: give --run runs/NAME"
    assert "no run directory 'nowhere'" in line("nowhere")
    assert "unknown key 'engine'" in line("--run", run, "--engine", "vllm")
    early = tmp_path / "early"
    early.mkdir()
    (early / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert "holds no adapter" in line("--run", early)
    (early / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        content = (run / "adapter" / name).read_bytes()
        (early / "adapter" / name).write_bytes(content[:2000])
    assert "adapter_model.safetensors is damaged" in line("--run", early)
