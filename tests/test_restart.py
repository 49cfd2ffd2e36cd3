"""Processes prepare their allocator and threads themselves, and import only what they need."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import command_of, launch_command, script_environment
from sologrpo import startup
from sologrpo.startup import cpu_environment, prepare_allocator
from tiny import ROOT

BIN = Path(sys.executable).parent

# Python runs it at each start. Whether the settings work shows in the pages that the kernel has to
# provide when 64 MiB are allocated for the second time.
HOOK = """
import ctypes, json, os, resource, signal, sys

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def faults(size=2**26):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    libc.memset(block, 1, ctypes.c_size_t(size))
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
start = {
    "pid": os.getpid(), "argv": sys.orig_argv, "cwd": os.getcwd(), "faults": faults(),
    "environment": dict(os.environ),
}
with open(os.environ["STARTS"], "a") as file:
    print(json.dumps(start), file=file)
if os.environ.get("SOLOGRPO_RESTARTED") == str(os.getpid()) and "SIGNAL" in os.environ:
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
"""
PLAIN, PREPARED = 2**26 // 4096, 100  # page faults: at least, at most

TORCHRUN = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", "0"]
TRAIN = ["--config", "no such config"]
LAUNCHERS = {
    "python": command_of("train", *TRAIN),
    "python with options": [sys.executable, "-u", "-X", "utf8", *command_of("train", *TRAIN)[1:]],
    "evaluate": command_of("evaluate", "--run", "no such run"),
    "module": [sys.executable, "-m", "sologrpo", "train", *TRAIN],
    "program": [sys.executable, "-c", "import sologrpo.__main__ as m; m.main()", "train", *TRAIN],
    "accelerate": launch_command(*TRAIN),
    "torchrun": [*TORCHRUN, str(ROOT / "train.py"), *TRAIN],
}


def starts_of(
    command: Sequence[str], folder: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[list[dict[str, Any]]]]:
    """Run a command; return how it ended, and the starts of each process of the project."""
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    log = folder / "starts.jsonl"
    env = script_environment(STARTS=str(log), **environment)
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    for name in {"OMP_NUM_THREADS", "GLIBC_TUNABLES"} - environment.keys():
        env.pop(name, None)
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    processes: dict[int, list[dict[str, Any]]] = {}
    for start in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
        if not {"launch", *TORCHRUN} & set(start["argv"]):
            processes.setdefault(start["pid"], []).append(start)
    return done, list(processes.values())


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_process_restarts_once_with_its_arguments(launcher: str, tmp_path: Path) -> None:
    done, processes = starts_of(LAUNCHERS[launcher], tmp_path)
    whole = [starts for starts in processes if len(starts) == 2]
    if launcher == "torchrun":  # it stops the one process when the other has failed
        assert whole
    else:
        assert "error: no " in done.stderr  # its own code ran
        assert len(whole) == len(processes) == 1
    for first, second in whole:
        assert first["argv"][1:] == second["argv"][1:]
        assert first["cwd"] == second["cwd"] == str(tmp_path)
        assert first["faults"] >= PLAIN
        assert second["faults"] <= PREPARED
        # accelerate's single thread is undone; torchrun's are for several processes.
        threads = {"accelerate": ("1", None), "torchrun": ("1", "1")}.get(launcher, (None, None))
        assert tuple(start["environment"].get("OMP_NUM_THREADS") for start in (first, second)) == (
            threads
        )


def test_threads_that_the_user_has_set_stay(tmp_path: Path) -> None:
    _, ((_, second),) = starts_of(LAUNCHERS["accelerate"], tmp_path, OMP_NUM_THREADS="1")
    assert second["environment"]["OMP_NUM_THREADS"] == "1"


def test_settings_that_the_user_has_chosen_stay() -> None:
    given = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9", "MALLOC_TOP_PAD_": "8", "OTHER": "x"}
    prepared = cpu_environment(given)
    settings = dict(word.split("=") for word in prepared.pop("GLIBC_TUNABLES").split(":"))
    assert settings["glibc.malloc.mmap_max"] == "9"
    assert settings["glibc.malloc.hugetlb"] == "1"
    assert "glibc.malloc.top_pad" not in settings
    assert prepared == {"MALLOC_TOP_PAD_": "8", "OTHER": "x"}


def test_a_process_that_is_prepared_does_not_restart(tmp_path: Path) -> None:
    _, ((start,),) = starts_of(LAUNCHERS["python"], tmp_path, **cpu_environment({}))
    assert start["faults"] <= PREPARED


@pytest.mark.parametrize("number", startup.STOPPED)
def test_a_signal_during_the_restart_is_not_lost(number: signal.Signals, tmp_path: Path) -> None:
    done, _ = starts_of(LAUNCHERS["module"], tmp_path, SIGNAL=str(int(number)))
    assert done.stderr == f"error: {startup.STOPPED[number]}\n"
    assert done.returncode == 128 + number


class Restarted(Exception):
    pass


def restarts(*_: object) -> None:
    raise Restarted


@pytest.fixture
def gpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch built for CUDA, on a machine with a GPU."""
    (tmp_path / "version.py").write_text(
        "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(startup.importlib.util, "find_spec", lambda name: torch)
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setattr(startup, "_GPU_FILES", {"cuda": (str(device),), "hip": (os.devnull,)})
    monkeypatch.setattr(os, "execve", restarts)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    for name in (*startup._CUDA_MALLOC, "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_on_a_gpu_only_its_allocator_is_set(
    gpu_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_allocator()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    prepare_allocator()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("hidden", ["no device", "CUDA_VISIBLE_DEVICES", "no CUDA in torch"])
def test_a_gpu_that_torch_cannot_use_is_none(
    hidden: str, gpu_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden == "no device":
        (gpu_build / "nvidiactl").unlink()
    elif hidden == "CUDA_VISIBLE_DEVICES":
        monkeypatch.setenv(hidden, "")
    else:
        (gpu_build / "version.py").write_text("cuda: Optional[str] = None\n")
    with pytest.raises(Restarted):
        prepare_allocator()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


# -- imports --------------------------------------------------------------------------------------

COMPILER = {"torch._inductor.compile_fx", "torch._functorch.aot_autograd", "networkx"}
AT_THE_END = {"matplotlib", "vllm", "deepspeed", "sklearn", "scipy"}
ONLY_TO_WORK = {
    "peft", "bitsandbytes", "datasets", "pandas", "wandb", "plotly", "sympy",
    "torch._dynamo", "transformers.modeling_utils",
}  # fmt: skip


LIST_MODULES = """
import atexit, gc, os, sys

def write():
    loaded = [name for name, module in sys.modules.items() if module is not None]
    with open(os.environ["MODULES"], "w") as file:
        print(*loaded, sep="\\n", file=file)
        print("collects new garbage" if gc.isenabled() and gc.get_freeze_count() else "", file=file)

atexit.register(write)
"""


def imports_of(folder: Path, name: str, *arguments: object) -> set[str]:
    """Run a script to its end; return the modules that it has imported."""
    (folder / "sitecustomize.py").write_text(LIST_MODULES, encoding="utf-8")
    modules = folder / "modules.txt"
    env = script_environment(MODULES=str(modules))
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    subprocess.run(
        command_of(name, *arguments), env=env, capture_output=True, check=True, timeout=120
    )
    return set(modules.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("script", ["train", "evaluate"])
def test_help_imports_only_what_it_shows(script: str, tmp_path: Path) -> None:
    imported = imports_of(tmp_path, script, "--help")
    assert {"trl.trainer.grpo_config", "collects new garbage"} <= imported
    assert imported & (COMPILER | AT_THE_END | ONLY_TO_WORK) == set()


def test_a_dry_run_imports_nothing_that_is_used_at_the_end(
    config_file: Path, tmp_path: Path
) -> None:
    imported = imports_of(tmp_path, "train", "--config", config_file, "--dry_run", "true")
    assert {"bitsandbytes", "datasets", "collects new garbage"} <= imported
    assert imported & AT_THE_END == set()
