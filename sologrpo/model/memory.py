"""Device memory: how much is free, what a pass keeps, and smaller passes after it ran out."""

import gc
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft import PeftModel
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# A process on a CPU takes up to this many times the size of its tensors: glibc keeps freed memory,
# and fragmentation adds to it. Measured (docs/memory.md) were 1.6 to 2.3 times, but 2.6 and 3.2 in
# fp32 with gradient checkpointing.
CPU_PROCESS, CPU_PROCESS_CHECKPOINTING_FP32 = 2.5, 3.2

# What memory of the device runs out in besides torch's allocator and cuDNN: cuBLAS (its handle and
# workspace), Triton's launcher and bitsandbytes' kernels, CUDA's runtime and driver.
_OTHER_LACK = re.compile(
    "CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDA( driver)? error: out of memory|Triton Error \[CUDA\]: out of memory"
    "|Error out of memory at line|cudaErrorMemoryAllocation"
)

# Activations are counted for this many tokens and twice as many: few, so that attention scores,
# which the kernels used in training do not keep, are negligible.
PROBE_TOKENS = 2


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error means that the device, or the machine, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, Exception):
        return False
    return bool(should_reduce_batch_size(error) or _OTHER_LACK.search(str(error)))


def free_bytes(device: torch.device) -> int:
    """Count the bytes that can still be allocated, including those that PyTorch keeps for reuse."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    return int(psutil.virtual_memory().available)


def cpu_process(number_bytes: int, checkpointing: bool) -> float:
    """Return how many times the size of its tensors a process on a CPU takes."""
    is_fp32 = number_bytes == torch.float32.itemsize
    return CPU_PROCESS_CHECKPOINTING_FP32 if checkpointing and is_fp32 else CPU_PROCESS


def bytes_for_tensors(device: torch.device, process: float, free: int | None = None) -> int:
    """Count the free bytes that tensors can take; on a CPU, `process` is from `cpu_process`."""
    free = free_bytes(device) if free is None else free
    return free if device.type == "cuda" else int(free / process)


def activation_bytes(model: PreTrainedModel | PeftModel) -> int:
    """Measure what all layers together keep of a token for the backward pass, in bytes.

    What does not grow with the tokens, such as autocast's copies of weights, is left out. The model
    may be on the meta device.
    """
    was_training = model.training
    model.eval()  # while training, checkpointing would keep less
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()  # it keeps its mask, and what follows keeps its output
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Dropout draws numbers.
        with torch.random.fork_rng(devices), _reference_attention_in_half():
            more, fewer = (_kept_bytes(model, n * PROBE_TOKENS) for n in (2, 1))
    finally:
        model.train(was_training)
    return (more - fewer) // PROBE_TOKENS


def _kept_bytes(model: PreTrainedModel | PeftModel, tokens: int) -> int:
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=model.device)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        inner.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def _reference_attention_in_half() -> Iterator[None]:
    """Let attention on the meta device keep what it is given, as kernels do, not fp32 copies."""
    backends = torch.backends.cuda  # the flag is that of every device
    before = backends.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    backends.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        backends.allow_fp16_bf16_reduction_math_sdp(before)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per token of a pass: kept by all layers, and added by the layer that runs backward."""

    kept: int
    passing: int

    @classmethod
    def of(
        cls, activations: int, layers: int, hidden_size: int, number_bytes: int, checkpointing: bool
    ) -> "TokenBytes":
        """Split the activations of a token in all layers, see `activation_bytes`.

        Gradient checkpointing keeps the input of each layer only. The backward pass computes a
        layer again, and holds its gradients and its activations.
        """
        layer = activations // layers
        if checkpointing:
            return cls(layers * hidden_size * number_bytes, 2 * layer)
        return cls(activations, layer)

    def fitting(self, free: float) -> int:
        """Count the tokens of a pass that fits into this many bytes."""
        return int(free / (self.kept + self.passing))


class TokenBudget:
    """Tokens (padding counted) of one pass, halved whenever the device runs out of memory.

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

        The caller then repeats the pass in smaller parts. `largest` are the tokens of its largest
        part, which the budget may be far above, and `rows` the rows of that part: a single row
        cannot be split, so its error is passed on.
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
