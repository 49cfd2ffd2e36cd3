"""Memory that a run will need, by part, and what to change where it is more than there is.

Computed from the model's config and the run's settings; docs/memory.md sets it beside measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from sologrpo.config import SoloGRPOConfig
from sologrpo.engines import FREE_SHARE, LOGIT_BYTES
from sologrpo.footprint import FP32, Footprint

# trl/trainer/utils.py:1646 (1.16): the LM head's logits are never whole. Of a tile, so many
# tensors of fp32 live at a time: the logits, their probabilities and the gradient.
LOGIT_TILES = 3


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the parts. Sampling and training follow each other, and only one is held at a time.

    Attributes:
        weights: frozen weights.
        adapter: adapter, gradient and optimizer.
        merged: copy of the weights for sampling; left out by itself where it does not fit.
        cache: keys, values and logits of all completions of a generation batch; sampled in several
            batches where it does not fit.
        trained_tokens: tokens of the largest forward-backward pass.
        activations: what the layers keep of them, and what the backward pass of a layer adds.
        logits: tiles of the LM head.
    """

    weights: int
    adapter: int
    merged: int
    cache: int
    trained_tokens: int
    activations: int
    logits: int

    @property
    def held(self) -> int:
        """Bytes from the first step to the last."""
        return self.weights + self.adapter

    @property
    def needed(self) -> int:
        """Bytes below which the run cannot work: sampling does with what is left."""
        return self.held + self.activations + self.logits

    def peak(self, free: int) -> int:
        """Bytes at the highest point of a step, if so many are free before the run."""
        left = max(0, free - self.held)
        merged = self.merged if self.merged <= FREE_SHARE * left else 0
        cache = min(self.cache, int(FREE_SHARE * (left - merged)))
        return max(self.held + merged + cache, self.needed)


def plan_memory(size: Footprint, args: SoloGRPOConfig, prompt_lengths: Sequence[int]) -> MemoryPlan:
    """Compute the parts for the longest prompts and completions that may occur.

    Args:
        size: of the model.
        args: of the trainer.
        prompt_lengths: tokens of the prompts.
    """
    prompt_T, completion_T = max(prompt_lengths), args.max_completion_length
    accumulated = args.gradient_accumulation_steps
    rows = args.per_device_train_batch_size * accumulated  # of an optimizer step
    sampled = args.per_device_train_batch_size * args.steps_per_generation
    prompts = -(-rows // args.num_generations) if args.share_prompts else rows
    tokens = min(prompts * prompt_T + rows * completion_T, args.train_token_budget)
    tokens = max(tokens, prompt_T + completion_T)  # a row is never cut
    kept = (
        size.checkpointed_token_bytes if args.gradient_checkpointing else size.trained_token_bytes
    )
    # The backward pass of a layer holds its gradients beside its activations, which checkpointing
    # computes again.
    passing = size.layer_token_bytes * (2 if args.gradient_checkpointing else 1)
    tile = min(tokens, TOKEN_CHUNK_SIZE) * min(size.vocabulary, _CHUNKED_LOGPROB_CHUNK_SIZE) * FP32
    return MemoryPlan(
        weights=size.weights_bytes,
        adapter=size.adapter_bytes,
        merged=size.merged_bytes,
        cache=sampled
        * ((prompt_T + completion_T) * size.sampled_token_bytes + size.vocabulary * LOGIT_BYTES),
        trained_tokens=tokens,
        activations=tokens * (kept + passing),
        logits=LOGIT_TILES * tile,
    )


def memory_mend(plan: MemoryPlan, free: int, args: SoloGRPOConfig, four_bit: bool) -> str | None:
    """Say which setting to change for the run to fit into the free memory; None where it does."""
    if plan.needed <= free:
        return None
    if plan.held > FREE_SHARE * free:
        return "take a smaller model" if four_bit else "set load_in_4bit: true, or a smaller model"
    if not args.gradient_checkpointing:
        return "set gradient_checkpointing: true"
    token = (plan.needed - plan.held) / plan.trained_tokens
    fitting = int((FREE_SHARE * free - plan.held) / token) // 256 * 256
    if fitting >= 256 and plan.trained_tokens <= args.train_token_budget:
        return f"set train_token_budget: {fitting}"
    return "lower max_completion_length, or leave out long prompts with max_prompt_tokens"
