"""The command line of the rewards: list them, or score a completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rewards import REWARDS

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, stdin="", cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "sologrpo", "rewards", *arguments],
        input=stdin.encode("utf-8", errors="surrogateescape"),
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )


def table(result):
    """The printed lines as {name: rest}."""
    assert result.returncode == 0, result.stderr
    lines = result.stdout.decode().splitlines()
    return {name.strip(): rest.strip() for name, _, rest in (x.partition("  ") for x in lines)}


@pytest.mark.parametrize("arguments", [[], ["list"]])
def test_lists_every_reward_with_one_line(arguments):
    listed = table(run(*arguments))
    assert list(listed) == list(REWARDS)
    assert all(listed.values())


def test_scores_an_argument():
    scores = table(run("score", "--gold", "1,200", "<answer>$1200</answer> Bye."))
    assert scores["strict_format"] == "-1"
    assert scores["trailing_text"] == "-0.5"
    assert scores["answer_correctness"] == "+1"
    assert scores["gsm8k_weighted"] == "+1"
    assert scores["extracted answer"] == "1200"
    assert scores["verdict"] == "right: 1200 is the gold answer"
    assert scores["signs of hacking"] == "trailing_text, empty_reasoning"


def test_scores_standard_input_with_any_bytes():
    scores = table(run("score", "--gold", "-5", stdin="<answer>-5</answer>\udcff\udcfe"))
    assert scores["answer_correctness"] == "+1"


def test_scores_a_box():
    scores = table(run("score", "--gold", "#### 5", "--prompt_format", "boxed", "so \\boxed{5}"))
    assert scores["answer_correctness"] == "+1"
    assert scores["verdict"].startswith("right")


def test_says_why_an_answer_is_wrong():
    scores = table(run("score", "--gold", "18", "The answer is 18."))
    assert scores["verdict"] == "wrong: no complete <answer> element outside the reasoning"
    assert scores["extracted answer"] == "None"
    assert scores["last number"].startswith("right")


@pytest.mark.parametrize(
    "arguments", [["list"], ["score", "--gold", "18", "<answer>18</answer>"], ["--help"]]
)
def test_nothing_needs_torch(arguments):
    program = (
        "import runpy, sys\n"
        "for name in ('torch', 'trl', 'transformers', 'datasets'):\n"
        "    sys.modules[name] = None  # an import of it now fails\n"
        f"sys.argv[1:] = ['rewards', *{arguments}]\n"
        "runpy.run_module('sologrpo', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, cwd=ROOT, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scoer"], "scoer"),
        (["list", "--gold", "18"], "unrecognized arguments: --gold 18"),
        (["score", "x"], "--gold"),
        (["score", "--gold", "x", "text"], "gold answer must be an integer"),
        (["score", "--gold", "18", "--prompt_format", "json", "x"], "json"),
        (["score", "--gold", "18", "--reward", "strict_fromat", "x"], "strict_format"),
        (["score", "--gold", "18", "--reward_timeout", "nan", "text"], "invalid seconds value"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == b""
    assert len(result.stderr.decode().splitlines()) == 1
    assert message in result.stderr.decode()
