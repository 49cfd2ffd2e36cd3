"""Memory of the tensors that live at one time, whatever the allocator and the libraries take."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Adds up the storages of all tensors that are made under it, until they are freed.

    On a CPU what `torch.cuda.max_memory_allocated` is on a GPU, but for what a kernel takes for
    itself while it runs.

    Attributes:
        now: bytes that live.
        peak: the most that lived at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int]
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = size = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size
