"""Replacements for parts of TRL and accelerate, each for the length of one call.

Each context manager names the lines of TRL 1.16.0 that it relies on: `grpo_trainer.py` unless it
names another file. `tests/training/test_trl_patches.py` quotes them, and fails when they change.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from trl import GRPOTrainer

# Entries of the vocabulary whose logits are computed at once on a CPU. Without Triton some thirty
# operations pass over them, which takes half as long where they stay in the processor's caches.
CPU_VOCABULARY_TILE = 1024

# What a forward pass gives: (B, T) log-probs, (B, T) entropies or None, auxiliary loss or None.
Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and restore what was there.

    Args:
        holder: an instance or a module.
        name: of the attribute; a method or an attribute of the class may have it too.
        value: of the attribute within the block.
    """
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
    35 % of a step on a CPU. It hands the size of a tile to the kernels in 1650.
    """
    tile = vocabulary_tile(torch.cuda.is_available())
    with (
        replaced(trl_utils, "_use_triton", lambda device: True),
        replaced(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", tile),
    ):
        yield


def vocabulary_tile(on_gpu: bool) -> int:
    """Return how many entries of the vocabulary the LM head computes at once."""
    return trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE if on_gpu else CPU_VOCABULARY_TILE


@contextmanager
def loss_of(trainer: GRPOTrainer, scores: Scores) -> Iterator[dict[str, list[float]]]:
    """Let `_compute_loss` take these scores of its rows, and keep its metrics to itself.

    3020-3049: it asks `_get_per_token_logps_and_entropies` for the scores, once. 3253-3290: it
    reduces and gathers its metrics over the processes, which would wait for one another forever:
    they differ in the number and size of their micro-batches.

    Args:
        trainer: whose loss is computed within the block.
        scores: of the rows of that loss.

    Yields:
        The metrics that are logged within the block.
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
