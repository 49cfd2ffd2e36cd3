"""Define the settings of a run, their defaults, and checks of the batch arithmetic.

`RunArguments` holds settings that TRL has no name for. `SoloGRPOConfig` is TRL's `GRPOConfig` with
the settings of our trainer. The model's settings are TRL's own `ModelConfig`.
"""

import os
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from transformers.hf_argparser import HfArg
from trl import GRPOConfig

from sologrpo.base.device import default_dtype
from sologrpo.base.errors import InputError
from sologrpo.config.checks import check_settings
from sologrpo.prompts import PROMPT_FORMATS

SAMPLING_ENGINES = ("adapter", "merged")
# What TRL 1.16.0 adds to the deviation of a group (grpo_trainer.py:2787).
TRL_EPSILON = 1e-4

# The ways to combine an adapter with the weights that it was trained on. They round differently.
MERGED, UNMERGED = "merged", "adapter"
PRECISIONS = {
    MERGED: "adapter merged into the weights that were trained on, NF4 ones dequantised",
    UNMERGED: "as trained, adapter not merged",
}

# Defaults for LoRA on one GPU; TRL's are for full fine-tuning on a cluster. A recipe in configs/
# lists only what differs from these.
ONE_GPU_DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "log_completions": True,
    "num_generations_eval": 1,  # validation is greedy: others would be the same completion
    "num_completions_to_print": 3,  # of every tenth step; the Parquet files hold all of them
    "save_total_limit": 2,
    # For load_best_model_at_end: accuracy on held-out problems, not a loss.
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

TRAINERS = ("solo", "stock")


@dataclass
class RunArguments:
    """Hold the settings of a run that TRL has no name for."""

    dataset_name: str = HfArg(
        default="openai/gsm8k",
        help="Hub name, local folder, or JSONL or Parquet file, with question and answer",
    )
    dataset_config: str | None = HfArg(
        default=None, help="Dataset configuration on the Hub (openai/gsm8k: main)"
    )
    dataset_train_split: str = HfArg(default="train", help="Split to train on")
    dataset_test_split: str = HfArg(default="test", help="Split to evaluate on")
    max_train_examples: int | None = HfArg(
        default=None, help="Train on this many rows, chosen by the seed (default: all)"
    )
    num_validation_examples: int = HfArg(
        default=0, help="Training rows held out for greedy validation"
    )
    prompt_format: str = HfArg(
        default="xml",
        metadata={"choices": sorted(PROMPT_FORMATS)},
        help="Format of prompts and answers",
    )
    prompt_formats: list[str] | None = HfArg(
        default=None,
        help="Formats of the training prompts, one per problem in turn, so that what is learned "
        "is not one prompt alone (default: prompt_format)",
    )
    system_prompt: str | None = HfArg(
        default=None, help="Replaces the system prompt of prompt_format; '' removes it"
    )
    worked_examples: list[str] | None = HfArg(
        default=None,
        help="Examples shown before the question, replacing the prompt format's: a list of "
        "{question, thinking, answer} in YAML, or the path of a YAML file with one",
    )
    max_prompt_tokens: int | None = HfArg(
        default=None, help="Leave out rows with a longer prompt, and report their number"
    )
    # None until `parse_config` fills in those of the prompt format.
    rewards: list[str] = HfArg(
        default=None,
        help="Rewards by name, {name: parameters}, or my_module:my_reward (default: those of "
        "the prompt format)",
    )
    reward_timeout: float = HfArg(
        default=600.0,
        help="Seconds allowed for one call of a reward before the run stops; 0 for no limit",
    )
    reward_workers: int = HfArg(
        default=1,
        help="Processes in which rewards of your own run; 0 to run them in the trainer's process",
    )
    trainer: str = HfArg(
        default="solo",
        metadata={"choices": list(TRAINERS)},
        help="solo, or stock: TRL's own GRPOTrainer",
    )
    resume: bool = HfArg(default=False, help="Resume from the last checkpoint in output_dir")
    accept_changes: bool = HfArg(
        default=False,
        help="With resume: continue although data, base weights, worked examples or rewards differ "
        "from those of the run, and record it",
    )
    dry_run: bool = HfArg(default=False, help="Print the plan and stop")
    traceback: bool = HfArg(default=False, help="Show tracebacks of bad input")

    def __post_init__(self) -> None:
        # Not a field. `parse_config` names the origin of each setting that is not TRL's default.
        self.origins: dict[str, str] = {}


