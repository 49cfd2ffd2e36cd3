"""Call rewards so that no mistake in one goes unseen, and nothing that it does reaches the trainer.

A mistake stops the run, as a score of 0 would hide it. Rewards that are not built in run in worker
processes: they may hang with the interpreter's lock held, ignore signals, exit, crash or print. A
pool of pebble 5.2.3 imports the trainer's script, and torch with it, into each process, takes
`os._exit(0)` for a hang, and leaves alone what a reward started.
"""

import asyncio
import contextlib
import copy
import faulthandler
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import pickle
import random
import reprlib
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rewards.completions import Scores, prompt_text, text_of
from rewards.errors import RewardError, RewardSpecError, one_line
from sologrpo.base.redact import redact_text
from sologrpo.base.text import escaped

# Arguments that TRL passes on every call, besides the data set columns.
PASSED_BY_TRL = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
# Columns that TRL does not pass on (grpo_trainer.py:1584, version 1.16.0).
_NOT_PASSED = ("prompt", "completion", "completion_ids")
MAX_SHOWN_CHARS = 2_000
MAX_FLOAT32 = 3.4028235e38  # TRL adds scores up in float32
NOT_A_LIST = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but no list of scores
NO_SCORE = ": return a finite number that fits into a float32, or None where it cannot judge"


def check_signature(name: str, reward: Any, columns: Sequence[str]) -> None:
    """Check that a reward accepts the arguments that TRL passes: its own and the data's columns."""
    passed = [*PASSED_BY_TRL, *(column for column in columns if column not in _NOT_PASSED)]
    try:
        signature = inspect.signature(reward)
        signature.bind(**dict.fromkeys(passed))
    except (TypeError, ValueError) as error:
        fix = "write it as a def, and end its parameters with **kwargs"
        if "missing" in str(error):
            fix = f"the data set has no such column; rewards are called with: {', '.join(passed)}"
        raise RewardSpecError(f"reward {name!r}: {error}: {fix}") from error
    # A config could name `transformers:pipeline` to download code and run it.
    if signature.parameters.keys().isdisjoint(PASSED_BY_TRL):
        raise RewardSpecError(
            f"reward {name!r} scores no completions: name one of its parameters `completions`"
        )


class About(NamedTuple):
    """Facts about a reward."""

    is_async: bool
    takes_token_ids: bool  # declares the parameter `completion_ids`
    source_hash: str  # SHA-256 of the file that defines it, to notice that it was edited


def about(reward: Any) -> About:
    """Inspect a reward."""
    takes_token_ids = "completion_ids" in inspect.signature(reward).parameters
    return About(_is_async(reward), takes_token_ids, hashlib.sha256(_source_of(reward)).hexdigest())


def _is_async(reward: Any) -> bool:
    function = _without_partials(reward)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def _without_partials(reward: Any) -> Any:
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def _source_of(reward: Any) -> bytes:
    reward = inspect.unwrap(_without_partials(reward))
    for defined in (reward, type(reward)):
        try:
            return Path(inspect.getsourcefile(defined) or "").read_bytes()
        except (TypeError, OSError):  # an object, or code without a file
            continue
    name: str = getattr(reward, "__qualname__", type(reward).__qualname__)
    return name.encode()  # compiled: only its name can change


# --- what a reward logs -------------------------------------------------------------------------

# Names that the trainer logs itself (docs/metrics.md).
RESERVED_METRICS = {
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "progress"),
    *("reward", "reward_std", "reward_min", "reward_max", "frac_reward_zero_std"),
    *("num_tokens", "num_input_tokens_seen", "trained_completions"),
    *("step_time", "total_flos"),
    *("kl", "entropy", "policy_loss", "entropy_coef", "aux_loss", "cispo_clip_ratio"),
}
RESERVED_PREFIXES = (
    *("rewards/", "degenerate/", "completions/", "hacking/", "tools/"),
    *("clip_ratio/", "ratio/", "sampling/", "vespo/", "time/", "memory/", "tokens_per_second/"),
    *("tokens/", "accuracy/"),
    *("eval_", "eval/", "train_", "train/"),
)
# Columns of the completions file, to which every reward adds its name (TRL 1.16.0,
# grpo_trainer.py:3343-3350).
RESERVED_COLUMNS = {"step", "prompt", "completion", "advantage", "image"}
KINDS = ({str}, {bool}, {int, float})  # types that fit into one column
INT64 = range(-(2**63), 2**63)
LOGGERS = ("log_metric", "log_extra")


