"""Replacements for parts of TRL and accelerate, each for the length of one call.

Each context manager names the lines of TRL 1.16.0 that it relies on: `grpo_trainer.py` unless it
names another file. `RELIED_ON` quotes those lines, and the lines around our overrides; a test
compares the quotes with the installed TRL.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from trl import GRPOTrainer

# What a forward pass gives: (B, T) log-probs, (B, T) entropies or None, auxiliary loss or None.
Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

RELIED_ON: dict[Any, tuple[str, ...]] = {
    GRPOTrainer.compute_loss: ("return self._compute_loss(model, inputs)",),
    GRPOTrainer._compute_loss: (
        # Sums over rows, normalised over the generation batch or the rows of the call.
        'elif self.loss_type in ["cispo", "dapo", "vespo"]:',
        'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        "* self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        "(per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
        'inputs["prompt_ids"], inputs["prompt_mask"]',
        'inputs["completion_ids"], inputs["completion_mask"]',
        'inputs["advantages"]',
        "aux_loss = self._get_per_token_logps_and_entropies(",
        'totals = self.accelerator.reduce(torch.stack([local_sum, local_count]), reduction="sum")',
        "self.accelerator.gather(masked_seq_mean(",
    ),
    GRPOTrainer._calculate_rewards: ("return rewards_per_func",),
    GRPOTrainer._generate_and_score_completions: (
        '"advantages": advantages,',
        'self._metrics[mode]["frac_reward_zero_std"].append(',
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
        "batch_size=batch_size",
        "if self.mask_truncated_completions:",
        "if self.args.gradient_accumulation_steps % generate_every != 0 or (",
    ),
    GRPOTrainer._get_per_token_logps_and_entropies: (
        "fused_lm_head=True",
        "batch_size=None,",
        "outputs.log_probs[:, -logits_to_keep:]",
    ),
    GRPOTrainer._prepare_inputs: (
        "shuffle_sequence_dict(generation_batch)",
        "self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ),
    GRPOTrainer._generate: (
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields,",
        "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids]",
    ),
    GRPOTrainer._generate_single_turn: (
        "**generate_inputs, generation_config=self.generation_config",
        "completion_ids = prompt_completion_ids[:, prompt_length:]",
        "if self.state.global_step != self._last_loaded_step:",
        "self.vllm_generation.sync_weights()",
        "self._last_loaded_step = self.state.global_step",
    ),
    GRPOTrainer.log: ('mode = "train" if self.model.training else "eval"',),
    trl_utils: ("compact = _use_triton(hidden_states.device)",),
}


def changed_lines() -> list[str]:
    """List the quotes of `RELIED_ON` that the installed TRL no longer contains."""
    return [
        f"{holder.__name__}: {line}"
        for holder, lines in RELIED_ON.items()
        for line in lines
        if line not in inspect.getsource(holder)
    ]


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an instance or module; afterwards all is as before."""
    own = vars(holder)
    had, before = name in own, own.get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if had:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


@contextmanager
def generate_replaced(model: Any, generate: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Sample by `generate` where TRL calls `model.generate`.

    1859-1872: `_generate_single_turn` calls it as `generate(**inputs, generation_config=...)` on
    the unwrapped model.
    """
    with replaced(model, "generate", generate):
        yield


@contextmanager
def truncated_kept(trainer: GRPOTrainer) -> Iterator[None]:
    """Let `_generate_and_score_completions` (2487-2498) mask no truncated completion.

    It takes for truncated what ends in no end token, so also what ended at a stop string.
    """
    with replaced(trainer, "mask_truncated_completions", False):
        yield


@contextmanager
def compact_lm_head() -> Iterator[None]:
    """Score completion tokens only, on a CPU too.

    trl/trainer/utils.py:1642 reads the flag only to decide whether to drop the masked positions
    before the LM head; the kernels have their own copy of the function. Scoring all positions was
    35 % of a step on a CPU.
    """
    with replaced(trl_utils, "_use_triton", lambda device: True):
        yield


@contextmanager
def loss_of(trainer: GRPOTrainer, scores: Scores) -> Iterator[dict[str, list[float]]]:
    """Let `_compute_loss` take these scores of its rows, and keep its metrics to itself.

    3020-3049: it asks `_get_per_token_logps_and_entropies` for the scores, once. 3253-3290: it
    reduces and gathers its metrics over the processes, which would wait for one another forever:
    they differ in the number and size of their micro-batches.

    Yields:
        What is logged within.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    accelerator = trainer.accelerator
    with (
        replaced(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: scores),
        replaced(trainer, "_metrics", trainer._metrics | {"train": metrics}),
        replaced(accelerator, "reduce", lambda tensor, reduction: tensor),
        replaced(accelerator, "gather", lambda tensor: tensor),
    ):
        yield metrics
