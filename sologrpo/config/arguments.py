"""The settings of a run: what each key means, its default, and the batch arithmetic.

`RunArguments` holds what TRL has no name for, `SoloGRPOConfig` is TRL's `GRPOConfig` plus the
switches of our trainer. The third part, the model, is TRL's own `ModelConfig`.
"""

import os
from dataclasses import dataclass, field, fields
from math import gcd, lcm
from typing import Any

import torch
from trl import GRPOConfig

from sologrpo.device import fast_dtype
from sologrpo.errors import InputError
from sologrpo.prompts import PROMPT_FORMATS

SAMPLING_ENGINES = ("adapter", "merged")
OUTCOME_GATES = ("group", "completion")
# What TRL 1.16.0 adds to the deviation of a group (grpo_trainer.py:2787).
TRL_EPSILON = 1e-4

# The ways to combine an adapter with its base model. Each rounds differently, and so is a different
# model (docs/evaluation.md).
MERGED, MERGED_DEQUANTISED, UNMERGED = "merged", "merged_dequantised", "adapter"
UNMERGED_NF4, MERGED_REQUANTISED = "nf4_adapter", "merged_requantised"
PRECISIONS = {
    MERGED: "adapter merged into the unquantised base",
    MERGED_DEQUANTISED: "adapter merged into the dequantised NF4 base",
    UNMERGED: "unquantised base, adapter not merged",
    UNMERGED_NF4: "NF4 base, adapter not merged (what a 4-bit run trains)",
    MERGED_REQUANTISED: "the default merge of the run, quantised to NF4 again",
}

EVALUATION_ENGINES = ("transformers", "vllm")

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

BATCH_COUNTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "steps_per_generation", "num_iterations",
)  # fmt: skip

TRAINERS = ("solo", "stock")
# Of TRL 1.16 (grpo_trainer.py:3109-3175).
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


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
        metadata={"help": "Try the largest step before the run: time, memory, and whether it fits "
                  "(default: on a GPU)"},
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
        metadata={"help": "What completions are sampled from: the model with its adapter, or "
                  "merged weights; auto: the faster one that agrees with the trainer",
                  "choices": ["auto", *SAMPLING_ENGINES]},
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
        check_choices(self)
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
                "use_transformers_continuous_batching turns the adapter to bf16 for good: leave "
                "it out"
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
