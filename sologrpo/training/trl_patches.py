"""Replacements for parts of TRL and accelerate, each for the length of one call.

Each context manager names the lines of TRL 1.16.0 that it relies on: `grpo_trainer.py` unless it
names another file. `tests/training/test_trl_patches.py` quotes them, and fails when they change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from peft import PeftModel
from trl import GRPOTrainer

# Entries of the vocabulary whose logits are computed at once on a CPU. Without Triton some thirty
# operations pass over them, which takes half as long where they stay in the processor's caches.
CPU_VOCABULARY_TILE = 1024

# What a forward pass gives: (B, T) log-probs, (B, T) entropies or None, auxiliary loss or None.
Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an instance or a module, and restore what was there."""
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
    """Sample by `generate` where TRL (1859-1872) calls that of the unwrapped model."""
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
def lm_head_at(model: Any, places: torch.Tensor) -> Iterator[None]:
    """Score these (K,) places of a sequence only, without waiting for the device.

    trl/trainer/utils.py:1606-1660 would find them by a mask, and the host would wait for their
    number. So the backbone hands on their hidden states alone. The size of a tile is handed to the
    kernels in 1650. The model is not wrapped for DDP or DeepSpeed, and `shift_labels` are K too.
    """

    def keep(backbone: Any, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, places]
        return output

    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    tile = vocabulary_tile(torch.cuda.is_available())
    with (
        inner.base_model.register_forward_hook(keep),
        replaced(trl_utils, "_use_triton", lambda device: False),
        replaced(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", tile),
    ):
        yield


def vocabulary_tile(on_gpu: bool) -> int:
    """Return how many entries of the vocabulary the LM head computes at once."""
    return trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE if on_gpu else CPU_VOCABULARY_TILE
