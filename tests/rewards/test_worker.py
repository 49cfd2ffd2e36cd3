"""The process that rewards run in: when it starts and ends, and what it keeps."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rewards import RewardError, RewardSpecError, load_rewards

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import asyncio, multiprocessing, os, random, sys, time

calls = []
print("imported")


def where(completions, **kwargs):
    return [os.getpid()] * len(completions)


def also(completions, **kwargs):
    return [os.getpid()] * len(completions)


def count(completions, **kwargs):
    calls.append(1)
    return [len(calls)] * len(completions)


def modules(completions, **kwargs):
    return [float(name in sys.modules) for name in ("torch", "trl", "numpy", "pydantic")]


def draw(completions, **kwargs):
    return [random.random() for _ in completions]


def progress(completions, trainer_state, **kwargs):
    return [trainer_state.global_step, len(trainer_state.log_history), hasattr(trainer_state, "f")]


def columns(completions, tags, when, **kwargs):
    return [len(t) + w.year for t, w in zip(tags, when, strict=True)]


async def slow(completions, **kwargs):
    await asyncio.sleep(0.7)
    return [id(asyncio.get_running_loop()) % 1e6] * len(completions)


async def slower(completions, **kwargs):
    await asyncio.sleep(0.7)
    return [id(asyncio.get_running_loop()) % 1e6] * len(completions)


def hangs_with_children(completions, **kwargs):
    for _ in range(2):
        multiprocessing.Process(target=time.sleep, args=(99,)).start()
    open("ready", "w").close()
    while True:
        pass


def logs(completions, log_metric, log_extra, **kwargs):
    log_metric("seconds", 2)
    log_extra("note", ["a", None, "c"])
    return [1.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def load(*names, workers=1, timeout=60):
    return load_rewards([f"own_module:{name}" for name in names], None, timeout, workers)


def call(reward, **more):
    scores = reward(prompts=["?"] * 3, completions=["one", "two", "three"], **more)
    return asyncio.run(scores) if asyncio.iscoroutine(scores) else scores


def test_rewards_share_a_process_and_what_the_module_keeps():
    where, count, also = load("where", "count", "also")
    assert [call(count)[0] for _ in range(3)] == [1, 2, 3]
    assert call(where) == call(also) == call(where)
    assert call(where)[0] != os.getpid()


def test_two_workers_and_two_trainings_have_processes_of_their_own():
    where, also = load("where", "also", workers=2)
    (other,) = load("where")
    assert len({call(where)[0], call(also)[0], call(other)[0]}) == 3
    assert call(where) == call(where)


def test_nothing_of_the_trainer_is_imported():
    # In a script that imports torch, as train.py does.
    code = (
        "import torch\nfrom rewards import load_rewards\n"
        "(reward,) = load_rewards(['own_module:modules'], None, 60, 1)\n"
        "print(reward(completions=[''] * 4))"
    )
    Path("script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "[0.0, 0.0, 0.0, 0.0]\n"
    assert done.stderr == "imported\n"


def test_random_numbers_repeat_with_the_completions_and_the_step():
    (draw,) = load("draw")
    first, again = (call(draw, trainer_state=SimpleNamespace(global_step=1)) for _ in range(2))
    (other_process,) = load("draw")
    assert first == again == call(other_process, trainer_state=SimpleNamespace(global_step=1))
    assert first != call(draw, trainer_state=SimpleNamespace(global_step=2))
    assert first != draw(completions=["other"] * 3, trainer_state=None)


def test_state_and_columns_arrive():
    import datetime

    class State(SimpleNamespace):  # of a class that the worker cannot import
        pass

    state = State(global_step=7, log_history=[{}] * 2, stateful_callbacks={"f": load})
    assert call(load("progress")[0], trainer_state=state) == [7, 2, 0]
    tags, when = [["a"], [], ["b", "c"]], [datetime.date(2000, 1, 1)] * 3
    assert call(load("columns")[0], tags=tags, when=when) == [2001, 2000, 2002]


def test_what_is_logged_reaches_the_trainer():
    logged = []
    functions = {name: lambda *a: logged.append(a) for name in ("log_metric", "log_extra")}
    call(load("logs")[0], **functions)
    assert logged == [("seconds", 2.0), ("note", ["a", None, "c"])]


def test_async_rewards_run_concurrently_in_one_loop():
    slow, slower = load("slow", "slower")
    batch = {"prompts": [""], "completions": [""]}

    async def both():
        return await asyncio.gather(slow(**batch), slower(**batch))

    start = time.monotonic()
    loops = asyncio.run(both())
    assert time.monotonic() - start < 1.35
    assert loops[0] == loops[1] == call(slow)[:1]  # a client that it keeps needs its loop


def test_a_process_that_was_killed_is_started_again():
    where, hangs = load("where", "hangs_with_children", timeout=1)
    before = int(call(where)[0])
    children = psutil.Process(before).parent().children(recursive=True)
    with pytest.raises(RewardError, match="took longer than 1 s"):
        call(hangs)
    assert call(where)[0] != before
    assert all(not is_running(child.pid) for child in children)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SCRIPT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
from rewards import load_rewards
(reward,) = load_rewards(["own_module:{reward}"], None, 0, 1)
open("loaded", "w").close()
try:
    reward(completions=["", ""])
    signal.pause()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("reward", ["where", "hangs_with_children"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_trainer(reward, number):
    Path("script.py").write_text(SCRIPT.format(reward=reward))
    trainer = subprocess.Popen(
        [sys.executable, "script.py"], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell starts background jobs with Ctrl-C ignored, and they inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    file = Path("ready" if reward == "hangs_with_children" else "loaded")
    wait_for(file.exists)
    started = psutil.Process(trainer.pid).children(recursive=True)
    assert len(started) >= (4 if reward == "hangs_with_children" else 2)
    os.killpg(trainer.pid, number)  # as Ctrl-C does, for one
    assert trainer.wait(timeout=60) in (-number, 0, 130)
    wait_for(lambda: not any(is_running(process.pid) for process in started))
    assert trainer.stderr.read() == "imported\n"
    trainer.stderr.close()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- trust ---------------------------------------------------------------------------------------

EVIL = "open('/dev/stderr', 'w').write('EVIL')\ndef reward(completions, **kwargs): return [1]\n"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("marker", ["environment.json", "checkpoint-5/"])
@pytest.mark.parametrize(
    ("file", "name", "cwd"),
    [
        ("run/evil_m.py", "evil_m", "run"),
        ("run/sub/evil_m.py", "evil_m", "run/sub"),
        ("run/evil_m.py", "run.evil_m", "."),
        ("run/evil_p/__init__.py", "evil_p", "run"),
        ("run/evil_p/__init__.py", "run.evil_p", "."),
    ],
)
def test_code_in_a_run_directory_is_not_run(
    file, name, cwd, marker, workers, tmp_path, monkeypatch, capfd
):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(EVIL)
    if marker.endswith("/"):
        (tmp_path / "run" / marker).mkdir()
    else:
        (tmp_path / "run" / marker).write_text("{}")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / cwd)
    with pytest.raises(RewardSpecError, match="is in a run directory, from which no code is run"):
        load_rewards([f"{name}:reward"], None, 60, workers)
    assert "EVIL" not in capfd.readouterr().err
