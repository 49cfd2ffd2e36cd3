"""Whatever a reward does, it ends in one line that names it: in training, `score` and `check`."""

import asyncio
import functools
import inspect
import json
import re
import sys

import pytest

from rewards import RewardError, RewardSpecError, load_rewards
from rewards.command import main as rewards_command
from sologrpo.base.errors import one_line_errors
from sologrpo.config.parsing import parse_config
from sologrpo.plan.reward_check import check_run

TIMEOUT = 1
LATE = rf"took longer than {TIMEOUT} s: make it faster, or raise reward_timeout"
ENDED = r"ended its process with {} on completion \d+ of the batch of \d+, .+"
RAISED = r"raised {} on completion \d+ of the batch of \d+, .+"
NO_SCORE = r"returned {} on completion \d+ of the batch of \d+, .+: return a .+"
NO_LIST = r"returned {} for \d+ completions, not a list of scores"
NUMBER = r"returned {} scores for \d+ completions"

# Body of the reward, and the end of the one line about it.
TABLE = {
    "holds_the_lock": ("re.match(r'(x+x+)+y', 'x' * 64)", LATE),
    "ignores_sigterm": ("signal.signal(15, signal.SIG_IGN); time.sleep(99)", LATE),
    "stops_itself": ("os.kill(os.getpid(), signal.SIGSTOP)", LATE),
    "waits_for_a_lock": ("threading.Event().wait()", LATE),
    "waits_for_a_child": ("subprocess.run(['sleep', '99'])", LATE),
    "exits": ("sys.exit(0)", RAISED.format("SystemExit: 0")),
    "exits_at_once": ("os._exit(0)", ENDED.format("exit code 0")),
    "exits_with_a_code": ("os._exit(7)", ENDED.format("exit code 7")),
    "crashes": ("ctypes.string_at(0)", ENDED.format("SIGSEGV")),
    "aborts": ("os.abort()", ENDED.format("SIGABRT")),
    "kills_its_group": ("os.killpg(0, 9)", ENDED.format("SIGKILL, as when memory runs out")),
    "runs_out_of_memory": ("return [b'x' * (1 << 48)]", RAISED.format("MemoryError")),
    "recurses": ("f = lambda: f(); f()", RAISED.format("RecursionError: .+")),
    "raises": ("raise ValueError('two\\nlines')", RAISED.format("ValueError: two lines")),
    "raises_what_pickle_cannot": (
        "raise Unpicklable(1, 2)",
        RAISED.format("misbehaving.Unpicklable: .+"),
    ),
    "raises_an_interrupt": ("raise KeyboardInterrupt", RAISED.format("KeyboardInterrupt")),
    "closes_everything": ("os.closerange(0, 99)", ".+"),
    "returns_nothing": ("return None", NO_LIST.format("None")),
    "returns_too_few": ("return [1.0] * (n - 1)", NUMBER.format(r"\d+")),
    "returns_without_end": ("return itertools.count()", NUMBER.format(r"\d+ or more")),
    "returns_what_pickle_cannot": ("return [lambda: 1] * n", NO_SCORE.format(".+")),
    "returns_nan": ("return [math.nan] * n", NO_SCORE.format("nan")),
    "logs_text": (
        "kwargs['log_metric']('x', 'abc')",
        RAISED.format("TypeError: must be real number, not str"),
    ),
}
# These are sound: they score 1 everywhere.
SOUND = {
    "forks": "multiprocessing.Pool(2).map(len, range_of(n))",
    "forks_and_returns_twice": "os.fork()",
    "prints": "print('{\"step\": 1}', end=''); os.write(1, b'raw'); sys.stdout.flush()",
    "closes_stdout": "sys.stdout.close()",
    "reads": "assert sys.stdin.read() == ''",
    "changes_arguments": "[v.clear() for v in [completions, *kwargs.values()] if type(v) is list]",
    "sets_an_alarm": "signal.signal(14, lambda *_: None); signal.alarm(60)",
    "runs_a_loop": "asyncio.run(asyncio.sleep(0))",
}
START = """
import asyncio, ctypes, itertools, math, multiprocessing, os, re, signal, subprocess, sys
import threading, time


class Unpicklable(Exception):
    def __init__(self, a, b):
        self.open = open(__file__)

    def __str__(self):
        raise ValueError


def range_of(n):
    return ['x' * i for i in range(n)]
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Write a module with all of them, and let it be imported."""
    folder = tmp_path_factory.mktemp("rewards")
    bodies = {name: body for name, (body, _) in TABLE.items()} | SOUND
    definitions = [
        f"{word}def {prefix}{name}(completions, **kwargs):\n"
        f"    n = len(completions)\n    {body}\n    return [1.0] * n\n"
        for name, body in bodies.items()
        for word, prefix in (("", ""), ("async ", "async_"))
    ]
    (folder / "misbehaving.py").write_text("\n\n".join([START, *definitions]))
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


