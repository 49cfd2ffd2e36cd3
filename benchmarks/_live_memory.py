"""Memory of the live tensors alone, without that of the allocator and the libraries."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
GEMMS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


class LiveMemory(TorchDispatchMode):
    """Adds up the storages of all tensors that are used in its context, until they are freed.

    The equivalent on a CPU of `torch.cuda.max_memory_allocated`, without the memory that a kernel
    allocates while it runs.

    Attributes:
        now: live bytes.
        peak: the most live bytes at one time.
        gemm_flop: floating point operations of the matrix products; not those of attention, which
            is another kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.gemm_flop = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int]
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count what it created."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        if func.overloadpacket in GEMMS:
            self.gemm_flop += flop_registry[func.overloadpacket](*args, out_val=made)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = size = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size
