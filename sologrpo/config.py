"""Configuration: flat YAML and command line, over three dataclasses.

`RunArguments` holds what TRL has no name for, `SoloGRPOConfig` is TRL's `GRPOConfig` plus the
switches of our trainer, and `ModelConfig` is TRL's own. A key has one meaning, in the file and on
the command line; the command line wins.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from math import gcd, inf, lcm
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import torch
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from trl import GRPOConfig, ModelConfig, TrlParser

from rewards import check_is_list, name_of_spec
from sologrpo.advantages import OUTCOME_GATES, TRL_EPSILON
from sologrpo.device import fast_dtype
from sologrpo.engines import SAMPLING_ENGINES
from sologrpo.errors import InputError, first_line
from sologrpo.prompts import PROMPT_FORMATS

# Names inside a run directory that more than one module relies on.
RUN_CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
ADAPTER = "adapter"

# The forms in which an adapter and its base model can be put together. Each computes something
# else, so each is another model (docs/evaluation.md).
MERGED, MERGED_DEQUANTISED, BESIDE = "merged", "merged_dequantised", "adapter"
BESIDE_NF4, MERGED_REQUANTISED = "nf4_adapter", "merged_requantised"
PRECISIONS = (MERGED, MERGED_DEQUANTISED, BESIDE, BESIDE_NF4, MERGED_REQUANTISED)

EVALUATION_ENGINES = ("transformers", "continuous", "vllm")

# Defaults that suit one GPU and LoRA; TRL's own are for full fine-tuning on a cluster.
# A recipe in configs/ names only what differs from these.
ONE_GPU_DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "log_completions": True,
    "num_generations_eval": 1,  # validation is greedy: more would be the same completion again
    "num_completions_to_print": 3,  # of every tenth step; the parquet files keep all
    "save_total_limit": 2,
    # What load_best_model_at_end goes by, when asked: held-out answers, not a loss.
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "save_strategy": "steps",
    "report_to": "none",
    "dtype": "auto",
    "attn_implementation": "sdpa",
    "load_in_4bit": True,
    "use_bnb_nested_quant": True,
    "use_peft": True,
    "lora_dropout": 0.0,  # TRL samples in train mode: dropout would act on the rollouts
    "lora_target_modules": "all-linear",
}

# Where a setting can come from, beside a config file.
COMMAND_LINE, PROJECT = "command line", "SoloGRPO"

BATCH_COUNTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "steps_per_generation", "num_iterations",
)  # fmt: skip

TRAINERS = ("solo", "stock")
# Of TRL 1.16 (grpo_trainer.py:3109-3175), which refuses others at the first loss only.
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
# Numbers that mean something: from, to, and whether the ends count. TRL and PEFT check few of them,
# and what they do with the others shows late or never.
RANGES: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(
        ("max_completion_length", "max_prompt_tokens", "max_train_examples", "train_token_budget",
         "num_generations_eval", "per_device_eval_batch_size", "lora_r", "lora_alpha",
         "save_total_limit"),
        (1, inf, True),
    ),
    **dict.fromkeys(
        ("learning_rate", "beta", "epsilon", "epsilon_high", "weight_decay", "max_grad_norm",
         "warmup_steps", "advantage_eps", "num_validation_examples", "reward_timeout",
         "max_nonfinite_steps", "max_resample_rounds", "seed"),
        (0, inf, True),
    ),
    **dict.fromkeys(
        ("temperature", "num_train_epochs", "logging_steps", "save_steps", "eval_steps"),
        (0, inf, False),
    ),
    **dict.fromkeys(("top_p", "min_p", "adam_beta1", "adam_beta2", "lora_dropout"), (0, 1, True)),
}  # fmt: skip
# Keys whose values are checked where they are read, with better words than a type has.
CHECKED_ELSEWHERE = ("rewards", "worked_examples", "env")

# What people write who come from another trainer or an older TRL, and what to write here.
RENAMED: dict[str, str] = {
    # CS336 / Tinker scripts
    "model_name": "model_name_or_path",
    "base_url": "vllm_server_base_url, with vllm_mode: server; without vLLM nothing is remote",
    "group_size": "num_generations",
    "rollout_batch_size": "generation_batch_size (counts completions: questions x num_generations)",
    "n_grpo_steps": "max_steps",
    "cliprange": "epsilon",
    "lora_rank": "lora_r",
    "epochs_per_rollout_batch": "num_iterations",
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "sampling_temperature": "temperature",
    "sampling_max_tokens": "max_completion_length",
    "sampling_top_p": "top_p",
    "max_tokens": "max_completion_length",
    "use_std_normalization": "scale_rewards (group or none)",
    "use_r1_zero_format": "prompt_format: r1_zero",
    "save_every": "save_steps",
    "eval_every": "eval_steps",
    "log_path": "output_dir",
    "wandb_project": "project, with report_to: wandb",
    "wandb_name": "run_name, with report_to: wandb",
    "lora_dim": "lora_r",
    # Names that TRL, transformers or PEFT removed or call differently
    "max_prompt_length": "max_prompt_tokens",
    "evaluation_strategy": "eval_strategy",
    "torch_dtype": "dtype",
    "kl_coef": "beta",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "reward_funcs": "rewards",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "trainer_class": "trainer",
}


@dataclass
class RunArguments:
    """What a run needs and TRL has no name for."""

    dataset_name: str = field(
        default="openai/gsm8k",
        metadata={"help": "Hub name, local folder, or JSONL/Parquet file with question and answer"},
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Dataset configuration on the hub (openai/gsm8k: main)"}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on"})
    dataset_test_split: str = field(default="test", metadata={"help": "Split evaluate.py uses"})
    max_train_examples: int | None = field(
        default=None, metadata={"help": "Train on so many rows only, chosen by the seed"}
    )
    num_validation_examples: int = field(
        default=0, metadata={"help": "Rows held out of train for greedy validation"}
    )
    prompt_format: str = field(
        default="xml",
        metadata={"help": "How the model is asked", "choices": sorted(PROMPT_FORMATS)},
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "Replaces the system prompt of the prompt format; '' leaves it out"},
    )
    worked_examples: list[str] | None = field(
        default=None,
        metadata={"help": "Examples shown before the question instead of the prompt format's own: "
                  "list of {question, thinking, answer} in YAML, or the path of a YAML file with "
                  "such a list"},
    )  # fmt: skip
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Leave out, and report, rows with a longer prompt"}
    )
    # None only until `parse_config` puts in those of the prompt format.
    rewards: list[str] = field(
        default=None,  # type: ignore[arg-type]
        metadata={"help": "Rewards by name, {name: parameters}, or my_module:my_reward; by "
                  "default those of the prompt format"},
    )  # fmt: skip
    reward_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds that a reward may take for the completions of a batch, before "
                  "the run stops; 0 for no limit"},
    )  # fmt: skip
    trainer: str = field(
        default="solo",
        metadata={"help": "solo, or stock: TRL's own GRPOTrainer", "choices": list(TRAINERS)},
    )
    resume: bool = field(
        default=False, metadata={"help": "Go on from the last checkpoint in output_dir"}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan and stop"})
    rehearse: bool | None = field(
        default=None,
        metadata={"help": "Try the largest steps that the run can have before it begins, in a "
                  "process of their own (default: on a GPU)"},
    )  # fmt: skip
    traceback: bool = field(default=False, metadata={"help": "Show tracebacks of bad input"})


@dataclass
class SoloGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """TRL's `GRPOConfig` plus the switches of `SoloGRPOTrainer`."""

    train_token_budget: int = field(
        default=8192,
        metadata={"help": "Tokens (padding counted) of one forward-backward pass of training"},
    )
    share_prompts: bool = field(
        default=True,
        metadata={"help": "Compute a prompt once for all its completions in the training forward"},
    )
    advantage_eps: float = field(
        default=TRL_EPSILON,
        metadata={"help": "Added to the deviation that a group's advantages are divided by"},
    )
    outcome_reward: str | None = field(
        default=None,
        metadata={"help": "The reward that tells right from wrong: the others, side rewards, then "
                  "count only where it is at least 1 (outcome_gate)"},
    )  # fmt: skip
    outcome_gate: str = field(
        default="group",
        metadata={"help": "Side rewards count in groups with a right answer (group), or in right "
                  "completions only (completion)", "choices": list(OUTCOME_GATES)},
    )  # fmt: skip
    max_resample_rounds: int = field(
        default=0,
        metadata={"help": "Replace groups without signal by groups of other prompts, in at most "
                  "so many further rounds of sampling a generation batch"},
    )  # fmt: skip
    sampling_engine: str = field(
        default="auto",
        metadata={"help": "How completions are sampled; auto: the fastest that agrees with the "
                  "trainer", "choices": ["auto", *SAMPLING_ENGINES]},
    )  # fmt: skip
    max_nonfinite_steps: int = field(
        default=0,
        metadata={"help": "Optimizer steps that are left out because their loss or gradient is not "
                  "a finite number, before the run stops"},
    )  # fmt: skip
    sampling_token_budget: int | None = field(
        default=None,
        metadata={"help": "Tokens (padding counted) of prompts and completions that are sampled at "
                  "once (default: what fits into memory)"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Choose the device, then check the batch arithmetic before TRL does."""
        if not torch.cuda.is_available():
            self.use_cpu = True
        self._choose_dtype()
        self._check_optimizer_steps()
        super().__post_init__()
        if self.n_gpu > 1:
            raise InputError(
                f"{self.n_gpu} GPUs are visible to one process: set CUDA_VISIBLE_DEVICES=0, or "
                "start one process a GPU with accelerate launch --num_processes"
            )
        self._check_sampling()
        if self.outcome_gate not in OUTCOME_GATES:  # argparse checks the command line, not the file
            raise InputError(f"unknown outcome_gate {self.outcome_gate!r}: group or completion")
        if self.max_resample_rounds and self.world_size > 1:
            raise InputError("max_resample_rounds works with one process only")
        per_group = self.scale_rewards in ("group", "none")
        if self.max_resample_rounds and not (
            per_group and self.multi_objective_aggregation == "sum_then_normalize"
        ):
            raise InputError(
                "max_resample_rounds needs advantages that are made group by group: scale_rewards "
                "group or none, multi_objective_aggregation sum_then_normalize"
            )

    def _check_sampling(self) -> None:
        engines = ("auto", *SAMPLING_ENGINES)
        if self.sampling_engine not in engines:  # argparse checks the command line, not the file
            raise InputError(
                f"unknown sampling_engine {self.sampling_engine!r}: use one of {', '.join(engines)}"
            )
        if self.sampling_token_budget is not None and self.sampling_token_budget < 1:
            raise InputError(
                f"sampling_token_budget {self.sampling_token_budget}: give at least 1, or leave it "
                "out for what fits into memory"
            )
        if self.use_vllm and self.sampling_engine != "auto":
            raise InputError(
                f"use_vllm and sampling_engine {self.sampling_engine} both say what samples: give "
                "one"
            )
        if self.use_transformers_continuous_batching:
            raise InputError(
                "use_transformers_continuous_batching turns the adapter to bf16 for good: set "
                "sampling_engine: continuous instead"
            )

    def _choose_dtype(self) -> None:
        bf16: bool | None = self.bf16
        fp16: bool = self.fp16
        if bf16 is None and not fp16:
            self.bf16: bool | None = fast_dtype() is torch.bfloat16
            self.fp16: bool = fast_dtype() is torch.float16

    def _check_optimizer_steps(self) -> None:
        """Refuse a generation batch of broken groups or optimizer steps, with what works nearest.

        TRL refuses most of these too, but neither does the sum nor names the mend.
        """
        for name in BATCH_COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InputError(f"{name} {count}: give at least 1")
        if self.num_generations < 2:
            raise InputError(
                f"num_generations {self.num_generations}: a completion is compared with the others "
                "of its prompt; give at least 2, for example 8"
            )
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise InputError(
                f"generation_batch_size {self.generation_batch_size} and steps_per_generation "
                f"{self.steps_per_generation} both say how much is sampled at once: give one"
            )
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # what every launcher sets
        _check_generation_batch(self, self.per_device_train_batch_size * processes)


def _check_generation_batch(args: SoloGRPOConfig, micro_batch: int) -> None:
    accumulation, group = args.gradient_accumulation_steps, args.num_generations
    step = micro_batch * accumulation
    batch = args.generation_batch_size or micro_batch * (args.steps_per_generation or accumulation)
    if batch % step:
        raise InputError(
            f"a generation batch of {batch} completions is {batch / micro_batch:.4g} micro-batches "
            f"of {micro_batch}, not whole optimizer steps of {micro_batch} x "
            f"gradient_accumulation_steps {accumulation} = {step} completions: set "
            f"{_nearest_batches(args, micro_batch, batch)}"
        )
    if batch % group:
        divisors = [n for n in range(2, batch + 1) if batch % n == 0]
        nearest = [n for n in divisors if n < group][-1:] + [n for n in divisors if n > group][:1]
        raise InputError(
            f"a generation batch ({batch}) of {batch // step} x per_device_train_batch_size "
            f"{micro_batch} x gradient_accumulation_steps {accumulation} completions is not "
            f"divisible by num_generations ({group}): {batch} = {batch // group} x {group} + "
            f"{batch % group}; set num_generations {_either(nearest)}, or "
            f"{_nearest_batches(args, micro_batch, batch)}"
        )


def _nearest_batches(args: SoloGRPOConfig, micro_batch: int, batch: int) -> str:
    """The key that sizes the generation batch, with the values next to its own that work."""
    group, step = args.num_generations, micro_batch * args.gradient_accumulation_steps
    whole = lcm(step, group)
    if args.generation_batch_size is not None:
        return f"generation_batch_size {_either(_multiples(batch, whole))}"
    if args.steps_per_generation is not None:
        steps = [near // micro_batch for near in _multiples(batch, whole)]
        return f"steps_per_generation {_either(steps)}"
    size = args.per_device_train_batch_size
    sizes = _multiples(size, group // gcd(group, step // size))
    return f"per_device_train_batch_size {_either(sizes)}"


def _multiples(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


class _Parser(TrlParser):  # type: ignore[misc]
    """`TrlParser` whose errors are one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse_config(
    argv: Sequence[str] | None = None,
) -> tuple[RunArguments, SoloGRPOConfig, ModelConfig]:
    """Parse `--config FILE` and `--key value` pairs.

    Raises:
        InputError: for an unreadable file, an unknown key, a value of the wrong type, or settings
            that contradict each other. The message is one line with the mend.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser((RunArguments, SoloGRPOConfig, ModelConfig), allow_abbrev=False)
    parser.set_defaults_with_config(**ONE_GPU_DEFAULTS)
    known = {action.dest for action in parser._actions} | {"config", "env"}
    config_path = _config_path(args)
    content = _read_yaml_mapping(config_path) if config_path else {}
    given = [arg[2:].split("=")[0] for arg in args if arg.startswith("--")]
    for key in (*content, *given):
        _check_known(key, known)
    _check_types(content, config_path)
    try:
        run_args, trainer_args, model_args = parser.parse_args_and_config(args)
    except (
        ValueError, TypeError, ArithmeticError, LookupError, AttributeError, OSError, ImportError,
        argparse.ArgumentTypeError,
    ) as error:  # fmt: skip
        if isinstance(error, InputError):
            raise
        raise InputError(" ".join(str(error).split()) or type(error).__name__) from error
    _check_ranges(run_args, trainer_args, model_args)
    _check_choices(run_args, trainer_args)
    _hide_token(trainer_args)
    _resolve_rewards(run_args)
    _cross_check(run_args, trainer_args, model_args)
    return run_args, trainer_args, model_args


def origins(argv: Sequence[str] | None = None) -> dict[str, str]:
    """Where each setting comes from that is not a default of TRL's, by key.

    The command line wins over the config file, and that over this project's defaults.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    path = _config_path(args)
    found = dict.fromkeys(ONE_GPU_DEFAULTS, PROJECT)
    if path is not None:
        found |= dict.fromkeys(_read_yaml_mapping(path), str(path))
    given = (arg[2:].partition("=")[0] for arg in args if arg.startswith("--"))
    found |= dict.fromkeys((key.replace("-", "_") for key in given), COMMAND_LINE)
    for name in ("config", "dry_run", "traceback"):
        found.pop(name, None)
    return found


def _config_path(args: list[str]) -> Path | None:
    for i, arg in enumerate(args):
        if arg.startswith("--config="):  # TRL's parser knows only the form with a space
            args[i : i + 1] = ["--config", arg.partition("=")[2]]
    if "--config" not in args:
        return None
    index = args.index("--config") + 1
    if index == len(args):
        raise InputError("--config needs a file, for example --config configs/quickstart.yaml")
    return Path(args[index])


def _read_yaml_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        have = sorted(str(p) for p in Path("configs").glob("*.yaml"))
        raise InputError(f"no config file {path}; there are: {', '.join(have) or 'none here'}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold key: value pairs")
    return content


def _check_known(key: str, known: set[str]) -> None:
    name = key.replace("-", "_")
    if name in known or name.removeprefix("no_") in known:  # --no_baseline is argparse's own form
        return
    if key in RENAMED:
        raise InputError(f"unknown key {key!r}: here it is {RENAMED[key]}")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "; see docs/configuration.md"
    raise InputError(f"unknown key {key!r}{hint}")


def _check_types(content: Mapping[str, Any], path: Path | None) -> None:
    """Refuse what a key of the file cannot hold; argparse does that for the command line only."""
    hints: dict[str, Any] = {}
    for settings in (RunArguments, SoloGRPOConfig, ModelConfig):
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


def _check_ranges(*settings: Any) -> None:
    """Refuse numbers that mean nothing, which nobody else may notice."""
    for name, (low, high, ends) in RANGES.items():
        value = next(getattr(part, name) for part in settings if hasattr(part, name))
        if value is None:
            continue
        inside = low <= value <= high if ends else low < value < high
        if not inside or value == inf:
            what = f"at least {low:g}" if ends else f"more than {low:g}"
            what = what if high == inf else f"{low:g} to {high:g}"
            raise InputError(f"{name} {value}: give {what}")


def _hide_token(args: SoloGRPOConfig) -> None:
    """Hand the Hub's token on in the environment alone.

    Checkpoints hold the settings as they are, and W&B sends the command line.
    """
    token = args.hub_token
    if token is None:
        return
    os.environ["HF_TOKEN"] = token
    args.hub_token = None
    for i, arg in reversed(list(enumerate(sys.argv))):
        if arg.replace("-", "_").startswith("__hub_token"):
            del sys.argv[i : i + (1 if "=" in arg else 2)]


def _check_choices(run: RunArguments, args: SoloGRPOConfig) -> None:
    """Names from the file; argparse checks those of the command line."""
    for key, value, known in (
        ("prompt_format", run.prompt_format, PROMPT_FORMATS),
        ("trainer", run.trainer, TRAINERS),
        ("loss_type", args.loss_type, LOSS_TYPES),
    ):
        if value not in known:
            raise InputError(f"unknown {key} {value!r}: use one of {', '.join(known)}")
    if run.rewards is not None and not run.rewards:
        raise InputError("rewards is empty: name at least one; `python -m rewards` lists them")


def _resolve_rewards(run: RunArguments) -> None:
    if run.rewards is None:
        run.rewards = list(PROMPT_FORMATS[run.prompt_format].rewards)
    check_is_list(run.rewards)


def _cross_check(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> None:
    if not model.model_name_or_path:
        raise InputError("no model: set model_name_or_path to a hub name or a local folder")
    if not model.use_peft:
        raise InputError("use_peft: false is not supported: SoloGRPO trains LoRA adapters")
    if args.reward_weights is not None and len(args.reward_weights) != len(run.rewards):
        raise InputError(
            f"{len(args.reward_weights)} reward_weights for {len(run.rewards)} rewards; "
            "give one weight a reward"
        )
    _check_outcome_reward(run, args)
    _check_trackers(args)
    _leave_out_of_stock(run, args)
    if args.eval_strategy != "no" and run.num_validation_examples < 1:
        raise InputError(
            "eval_strategy is set but nothing is held out: set num_validation_examples, e.g. 100"
        )


def _check_trackers(args: SoloGRPOConfig) -> None:
    """Ask transformers now; the trainer would ask when the model is loaded."""
    try:
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    except (ValueError, RuntimeError) as error:  # unknown; not installed
        raise InputError(f"report_to: {first_line(error)}") from error


def _leave_out_of_stock(run: RunArguments, args: SoloGRPOConfig) -> None:
    """TRL's own validation gives no accuracy to choose the best adapter by."""
    if run.trainer == "stock" and args.metric_for_best_model == "eval_accuracy":
        args.metric_for_best_model, args.greater_is_better = None, None


def _check_outcome_reward(run: RunArguments, args: SoloGRPOConfig) -> None:
    if args.outcome_reward is None:
        return
    if run.trainer == "stock":
        raise InputError("outcome_reward needs trainer: solo; TRL's own trainer has no gate")
    names = [name_of_spec(spec) for spec in run.rewards]
    if args.outcome_reward not in names:
        raise InputError(
            f"outcome_reward {args.outcome_reward!r} is not among the rewards: {', '.join(names)}"
        )


@dataclass
class EvaluationArguments:
    """The command line of `evaluate.py`. What is not given comes from the run's own config."""

    run: str | None = field(default=None, metadata={"help": "Run directory of train.py"})
    model: str | None = field(default=None, metadata={"help": "Base model, or a merged folder"})
    adapter: str | None = field(default=None, metadata={"help": "Adapter folder"})
    label: str | None = field(
        default=None, metadata={"help": "Name of the result under eval/ (trained, or the model's)"}
    )
    baseline: bool = field(
        default=True, metadata={"help": "Evaluate the base model first, for comparison"}
    )
    precision: str | None = field(
        default=None,
        metadata={
            "help": "Form of the weights: merged (into the unquantised base), merged_dequantised "
            "(into the dequantised NF4 base), adapter (beside the unquantised base), nf4_adapter "
            "(beside the NF4 base), merged_requantised (to NF4 again)",
            "choices": list(PRECISIONS),
        },
    )
    compare_precisions: bool = field(
        default=False, metadata={"help": "Evaluate the adapter in every precision, and compare"}
    )
    engine: str = field(
        default="transformers",
        metadata={"help": "What generates: our loop on transformers, transformers' own continuous "
                  "batching, or vLLM where it is installed", "choices": list(EVALUATION_ENGINES)},
    )  # fmt: skip
    num_samples: int = field(
        default=0,
        metadata={"help": "Also draw so many completions a problem, for pass@k and maj@k"},
    )
    temperature: float = field(default=1.0, metadata={"help": "Of those completions"})
    top_p: float = field(default=1.0, metadata={"help": "Of those completions"})
    resume: bool = field(
        default=False, metadata={"help": "Go on with an evaluation that was interrupted"}
    )
    regrade: str | None = field(
        default=None,
        metadata={"help": "Judge the completions of this records.jsonl again, without a model"},
    )
    write: bool = field(
        default=False, metadata={"help": "With regrade: put the new verdicts into the files"}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "As in train.py"})
    dataset_config: str | None = field(default=None, metadata={"help": "As in train.py"})
    dataset_test_split: str | None = field(default=None, metadata={"help": "As in train.py"})
    prompt_format: str | None = field(
        default=None, metadata={"help": "As in train.py", "choices": sorted(PROMPT_FORMATS)}
    )
    max_completion_length: int | None = field(default=None, metadata={"help": "In tokens"})
    limit: int | None = field(
        default=None, metadata={"help": "Evaluate so many problems only, chosen by the seed"}
    )
    seed: int = field(
        default=0, metadata={"help": "Seed of the choice of problems, and of sampling"}
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Where eval/<label>/ goes (default: the run directory)"}
    )
    traceback: bool = field(default=False, metadata={"help": "Show tracebacks of bad input"})


@dataclass
class EvaluationSettings:
    """What `evaluate.py` will do, with every value resolved."""

    run: Path | None
    output_dir: Path
    label: str
    baseline_label: str
    baseline: bool
    adapter: Path | None
    model: ModelConfig
    trained_in_4bit: bool
    precision: str
    compare_precisions: bool
    data: RunArguments
    max_completion_length: int
    limit: int | None
    seed: int
    engine: str
    num_samples: int
    temperature: float
    top_p: float
    resume: bool
    trust_remote_code: bool

    @property
    def trained_precision(self) -> str:
        """The form in which the adapter was trained."""
        return BESIDE_NF4 if self.trained_in_4bit else BESIDE

    def label_of(self, precision: str) -> str:
        """The default label of the trained model in this precision."""
        return "trained" + _label_suffix(precision, self.trained_in_4bit)


def _usual_precision(trained_in_4bit: bool) -> str:
    """The merge into what was trained on."""
    return MERGED_DEQUANTISED if trained_in_4bit else MERGED


def _label_suffix(precision: str, trained_in_4bit: bool) -> str:
    """Another form of the weights is another model: its results stand beside, not over."""
    return "" if precision == _usual_precision(trained_in_4bit) else f"-{precision}"


def parse_evaluation(argv: Sequence[str], merge_into: str | None = None) -> EvaluationSettings:
    """Parse the command line of `evaluate.py` and fill it from the run's resolved config.

    Args:
        argv: without the flags of an export.
        merge_into: what the export merges into; `original` is then also what is evaluated, if
            `--precision` does not say otherwise.

    Raises:
        InputError: for an unknown key, or if there is neither a run nor a model.
    """
    parser = _Parser((EvaluationArguments,), allow_abbrev=False)
    known = {action.dest for action in parser._actions}
    for arg in argv:
        if arg.startswith("--"):
            _check_known(arg[2:].split("=")[0], known)
    (args,) = parser.parse_args_into_dataclasses(args=list(argv))
    if not args.run and not args.model:
        raise InputError("give --run runs/NAME, or --model NAME [--adapter FOLDER]")
    saved = load_run_config(Path(args.run)) if args.run else {}
    adapter = args.adapter or (str(Path(args.run) / ADAPTER) if args.run else None)
    model = ModelConfig(**_fields_of(ModelConfig, saved))
    model.model_name_or_path = args.model or saved.get("model_name_or_path")
    # As it was trained, whatever `auto` would be on this machine.
    model.dtype = (recorded_dtype(Path(args.run)) if args.run else None) or model.dtype or "auto"
    trained_in_4bit = bool(saved.get("load_in_4bit", False))
    data = RunArguments(**_fields_of(RunArguments, saved))
    for name in ("dataset_name", "dataset_config", "dataset_test_split", "prompt_format"):
        if getattr(args, name) is not None:
            setattr(data, name, getattr(args, name))
    _check_evaluation(args, adapter)
    precision = args.precision or (
        MERGED if merge_into == "original" else _usual_precision(trained_in_4bit)
    )
    suffix = _label_suffix(precision, trained_in_4bit)
    default_label = "trained" if adapter else Path(str(model.model_name_or_path)).name
    return EvaluationSettings(
        run=Path(args.run) if args.run else None,
        output_dir=Path(args.output_dir or args.run or "runs/evaluation"),
        label=args.label or default_label + suffix,
        baseline_label="baseline" + suffix,
        baseline=args.baseline,
        adapter=Path(adapter) if adapter else None,
        model=model,
        trained_in_4bit=trained_in_4bit,
        precision=precision,
        compare_precisions=args.compare_precisions,
        data=data,
        max_completion_length=args.max_completion_length
        or saved.get("max_completion_length")
        or 512,
        limit=args.limit,
        seed=args.seed,
        engine=args.engine,
        num_samples=args.num_samples,
        temperature=args.temperature,
        top_p=args.top_p,
        resume=args.resume,
        trust_remote_code=bool(saved.get("trust_remote_code", False)),
    )


def _check_evaluation(args: EvaluationArguments, adapter: str | None) -> None:
    """Refuse what cannot work, or would silently mean something else."""
    if args.num_samples < 0:
        raise InputError(f"num_samples {args.num_samples}: give 1 or more, or leave it out")
    if args.temperature <= 0:
        raise InputError(
            f"temperature {args.temperature}: give more than 0; the greedy answer is always there"
        )
    if not 0 < args.top_p <= 1:
        raise InputError(f"top_p {args.top_p}: give more than 0 and at most 1")
    if args.max_completion_length is not None and args.max_completion_length < 1:
        raise InputError(f"max_completion_length {args.max_completion_length}: give at least 1")
    if not args.num_samples and (args.temperature, args.top_p) != (1.0, 1.0):
        raise InputError("temperature and top_p are for num_samples: add --num_samples 8")
    if args.write:
        raise InputError("--write belongs to --regrade FILE")
    if args.compare_precisions and not adapter:
        raise InputError("--compare_precisions compares the forms of an adapter: add --adapter")
    if args.compare_precisions and (args.precision or args.label):
        raise InputError(
            "--compare_precisions goes through all precisions under their own labels: leave "
            "--precision and --label out"
        )
    if args.engine == "vllm" and find_spec("vllm") is None:
        raise InputError(
            "engine vllm: vLLM is not installed; pip install 'sologrpo[vllm]', or use engine "
            "transformers"
        )
    if args.engine != "transformers" and (
        args.compare_precisions or args.precision not in (None, MERGED, MERGED_DEQUANTISED)
    ):
        raise InputError(
            f"engine {args.engine} needs merged weights (on 4-bit weights engines have given "
            "garbage): use precision merged or merged_dequantised, or engine transformers"
        )


def _fields_of(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def load_run_config(directory: Path) -> dict[str, Any]:
    """Read the resolved config that `train.py` wrote.

    Raises:
        InputError: if the directory holds no run.
    """
    path = directory / RUN_CONFIG
    if not path.is_file():
        raise InputError(f"{directory} is not a run directory: it has no {RUN_CONFIG}")
    return _read_yaml_mapping(path)


def recorded_dtype(directory: Path) -> str | None:
    """Read the dtype that a run resolved to, or None if the run has not recorded it."""
    path = directory / ENVIRONMENT
    if not path.is_file():
        return None
    recorded: str | None = json.loads(path.read_text(encoding="utf-8")).get("dtype")
    return recorded
