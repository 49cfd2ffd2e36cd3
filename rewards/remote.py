"""Run rewards in worker processes, and end a process that misbehaves.

A reward may hang with the interpreter's lock held, ignore signals, exit, crash or print. None of it
reaches the trainer. A pool of pebble 5.2.3 was tried: it imports the trainer's script, and torch
with it, into each process, takes `os._exit(0)` for a hang, and leaves alone what a reward started.
"""

import asyncio
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

from rewards.checking import Loaded, one_row, place_of, plain_state
from rewards.completions import Scores
from rewards.errors import RewardError, RewardSpecError, escaped, one_line

# The child's search path is the trainer's. `-P`: nothing else is on it while this line runs.
START = (
    "import json, sys; _, path, *files = sys.argv; sys.path[:] = json.loads(path); "
    "from rewards.worker import main; main(*map(int, files))"
)
CHECK_S = 0.2  # seconds between checks that a process still runs and is in time
TRACE_S = 0.5  # seconds a process has to write down where it is when its time is over
SIGNALLED = 128  # exit codes above it stand for a signal, as in a shell
EXIT_S = 1.0  # seconds to wait for the exit code of a process that has ended
MAX_TRACE_BYTES = 2**16  # capacity of a pipe
OWN_FOLDER = str(Path(__file__).parent)
LOGGERS = {"log_extra", "log_metric"}  # the process has its own
Answer = tuple[Any, ...]


class _Request(NamedTuple):
    answer: Future[Answer]
    deadline: float


