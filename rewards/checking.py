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
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set, Sized
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from rewards.completions import Scores, prompt_text, text_of
from rewards.errors import RewardError, RewardSpecError, escaped, one_line
from rewards.logs import Logs

# Arguments that TRL passes on every call, besides the data set columns.
PASSED_BY_TRL = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
# Columns that TRL does not pass on (grpo_trainer.py:1584, version 1.16.0).
_NOT_PASSED = ("prompt", "completion", "completion_ids")
NOT_COPIED = ("log_extra", "log_metric", "environments")  # they act on the trainer
Result = TypeVar("Result")
MAX_SHOWN_CHARS = 2_000
MAX_FLOAT32 = 3.4028235e38  # TRL adds scores up in float32
NOT_A_LIST = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but no list of scores


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
        inspect.signature(reward).bind(**dict.fromkeys(passed))
    except TypeError as error:
        if "missing" in str(error):
            raise RewardSpecError(
                f"reward {name!r}: {error}, and the data set has no such column; "
                f"rewards are called with: {', '.join(passed)}"
            ) from error
        raise RewardSpecError(
            f"reward {name!r}: {error}: end its parameters with **kwargs"
        ) from error
    except ValueError as error:
        raise RewardSpecError(f"reward {name!r}: {error}: write it as a def") from error


def takes_token_ids(reward: Any) -> bool:
    """Check whether a reward declares the parameter `completion_ids`."""
    return "completion_ids" in inspect.signature(reward).parameters


def reward_name(reward: Any) -> str:
    """Return the name that a reward is logged under.

    >>> reward_name(reward_name)
    'reward_name'
    """
    return str(getattr(reward, "__name__", type(reward).__name__))


def source_hash(reward: Any) -> str:
    """Return the SHA-256 of the source file that defines a reward, to notice that it was edited.

    Args:
        reward: as loaded by `load_rewards`, or a plain function or callable object.

    >>> source_hash(reward_name) == source_hash(checked(reward_name))
    True
    """
    if isinstance(reward, Loaded):
        return reward.source_hash
    return hashlib.sha256(_source_of(_plain(reward))).hexdigest()


def _source_of(reward: Any) -> bytes:
    for defined in (reward, type(reward)):
        try:
            return Path(inspect.getsourcefile(defined) or "").read_bytes()
        except (TypeError, OSError):  # an object, or code without a file
            continue
    return reward_name(reward).encode()  # compiled: only its name can change


def _plain(reward: Any) -> Any:
    """Return the function inside partials and decorators."""
    reward = inspect.unwrap(reward)
    while isinstance(reward, functools.partial):
        reward = inspect.unwrap(reward.func)
    return reward


def is_async(reward: Any) -> bool:
    """Check whether a call of a reward has to be awaited."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


# --- rewards in this process --------------------------------------------------------------------


class Loaded:
    """A reward that returns only floats and None, or raises `RewardError`.

    Args:
        name: that it is logged under.
        source_hash: of the file that defines it.
        takes_token_ids: whether it declares the parameter `completion_ids`.
    """

    __call__: Callable[..., Any]

    def __init__(self, name: str, source_hash: str, takes_token_ids: bool) -> None:
        self.__name__ = name
        self.source_hash = source_hash
        self.takes_token_ids = takes_token_ids


def checked(reward: Any, name: str = "", trusted: bool = False) -> Any:
    """Wrap a reward so that it returns only floats and None, or raises `RewardError`.

    The wrapper is async if the reward is, and can be pickled if the reward can.

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
    if isinstance(reward, Loaded):
        return reward
    wrapper = _CheckedAsync if is_async(reward) else _CheckedSync
    return wrapper(reward, name or reward_name(reward), trusted)


class _Checked(Loaded):
    def __init__(self, reward: Any, name: str, trusted: bool) -> None:
        super().__init__(name, source_hash(reward), takes_token_ids(reward))
        self.reward = reward
        self.trusted = trusted

    async def _scores(self, arguments: dict[str, Any]) -> Scores:
        copied = dict if self.trusted else copy_of
        scores, logs = await score(self.__name__, self.reward, lambda: copied(arguments))
        logs.replay(arguments)
        return scores


class _CheckedAsync(_Checked):
    async def __call__(self, **arguments: Any) -> Scores:
        return await self._scores(arguments)


class _CheckedSync(_Checked):
    def __call__(self, **arguments: Any) -> Scores:
        return run_now(self.__name__, self._scores(arguments))


