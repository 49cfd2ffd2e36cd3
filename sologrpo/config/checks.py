"""Check single settings: their type, their range, and the names that they can take."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sologrpo.errors import InputError

# Ranges of numbers: low, high, and whether these are included. TRL and PEFT check few of them, and
# what a number out of range does shows late or never.
RANGES: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(
        ("max_completion_length", "max_prompt_tokens", "max_train_examples", "train_token_budget",
         "num_generations_eval", "per_device_eval_batch_size", "lora_r", "lora_alpha",
         "save_total_limit", "parity_problems"),
        (1, inf, True),
    ),
    **dict.fromkeys(
        ("learning_rate", "beta", "epsilon", "epsilon_high", "weight_decay", "max_grad_norm",
         "warmup_steps", "advantage_eps", "num_validation_examples", "reward_timeout",
         "reward_workers",
         "max_nonfinite_steps", "max_resample_rounds", "seed", "num_samples"),
        (0, inf, True),
    ),
    **dict.fromkeys(
        ("temperature", "num_train_epochs", "logging_steps", "save_steps", "eval_steps"),
        (0, inf, False),
    ),
    **dict.fromkeys(("top_p", "min_p", "adam_beta1", "adam_beta2", "lora_dropout"), (0, 1, True)),
}  # fmt: skip
# Keys whose values are checked where they are read, with clearer messages.
CHECKED_ELSEWHERE = ("rewards", "worked_examples", "env")
# Of TRL 1.16 (grpo_trainer.py:3109-3175).
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def check_types(content: Mapping[str, Any], path: Path, classes: Iterable[type]) -> None:
    """Check the types of a config file's values; argparse does so for the command line only.

    Args:
        content: of the file.
        path: of the file, for the message.
        classes: dataclasses that declare the keys.

    Raises:
        InputError: for the first value of another type.
    """
    hints: dict[str, Any] = {}
    for settings in classes:
        hints |= get_type_hints(settings)
    for key, value in content.items():
        hint = hints.get(key.replace("-", "_"))
        if hint is None or key in CHECKED_ELSEWHERE:
            continue
        check = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        # A list of one may be written without brackets.
        if not any(_is_valid(check, candidate) for candidate in (value, [value])):
            name = getattr(hint, "__name__", None) if isinstance(hint, type) else None
            raise InputError(f"{path}: {key}: {value!r} is not {name or hint}")


def _is_valid(check: TypeAdapter[Any], value: Any) -> bool:
    try:
        check.validate_python(value)
    except ValidationError:
        return False
    return True


def check_ranges(*settings: Any) -> None:
    """Check that numbers are in their range.

    Args:
        settings: dataclasses.

    Raises:
        InputError: for the first number out of its range.
    """
    values = {name: value for part in settings for name, value in vars(part).items()}
    for name, (low, high, included) in RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        inside = low <= value <= high if included else low < value < high
        if not inside or value == inf:
            expected = f"at least {low:g}" if included else f"more than {low:g}"
            expected = expected if high == inf else f"{low:g} to {high:g}"
            raise InputError(f"{name} {value}: give {expected}")


def check_choices(*settings: Any) -> None:
    """Check settings that take one of several names; argparse does so for the command line only.

    Args:
        settings: dataclasses; the metadata of a field names its `choices`.

    Raises:
        InputError: for the first other name.
    """
    for part in settings:
        for setting in fields(part):
            choices = setting.metadata.get("choices")
            if setting.name == "loss_type":  # TRL refuses others at the first loss only
                choices = LOSS_TYPES
            value = getattr(part, setting.name)
            if choices and value is not None and value not in list(choices):
                names = ", ".join(choices)
                raise InputError(f"unknown {setting.name} {value!r}: use one of {names}")
