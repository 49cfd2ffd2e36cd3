"""Every key of a run is checked by its type and range, alike in a file and on the command line."""

import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer, ModelConfig

from scripts import refusal
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.checks import FILE_OR_DICT, RULES, check_settings, free_text
from sologrpo.config.parsing import parse_config
from sologrpo.training.run_directory import resolved_config

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
CLASSES = (RunArguments, SoloGRPOConfig, ModelConfig)
HINTS = {
    key: {hint, *get_args(hint)} - {type(None)}
    for cls in CLASSES
    for key, hint in get_type_hints(cls).items()
    if key in {field.name for field in fields(cls)}
}
# `rewards` and `worked_examples` are checked by their readers; the other is not an option.
UNCHECKED = {"rewards", "worked_examples", "parallelism_config"}
KEYS = sorted(HINTS.keys() - UNCHECKED)


@pytest.fixture(autouse=True)
def in_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def bad_values(key: str) -> Iterator[Any]:
    """Yield values that no setting of this type takes."""
    hint, rule = HINTS[key], RULES.get(key)
    if {int, float, list[float]} & hint:
        yield from (math.nan, math.inf, -math.inf, 1e38, -1e38, True, "fast", {"a": 1}, [[]])
    elif {dict, dict[str, Any], dict[str, bool]} & hint:
        yield from (5, True, [1], {1: 2}, *([] if key in FILE_OR_DICT else ["words", '{"a": ']))
    elif str not in hint and bool in hint:
        yield from (5, 1, 1.0, "perhaps", [True, False], {})
    elif {str, list[str]} & hint:
        yield from (5, 1.5, {"a": 1}, "a\0b", "\x1b[31m", "\udc80", [""])
        if rule is not free_text:
            yield from ("", " ", "a\nb", "x" * 256)
        if rule is None:
            yield from ("https://me:secret@host/a", "sk-12345678901234567890")
    if any(isinstance(part, type) and issubclass(part, Enum) for part in hint):
        yield "nothing"


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_its_type_does_not_take_is_refused(key: str) -> None:
    tried = list(bad_values(key))
    assert tried
    for value in tried:
        line = refusal(lambda value=value: check_settings({key: value}, "a.yaml", *CLASSES))
        assert line is not None, value
        assert line.startswith(f"a.yaml: {key}")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("learning_rate", 1e38, "1e+38; expected less than or equal to 1"),
        ("seed", 2**32, "expected less than or equal to 2147483647"),
        ("max_steps", -7, "expected greater than or equal to 0"),
        ("temperature", 0, "expected greater than or equal to 0.01"),
        ("top_p", 0, "expected greater than or equal to 0.000001"),
        ("num_generations", 0, "expected greater than or equal to 1"),
        ("num_generations", None, "None; expected a valid integer"),
        ("logging_steps", 0, "expected greater than or equal to 0.000001"),
        ("pad_to_multiple_of", 0, "expected 'auto' or"),
        ("loss_type", "nothing", "'dapo'"),
        ("importance_sampling_level", "tokens", "expected 'token' or 'sequence'"),
        ("multi_objective_aggregation", "sum", "'sum_then_normalize'"),
        ("scale_rewards", "groups", "'group'"),
        ("prompt_format", "nothing", "expected 'boxed', 'lm_eval', 'r1_zero' or 'xml'"),
        ("optim", "adam", "'adamw_torch_fused'"),
        ("dtype", "bfloat17", "dtype: 'bfloat17'; expected 'auto', 'bfloat16'"),
        ("save_strategy", "bests", "'best'"),
        ("reward_weights", [1, math.nan], "reward_weights.1: nan; expected a finite number"),
        ("lora_target_modules", [], "expected at least 1 item"),
        ("lora_target_modules", ["q_proj", ""], "lora_target_modules.1: ''"),
        ("liger_kernel_config", {"rope": "yes"}, "liger_kernel_config.rope"),
        ("lerning_rate", 1, "lerning_rate: unknown key"),
        (
            "dataset_name",
            "https://me:secret@host/a",
            "dataset_name: holds credentials",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_range(key: str, value: Any, says: str) -> None:
    line = refusal(lambda: check_settings({key: value}, "a.yaml", *CLASSES))
    assert line is not None
    assert says in line


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("learning_rate", "1e-6", 1e-6),
        ("learning_rate", 1, 1.0),
        ("max_steps", -1, -1),
        ("save_strategy", False, "no"),
        ("eval_strategy", "no", "no"),
        ("lora_target_modules", "q_proj", ["q_proj"]),
        ("reward_weights", 1, [1.0]),
        ("lr_scheduler_kwargs", '{"num_cycles": 2}', {"num_cycles": 2}),
        ("deepspeed", "ds_zero2.json", "ds_zero2.json"),
        ("pad_to_multiple_of", "8", 8),
        ("system_prompt", "", ""),
        ("system_prompt", "Think.\nThen answer.", "Think.\nThen answer."),
        ("save_total_limit", None, None),
        ("scale_rewards", False, False),
        ("output_dir", "runs/übung [x/y]", "runs/übung [x/y]"),
        ("vllm_server_base_url", "http://me:secret@host:1", "http://me:secret@host:1"),
    ],
)
def test_a_value_is_taken_as_it_is_meant(key: str, written: Any, meant: Any) -> None:
    assert check_settings({key: written}, "a.yaml", *CLASSES)[key] == meant