@dataclass
class SoloGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """Extend TRL's `GRPOConfig` with the settings of `SoloGRPOTrainer`."""

    train_token_budget: int | None = HfArg(
        default=None,
        help="Tokens per forward-backward pass of training (default: by the batch and the memory)",
    )
    share_prompts: bool = HfArg(
        default=True,
        help="Compute a prompt once for all of its completions in the training forward pass",
    )
    advantage_eps: float = HfArg(
        default=TRL_EPSILON,
        help="Added to the standard deviation that a group's advantages are divided by",
    )
    outcome_reward: str | None = HfArg(
        default=None,
        help="Reward that decides whether a completion is right: the others then count only in "
        "groups where it is at least 1 once",
    )
    sampling_engine: str = HfArg(
        default="auto",
        metadata={"choices": ["auto", *SAMPLING_ENGINES]},
        help="What completions are sampled from: the model with its adapter, or "
        "merged weights; auto: the faster one that agrees with the trainer",
    )
    sampling_token_budget: int | None = HfArg(
        default=None,
        help="Tokens in the cache of the completions sampled at once "
        "(default: as many as fit into memory)",
    )

    def __post_init__(self) -> None:
        """Choose the device and its precision, and check the batch arithmetic before TRL does."""
        check_settings({name: getattr(self, name) for name in OURS}, "settings", SoloGRPOConfig)
        if not torch.cuda.is_available():
            self.use_cpu = True
        self._choose_dtype()
        self._check_optimizer_steps()
        if self.deepspeed and "LOCAL_RANK" not in os.environ:  # what every launcher sets
            raise InputError(
                "deepspeed needs a launcher: leave it out, and start with accelerate launch "
                "--config_file configs/accelerate/zero2.yaml"
            )
        super().__post_init__()
        if self.n_gpu > 1:
            raise InputError(
                f"{self.n_gpu} GPUs are visible to one process: set CUDA_VISIBLE_DEVICES=0, or "
                "start one process per GPU with accelerate launch --num_processes"
            )
        self._check_sampling()

    def _check_sampling(self) -> None:
        if self.use_vllm and self.sampling_engine != "auto":
            raise InputError(
                f"use_vllm and sampling_engine {self.sampling_engine} both choose the engine: give "
                "one"
            )
        if self.use_vllm:
            self._check_vllm()
        if self.use_transformers_continuous_batching:
            raise InputError(
                "use_transformers_continuous_batching converts the adapter to bf16 permanently: "
                "leave it out"
            )

    def _check_vllm(self) -> None:
        """Refuse settings under which vLLM's log-probs tell nothing about the trained policy.

        They are those of the distribution that is sampled from. `top_p` raises them by a known
        amount at most, these without bound.
        """
        for name, plain in (("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
            value = getattr(self, name)
            if value and value != plain:
                raise InputError(
                    f"use_vllm with {name} {value}: vLLM's log-probs could not be compared with "
                    f"the trainer's; leave {name} out, or use top_p"
                )
        if self.vllm_mode == "colocate" and self.world_size % self.vllm_tensor_parallel_size:
            raise InputError(
                f"vllm_tensor_parallel_size {self.vllm_tensor_parallel_size}: {self.world_size} "
                "processes cannot be divided by it; set it to 1"
            )

    def _choose_dtype(self) -> None:
        bf16: bool | None = self.bf16
        fp16: bool = self.fp16
        # Not a field. If nothing is given, `choose_number_format` may still set it.
        self.is_precision_given = bf16 is not None or fp16
        if not self.is_precision_given:
            self.bf16: bool | None = default_dtype() is torch.bfloat16
            self.fp16: bool = default_dtype() is torch.float16

    def _check_optimizer_steps(self) -> None:
        """Refuse incomplete groups or optimizer steps, and name the nearest sizes that work."""
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise InputError(
                f"generation_batch_size {self.generation_batch_size} and steps_per_generation "
                f"{self.steps_per_generation} both set how much is sampled at once: give one"
            )
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # what every launcher sets
        _check_generation_batch(self, self.per_device_train_batch_size * processes)


OURS = tuple(SoloGRPOConfig.__annotations__)  # without TRL's


def _check_generation_batch(args: SoloGRPOConfig, micro_batch: int) -> None:
    accumulation, group = args.gradient_accumulation_steps, args.num_generations
    step = micro_batch * accumulation
    batch = args.generation_batch_size or micro_batch * (args.steps_per_generation or accumulation)
    whole = lcm(step, group)
    if batch % whole:
        below = batch // whole * whole
        nearest = " or ".join(str(size) for size in (below, below + whole) if size)
        raise InputError(
            f"a generation batch of {batch} completions is not a multiple of num_generations "
            f"{group} and of the optimizer step (per_device_train_batch_size {micro_batch} x "
            f"gradient_accumulation_steps {accumulation} = {step}): change one of them, or set "
            f"generation_batch_size {nearest} without steps_per_generation"
        )
