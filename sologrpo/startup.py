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
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

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

_received: signal.Signals | None = None
_dropped = False  # Python has dropped the exception of that signal


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
    """Return the environment in which a process on a CPU is fast.

    Args:
        environment: what the process has; settings of its user are kept.
    """
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

    The first Ctrl-C or SIGTERM prints one line and unwinds, the second ends the process at once. A
    signal that the process was started to ignore stays ignored.
    """
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        return
    gc.disable()  # until `end_imports`: a fifth of their time
    for name, text in _NOISE.items():
        logging.getLogger(name).addFilter(partial(_is_news, text))
    for number in STOPPED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    sys.unraisablehook = _repeat_dropped_signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED)  # blocked by `prepare_allocator`
    atexit.register(_ignore_signals)  # runs after those registered later
    os.register_at_fork(after_in_child=_use_default_handlers)
    if sys.stdout is not None and not sys.stdout.isatty():
        _tolerate_closed_pipe()


def end_imports() -> None:
    """Collect garbage again; call it once the libraries are imported.

    What they have made by then stays to the end. To look through it again takes time: at the exit
    alone, half a second.
    """
    # Libraries of vLLM (nanobind's) warn of each of their objects that is not collected.
    if "vllm" not in sys.modules:
        gc.freeze()
    gc.enable()


def _is_news(noise: str, record: logging.LogRecord) -> bool:
    return noise not in str(record.msg)


def stopped_by() -> signal.Signals | None:
    """Return the signal that stops this process; its line is printed already."""
    return _received


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Print the line and unwind; leave at once at the start, while libraries are imported.

    A half-imported library may swallow the exception or turn it into another, and nothing has to
    be cleaned up by then.
    """
    global _received, _dropped
    if _received is None:
        # Not `print`: the signal may have come in the middle of one.
        with suppress(OSError):  # stderr is closed
            os.write(2, f"error: {STOPPED[signal.Signals(number)]}\n".encode())
    if (_received is not None and not _dropped) or _is_starting(frame):
        os._exit(128 + number)
    _received, _dropped = signal.Signals(number), False
    raise KeyboardInterrupt


def _repeat_dropped_signal(dropped: "sys.UnraisableHookArgs") -> None:
    """Send the signal again if its exception was raised in a `__del__`, where it ends nothing."""
    global _dropped
    if _received is None or not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    _dropped = True
    threading.Timer(0.01, os.kill, (os.getpid(), _received)).start()


def _is_starting(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code is start_process.__code__ or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    """Let a process that has done its work exit in peace."""
    for number in STOPPED:
        signal.signal(number, signal.SIG_IGN)


def _use_default_handlers() -> None:
    """Let a forked child die of a signal: it has nothing to save, and its parent waits for it."""
    for number in STOPPED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


class _Pipe(io.FileIO):
    """A file that takes whatever is written to it, also as a pipe that its reader has left."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _tolerate_closed_pipe() -> None:
    """Finish the work although nobody reads the output any more, as in `sologrpo report | head`."""
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Pipe(1, "w", closefd=False)),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
