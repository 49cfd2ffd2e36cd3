"""Check settings by one schema: the type hints of their dataclasses, and what those cannot say.

`RULES` holds the latter. Every key without a rule is checked by its type: numbers are finite and in
a wide range, texts are not empty, and names of an enumeration exist.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from dataclasses import Field as Setting
from enum import Enum
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unicodedata import category

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from sologrpo.base.errors import InputError
from sologrpo.base.redact import redact
from sologrpo.base.schema import STRICT, as_number, one_of, parse, parse_json, shown
from sologrpo.prompts import PROMPT_FORMATS

LONGEST_NAME = 255  # bytes of a name in a path, on Linux


def between(low: float, high: float) -> FieldInfo:
    """Limit a number, both ends included."""
    limits: FieldInfo = Field(ge=low, le=high)
    return limits


LARGEST = 2**31 - 1  # of most counts in C
COUNT, SCALE = between(0, LARGEST), between(0, 1e6)  # of integers and floats without a rule
POSITIVE, RATIO = between(1, LARGEST), between(1e-6, 1e6)
SHARE, PART, SIZE = between(0, 1), between(1e-6, 1), between(1, 2**20)


def text(value: str) -> str:
    """Return a name or a path, or raise a ValueError that shows the problem."""
    if not free_text(value).strip() or "\n" in value:
        raise ValueError(f"{shown(value)}; expected a name, or leave it out")
    if max(len(part.encode()) for part in value.split("/")) > LONGEST_NAME:
        raise ValueError(f"{shown(value)}; expected at most {LONGEST_NAME} bytes per name")
    return value


def public(value: Any) -> Any:
    """Return a value, or raise a ValueError for a secret in it."""
    if redact(value) != value:
        raise ValueError("holds credentials, which would be recorded: leave them out")
    return value


def free_text(value: str) -> str:
    """Return any text, or raise a ValueError for control characters in it."""
    kinds = {category(character) for character in value.replace("\n", "")}
    if not kinds.isdisjoint(("Cc", "Cs")):  # surrogates stand for bytes that are not UTF-8
        raise ValueError(f"{shown(value)}; expected text without control characters")
    return value


def _no_as_text(value: Any) -> Any:
    """Take the bare `no` of YAML 1.1, which is false, as the word."""
    return "no" if value is False else value


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, list | dict) else [value]


def _split_names(value: Any) -> Any:
    """Take names with commas between them as a list, as a command line writes it."""
    listed = _as_list(value)
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        return listed
    return [name.strip() for entry in listed for name in entry.split(",") if name.strip()]


def _as_integer(value: Any) -> Any:
    """Take the digits that a command line gives where a text is possible too."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value) else value


UNCHECKED: Any = Any  # its reader checks it
# What a type hint cannot say, by key: limits of its numbers, `free_text`, or another hint. Of TRL's
# settings those whose wrong value would train, or fail late.
RULES: dict[str, Any] = {
    # Ours.
    "rewards": UNCHECKED,
    "worked_examples": Annotated[Any, AfterValidator(public)],  # its reader checks the rest
    "system_prompt": free_text,
    **dict.fromkeys(("max_train_examples", "max_prompt_tokens", "train_token_budget",
                     "sampling_token_budget", "limit"), POSITIVE),
    "max_kl": RATIO,
    "advantage_eps": SHARE,
    "reward_workers": between(0, 256),
    "reward_timeout": COUNT,
    "prompt_formats": Annotated[list[Annotated[str, one_of(*PROMPT_FORMATS)]],
                                BeforeValidator(_split_names), Field(min_length=1)],
    # Texts: these may hold a secret, or more than a name.
    **dict.fromkeys(("hub_token", "vllm_server_base_url"), Annotated[str, AfterValidator(text)]),
    **dict.fromkeys(("vllm_structured_outputs_regex", "optim_args", "debug", "fsdp"), free_text),
    # Choices that TRL 1.16.0 looks at in the first step: grpo_trainer.py: 3084-3093, 3109-3184,
    # 2761-2806.
    "loss_type": Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"],
    "importance_sampling_level": Literal["token", "sequence"],
    "scale_rewards": Literal["group", "batch", "none", True, False],
    "include_num_input_tokens_seen": Literal["all", "non_padding", "no", True, False],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "vllm_importance_sampling_mode": Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    # Numbers that may be negative, or must not be 0, or not more than 1.
    "reward_weights": between(-1e6, 1e6),
    "entropy_coef": between(-1000, 1000),
    **dict.fromkeys(("delta", "off_policy_mask_threshold", "sapo_temperature_neg",
                     "sapo_temperature_pos", "num_train_epochs",
                     "vllm_importance_sampling_clip_max"), RATIO),
    **dict.fromkeys(("learning_rate", "top_entropy_quantile", "lora_dropout"), SHARE),
    "temperature": between(0.01, 100),
    "top_p": PART,
    **dict.fromkeys(("max_completion_length", "generation_batch_size", "num_generations",
                     "num_generations_eval", "num_iterations", "steps_per_generation",
                     "gradient_accumulation_steps", "per_device_train_batch_size",
                     "per_device_eval_batch_size", "lora_r", "lora_alpha",
                     "vllm_tensor_parallel_size"), SIZE),
    **dict.fromkeys(("save_total_limit", "torch_empty_cache_steps", "eval_accumulation_steps",
                     "dataloader_prefetch_factor"), POSITIVE),
    **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), between(1e-6, LARGEST)),
    "dataloader_num_workers": between(0, 256),
    "pad_to_multiple_of": Literal["auto"] | Annotated[
        int, BeforeValidator(_as_integer), POSITIVE],
    # The others start Python in the current folder, and import its `multiprocessing.py`.
    "dataloader_multiprocessing_context": Literal["fork"],
    "remove_unused_columns": Literal[False],  # rewards take the columns
    # A run with LoRA has no reference model to update: TRL 1.16.0, grpo_trainer.py:1197-1204.
    "sync_ref_model": Literal[False],
    # TRL would make the repository before the first step.
    "log_completions_hub_repo": Literal[None],
    "lora_task_type": Literal["CAUSAL_LM"],
    "bnb_4bit_quant_storage": Literal["uint8", "bfloat16", "float16", "float32", "float64"],
}  # fmt: skip
# Settings without which nothing runs, although their type hint allows none.
NEEDED = ("num_generations", "max_completion_length", "output_dir")
# Dictionaries that may also be the path of a JSON file.
FILE_OR_DICT = ("deepspeed", "fsdp_config", "accelerator_config")


