"""Rewards that tell a model how good a completion is. This is the folder to read, copy and edit.

Every reward is a plain function under TRL's contract: it takes the batch's ``completions`` and,
by keyword, the dataset's columns (``answer``: the raw GSM8K answers), and returns one score a
completion, or None where it cannot judge.

    rewards = load_rewards(["strict_format", {"completion_length": {"max_tokens": 200}}])

``python -m rewards`` lists the names and scores a completion from the command line.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewards.checking import (
    PASSED_BY_TRL,
    RewardError,
    RewardSpecError,
    check_signature,
    checked,
    reward_name,
)
from rewards.correctness import answer_correctness, boxed_correctness, gsm8k_weighted
from rewards.format import (
    has_strict_format,
    has_trailing_text,
    integer_answer,
    is_integer_answer,
    strict_format,
    trailing_text,
)
from rewards.grading import (
    PROMPT_FORMATS,
    Verdict,
    extract_answer,
    is_correct,
    judge,
    lenient_is_correct,
    parse_gold,
)
from rewards.hacking import hacking_signs
from rewards.length import completion_length, reasoning_length

__all__ = [
    "OUTCOME_REWARDS",
    "PROMPT_FORMATS",
    "REWARDS",
    "Reward",
    "RewardError",
    "RewardSpecError",
    "Verdict",
    "answer_correctness",
    "boxed_correctness",
    "check_is_list",
    "check_signature",
    "checked",
    "completion_length",
    "extract_answer",
    "gsm8k_weighted",
    "hacking_signs",
    "has_strict_format",
    "has_trailing_text",
    "integer_answer",
    "is_correct",
    "is_integer_answer",
    "judge",
    "lenient_is_correct",
    "load_reward",
    "load_rewards",
    "name_of_spec",
    "parse_gold",
    "reasoning_length",
    "reward_name",
    "strict_format",
    "trailing_text",
]

# A user's own reward may be async, so what a call returns is left open.
Reward = Callable[..., Any]
Spec = str | Mapping[str, Mapping[str, Any] | None]

REWARDS: dict[str, Reward] = {
    reward.__name__: reward
    for reward in (
        strict_format,
        trailing_text,
        integer_answer,
        answer_correctness,
        boxed_correctness,
        gsm8k_weighted,
        completion_length,
        reasoning_length,
    )
}

# Those that judge the answer: 1 for a right one.
OUTCOME_REWARDS = ("answer_correctness", "boxed_correctness", "gsm8k_weighted")


def load_rewards(
    specs: Sequence[Spec], columns: Sequence[str] | None = None, timeout: float = 0.0
) -> list[Reward]:
    """The reward functions named by a config's list, in its order, each `checked` on every call.

    Args:
        specs: names, ``{name: parameters}``, or ``my_module:my_reward``.
        columns: the columns of the dataset, to check that each reward can be called with them.
        timeout: seconds that one call of a reward may take; 0 for no limit.

    Raises:
        RewardSpecError: one line that says what to write instead.

    >>> length = {"completion_length": {"max_tokens": 200, "penalty": 1.0}}
    >>> [reward.__name__ for reward in load_rewards(["strict_format", length])]
    ['strict_format', 'completion_length']
    """
    check_is_list(specs)
    rewards = [load_reward(spec) for spec in specs]
    names = [reward_name(reward) for reward in rewards]
    for name, reward in zip(names, rewards, strict=True):
        if names.count(name) > 1:
            raise RewardSpecError(f"reward {name!r} is listed twice: its metrics would be mixed up")
        if columns is not None:
            check_signature(reward, columns)
    return [checked(reward, timeout) for reward in rewards]


def check_is_list(specs: Any) -> None:
    """Refuse what is no list of specs.

    Raises:
        RewardSpecError: one line that says what to write instead.
    """
    if isinstance(specs, str) or not isinstance(specs, Sequence):
        raise RewardSpecError(f"rewards must be a list, not {specs!r}: write rewards: [{specs}]")


def name_of_spec(spec: Spec) -> str:
    """The name under which the reward of a spec is logged, without loading it.

    >>> name_of_spec({"my_module:my_reward": {"scale": 2.0}})
    'my_reward'
    """
    return _split(spec)[0].rpartition(":")[2]


def load_reward(spec: Spec) -> Reward:
    """One reward: a name, ``{name: parameters}``, or ``my_module:my_reward``.

    >>> load_reward({"completion_length": {"max_tokens": 1}})([""], completion_ids=[[7, 7]])
    [-0.5]
    """
    name, parameters = _split(spec)
    reward = _import(name) if ":" in name else _built_in(name)
    if not parameters:
        return reward
    _check_parameters(name, reward, parameters)
    # A partial of a module-level function can be pickled, and is given its name here.
    return functools.update_wrapper(functools.partial(reward, **parameters), reward)


def _split(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, Mapping) and len(spec) == 1:
        name, parameters = next(iter(spec.items()))
        if isinstance(name, str) and (parameters is None or isinstance(parameters, Mapping)):
            return name, dict(parameters or {})
    raise RewardSpecError(f"a reward is a name or {{name: {{parameter: value}}}}, not {spec!r}")


def _built_in(name: str) -> Reward:
    if name in REWARDS:
        return REWARDS[name]
    hint = _nearest(name, REWARDS)
    raise RewardSpecError(f"unknown reward {name!r}{hint}; 'python -m rewards' lists all names")


def _import(path: str) -> Reward:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RewardSpecError(
            f"reward {path!r}: cannot import {module_name!r} ({problem})"
        ) from error
    reward = getattr(module, name, None)
    if reward is None:
        hint = _nearest(name, vars(module))
        raise RewardSpecError(f"reward {path!r}: module {module_name!r} has no {name!r}{hint}")
    if not callable(reward):
        raise RewardSpecError(f"reward {path!r} is a {type(reward).__name__}, not a function")
    return reward  # type: ignore[no-any-return]


def _check_parameters(name: str, reward: Reward, parameters: dict[str, Any]) -> None:
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(reward).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and key not in PASSED_BY_TRL  # a value of the config would be overwritten
    }
    for key, value in parameters.items():
        if key not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise RewardSpecError(f"reward {name!r} has no parameter {key!r}; it takes: {takes}")
        if _is_number(known[key]) and not _is_number(value):
            raise RewardSpecError(f"reward {name!r}: {key} must be a number, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