def literals(source: Any, name: str) -> set[str]:
    """Collect the texts that TRL compares a setting with."""
    text = inspect.getsource(source)
    compared = re.findall(rf"self\.{name} (?:==|!=|in|not in) (\[.*?\]|\".*?\")", text, re.S)
    return set(re.findall(r'"(\w+)"', " ".join(compared)))


@pytest.mark.parametrize(
    ("key", "source", "name"),
    [
        ("loss_type", GRPOTrainer._compute_loss, "loss_type"),
        ("importance_sampling_level", GRPOTrainer._compute_loss, "importance_sampling_level"),
        (
            "multi_objective_aggregation",
            GRPOTrainer._generate_and_score_completions,
            "multi_objective_aggregation",
        ),
        (
            "vllm_importance_sampling_mode",
            GRPOTrainer._generate_and_score_completions,
            "vllm_importance_sampling_mode",
        ),
    ],
)
def test_the_choices_are_those_of_trl(key: str, source: Any, name: str) -> None:
    assert set(get_args(RULES[key])) == literals(source, name)


def test_the_scales_of_rewards_are_those_of_trl() -> None:
    text = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    (refused,) = re.findall(r"scale_rewards: .*?Must be one of (.*)\.\"", text)
    assert set(re.findall(r"'(\w+)'", refused)) == set(get_args(RULES["scale_rewards"])) - {
        True,
        False,
    }


# -- a file, and the command line ------------------------------------------------------------------


def parsed(config: Path, content: object) -> None:
    config.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    parse_config(["--config", str(config)])


scalars = (
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=12)
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)
in_one_folder = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(
    st.sampled_from(RECIPES),
    st.dictionaries(st.sampled_from([*KEYS, "rewards", "env"]), junk, min_size=1, max_size=3),
)
@in_one_folder
def test_any_value_in_a_recipe_is_taken_or_refused_in_one_line(
    tmp_path: Path, recipe: Path, changes: dict[str, Any]
) -> None:
    content = yaml.safe_load(recipe.read_text(encoding="utf-8")) | changes
    refusal(lambda: parsed(tmp_path / "config.yaml", content))


@given(
    st.sampled_from(KEYS),
    st.lists(st.sampled_from(["nan", "-1", "1e38", "5", "", "yes", "{", '{"a": 1}', "x", "no"])),
)
@in_one_folder
def test_any_value_on_the_command_line_is_taken_or_refused_in_one_line(
    key: str, values: list[str]
) -> None:
    refusal(lambda: parse_config(["--config", "quickstart", f"--{key}", *values]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--learning_rate nan", "command line: learning_rate: nan"),
        ("--learning_rate fast", "invalid float value: 'fast'"),
        ("--max_steps -7", "max_steps: -7; expected greater than or equal to 0"),
        ("--num_generations 1", "at least 2 generations"),
        ("--reward_weights inf 1", "reward_weights.0: inf"),
        ("--optim adam", "invalid choice: 'adam'"),
        ("--output_dir=", "output_dir: ''; expected a name"),
        ("--lr_scheduler_kwargs junk", "key: value pairs"),
        ("--resume perhaps", "resume"),
        ("--report_to nothing", "report_to: nothing is not supported"),
        ("--report_to comet_ml", "pip install comet-ml"),  # not among the packages of the tests
        ("--rewards", "expected at least one argument"),
        ("--use_peft false", "use_peft"),
        ("--outcome_reward nothing", "is not among the rewards"),
        ("--eval_strategy steps", "set num_validation_examples"),
        ("--eval_on_start true", "set num_validation_examples"),
        ("--remove_unused_columns true", "expected False"),
        ("--log_completions_hub_repo a", "expected None"),
        ("--config dr-grpo", "give one file"),
    ],
)
def test_a_bad_value_on_the_command_line_is_refused(arguments: str, says: str) -> None:
    line = refusal(lambda: parse_config(["--config", "quickstart", *arguments.split()]))
    assert line is not None
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "") for text in ("", "5", "- a", "a: [", "a: b: c", "\x00", "\t", "? :")),
        ("!!python/object:os.x {}", ""),
        ("5: 1", "5"),
        ("yes: 1", "True"),
        ("seed: 1\nseed: 2", "seed"),
        ("max-steps: 1", "max-steps: unknown key"),
        ("seed: true", "seed: True; expected"),
        ("trust_remote_code: true", "add --trust_remote_code to the command"),
        ("env: 5", "env"),
        ("env: {}", "env is not taken from a file: write NAME=VALUE before the command"),
        ("env: {HF_HUB_OFFLINE: 1}", "env"),
        ("attn_implementation: someone/kernel", "add --attn_implementation to the command"),
        ("lerning_rate: 1", "did you mean 'learning_rate'"),
        ("no_load_in_4bit: true", "no_load_in_4bit"),
    ],
)
def test_a_config_file_that_cannot_be_meant(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text, encoding="utf-8")
    line = refusal(lambda: parse_config(["--config", str(config)]))
    assert line is not None
    assert says in line
    config.write_bytes(b"\xff\xfe" + text.encode())
    assert str(config) in str(refusal(lambda: parse_config(["--config", str(config)])))


def test_credentials_of_a_url_are_not_recorded() -> None:
    url = "http://me:secret@host:8000"
    parsed_settings = parse_config(["--config", "quickstart", "--vllm_server_base_url", url])
    assert parsed_settings[1].vllm_server_base_url == url
    recorded = resolved_config(*parsed_settings)
    assert recorded["vllm_server_base_url"] == "http://***@host:8000"
    assert "secret" not in json.dumps(recorded)
