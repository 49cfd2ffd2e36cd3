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
from peft import PeftModel
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

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
    with _lm_head_in_tiles(drops_masked=True):
        yield


@contextmanager
def _lm_head_in_tiles(drops_masked: bool) -> Iterator[None]:
    tile = vocabulary_tile(torch.cuda.is_available())
    with (
        replaced(trl_utils, "_use_triton", lambda device: drops_masked),
        replaced(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", tile),
    ):
        yield


@contextmanager
def lm_head_at(model: Any, places: torch.Tensor) -> Iterator[None]:
    """Score these places of a sequence only, without waiting for the device.

    trl/trainer/utils.py:1606-1660 would find them by a mask, and the host would wait for their
    number. So the backbone hands on their hidden states alone, and there is nothing to drop.

    Args:
        model: with TRL's fused LM head, not wrapped for DDP or DeepSpeed.
        places: (K,); `shift_labels` is as long.
    """

    def keep(backbone: Any, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, places]
        return output

    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    with (
        inner.base_model.register_forward_hook(keep),
        _lm_head_in_tiles(drops_masked=False),
    ):
        yield


def vocabulary_tile(on_gpu: bool) -> int:
    """Return how many entries of the vocabulary the LM head computes at once."""
    return trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE if on_gpu else CPU_VOCABULARY_TILE


@contextmanager
def loss_of(trainer: GRPOTrainer, scores: Scores) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Let `_compute_loss` take these scores of its rows, and keep its metrics to itself.

    3020-3049: it asks `_get_per_token_logps_and_entropies` for the scores, once. 3253-3290: it
    reduces and gathers its metrics over the processes, which would wait for one another forever:
    they differ in the number and size of their micro-batches. It reads each metric from the device
    with `item`, and `nanmin` and `nanmax` read two more values: here nothing is read.

    Args:
        trainer: whose loss is computed within the block.
        scores: of the rows of that loss.

    Yields:
        The metrics that are logged within the block, still on the device.
    """
    metrics: dict[str, list[torch.Tensor]] = defaultdict(list)
    accelerator = trainer.accelerator
    with (
        replaced(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: scores),
        replaced(trainer, "_metrics", trainer._metrics | {"train": metrics}),
        replaced(accelerator, "reduce", lambda tensor, reduction: tensor),
        replaced(accelerator, "gather", lambda tensor: tensor),
        replaced(torch.Tensor, "item", torch.Tensor.detach),
        replaced(grpo_trainer, "nanmin", nanmin),
        replaced(grpo_trainer, "nanmax", nanmax),
    ):
        yield metrics


def nanmin(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the minimum of what is not NaN, NaN if all is; waits for no device, unlike TRL's."""
    is_nan = tensor.isnan()
    return tensor.masked_fill(is_nan, torch.inf).amin().masked_fill(is_nan.all(), torch.nan)


def nanmax(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the maximum as `nanmin` does the minimum."""
    return -nanmin(-tensor)
