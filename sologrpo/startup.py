"""Start a process of the command line: allocator and threads, signals, output, noise of libraries.

Imports nothing but the standard library: it runs before the libraries are imported, which takes
seconds.
"""

import atexit
import gc
import importlib.util
import io
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

STOPPED = {signal.SIGINT: "stopped by Ctrl-C", signal.SIGTERM: "stopped by SIGTERM"}

# Logged although nothing is wrong: logger and text.
_NOISE = {
    # bitsandbytes 0.50, backends/cpu/ops.py:253. The kernel has no backward: `keep_nf4_trainable`
    # (model/loading.py) would turn it off.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # transformers 5.23, integrations/bitsandbytes.py:311, for a merge that asks for that dtype.
    "transformers.integrations.bitsandbytes": "The modules are dequantized in",
    # transformers 5.23, trainer_utils.py:323, for two checkpoints within a second.
    "transformers.trainer_utils": "mtime may not be reliable",
}

# Settings of glibc's malloc, for the CPU. A training step allocates and frees the same gigabytes
# again and again; by default large blocks are mapped again each time and the kernel zeroes their
# pages, which was a third of the CPU time (docs/LOG.md).
_MALLOC = {
    "hugetlb": 1,  # pages of 2 MiB: a thousandth of the page faults
    "mmap_max": 0,  # large blocks too are taken from memory that was freed
    "arena_max": 1,  # the backward thread takes what the forward thread gave back
    "trim_threshold": 2**31 - 1,  # bytes
    "top_pad": 256 * 2**20,  # bytes
}
# Number of the process that was restarted, so that it restarts once whatever its environment is.
_RESTARTED = "SOLOGRPO_RESTARTED"

_GPU_FILES = {"cuda": ("/dev/nvidiactl", "/dev/dxg"), "hip": ("/dev/kfd",)}
_CUDA_MALLOC = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_starting = False  # until `end_imports`
_step_first = False  # within `finishing_step`
_received: signal.Signals | None = None


def prepare_allocator() -> None:
    """Set the allocator and the threads, whatever launched this process; call it before all else.

    On a CPU the process starts itself again, once: glibc and OpenMP read their settings at the
    start. Its number, arguments, folder and open files stay. Settings of the user stay too.
    """
    if _has_gpu():
        # Freed memory of one shape then serves another. vLLM looks for this name.
        if not any(name in os.environ for name in _CUDA_MALLOC):
            os.environ[_CUDA_MALLOC[0]] = "expandable_segments:True"
        return
    this = {_RESTARTED: str(os.getpid())}
    environment = cpu_environment(os.environ)
    if this.items() <= os.environ.items() or environment == os.environ:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED)  # until `start_process` can handle them
    with suppress(OSError):  # continue as it was started
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, environment | this)


def cpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process on a CPU is fast; settings of the user are kept."""
    prepared = dict(environment)
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:  # another libc has other settings
        given = environment.get("GLIBC_TUNABLES", "")
        tunables = [given] if given else []
        for name, value in _MALLOC.items():
            # The older names end in an underscore, but for MALLOC_ARENA_MAX.
            older = {f"MALLOC_{name.upper()}", f"MALLOC_{name.upper()}_"}
            if f"glibc.malloc.{name}=" not in given and not older & environment.keys():
                tunables.append(f"glibc.malloc.{name}={value}")
        prepared["GLIBC_TUNABLES"] = ":".join(tunables)
    if _has_launchers_thread(environment):
        del prepared["OMP_NUM_THREADS"]
    return prepared


def _has_launchers_thread(environment: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` has chosen one thread for a process that is alone.

    That is right for several processes on one machine, but leaves all cores but one idle. A value
    that the user has set was in the launcher's environment when it started.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in environment
    if not launched or environment.get("WORLD_SIZE", "1") != "1":
        return False
    try:
        launcher = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        launcher = b""
    chosen = any(line.startswith(b"OMP_NUM_THREADS=") for line in launcher.split(b"\0"))
    return environment.get("OMP_NUM_THREADS") == "1" and not chosen


def _has_gpu() -> bool:
    """Return whether torch will find a GPU, without importing it, which takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    if not version.is_file():
        return False
    # Lines such as: cuda: Optional[str] = '13.0'
    build = version.read_text(encoding="utf-8")
    return any(
        os.path.exists(file) and re.search(rf"^{backend}\b.*= '", build, re.MULTILINE)
        for backend, files in _GPU_FILES.items()
        for file in files
    )


def start_process() -> None:
    """Prepare the process of a command; call it before the libraries are imported.

    The first Ctrl-C or SIGTERM unwinds to `errors.one_line_errors`, which prints one line; the
    second ends the process at once, as the first does while libraries are imported.
    """
    global _starting
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        return
    _starting = True
    gc.disable()  # until `end_imports`: a fifth of their time
    for name, text in _NOISE.items():
        logging.getLogger(name).addFilter(partial(_is_news, text))
    _set_handlers(_on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED)  # blocked by `prepare_allocator`
    atexit.register(_end_process)  # runs after those registered later
    # A forked child has nothing to save, and its parent waits for it.
    os.register_at_fork(after_in_child=partial(_set_handlers, signal.SIG_DFL))
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(errors="backslashreplace")


def end_imports() -> None:
    """Collect garbage again; call it once the libraries are imported.

    What they have made by then stays to the end. To look through it again takes time: at the exit
    alone, half a second.
    """
    global _starting
    _starting = False
    # Libraries of vLLM (nanobind's) warn of each of their objects that is not collected.
    if "vllm" not in sys.modules:
        gc.freeze()
    gc.enable()


def _is_news(noise: str, record: logging.LogRecord) -> bool:
    return noise not in str(record.msg)


@contextmanager
def finishing_step() -> Iterator[None]:
    """Note Ctrl-C and SIGTERM for `stopped_by` within the block; a second Ctrl-C unwinds."""
    global _step_first, _received
    _set_handlers(_on_signal)
    _step_first = True
    try:
        yield
    finally:
        _step_first, _received = False, None


def stopped_by() -> signal.Signals | None:
    """Return the signal that stops this process."""
    return _received


def has_reader() -> bool:
    """Return whether there is somebody to read the output, if it is a pipe."""
    poll = select.poll()
    poll.register(1, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def drop_output() -> None:
    """Finish the work although nobody reads the output any more, as in `sologrpo report | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_process() -> None:
    """Let a process that has done its work exit in peace."""
    _set_handlers(signal.SIG_IGN)
    # CPython notes that a KeyboardInterrupt left an `eval` of text, such as namedtuple's while a
    # library is imported, and `python -m` would end by SIGINT for it. The next `eval` clears that.
    eval("0")
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def _set_handlers(handler: Any) -> None:
    """Set the handler of both signals; one that the process was started to ignore stays ignored."""
    for number in STOPPED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _received
    before, _received = _received, signal.Signals(number)
    # Not `print`: the signal may have come in the middle of one.
    if _step_first and not (before and number == signal.SIGINT):
        os.write(2, f"{_received.name}: this step is finished and saved, then the run stops "
                    "(Ctrl-C: at once)\n".encode())  # fmt: skip
        return
    # A half-imported library may swallow the exception, and nothing has to be cleaned up by then.
    if _starting or (before and not _step_first):
        with suppress(OSError):  # stderr is closed
            os.write(2, f"error: {STOPPED[_received]}\n".encode())
        os._exit(128 + number)
    raise KeyboardInterrupt