def run_now(name: str, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run the call of a sync reward without an event loop: its first step is its last.

    Args:
        name: of the reward.
        coroutine: of the call.

    Raises:
        RewardError: the reward is async after all.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    coroutine.close()
    raise RewardError(f"reward {name!r} returned a coroutine: declare it async def")


def copy_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments of a call, so that a reward may change them."""
    return {
        name: value if name in NOT_COPIED else copy.deepcopy(value)
        for name, value in {**arguments, **plain_state(arguments)}.items()
    }


def plain_state(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `trainer_state` as plain data: its class is defined where torch is needed."""
    state = arguments.get("trainer_state")
    if state is None:
        return {}
    fields = {name: value for name, value in vars(state).items() if name != "stateful_callbacks"}
    return {"trainer_state": SimpleNamespace(**fields)}


# --- one call -----------------------------------------------------------------------------------


async def score(
    name: str, reward: Any, arguments: Callable[[], dict[str, Any]]
) -> tuple[Scores, Logs]:
    """Call a reward and check what it returns.

    Args:
        name: of the reward.
        reward: plain or async.
        arguments: makes those of the call; each time a copy that the reward may change.

    Returns:
        The scores, and what the reward logged.

    Raises:
        RewardError: the reward raised, or returned or logged something that it must not.
    """
    try:
        passed = arguments()
        count = len(passed["completions"])
        logs = Logs(name, count)
        returned = await _result(reward, logs.passed_with(passed))
        _check_is_list(name, returned, count)
        scores = list(islice(returned, count + 1))  # a generator may have no end
    except RewardError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise await _failure(name, reward, arguments, error) from None
    if len(scores) != count:
        number = len(returned) if isinstance(returned, Sized) else f"{len(scores)} or more"
        raise RewardError(f"reward {name!r} returned {number} scores for {count} completions")
    return [_number(name, arguments, row, value) for row, value in enumerate(scores)], logs


async def _result(reward: Any, arguments: dict[str, Any]) -> Any:
    result = reward(**arguments)
    return await result if isinstance(result, Coroutine) else result


def _check_is_list(name: str, returned: Any, count: int) -> None:
    if isinstance(returned, NOT_A_LIST) or not isinstance(returned, Iterable):
        problem = f"returned {_shown(returned)} for {count} completions, not a list of scores"
        raise RewardError(f"reward {name!r} {problem}")


def _number(name: str, arguments: Callable[[], dict[str, Any]], row: int, value: Any) -> Any:
    if value is None:
        return None
    problem, fix = f"returned {_shown(value)}", "return a number, or None where it cannot judge"
    try:
        # Neither a string is a score, nor an array of one number.
        if hasattr(type(value), "__float__") and getattr(value, "shape", ()) == ():
            number = float(value)
            if abs(number) <= MAX_FLOAT32:
                return number
            fix = "return a finite number that fits into a float32, or None where it cannot judge"
    except Exception as error:  # the value's own code
        problem = f"{problem} ({one_line(error)})"
    place, details = place_of(arguments(), row)
    raise RewardError(f"reward {name!r} {problem} {place}: {fix}", details)


async def _failure(
    name: str, reward: Any, arguments: Callable[[], dict[str, Any]], error: BaseException
) -> RewardError:
    """Describe an exception, with the first completion that raises when scored alone."""
    frame = error.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    trace = escaped("".join(traceback.format_exception(None, error, frame)))
    place, details = await _first_row_that_raises(name, reward, arguments)
    return RewardError(f"reward {name!r} raised {one_line(error)} {place}", trace + details)


async def _first_row_that_raises(
    name: str, reward: Any, arguments: Callable[[], dict[str, Any]]
) -> tuple[str, str]:
    try:
        passed = arguments()
    except Exception:  # they cannot even be copied
        return "when it was called", ""
    count = len(passed["completions"])
    for row in range(count):
        try:
            await _result(reward, Logs(name, 1).passed_with(one_row(passed, row)))
        except (Exception, SystemExit, asyncio.CancelledError):
            return place_of(arguments(), row)
    return f"on the batch of {count}; each completion alone can be scored", ""


def one_row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the arguments to score one completion of a batch alone."""
    count = len(arguments["completions"])
    return {
        name: [value[row]] if isinstance(value, list) and len(value) == count else value
        for name, value in arguments.items()
    }


def place_of(arguments: dict[str, Any], row: int) -> tuple[str, str]:
    """Name a row of the batch; and show the end of its prompt, its gold answer, its completion."""
    text = text_of(arguments["completions"][row])
    count = len(arguments["completions"])
    lines = []
    if "prompts" in arguments:
        lines.append(f"prompt:     {_end_of(prompt_text(arguments['prompts'][row]))}\n")
    if "answer" in arguments:
        lines.append(f"answer:     {_end_of(str(arguments['answer'][row]))}\n")
    lines.append(f"completion: {_end_of(text)}\n")
    return f"on completion {row} of the batch of {count}, {_end_of(text, 40)}", "".join(lines)


def _shown(value: Any) -> str:
    return one_line(reprlib.repr(value))


def _end_of(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    return repr(text if len(text) <= limit else "..." + text[-limit:])