class _Process:
    """A running process; a thread receives its answers."""

    def __init__(self) -> None:
        self.ended = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._connection, theirs = Pipe()
        self._trace, trace = os.pipe()
        os.set_blocking(self._trace, False)
        arguments = [json.dumps([*map(str, sys.path)]), str(theirs.fileno()), str(trace)]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *arguments],
            stdin=subprocess.PIPE,  # open for as long as the trainer lives (worker._guard)
            stdout=2,  # what a reward prints goes to standard error
            pass_fds=[theirs.fileno(), trace],
            start_new_session=True,  # no Ctrl-C; and a group that can be killed as a whole
        )
        theirs.close()
        os.close(trace)
        threading.Thread(target=self._receive, name="reward worker", daemon=True).start()

    def request(self, number: int, timeout: float, *request: Any) -> Future[Answer]:
        """Send a request; the future gets an answer in any case."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        deadline = time.monotonic() + timeout + TRACE_S if timeout else float("inf")
        with self._lock:
            if self.ended:
                answer.set_result(self._ending())
                return answer
            self._requests[number] = _Request(answer, deadline)
        with self._sending, contextlib.suppress(OSError):  # it has ended, as the thread will see
            self._connection.send((number, timeout, *request))
        return answer

    def end(self) -> None:
        """Kill the process and all that it started; not in a fork of the trainer."""
        if os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _receive(self) -> None:
        late = False
        try:
            while not late:
                if self._connection.poll(CHECK_S):
                    self._take(*self._connection.recv())
                elif self._popen.poll() is not None and not self._connection.poll(0):
                    break
                else:
                    late = self._is_late()
            if not late:
                raise EOFError
        except (EOFError, OSError):  # it has ended: its exit code follows
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=EXIT_S)
        finally:  # whatever happened: nobody may wait for an answer that does not come
            self._close()

    def _is_late(self) -> bool:
        with self._lock:
            return any(r.deadline < time.monotonic() for r in self._requests.values())

    def _take(self, number: int, *answer: Any) -> None:
        with self._lock:
            request = self._requests.pop(number, None)
        if request:
            request.answer.set_result(answer)

    def _close(self) -> None:
        self.end()
        with self._lock:
            self.ended = True
            requests = sorted(self._requests.values(), key=lambda request: request.deadline)
            self._requests.clear()
        trace = self._read_trace()
        for request in requests:
            late = request.deadline < time.monotonic()
            request.answer.set_result(("late", trace) if late else self._ending(trace))
        self._connection.close()
        os.close(self._trace)
        if self._popen.stdin:
            self._popen.stdin.close()

    def _ending(self, trace: str = "") -> Answer:
        code = self._popen.returncode
        number = -code if code < 0 else code - SIGNALLED
        if number not in [*map(int, signal.Signals)]:
            return "ended", f"exit code {code}", trace
        name = signal.Signals(number).name
        return "ended", f"{name}{', as when memory runs out' * (name == 'SIGKILL')}", trace

    def _read_trace(self) -> str:
        """Read where the reward was, from its own first frame."""
        try:
            text = os.read(self._trace, MAX_TRACE_BYTES).decode(errors="replace")
        except BlockingIOError:  # nothing was written
            return ""
        lines = text.splitlines(keepends=True)
        own = [i for i, line in enumerate(lines) if OWN_FOLDER in line]
        return escaped("".join(lines[: own[0]] if own else lines))


class Worker:
    """A process for rewards: started when it is first needed, and again after it has ended."""

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._numbers = itertools.count()

    def request(self, timeout: float, *request: Any) -> Future[Answer]:
        """Send a request.

        Args:
            timeout: seconds until the process is killed; 0 for no limit.
            request: what `rewards.worker` understands.
        """
        if self._process is None or self._process.ended:
            self._process = _Process()
            weakref.finalize(self, self._process.end)
        return self._process.request(next(self._numbers), timeout, *request)


# --- rewards ------------------------------------------------------------------------------------


def load_remote(
    spec: Any, name: str, worker: Worker, columns: Sequence[str] | None, timeout: float
) -> Loaded:
    """Load a reward in a worker process.

    Args:
        spec: ``my_module:my_reward``, or ``{my_module:my_reward: parameters}``.
        name: that the reward is logged under.
        worker: the process.
        columns: data set columns, to check that the reward can be called with them.
        timeout: seconds allowed for the import, and then for each call; 0 for no limit.

    Raises:
        RewardSpecError: it cannot be loaded or called.
    """
    kind, *facts = worker.request(timeout, "load", spec, columns).result()
    if kind == "done":
        is_async, *about = facts
        return (_RemoteAsync if is_async else _RemoteSync)(spec, worker, timeout, name, *about)
    problem = {
        "refused": facts[0],
        "late": f"reward {name!r}: importing its module took longer than reward_timeout, "
        f"{timeout:g} s: see what the module does when it is imported",
        "ended": f"reward {name!r}: importing its module ended the process with {facts[0]}: "
        "see what the module does when it is imported",
    }
    raise RewardSpecError(problem[kind])


class _Remote(Loaded):
    def __init__(self, spec: Any, worker: Worker, timeout: float, *about: Any) -> None:
        super().__init__(*about)
        self.spec = spec
        self.worker = worker
        self.timeout = timeout

    def _request(self, arguments: dict[str, Any]) -> Future[Answer]:
        passed = arguments | plain_state(arguments) | dict.fromkeys(LOGGERS & arguments.keys())
        step = getattr(passed.get("trainer_state"), "global_step", 0)
        seed = zlib.crc32(repr((step, passed["completions"])).encode(errors="surrogatepass"))
        try:
            data = pickle.dumps(passed, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a value's own code
            raise RewardError(
                f"reward {self.__name__!r}: its arguments cannot be sent to its process "
                f"({one_line(error)}): set reward_workers: 0"
            ) from None
        return self.worker.request(self.timeout, "score", self.spec, seed, data)

    def _scores(self, arguments: dict[str, Any], answer: Answer) -> Scores:
        kind, *facts = answer
        if kind == "done":
            scores, logs = facts
            logs.replay(arguments)
            return scores  # type: ignore[no-any-return]
        if kind in ("error", "refused"):
            raise RewardError(*facts)
        if kind == "late":
            count = len(arguments["completions"])
            raise RewardError(
                f"reward {self.__name__!r} did not score {count} completions within "
                f"{self.timeout:g} s: make it faster, or raise reward_timeout",
                *facts,
            )
        how, trace = facts
        place, details = self._row_that_ends_it(arguments)
        problem = f"reward {self.__name__!r} ended its process with {how} {place}"
        raise RewardError(problem, trace + details)

    def _row_that_ends_it(self, arguments: dict[str, Any]) -> tuple[str, str]:
        count = len(arguments["completions"])
        for row in range(count):
            if self._request(one_row(arguments, row)).result()[0] in ("ended", "late"):
                return place_of(arguments, row)
        return f"on the batch of {count}; each completion alone can be scored", ""


class _RemoteAsync(_Remote):
    async def __call__(self, **arguments: Any) -> Scores:
        return self._scores(arguments, await asyncio.wrap_future(self._request(arguments)))


class _RemoteSync(_Remote):
    def __call__(self, **arguments: Any) -> Scores:
        return self._scores(arguments, self._request(arguments).result())