class Logs:
    """Record what one call of a reward logs, until it has returned sound scores."""

    def __init__(self, count: int) -> None:
        self._count = count  # of completions
        self._metrics: list[tuple[str, float]] = []
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Record a number."""
        _check_name(name)
        if name in RESERVED_METRICS or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"the trainer logs {name!r} itself: choose another name")
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}): {value} is not a finite number")
        self._metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Any) -> None:
        """Record a column of the completions file: one string or number per completion."""
        _check_name(column)
        if column in RESERVED_COLUMNS or column in self._columns:
            raise ValueError(f"the file has a column {column!r}: choose another name")
        listed = [_plain(value) for value in values] if isinstance(values, list | tuple) else []
        if len(listed) != self._count:
            problem = f"expected a list of {self._count} values, one per completion"
            raise ValueError(f"log_extra({column!r}): {problem}")
        types = {type(value) for value in listed if value is not None}
        fits = all(value in INT64 for value in listed if type(value) is int)
        if not fits or not any(types <= kind for kind in KINDS):
            problem = "log only strings, only numbers or only booleans, and None"
            raise ValueError(f"log_extra({column!r}): {problem}")
        self._columns[column] = listed

    def replay(self, arguments: Mapping[str, Any]) -> None:
        """Log with the functions that TRL passes; outside of training, nothing is logged."""
        if "log_metric" in arguments:
            for name, value in self._metrics:
                arguments["log_metric"](name, value)
            for column, values in self._columns.items():
                arguments["log_extra"](column, values)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"the name must be a printable string, not {name!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # lone surrogates fit into no file
        return value.encode("utf-8", "replace").decode()
    # Scalars of numpy and torch become numbers.
    return value.item() if getattr(value, "shape", None) == () else value


# --- one call, where the reward runs ------------------------------------------------------------


class Failure(NamedTuple):
    """A call that gave no scores, and why."""

    problem: str  # what the reward did, as in "reward 'x' PROBLEM on completion 3"
    trace: str = ""  # the reward's own traceback
    fix: str = ""
    row: int | None = None  # of the batch, if it is known
    in_some_row: bool = False  # one completion may be the cause; it is searched for


Outcome = tuple[Scores, Logs] | Failure
Caught = type[BaseException] | tuple[type[BaseException], ...]


def _start(
    reward: Any, arguments: dict[str, Any], caught: Caught = BaseException
) -> Future[Outcome]:
    """Call a sync reward, or start to call an async one: their calls share one event loop.

    The reward may change `arguments`. Exceptions of a sync reward that are not `caught`, a Ctrl-C
    for example, are not its own.
    """
    if _is_async(reward):
        return asyncio.run_coroutine_threadsafe(_outcome(reward, arguments), _event_loop())
    done: Future[Outcome] = Future()
    try:
        _outcome(reward, arguments, caught).send(None)
    except StopIteration as end:  # nothing is awaited, so the first step is the last
        done.set_result(end.value)
    return done


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


async def _outcome(
    reward: Any, arguments: dict[str, Any], caught: Caught = BaseException
) -> Outcome:
    count = len(arguments["completions"])
    logs = Logs(count)
    try:
        returned = reward(**arguments | {name: getattr(logs, name) for name in LOGGERS})
        returned = await returned if _is_async(reward) else returned
        if isinstance(returned, NOT_A_LIST) or not isinstance(returned, Iterable):
            problem = f"returned {_shown(returned)} for {count} completions, not a list of scores"
            return Failure(problem)
        values = list(itertools.islice(returned, count + 1))  # a generator may have no end
        if len(values) != count:
            or_more = " or more" * (len(values) > count)
            return Failure(f"returned {len(values)}{or_more} scores for {count} completions")
    except caught as error:
        return Failure(f"raised {one_line(error)}", _own_trace(error), in_some_row=True)
    scores: Scores = []
    for row, value in enumerate(values):
        try:
            scores.append(_score(value))
        except Exception:  # the value's own code
            return Failure(f"returned {_shown(value)}", fix=NO_SCORE, row=row)
    return scores, logs


def _score(value: Any) -> float | None:
    if value is None:
        return None
    # Neither a string is a score, nor an array of one number.
    if hasattr(type(value), "__float__") and getattr(value, "shape", ()) == ():
        number = float(value)
        if abs(number) <= MAX_FLOAT32:
            return number
    raise ValueError


def _own_trace(error: BaseException) -> str:
    trace = traceback.TracebackException.from_exception(error)
    trace.stack[:] = [frame for frame in trace.stack if frame.filename != __file__]
    return escaped(redact_text("".join(trace.format())))


def _shown(value: Any) -> str:
    return one_line(reprlib.repr(value))


# --- loaded rewards, as the trainer calls them --------------------------------------------------


Start = Callable[[dict[str, Any]], Future[Outcome]]


class Reward:
    """A reward that returns only floats and None, or raises `RewardError`."""

    def __init__(self, name: str, about: About, start: Start) -> None:
        self.__name__ = name
        self.takes_token_ids = about.takes_token_ids
        self.source_hash = about.source_hash
        self._start = start

    def __call__(self, **arguments: Any) -> Any:
        """Score completions, as TRL calls a reward."""
        return self._scores(arguments, self._start(arguments).result())

    def score(self, **arguments: Any) -> Scores:
        """Score outside of training, where nothing is logged; also with an async reward."""
        arguments |= {"trainer_state": None}
        return self._scores(arguments, self._start(arguments).result())

    def _scores(self, arguments: dict[str, Any], outcome: Outcome) -> Scores:
        if isinstance(outcome, Failure):
            raise self._error(arguments, outcome)
        scores, logs = outcome
        logs.replay(arguments)
        return scores

    def _error(self, arguments: dict[str, Any], failure: Failure) -> RewardError:
        place, details = "", ""
        row = self._row_that_fails(arguments) if failure.in_some_row else failure.row
        if row is not None:
            place, details = _place_of(arguments, row)
        elif failure.in_some_row:
            count = len(arguments["completions"])
            place = f" on the batch of {count}; each completion alone can be scored"
        message = f"reward {self.__name__!r} {failure.problem}{place}{failure.fix}"
        return RewardError(message, failure.trace + details)

    def _row_that_fails(self, arguments: dict[str, Any]) -> int | None:
        """Find the first completion that raises or ends the process when it is scored alone."""
        for row in range(len(arguments["completions"])):
            outcome = self._start(_one_row(arguments, row)).result()
            if isinstance(outcome, Failure) and outcome.in_some_row:
                return row
        return None


class _AsyncReward(Reward):
    async def __call__(self, **arguments: Any) -> Any:
        return self._scores(arguments, await asyncio.wrap_future(self._start(arguments)))


def _reward_of(name: str, about: About, start: Start) -> Reward:
    return (_AsyncReward if about.is_async else Reward)(name, about, start)


def checked(reward: Any, name: str = "", trusted: bool = False) -> Reward:
    """Wrap a reward of this process; its arguments are copied, unless it is `trusted` to keep them.

    >>> def reward_all(completions, **kwargs): return [1]
    >>> checked(reward_all)(completions=["18"])
    [1.0]
    >>> checked(reward_all)(completions=["18", "19"])
    Traceback (most recent call last):
    rewards.errors.RewardError: reward 'reward_all' returned 1 scores for 2 completions
    """

    def start_here(arguments: dict[str, Any]) -> Future[Outcome]:
        passed = arguments if trusted else copy.deepcopy(_without_trainer(arguments))
        return _start(reward, passed, caught=(Exception, SystemExit))

    return _reward_of(name or reward.__name__, about(reward), start_here)


def _without_trainer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what acts on the trainer; `trainer_state` becomes plain data, without torch."""
    passed = {name: value for name, value in arguments.items() if name not in LOGGERS}
    if (state := arguments.get("trainer_state")) is not None:
        fields = {key: value for key, value in vars(state).items() if key != "stateful_callbacks"}
        passed["trainer_state"] = SimpleNamespace(**fields)
    return passed