BATCH = {
    "prompts": ["Question?"] * 3,
    "completions": [[{"role": "assistant", "content": text}] for text in ("one", "two", "three")],
    "answer": ["#### 18"] * 3,
    "trainer_state": None,
    "log_metric": lambda name, value: None,
    "log_extra": lambda name, values: None,
}


@functools.cache
def quickstart():
    return parse_config(["--config", "quickstart", "--reward_timeout", str(TIMEOUT)])[0]


def trained_with(name):
    """Load and call a reward as `train.py --config quickstart` does."""
    run, columns = quickstart(), ["prompt", "question", "answer", "prompt_format"]
    specs = [f"misbehaving:{name}"]
    (reward,) = load_rewards(specs, columns, run.reward_timeout, run.reward_workers)
    scores = reward(**BATCH)
    return asyncio.run(scores) if inspect.iscoroutine(scores) else scores


def assert_says(line, name, ending):
    assert "\n" not in line.rstrip("\n")
    assert re.fullmatch(rf"reward '{name}' {ending}", line.rstrip("\n")), line


@pytest.mark.parametrize("name", TABLE)
def test_in_training(name):
    with pytest.raises(RewardError) as error:
        trained_with(name)
    assert_says(str(error.value), name, TABLE[name][1])


ASYNC = ("holds_the_lock", "waits_for_a_lock", "exits", "exits_at_once", "crashes", "raises",
         "raises_an_interrupt", "returns_nan", "logs_text")  # fmt: skip


@pytest.mark.parametrize("name", ASYNC)
def test_async_rewards_in_training(name):
    with pytest.raises(RewardError) as error:
        trained_with(f"async_{name}")
    assert_says(str(error.value), f"async_{name}", TABLE[name][1])


FEW = ("holds_the_lock", "crashes", "raises", "returns_nan")


@pytest.mark.parametrize("name", FEW)
def test_in_score(name, capfd):
    argv = ["score", "--gold", "18", "--reward", f"misbehaving:{name}", "18"]
    with pytest.raises(SystemExit) as ended:
        one_line_errors(rewards_command)([*argv, "--reward_timeout", str(TIMEOUT)])
    assert ended.value.code == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = [x for x in printed.err.splitlines() if x.startswith("error: ")]
    assert_says(line.removeprefix("error: "), name, TABLE[name][1])
    assert "sologrpo" not in printed.err


def test_in_check(tmp_path):
    config, data = tmp_path / "tiny.yaml", tmp_path / "problems.jsonl"
    config.write_text("model_name_or_path: no-such-model\nper_device_train_batch_size: 8\n")
    rows = [{"question": f"Question {i}?", "answer": f"9 * 2 = 18\n#### {i}"} for i in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    argv = ["--config", config, "--dataset_name", data, "--num_generations", 4]
    argv += ["--reward_timeout", TIMEOUT, "--rewards", *(f"misbehaving:{name}" for name in FEW)]
    report = check_run([*map(str, argv)])
    assert report.failures == len(FEW)
    for result in report.rewards:
        (problem,) = result.problems
        assert_says(f"reward '{result.name}' {problem}", result.name, f".*{TABLE[result.name][1]}")


@pytest.mark.parametrize("name", SOUND)
def test_what_does_no_harm(name, capfd):
    assert trained_with(name) == [1.0] * 3
    assert "".join(c[0]["content"] for c in BATCH["completions"]) == "onetwothree"
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit(3)", r"cannot import 'module' \(SystemExit: 3\)"),
        (
            "import os; os._exit(3)",
            "ended its process with exit code 3 while its module was imported",
        ),
        (
            "import ctypes; ctypes.string_at(0)",
            "ended its process with SIGSEGV while its module was imported",
        ),
        (
            "import time; time.sleep(99)",
            "took longer than 1 s while its module was imported: make it faster, or",
        ),
        ("raise ValueError('a\\nb')", r"cannot import 'module' \(ValueError: a b\)"),
        ("def x(:", r"cannot import 'module' \(File \".*module.py\", line 1 def x.* SyntaxError: "),
        ("print('hello')", "module 'module' has no function 'reward'"),
        ("reward = print", "'reward'"),
        ("reward = dict", "'reward'"),
        ("reward = 3", "module 'module' has no function 'reward'"),
    ],
)
def test_modules_that_misbehave(code, says, tmp_path, monkeypatch, capfd):
    (tmp_path / "module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardSpecError, match=says) as error:
        load_rewards(["module:reward"], ["answer"], TIMEOUT, 1)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""
