"""Enforce the contract of a reward: its arguments and its return values.

A reward that breaks the contract stops the run. The error names the reward, the completion and the
problem. A score of 0 would hide the bug in the reward curve.
"""

import asyncio
import functools
import hashlib
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rewards.completions import Scores, prompt_text, text_of

# Arguments that TRL passes on every call, besides the data set columns.
PASSED_BY_TRL = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
# Columns that TRL does not pass on (grpo_trainer.py:1584, version 1.16.0).
_NOT_PASSED = ("prompt", "completion", "completion_ids")
MAX_SHOWN_CHARS = 2_000


class RewardSpecError(ValueError):
    """The rewards of a config cannot be loaded. The message is one line that says how to fix it."""


class RewardError(Exception):
    """A reward raised or returned something other than scores. Its own exception is the cause."""

    def own_traceback(self) -> str:
        """Format the traceback of the reward's exception, starting at the reward's first frame.

        Returns:
            The traceback, or an empty string if the reward did not raise.
        """
        if self.__cause__ is None:
            return ""
        frame = self.__cause__.__traceback__
        while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        return "".join(traceback.format_exception(None, self.__cause__, frame))


def check_signature(reward: Any, columns: Sequence[str]) -> None:
    """Check that a reward accepts the arguments that TRL passes.

    Args:
        reward: the reward function.
        columns: data set columns. Each except ``prompt`` is passed by name.

    Raises:
        RewardSpecError: its signature does not match.
    """
    passed = [*PASSED_BY_TRL, *(name for name in columns if name not in _NOT_PASSED)]
    try:
        inspect.signature(reward).bind(**dict.fromkeys(passed))
    except TypeError as error:
        name = reward_name(reward)
        if "missing" in str(error):
            raise RewardSpecError(
                f"reward {name!r}: {error}, and the data set has no such column; "
                f"rewards are called with: {', '.join(passed)}"
            ) from error
        raise RewardSpecError(
            f"reward {name!r}: {error}: end its parameters with **kwargs"
        ) from error


def checked(reward: Any, timeout: float = 0.0) -> Any:
    """Wrap a reward so that it returns only floats and None, or raises `RewardError`.

    The wrapper keeps the reward's name. It is async if the reward is, and can be pickled if the
    reward can.

    Args:
        reward: the reward function.
        timeout: seconds allowed for one call; 0 for no limit. With a limit, the reward runs in a
            separate thread. All calls of an async reward share one event loop.

    >>> def reward_all(completions, **kwargs): return [1]
    >>> checked(reward_all)(completions=["18"])
    [1.0]
    >>> checked(reward_all)(completions=["18", "19"])
    Traceback (most recent call last):
    rewards.checking.RewardError: reward 'reward_all' returned 1 scores for 2 completions
    """
    if isinstance(reward, _Checked):
        return reward
    return (_CheckedAsync if _is_async(reward) else _CheckedSync)(reward, timeout)


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
    if isinstance(reward, _Checked):
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


def _is_async(reward: Any) -> bool:
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


class _Checked:
    def __init__(self, reward: Any, timeout: float) -> None:
        self.reward = reward
        self.timeout = timeout
        self.__name__ = reward_name(reward)
        self.source_hash = source_hash(reward)

    async def _scores(self, arguments: dict[str, Any]) -> Scores:
        name, count = self.__name__, len(arguments["completions"])
        try:
            scores = await _result(self.reward, arguments)
        except Exception as error:
            where = await _first_row_that_raises(self.reward, arguments)
            problem = f"reward {name!r} raised {type(error).__name__}: {error}"
            raise RewardError(f"{problem}\n{where}") from error
        if not isinstance(scores, Iterable) or isinstance(scores, str):
            raise RewardError(f"reward {name!r} returned {scores!r}, not a list of scores")
        scores = list(scores)
        if len(scores) != count:
            problem = f"returned {len(scores)} scores for {count} completions"
            raise RewardError(f"reward {name!r} {problem}")
        return [_score(name, arguments, row, score) for row, score in enumerate(scores)]

    def _too_slow(self, arguments: dict[str, Any]) -> RewardError:
        count = len(arguments["completions"])
        return RewardError(
            f"reward {self.__name__!r} did not score {count} completions within {self.timeout:g} s:"
            " make it faster, or raise reward_timeout"
        )


