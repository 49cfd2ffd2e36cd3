"""Enforce the contract of a reward: its arguments, its return values and what it logs.

A reward that breaks the contract stops the run. The error names the reward, the completion and the
problem. A score of 0 would hide the bug in the reward curve.
"""

import asyncio
import copy
import functools
import hashlib
import inspect
import reprlib
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rewards.completions import Scores, prompt_text, text_of
from rewards.errors import RewardError, RewardSpecError, escaped, one_line
from rewards.logs import Logs
from rewards.redact import redact_text

# Arguments that TRL passes on every call, besides the data set columns.
PASSED_BY_TRL = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
# Columns that TRL does not pass on (grpo_trainer.py:1584, version 1.16.0).
_NOT_PASSED = ("prompt", "completion", "completion_ids")
LOGGERS = {"log_extra", "log_metric"}
MAX_SHOWN_CHARS = 2_000
MAX_FLOAT32 = 3.4028235e38  # TRL adds scores up in float32
NOT_A_LIST = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but no list of scores
OWN_FILES = (__file__, inspect.getfile(Logs))  # left out of a reward's traceback
NO_SCORE = ": return a finite number that fits into a float32, or None where it cannot judge"


def check_signature(name: str, reward: Any, columns: Sequence[str]) -> None:
    """Check that a reward accepts the arguments that TRL passes.

    Args:
        name: of the reward.
        reward: the reward function.
        columns: data set columns. Each except ``prompt`` is passed by name.

    Raises:
        RewardSpecError: its signature does not match.
    """
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
    """Facts about a reward.

    Attributes:
        is_async: whether a call has to be awaited.
        takes_token_ids: whether it declares the parameter `completion_ids`.
        source_hash: SHA-256 of the source file that defines it, to notice that it was edited.
    """

    is_async: bool
    takes_token_ids: bool
    source_hash: str


def about(reward: Any) -> About:
    """Inspect a reward function or callable object."""
    takes_token_ids = "completion_ids" in inspect.signature(reward).parameters
    return About(is_async(reward), takes_token_ids, hashlib.sha256(_source_of(reward)).hexdigest())


def is_async(reward: Any) -> bool:
    """Check whether a call of a reward has to be awaited."""
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


# --- one call, where the reward runs ------------------------------------------------------------


class Failure(NamedTuple):
    """A call that gave no scores, and why.

    Attributes:
        problem: what the reward did, as in "reward 'x' PROBLEM on completion 3".
        trace: the reward's own traceback.
        fix: how to solve it.
        row: of the batch, if it is known.
        in_some_row: one completion may be the cause; it is searched for.
    """

    problem: str
    trace: str = ""
    fix: str = ""
    row: int | None = None
    in_some_row: bool = False


Outcome = tuple[Scores, Logs] | Failure
Caught = type[BaseException] | tuple[type[BaseException], ...]


def start(
    reward: Any, arguments: dict[str, Any], caught: Caught = BaseException
) -> Future[Outcome]:
    """Call a sync reward, or start to call an async one: their calls share one event loop.

    Args:
        reward: plain or async.
        arguments: of the call; the reward may change them.
        caught: exceptions of a sync reward that are its own, and not a Ctrl-C, for example.

    Returns:
        The scores and what the reward logged, or its failure.
    """
    if is_async(reward):
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
        returned = reward(**arguments | logs.functions())
        returned = await returned if is_async(reward) else returned
        if isinstance(returned, NOT_A_LIST) or not isinstance(returned, Iterable):
            problem = f"returned {_shown(returned)} for {count} completions, not a list of scores"
            return Failure(problem)
        values = list(islice(returned, count + 1))  # a generator may have no end
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
    trace.stack[:] = [frame for frame in trace.stack if frame.filename not in OWN_FILES]
    return escaped(redact_text("".join(trace.format())))


def _shown(value: Any) -> str:
    return one_line(reprlib.repr(value))


# --- loaded rewards, as the trainer calls them --------------------------------------------------


Start = Callable[[dict[str, Any]], Future[Outcome]]


class Reward:
    """A reward that returns only floats and None, or raises `RewardError`.

    Args:
        name: that it is logged under.
        about: the reward.
        start: starts a call, in this process or another.
    """

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
        count = len(arguments["completions"])
        if row is not None:
            place, details = _place_of(arguments, row)
        elif failure.in_some_row:
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


def reward_of(name: str, about: About, start: Start) -> Reward:
    """Return a `Reward` that is async if the function is."""
    return (_AsyncReward if about.is_async else Reward)(name, about, start)


def checked(reward: Any, name: str = "", trusted: bool = False) -> Reward:
    """Wrap a reward of this process.

    Args:
        reward: the reward function.
        name: that it is logged under; by default its own.
        trusted: it does not change its arguments, so that they need not be copied.

    >>> def reward_all(completions, **kwargs): return [1]
    >>> checked(reward_all)(completions=["18"])
    [1.0]
    >>> checked(reward_all)(completions=["18", "19"])
    Traceback (most recent call last):
    rewards.errors.RewardError: reward 'reward_all' returned 1 scores for 2 completions
    """

    def start_here(arguments: dict[str, Any]) -> Future[Outcome]:
        passed = arguments if trusted else copy.deepcopy(plain(arguments))
        return start(reward, passed, caught=(Exception, SystemExit))

    return reward_of(name or reward.__name__, about(reward), start_here)


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that can be copied: without what acts on the trainer.

    `trainer_state` becomes plain data, as its class is defined where torch is needed.
    """
    passed = {name: value for name, value in arguments.items() if name not in LOGGERS}
    if (state := arguments.get("trainer_state")) is not None:
        fields = {key: value for key, value in vars(state).items() if key != "stateful_callbacks"}
        passed["trainer_state"] = SimpleNamespace(**fields)
    return passed


def _one_row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the arguments to score one completion of a batch alone."""
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
