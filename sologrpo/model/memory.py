"""Memory of the device: how much is free, and going on with less after it ran out."""

import gc
import logging

import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size

logger = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the machine, had no room left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated, those that PyTorch keeps for reuse included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return int(psutil.virtual_memory().available)


class TokenBudget:
    """Tokens (padding counted) of one pass, halved whenever the device runs out of memory.

    Args:
        tokens: what to begin with.
        purpose: what the passes do, for the message.

    Example:
        >>> budget = TokenBudget(8192, "training")
        >>> budget.halve(torch.OutOfMemoryError(), largest=6000, rows=2)
        >>> budget.tokens
        3000
    """

    def __init__(self, tokens: int, purpose: str) -> None:
        self.tokens = tokens
        self._purpose = purpose

    def halve(self, error: Exception, largest: int, rows: int) -> None:
        """Make the next passes half as large as the one that failed.

        Args:
            error: what the pass raised.
            largest: tokens of the largest pass there was; the budget may have been far above it.
            rows: rows of that pass. A single one cannot be made smaller.

        Raises:
            Exception: the error itself, if memory was not the reason or there is nothing to halve.
        """
        if not is_out_of_memory(error) or rows < 2:
            raise error
        self.tokens = min(self.tokens, largest) // 2
        logger.warning(
            "out of memory in %s with %d tokens in one pass: going on with %d",
            self._purpose, largest, self.tokens,
        )  # fmt: skip


def release_unused() -> None:
    """Give back what a failed pass left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
