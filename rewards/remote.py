"""Run rewards in worker processes, and end a process that misbehaves.

A reward may hang with the interpreter's lock held, ignore signals, exit, crash or print. None of it
reaches the trainer. A pool of pebble 5.2.3 was tried: it imports the trainer's script, and torch
with it, into each process, takes `os._exit(0)` for a hang, and leaves alone what a reward started.
"""

import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

from rewards.checking import Failure, Outcome, Reward, plain, reward_of
from rewards.errors import RewardSpecError, escaped

# The child's search path is the trainer's. `-P`: nothing else is on it while this line runs.
START = (
    "import json, sys; path, *arguments = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from rewards.worker import main; main(*arguments)"
)
CHECK_S = 0.2  # seconds between checks that a process still runs and is in time
TRACE_S = 0.5  # seconds a process has to write down where it is when its time is over
SIGNALLED = 128  # exit codes above it stand for a signal, as in a shell
EXIT_S = 1.0  # seconds to wait for the exit code of a process that has ended
MAX_TRACE_BYTES = 2**16  # capacity of a pipe
OWN_FOLDER = str(Path(__file__).parent)


class _Request(NamedTuple):
    answer: Future[Any]
    deadline: float


class _Process:
    """A running process; a thread receives its answers."""

    def __init__(self, timeout: float) -> None:
        self.ended = False
        self._timeout = timeout
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}  # the oldest first
        self._connection, theirs = Pipe()
        self._trace, trace = os.pipe()
        os.set_blocking(self._trace, False)
        arguments = [[*map(str, sys.path)], theirs.fileno(), trace, timeout]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *map(json.dumps, arguments)],
            stdin=subprocess.PIPE,  # open for as long as the trainer lives (worker._guard)
            stdout=2,  # what a reward prints goes to standard error
            pass_fds=[theirs.fileno(), trace],
            start_new_session=True,  # no Ctrl-C; and a group that can be killed as a whole
        )
        theirs.close()
        os.close(trace)
        threading.Thread(target=self._receive, name="reward worker", daemon=True).start()

    def request(self, *request: Any) -> Future[Any]:
        """Send a request; the future gets an answer in any case."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        limit = self._timeout + TRACE_S if self._timeout else float("inf")
        with self._lock:
            if self.ended:
                answer.set_result(self._ending(""))
                return answer
            number = next(self._numbers)
            self._requests[number] = _Request(answer, time.monotonic() + limit)
        with self._sending, contextlib.suppress(OSError):  # it has ended, as the thread will see
            self._connection.send((number, *request))
        return answer

    def end(self) -> None:
        """Kill the process and all that it started; not in a fork of the trainer."""
        if os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _receive(self) -> None:
        try:
            while not self._is_late():
                if self._connection.poll(CHECK_S):
                    self._take(*self._connection.recv())
                elif self._popen.poll() is not None and not self._connection.poll(0):
                    break
        except (EOFError, OSError):  # it has ended: its exit code follows
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=EXIT_S)
        finally:  # whatever happened: nobody may wait for an answer that does not come
            self._close()

    def _is_late(self) -> bool:
        with self._lock:
            return any(r.deadline < time.monotonic() for r in self._requests.values())

    def _take(self, number: int, answer: Any) -> None:
        with self._lock:
            request = self._requests.pop(number)
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)

    def _close(self) -> None:
        self.end()
        with self._lock:
            self.ended = True
        trace = self._read_trace()
        late = Failure(
            f"took longer than {self._timeout:g} s",
            trace,
            ": make it faster, or raise reward_timeout",
        )
        for request in self._requests.values():
            is_late = request.deadline < time.monotonic()
            request.answer.set_result(late if is_late else self._ending(trace))
        self._connection.close()
        os.close(self._trace)
        if self._popen.stdin:
            self._popen.stdin.close()

    def _ending(self, trace: str) -> Failure:
        code = self._popen.returncode
        number = -code if code < 0 else code - SIGNALLED
        how = f"exit code {code}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(number).name
        if number == signal.SIGKILL:
            how += ", as when memory runs out"
        return Failure(f"ended its process with {how}", trace, in_some_row=True)

    def _read_trace(self) -> str:
        """Read where the reward was, from its own first frame."""
        try:
            text = os.read(self._trace, MAX_TRACE_BYTES).decode(errors="replace")
        except BlockingIOError:  # nothing was written
            return ""
        lines = text.splitlines(keepends=True)
        own = itertools.takewhile(lambda line: OWN_FOLDER not in line, lines)
        return escaped("".join(own))


class Worker:
    """A process for rewards: started when it is first needed, and again after it has ended.

    Args:
        timeout: seconds for a request until the process is killed; 0 for no limit.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: _Process | None = None

    def request(self, *request: Any) -> Future[Any]:
        """Send what `rewards.worker` understands."""
        if self._process is None or self._process.ended:
            self._process = _Process(self._timeout)
            weakref.finalize(self, self._process.end)
        return self._process.request(*request)


def load_remote(spec: Any, name: str, worker: Worker, columns: Sequence[str] | None) -> Reward:
    """Load a reward in a worker process.

    Args:
        spec: ``my_module:my_reward``, or ``{my_module:my_reward: parameters}``.
        name: that the reward is logged under.
        worker: the process.
        columns: data set columns, to check that the reward can be called with them.

    Raises:
        RewardSpecError: it cannot be loaded or called.
    """

    def start(arguments: dict[str, Any]) -> Future[Outcome]:
        passed = plain(arguments)
        step = getattr(passed.get("trainer_state"), "global_step", 0)
        seed = zlib.crc32(repr((step, passed["completions"])).encode(errors="surrogatepass"))
        data = pickle.dumps(passed, pickle.HIGHEST_PROTOCOL)
        return worker.request("score", spec, seed, data)

    about = worker.request("load", spec, columns).result()
    if isinstance(about, Failure):
        problem = f"{about.problem} while its module was imported"
        raise RewardSpecError(f"reward {name!r} {problem}{about.fix}")
    return reward_of(name, about, start)
