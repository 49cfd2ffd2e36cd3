"""Estimate the memory of a run by component, and how to fix a shortage.

Computed from the model's config and the run's settings. docs/memory.md has measurements next to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.plan.footprint import FP32, Footprint
from sologrpo.sampling.sampler import FREE_SHARE, LOGIT_BYTES
from sologrpo.training.packed_loss import PASS_TOKENS_ON_CPU, PASS_TOKENS_ON_GPU
from sologrpo.training.packing import Rows
from sologrpo.training.trl_patches import vocabulary_tile

# trl/kernels/chunked_logprob.py:254-298 (1.16): the LM head's logits are computed in tiles, each in
# place by a Triton kernel. Without Triton the backward pass holds seven copies of a tile in fp32
# (logits twice, log-probs, probabilities, the gradient and two of its intermediates) and a mask of
# one byte.
COPIES_OF_TILE = 7 + 1 / FP32


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by component. Sampling and training take turns, so only one of them is held at a time.

    Attributes:
        adapter: adapter, gradient and optimizer.
        merged: copy of the weights for sampling; not made where it does not fit.
        cache: keys and values of a generation batch, of a prompt once for all of its completions,
            and logits. It is sampled in several batches where they do not fit.
        packed: passes are made of as many rows as fit; otherwise they are TRL's micro-batches.
        step_tokens: tokens that the passes of an optimizer step compute.
        trained_tokens: tokens of the largest of these passes.
        layer: added by the backward pass of one layer.
        logits: added by the backward pass of the LM head, which comes before those of the layers.
    """

    weights: int
    adapter: int
    merged: int
    cache: int
    packed: bool
    step_tokens: int
    trained_tokens: int
    activations: int
    layer: int
    logits: int

    @property
    def held(self) -> int:
        """Bytes held throughout the run."""
        return self.weights + self.adapter

    @property
    def training(self) -> int:
        """Bytes added by a forward-backward pass."""
        return self.activations + max(self.layer, self.logits)

    @property
    def needed(self) -> int:
        """Bytes that the run cannot do without; sampling adapts to what is left."""
        return self.held + self.training

    def sampling(self, free: int) -> tuple[int, int]:
        """Return the bytes of the merged copy and of the cache; `free` is before the run."""
        left = max(0, free - self.held)
        merged = self.merged if self.merged <= FREE_SHARE * left else 0
        return merged, min(self.cache, int(FREE_SHARE * (left - merged)))

    def peak(self, free: int) -> int:
        """Return the highest use of memory in a step, in bytes; `free` is before the run."""
        return max(self.held + sum(self.sampling(free)), self.needed)


def plan_memory(
    size: Footprint,
    args: SoloGRPOConfig,
    prompt_lengths: Sequence[int],
    free: int,
    *,
    root_T: int = 0,
    packed: bool = True,
    on_gpu: bool,
) -> MemoryPlan:
    """Estimate memory for the longest prompts and completions that can occur.

    Args:
        prompt_lengths: tokens of each prompt.
        free: bytes that tensors can take.
        root_T: tokens that all prompts begin with.
    """
    prompt_T, completion_T = max(prompt_lengths), args.max_completion_length
    sampled = args.per_device_train_batch_size * args.steps_per_generation
    prompts = math.ceil(sampled / args.num_generations)
    token = size.token_bytes(bool(args.gradient_checkpointing))
    left = free - size.weights_bytes - size.adapter_bytes
    budget = args.train_token_budget or max(1, token.fitting(FREE_SHARE * left))
    micro_batch, row_T = args.per_device_train_batch_size, prompt_T + completion_T
    if packed:
        passes = _passes(args, prompt_T, root_T, budget, on_gpu)
    else:
        passes = [(micro_batch * row_T, micro_batch)] * args.gradient_accumulation_steps
    tokens, rows = max(passes)
    # Attention over prompts that are not shared takes a mask, which every layer converts.
    mask_T = tokens if packed else row_T
    mask = 0 if packed and args.share_prompts else tokens * mask_T * size.number_bytes
    masks = 0 if args.gradient_checkpointing else size.layers
    # The LM head sees completions only; in TRL's own pass on a CPU every token, in TRL's tiles.
    seen = rows * completion_T if packed or on_gpu else tokens
    scored = min(seen, TOKEN_CHUNK_SIZE)
    vocabulary = vocabulary_tile(on_gpu or not packed)
    logits = scored * vocabulary * size.number_bytes
    if not on_gpu:
        tile = scored * min(size.vocabulary, vocabulary) * FP32
        logits += int(COPIES_OF_TILE * tile)
    return MemoryPlan(
        weights=size.weights_bytes,
        adapter=size.adapter_bytes,
        merged=size.merged_bytes,
        cache=(prompts * prompt_T + sampled * completion_T) * size.sampled_token_bytes
        + sampled * size.vocabulary * LOGIT_BYTES,
        packed=packed,
        step_tokens=sum(tokens for tokens, _ in passes),
        trained_tokens=tokens,
        activations=tokens * token.kept + masks * mask,
        layer=tokens * token.passing + mask,
        logits=logits,
    )


def _passes(
    args: SoloGRPOConfig, prompt_T: int, root_T: int, budget: int, on_gpu: bool
) -> list[tuple[int, int]]:
    """Count the tokens and rows of the passes of a step in which all rows are the longest."""
    every = range(args.per_device_train_batch_size * args.gradient_accumulation_steps)
    rows = Rows(
        [row // args.num_generations if args.share_prompts else row for row in every],
        [prompt_T] * len(every),
        [args.max_completion_length] * len(every),
        root_T if args.share_prompts else 0,
    )
    if args.train_token_budget is None:
        pass_tokens = PASS_TOKENS_ON_GPU if on_gpu else PASS_TOKENS_ON_CPU
        budget = rows.best_budget(every, budget, pass_tokens)
    return [(rows.tokens(group), len(group)) for group in rows.packed(every, budget)]


def memory_fix(plan: MemoryPlan, free: int, args: SoloGRPOConfig, four_bit: bool) -> str | None:
    """Name the setting to change so that a run fits into memory; None if it fits."""
    if plan.needed <= free:
        return None
    if plan.packed and args.train_token_budget is not None:
        return "leave out train_token_budget: what fits is then computed at once"
    if plan.held > FREE_SHARE * free:
        smaller = "use a smaller model"
        return smaller if four_bit else f"set load_in_4bit: true, or {smaller}"
    if not plan.packed and args.per_device_train_batch_size > 1:
        return "lower per_device_train_batch_size, and raise gradient_accumulation_steps as much"
    if not args.gradient_checkpointing:
        return "set gradient_checkpointing: true"
    return "lower max_completion_length, or leave out long prompts with max_prompt_tokens"
