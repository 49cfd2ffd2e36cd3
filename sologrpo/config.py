"""Configuration: flat YAML and command line, over three dataclasses.

`RunArguments` holds what TRL has no name for, `SoloGRPOConfig` is TRL's `GRPOConfig` plus the
switches of our trainer, and `ModelConfig` is TRL's own. A key has one meaning, in the file and on
the command line; the command line wins.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from trl import GRPOConfig, ModelConfig, TrlParser

from sologrpo.device import fast_dtype
from sologrpo.errors import InputError
from sologrpo.prompts import PROMPT_FORMATS

# Names inside a run directory that more than one module relies on.
RUN_CONFIG = "config.yaml"
ADAPTER = "adapter"

# Defaults that suit one GPU and LoRA; TRL's own are for full fine-tuning on a cluster.
# A recipe in configs/ names only what differs from these.
ONE_GPU_DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "log_completions": True,
    "num_generations_eval": 1,  # validation is greedy: more would be the same completion again
    "num_completions_to_print": 0,  # our console prints them; the parquet files keep all
    "save_total_limit": 2,
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

# What people write who come from another trainer or an older TRL, and what to write here.
RENAMED: dict[str, str] = {
    # CS336 / Tinker scripts
    "model_name": "model_name_or_path",
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
        default=None, metadata={"help": "Replaces the system prompt of the prompt format"}
    )
    worked_examples: list[str] | None = field(
        default=None,
        metadata={"help": "Examples shown before the question: list of {question, thinking, "
                  "answer} in YAML, or the path of a YAML file with such a list"},
    )  # fmt: skip
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Leave out, and report, rows with a longer prompt"}
    )
    rewards: list[str] = field(
        default_factory=lambda: [
            "strict_format", "trailing_text", "integer_answer", "answer_correctness",
        ],
        metadata={"help": "Rewards by name, {name: parameters}, or my_module:my_reward"},
    )  # fmt: skip
    trainer: str = field(
        default="solo",
        metadata={"help": "solo, or stock: TRL's own GRPOTrainer", "choices": ["solo", "stock"]},
    )
    resume: bool = field(
        default=False, metadata={"help": "Go on from the last checkpoint in output_dir"}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan and stop"})
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

    def __post_init__(self) -> None:
        """Choose the device, then check the batch arithmetic before TRL does."""
        if not torch.cuda.is_available():
            self.use_cpu = True
        self._choose_dtype()
        super().__post_init__()
        if self.n_gpu > 1:
            raise InputError(
                f"{self.n_gpu} GPUs are visible to one process: set CUDA_VISIBLE_DEVICES=0, or "
                "start one process a GPU with accelerate launch --num_processes"
            )
        self._check_optimizer_steps()

    def _choose_dtype(self) -> None:
        bf16: bool | None = self.bf16
        fp16: bool = self.fp16
        if bf16 is None and not fp16:
            self.bf16: bool | None = fast_dtype() is torch.bfloat16
            self.fp16: bool = fast_dtype() is torch.float16

    def _check_optimizer_steps(self) -> None:
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise InputError(
                f"a generation batch of {self.generation_batch_size} completions is "
                f"{self.steps_per_generation} micro-batches of {self.per_device_train_batch_size}, "
                f"not a whole number of optimizer steps of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} micro-batches; change one of them"
            )


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
    keys = list(_read_yaml_mapping(config_path)) if config_path else []
    keys += [arg[2:].split("=")[0] for arg in args if arg.startswith("--")]
    for key in keys:
        _check_known(key, known)
    try:
        run_args, trainer_args, model_args = parser.parse_args_and_config(args)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(_with_batch_mend(" ".join(str(error).split()))) from error
    _cross_check(run_args, trainer_args, model_args)
    return run_args, trainer_args, model_args


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


def _with_batch_mend(message: str) -> str:
    if "must be divisible by num_generations" not in message:
        return message
    return (
        f"{message} The generation batch is per_device_train_batch_size x "
        "gradient_accumulation_steps completions unless set, and must hold whole groups of "
        "num_generations: change one of them"
    )


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
    if args.eval_strategy != "no" and run.num_validation_examples < 1:
        raise InputError(
            "eval_strategy is set but nothing is held out: set num_validation_examples, e.g. 100"
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
    merge_into: str = field(
        default="trained",
        metadata={
            "help": "Merge the adapter into the weights it was trained on (dequantised NF4 for a "
            "4-bit run), or into the original ones",
            "choices": ["trained", "original"],
        },
    )
    save_merged: str | None = field(default=None, metadata={"help": "Save the merged model here"})
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
    seed: int = field(default=0, metadata={"help": "Seed of the choice of problems"})
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
    data: RunArguments
    save_merged: str | None
    max_completion_length: int
    limit: int | None
    seed: int
    trust_remote_code: bool


def parse_evaluation(argv: Sequence[str]) -> EvaluationSettings:
    """Parse the command line of `evaluate.py` and fill it from the run's resolved config.

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
    if args.merge_into == "original" or not saved:
        model.load_in_4bit = False
    model.dtype = model.dtype if saved else "auto"
    data = RunArguments(**_fields_of(RunArguments, saved))
    for name in ("dataset_name", "dataset_config", "dataset_test_split", "prompt_format"):
        if getattr(args, name) is not None:
            setattr(data, name, getattr(args, name))
    # A 4-bit run's original weights are another model: its results stand beside, not over.
    suffix = "-original" if args.merge_into == "original" and saved.get("load_in_4bit") else ""
    default_label = "trained" if adapter else Path(str(model.model_name_or_path)).name
    return EvaluationSettings(
        run=Path(args.run) if args.run else None,
        output_dir=Path(args.output_dir or args.run or "runs/evaluation"),
        label=args.label or default_label + suffix,
        baseline_label="baseline" + suffix,
        baseline=args.baseline,
        adapter=Path(adapter) if adapter else None,
        model=model,
        data=data,
        save_merged=args.save_merged,
        max_completion_length=args.max_completion_length
        or saved.get("max_completion_length")
        or 512,
        limit=args.limit,
        seed=args.seed,
        trust_remote_code=bool(saved.get("trust_remote_code", False)),
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