def check_settings(values: Mapping[str, Any], where: Any, *classes: type) -> dict[str, Any]:
    """Check settings by the types and rules of their keys, which `classes` declare.

    Returns:
        The values, as their types are: the number for the text `1e-6`, a list for a single entry.

    Raises:
        InputError: for the first value that is not allowed, or an unknown key.
    """
    declared = {entry.name: entry for cls in classes for entry in fields(cls)}
    given = {
        key: value.value if isinstance(value, Enum) else value
        for key, value in values.items()
        if key not in declared or not _is_default(value, declared[key])
    }
    checked = vars(parse(_schema(*classes), given, where))
    return {**values, **{key: checked[key] for key in given if checked[key] != given[key]}}


def _is_default(value: Any, declared: Setting[Any]) -> bool:
    default = declared.default
    if declared.default_factory is not MISSING:
        default = declared.default_factory()
    return type(value) is type(default) and bool(value == default)


@cache
def _schema(*classes: type) -> type[BaseModel]:
    hints = {key: hint for cls in classes for key, hint in get_type_hints(cls).items()}
    types = {
        entry.name: (_type_of(entry, hints[entry.name]), None)
        for cls in classes
        for entry in fields(cls)
    }
    options = STRICT | ConfigDict(extra="forbid", protected_namespaces=())
    schema: type[BaseModel] = create_model("Settings", __config__=options, **types)  # type: ignore[call-overload]
    return schema


def _type_of(setting: Setting[Any], hint: Any) -> Any:
    rule = RULES.get(setting.name)
    if rule is None and "choices" in setting.metadata:
        rule = Literal[tuple(setting.metadata["choices"])]
    parts = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    if setting.name in NEEDED:
        parts.remove(NoneType)
    if not (rule is None or rule is free_text or isinstance(rule, FieldInfo)):
        return rule | None if NoneType in parts else rule
    kinds = {get_origin(part) or part for part in parts} - {NoneType}
    if any(map(_is_enum, kinds)) or kinds == {dict, str}:
        # A text is then a name of the enumeration, or JSON; a few may be the path of a file.
        parts = [part for part in parts if part is not str or setting.name in FILE_OR_DICT]
    limited: Any = reduce(or_, [_limited(part, rule) for part in parts])
    if kinds == {list}:
        return Annotated[limited, BeforeValidator(_as_list)]
    return Annotated[limited, BeforeValidator(_as_dict)] if dict in kinds else limited


def _limited(hint: Any, rule: Any) -> Any:
    kind = get_origin(hint) or hint
    if kind is float:
        return Annotated[float, BeforeValidator(as_number), rule or SCALE]
    if kind is int:
        return Annotated[int, rule or COUNT]
    if kind is str:
        check = free_text if rule is free_text else text
        return Annotated[str, AfterValidator(check), AfterValidator(public)]
    if kind is list:
        (entry,) = get_args(hint)
        entries: Any = list.__class_getitem__(_limited(entry, rule))
        return Annotated[entries, Field(min_length=1)]
    if _is_enum(kind):
        return Annotated[
            Literal[tuple(choice.value for choice in kind)], BeforeValidator(_no_as_text)
        ]
    return dict[str, Any] if hint is dict else hint


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _as_dict(value: Any) -> Any:
    """Parse JSON, which is how a command line writes a dictionary."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return parse_json(value, "the text")
    except InputError as error:
        raise ValueError(str(error)) from error
