"""Start a process of the command line: signals, output that nobody reads, noise of libraries.

Imports nothing but the standard library: it runs before the libraries are imported, which takes
seconds.
"""

import atexit
import io
import logging
import os
import signal
import sys
from contextlib import suppress
from functools import partial
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

_received: signal.Signals | None = None


def start_process() -> None:
    """Prepare the process of a command; call it before the libraries are imported.

    The first Ctrl-C or SIGTERM prints one line and unwinds, the second ends the process at once. A
    signal that the process was started to ignore stays ignored.
    """
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        return
    for name, text in _NOISE.items():
        logging.getLogger(name).addFilter(partial(_is_news, text))
    for number in STOPPED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    atexit.register(_ignore_signals)  # runs after those registered later
    os.register_at_fork(after_in_child=_use_default_handlers)
    if sys.stdout is not None and not sys.stdout.isatty():
        _tolerate_closed_pipe()


def _is_news(noise: str, record: logging.LogRecord) -> bool:
    return noise not in str(record.msg)


def stopped_by() -> signal.Signals | None:
    """Return the signal that stops this process; its line is printed already."""
    return _received


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Print the line and unwind; leave at once if libraries are being imported.

    A half-imported library may swallow the exception or turn it into another, and nothing has to
    be cleaned up by then.
    """
    global _received
    if _received is None:
        # Not `print`: the signal may have come in the middle of one.
        with suppress(OSError):  # stderr is closed
            os.write(2, f"error: {STOPPED[signal.Signals(number)]}\n".encode())
    if _received is not None or _is_importing(frame):
        os._exit(128 + number)
    _received = signal.Signals(number)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
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