class _CheckedAsync(_Checked):
    @functools.cached_property
    def _loop(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        """Start an event loop that may block: TRL's own has to keep running for the timeout."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=loop.run_forever, name=f"reward {self.__name__}", daemon=True
        )
        thread.start()
        return loop, thread

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_loop"}

    async def __call__(self, **arguments: Any) -> Scores:
        if not self.timeout:
            return await self._scores(arguments)
        loop, thread = self._loop
        scores = asyncio.run_coroutine_threadsafe(self._scores(arguments), loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(scores), self.timeout)
        except TimeoutError:  # one that the reward raised has become a `RewardError`
            raise self._too_slow(arguments) from _where_it_is(thread)


class _CheckedSync(_Checked):
    def __call__(self, **arguments: Any) -> Scores:
        if not self.timeout:
            return self._run(arguments)
        scores: Future[Scores] = Future()

        def work() -> None:
            try:
                scores.set_result(self._run(arguments))
            except BaseException as error:
                scores.set_exception(error)

        # A daemon: a thread that hangs cannot be stopped, and the process must not wait for it.
        thread = threading.Thread(target=work, name=f"reward {self.__name__}", daemon=True)
        thread.start()
        try:
            return scores.result(timeout=self.timeout)
        except TimeoutError:
            if scores.done():  # it finished at the last moment
                return scores.result()
            raise self._too_slow(arguments) from _where_it_is(thread)

    def _run(self, arguments: dict[str, Any]) -> Scores:
        # A sync reward never suspends, so the first step of the coroutine is also the last.
        try:
            self._scores(arguments).send(None)
        except StopIteration as done:
            scores: Scores = done.value
            return scores
        raise RewardError(f"reward {self.__name__!r} returned a coroutine: declare it async def")


def _where_it_is(thread: threading.Thread) -> TimeoutError | None:
    """Return an exception whose traceback shows where the reward is; None while it awaits."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    stack = None
    while frame is not None and frame.f_code.co_filename != __file__:  # up to its call
        stack = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None if frame is None else TimeoutError("the reward was here").with_traceback(stack)


async def _result(reward: Any, arguments: dict[str, Any]) -> Any:
    result = reward(**arguments)
    return await result if isinstance(result, Coroutine) else result


def _score(name: str, arguments: dict[str, Any], row: int, score: Any) -> float | None:
    if score is None:
        return None
    try:
        number = float(score)
    except (TypeError, ValueError) as error:
        problem = f"reward {name!r} returned {score!r}; return a number or None"
        raise RewardError(f"{problem}\n{_describe(arguments, row)}") from error
    if not math.isfinite(number):
        problem = f"reward {name!r} returned {number}; return None where it cannot judge"
        raise RewardError(f"{problem}\n{_describe(arguments, row)}")
    return number


async def _first_row_that_raises(reward: Any, arguments: dict[str, Any]) -> str:
    """Describe the first completion that raises when scored alone."""
    for row in range(len(arguments["completions"])):
        try:
            await _result(reward, _one_row(arguments, row))
        except Exception:
            return _describe(arguments, row)
    return "on the batch; each completion alone can be scored"


def _one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    count = len(arguments["completions"])
    return {
        name: [value[row]] if isinstance(value, list) and len(value) == count else value
        for name, value in arguments.items()
    }


def _describe(arguments: dict[str, Any], row: int) -> str:
    """Describe a row of the batch: the end of its prompt, its gold answer, its completion."""
    lines = [f"on completion {row} of the batch of {len(arguments['completions'])}"]
    if "prompts" in arguments:
        lines.append(f"prompt:     {_shown(prompt_text(arguments['prompts'][row]))}")
    if "answer" in arguments:
        lines.append(f"answer:     {_shown(str(arguments['answer'][row]))}")
    lines.append(f"completion: {_shown(text_of(arguments['completions'][row]))}")
    return "\n".join(lines)


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else "..." + text[-MAX_SHOWN_CHARS:])
