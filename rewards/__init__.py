"""Reward functions that follow TRL's contract, and the code that loads them by name.

They take the batch's ``completions`` and the data set's columns (``answer``: raw GSM8K answers),
and return one score per completion, or None where they cannot judge.
"""

import difflib
import functools
import glob
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rewards.contained import (
    PASSED_BY_TRL,
    Reward,
    Worker,
    check_signature,
    checked,
    load_remote,
)
from rewards.correctness import answer_correctness, gsm8k_weighted
from rewards.errors import RewardError, RewardSpecError, one_line
from rewards.format import integer_answer, strict_format, trailing_text
from rewards.grading import (
    Verdict,
    is_correct,
    judge,
    lenient_is_correct,
    parse_gold,
)
from rewards.hacking import hacking_signs
from sologrpo.base.redact import redact
from sologrpo.prompts import PROMPT_FORMATS

__all__ = [
    "OF_ANY_FORMAT",
    "OF_ONE_FORMAT",
    "OUTCOME_REWARDS",
    "PROMPT_FORMATS",
    "REWARDS",
    "Reward",
    "RewardError",
    "RewardSpecError",
    "Verdict",
    "answer_correctness",
    "hacking_signs",
    "is_correct",
    "judge",
    "lenient_is_correct",
    "load_reward",
    "load_rewards",
    "make_importable",
    "name_of_spec",
    "parse_gold",
]

Function = Callable[..., Any]  # that scores; it may be async
Spec = str | Mapping[str, Mapping[str, Any] | None]

REWARDS: dict[str, Function] = {
    reward.__name__: reward
    for reward in (
        strict_format,
        trailing_text,
        integer_answer,
        answer_correctness,
        gsm8k_weighted,
    )
}

RUN_FILES = ("environment.json", "checkpoint-*")  # what shows a run directory

# Rewards that judge the answer. A correct one scores 1.
OUTCOME_REWARDS = ("answer_correctness", "gsm8k_weighted")
# Rewards for runs that ask in several prompt formats, and those that only know answer elements.
OF_ANY_FORMAT = ("strict_format", "answer_correctness")
OF_ONE_FORMAT = frozenset({"trailing_text", "integer_answer"})


def load_rewards(
    specs: Sequence[Spec],
    columns: Sequence[str] | None = None,
    timeout: float = 0.0,
    workers: int = 0,
) -> list[Reward]:
    """Load the rewards that a config lists, in order; each checks what it returns.

    Args:
        specs: names, ``{name: parameters}``, or ``my_module:my_reward``.
        columns: data set columns, to check that each reward can be called with them.
        timeout: seconds allowed for one call of a reward in a worker; 0 for no limit.
        workers: processes for rewards that are not built in; each reward stays in one of them.
            With 0 they run in this process, without a limit.

    >>> [reward.__name__ for reward in load_rewards(["strict_format", "answer_correctness"])]
    ['strict_format', 'answer_correctness']
    """
    names = [name_of_spec(spec) for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise RewardSpecError(f"reward {name!r} is listed twice: list it once, with one weight")
    processes = itertools.cycle([Worker(timeout) for _ in range(workers)])
    rewards = []
    for name, spec in zip(names, specs, strict=True):
        is_built_in = ":" not in _split(spec)[0]
        if workers and not is_built_in:
            rewards.append(load_remote(spec, name, next(processes), columns))
        else:
            rewards.append(checked(load_reward(spec, columns), name, trusted=is_built_in))
    return rewards


def name_of_spec(spec: Spec) -> str:
    """Return the name that a reward is logged under, without loading it.

    >>> name_of_spec({"my_module:my_reward": {"scale": 2.0}})
    'my_reward'
    """
    return _split(spec)[0].rpartition(":")[2]


def load_reward(spec: Spec, columns: Sequence[str] | None = None) -> Function:
    """Load one reward; with ``columns`` of a data set, check that it can be called with them.

    >>> load_reward({"answer_correctness": None})(["<answer>18</answer>"], answer=["#### 18"])
    [1.0]
    """
    name, parameters = _split(spec)
    reward = _import(name) if ":" in name else _built_in(name)
    if parameters:
        _check_parameters(name, reward, parameters)
        reward = functools.partial(reward, **parameters)
    if columns is not None:
        check_signature(name_of_spec(spec), reward, columns)
    return reward


def _split(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, Mapping) and len(spec) == 1:
        name, parameters = next(iter(spec.items()))
        if isinstance(name, str) and (parameters is None or isinstance(parameters, Mapping)):
            return name, dict(parameters or {})
    expected = "a name or {name: {parameter: value}}"
    raise RewardSpecError(f"write a reward as {expected}, not {redact(spec)!r}")


def _built_in(name: str) -> Function:
    if name in REWARDS:
        return REWARDS[name]
    hint = _nearest(name, REWARDS)
    raise RewardSpecError(f"unknown reward {name!r}{hint}; 'sologrpo rewards' lists all names")


def make_importable(folder: str | os.PathLike[str]) -> None:
    """Let reward modules be imported from a folder. Installed modules still come first."""
    path = os.path.abspath(folder)
    if path not in sys.path and not _is_run_directory(path):
        sys.path.append(path)


def _is_run_directory(folder: str) -> bool:
    """Check whether a run wrote this folder, or the one around it; nothing in there is run."""
    folders = [glob.escape(path) for path in (folder, os.path.dirname(folder))]
    return any(glob.glob(f"{path}/{name}") for path in folders for name in RUN_FILES)


def _import(path: str) -> Function:
    module_name, _, name = path.partition(":")
    make_importable(os.curdir)
    try:
        _check_place(path, module_name)
        module = importlib.import_module(module_name)
    except RewardSpecError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the module's own code
        raise RewardSpecError(
            f"reward {path!r}: cannot import {module_name!r} ({one_line(error)}); "
            "put the module next to the config or into the current directory"
        ) from error
    reward: Function | None = getattr(module, name, None)
    if not callable(reward):
        hint = _nearest(name, [key for key, value in vars(module).items() if callable(value)])
        problem = f"module {module_name!r} has no function {name!r}{hint}"
        raise RewardSpecError(f"reward {path!r}: {problem}")
    return reward


def _check_place(path: str, module_name: str) -> None:
    """Refuse a module in a run directory: what was downloaded must not be able to run."""
    parts = module_name.split(".")
    for count in range(1, len(parts) + 1):  # a package is checked before it is imported
        found = importlib.util.find_spec(".".join(parts[:count]))
        if found is None:
            return
        places = [*(found.submodule_search_locations or ()), os.path.dirname(found.origin or "")]
        if any(_is_run_directory(os.path.abspath(place)) for place in places if place):
            raise RewardSpecError(
                f"reward {path!r}: {module_name!r} is in a run directory, from which no code is "
                "run: move it next to a config of your own or into the current directory"
            )


def _check_parameters(name: str, reward: Function, parameters: dict[str, Any]) -> None:
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(reward).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and key not in PASSED_BY_TRL  # TRL would overwrite a value from the config
    }
    for key, value in parameters.items():
        if key not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise RewardSpecError(f"reward {name!r} has no parameter {key!r}; it takes: {takes}")
        if _is_number(known[key]) and not _is_number(value):
            shown = redact(value, key)
            raise RewardSpecError(f"reward {name!r}: {key} must be a number, not {shown!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