def _one_row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    count = len(arguments["completions"])
    return {
        name: [value[row]] if isinstance(value, list) and len(value) == count else value
        for name, value in arguments.items()
    }


def _place_of(arguments: dict[str, Any], row: int) -> tuple[str, str]:
    """Name a row of the batch; and show the end of its prompt, its gold answer, its completion."""
    text = text_of(arguments["completions"][row])
    shown = {}
    if "prompts" in arguments:
        shown["prompt"] = prompt_text(arguments["prompts"][row])
    if "answer" in arguments:
        shown["answer"] = str(arguments["answer"][row])
    shown["completion"] = text
    details = "".join(f"{key + ':':11} {_end_of(value)}\n" for key, value in shown.items())
    count = len(arguments["completions"])
    return f" on completion {row} of the batch of {count}, {_end_of(text, 40)}", details


def _end_of(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    return repr(text if len(text) <= limit else "..." + text[-limit:])


# --- a worker process, as the trainer sees it ---------------------------------------------------

# The child's search path is the trainer's. `-P`: nothing else is on it while this line runs.
START = (
    "import json, sys; path, *arguments = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from rewards import contained, load_reward; contained.serve(load_reward, *arguments)"
)
CHECK_S = 0.2  # seconds between checks that a process still runs and is in time
TRACE_S = 0.5  # seconds a process has to write down where it is when its time is over
SIGNALLED = 128  # exit codes above it stand for a signal, as in a shell
EXIT_S = 1.0  # seconds to wait for the exit code of a process that has ended
MAX_TRACE_BYTES = 2**16  # capacity of a pipe
OWN_FOLDER = str(Path(__file__).parent) + os.sep


def load_remote(spec: Any, name: str, worker: "Worker", columns: Sequence[str] | None) -> Reward:
    """Load a reward in a worker process."""

    def start(arguments: dict[str, Any]) -> Future[Outcome]:
        passed = _without_trainer(arguments)
        step = getattr(passed.get("trainer_state"), "global_step", 0)
        seed = zlib.crc32(repr((step, passed["completions"])).encode(errors="surrogatepass"))
        data = pickle.dumps(passed, pickle.HIGHEST_PROTOCOL)
        return worker.request("score", spec, seed, data)

    about = worker.request("load", spec, columns).result()
    if isinstance(about, Failure):
        problem = f"{about.problem} while its module was imported"
        raise RewardSpecError(f"reward {name!r} {problem}{about.fix}")
    return _reward_of(name, about, start)


class Worker:
    """A process for rewards: started when it is first needed, and again after it has ended.

    A request that takes longer than `timeout` seconds ends it; 0 is no limit.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: _Process | None = None

    def request(self, *request: Any) -> Future[Any]:
        """Send what `_Server` understands."""
        if self._process is None or self._process.ended:
            self._process = _Process(self._timeout)
            weakref.finalize(self, self._process.end)
        return self._process.request(*request)


class _Request(NamedTuple):
    answer: Future[Any]
    deadline: float


class _Process:
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
            stdin=subprocess.PIPE,  # open for as long as the trainer lives (`_guard`)
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
        fix = ": make it faster, or raise reward_timeout"
        late = Failure(f"took longer than {self._timeout:g} s", trace, fix)
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


# --- the worker process -------------------------------------------------------------------------


def serve(load: Callable[..., Any], connection: int, trace: int, timeout: float) -> None:
    """Answer requests one at a time until the trainer is gone.

    It runs in the main thread, where a reward may set an alarm. Calls of async rewards share one
    event loop in a thread, and run concurrently.

    Args:
        load: `rewards.load_reward`, which imports this module.
        trace: file descriptor for the traceback of a crash or of a reward that takes `timeout`
            seconds; 0 for no limit.
    """
    _guard(connection, trace)
    with contextlib.suppress(ValueError):
        faulthandler.enable(file=trace)
    # Standard output is standard error here (`_Process`); lines appear when they are printed.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    _Server(load, Connection(connection), trace, timeout).answer_all()


def _guard(*open_files: int) -> None:
    """Fork. The child returns, and is the worker; this process ends with it.

    Standard input is a pipe that only the trainer can write to. When it closes, the trainer is
    gone, and this process ends the worker and all that the worker started.
    """

    def ended(*_: object) -> None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else SIGNALLED - code)

    signal.signal(signal.SIGCHLD, ended)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return
    for file in open_files:
        os.close(file)
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


class _Server:
    def __init__(
        self, load: Callable[..., Any], connection: Connection, trace: int, timeout: float
    ) -> None:
        self._load_reward = load
        self._connection = connection
        self._trace = trace
        self._timeout = timeout
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._rewards: dict[str, Any] = {}

    def answer_all(self) -> None:
        while True:
            try:
                number, task, *request = self._connection.recv()
            except EOFError:
                return
            if self._timeout:
                faulthandler.dump_traceback_later(self._timeout, file=self._trace)
            try:
                if task == "load":
                    self._load(number, *request)
                else:
                    self._score(number, *request)
            except RewardSpecError as error:
                self._send(number, error)

    def _load(self, number: int, spec: Any, columns: Sequence[str] | None) -> None:
        self._rewards[repr(spec)] = reward = self._load_reward(spec, columns)
        self._send(number, about(reward))

    def _score(self, number: int, spec: Any, seed: int, arguments: bytes) -> None:
        if repr(spec) not in self._rewards:  # this process was started again
            self._rewards[repr(spec)] = self._load_reward(spec)
        reward = self._rewards[repr(spec)]
        _seed(seed)
        outcome = _start(reward, pickle.loads(arguments))
        outcome.add_done_callback(lambda done: self._send(number, done.result()))

    def _send(self, number: int, answer: Any) -> None:
        if os.getpid() != self._pid:  # the reward forked, and its child came back here
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        with self._sending:
            self._connection.send((number, answer))


def _seed(seed: int) -> None:
    """Seed what a reward draws from, so that a resumed run draws the same."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
