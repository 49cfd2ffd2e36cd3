"""Device memory: how much is free, and smaller passes after it ran out."""

import gc
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size

logger = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error means that the device, or the machine, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


def free_bytes(device: torch.device) -> int:
    """Count the bytes that can still be allocated, including those that PyTorch keeps for reuse."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return int(psutil.virtual_memory().available)


class TokenBudget:
    """Tokens (padding counted) of one pass, halved whenever the device runs out of memory.

    Args:
        tokens: the initial budget.
        purpose: what the passes are for, used in the message.

    Example:
        >>> budget = TokenBudget(8192, "training")
        >>> for _ in range(2):  # the first pass fails, the second is smaller
        ...     with budget.halved_if_out_of_memory(largest=6000, rows=2):
        ...         if budget.tokens > 4096:
        ...             raise torch.OutOfMemoryError
        >>> budget.tokens
        3000
    """

    def __init__(self, tokens: int, purpose: str) -> None:
        self.tokens = tokens
        self._purpose = purpose

    @contextmanager
    def halved_if_out_of_memory(self, largest: int, rows: int) -> Iterator[None]:
        """Catch an out-of-memory error of a pass, halve the budget, and release the memory.

        The caller then repeats the pass in smaller parts. Any other error is passed on, and so is
        one that smaller parts cannot fix.

        Args:
            largest: tokens of the largest part of the pass; the budget may be far above it.
            rows: rows of that part. A single row cannot be split.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error) or rows < 2:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what the pass had computed
            self.tokens = min(self.tokens, largest) // 2
            logger.warning(
                "out of memory in %s with %d tokens in one pass: continuing with %d",
                self._purpose, largest, self.tokens,
            )  # fmt: skip
            release_unused()


def release_unused() -> None:
    """Release memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
