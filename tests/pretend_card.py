"""A pretend GPU: tensors that claim to be on `cuda:0`, and compute on the CPU.

As on a GPU, an operation that mixes devices is an error. Every wait of the host for the GPU is
counted, with the line of code. CUDA graphs are recorded and replayed.

It does not show which kernels a GPU would run, how fast, with what rounding, or in how much memory.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
T = TypeVar("T")
aten = torch.ops.aten

# What the host waits for, besides copies: the shape of the result, or the value itself.
WAITS = {
    aten._local_scalar_dense.default: "reads a value",
    aten.equal.default: "compares",
    aten.nonzero.default: "counts what is not zero",
    aten.masked_select.default: "counts a mask",
    aten._unique2.default: "counts unique values",
    aten.unique_dim.default: "counts unique values",
    aten.unique_consecutive.default: "counts unique values",
    aten.bincount.default: "counts bins",
    aten.repeat_interleave.Tensor: "counts repeats",
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class CardTensor(torch.Tensor):
    """A tensor on the pretend GPU.

    Attributes:
        held: its values, in main memory.
    """

    held: torch.Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "CardTensor":
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device="meta")
            made = torch.Tensor._make_subclass(
                cls, empty, False, dispatch_device=True, device_for_backend_keys=CUDA
            )
            made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        raise RuntimeError(f"{func} is called outside of `pretend_card`")

    def __repr__(self, **kwargs: Any) -> str:
        return f"CardTensor({self.held})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    # torch's own code would make a tensor on the meta device, without the numbers.
    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_moved(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_moved(index), value)

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=CUDA)


class Card(TorchDispatchMode):
    """The pretend GPU.

    Attributes:
        waits: of the host, by what for and where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._capturing: Graph | None = None

    def report(self) -> str:
        """List the waits, one to a line."""
        return "\n".join(f"{n:5d} x {place}" for place, n in self.waits.most_common())

    def move(self, value: T) -> T:
        """Move a tensor, the tensors of a batch, or a model in place."""
        if isinstance(value, torch.nn.Module):
            for module in value.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        moved = torch.nn.Parameter(self.move(p.data), p.requires_grad)
                        module._parameters[name] = moved
                for name, buffer in module._buffers.items():
                    module._buffers[name] = self.move(buffer)
            return value
        with _disable_current_modes():
            return tree_map(
                lambda x: CardTensor(x.clone()) if isinstance(x, torch.Tensor) else x, value
            )

    def wait(self, reason: str) -> None:
        place = _place()
        if self._capturing is not None:
            raise RuntimeError(f"the host {reason} while a CUDA graph is captured: {place}")
        self.waits[f"{place} {reason}"] += 1

    @contextmanager
    def capture(self, graph: "Graph", pool: Any = None) -> Iterator[None]:
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on = [x for x in tensors if isinstance(x, CardTensor)]
        if func is torch.ops.prim.device.default:
            return META if on else CPU  # only there is a backward pass in a build without CUDA
        if func is aten._fused_sdp_choice.default and on:
            return 0  # no kernel of a GPU: products and a softmax
        to_card = bool(on)
        if kwargs.get("device") is not None:
            to_card = torch.device(kwargs["device"]).type in ("cuda", "meta")
            kwargs["device"] = CPU
        if on and _mixes_devices(func, args, tensors):
            raise RuntimeError(f"{func} gets tensors on different devices: {_place()}")
        if reason := _reason_to_wait(func, args, kwargs, to_card):
            self.wait(reason)
        args, kwargs = tree_map(_held, (args, kwargs))
        out = func(*args, **kwargs)
        if (on or to_card) and self._capturing is not None:
            self._capturing.calls.append((func, args, kwargs, out))
        if _returns_its_argument(func):
            return next(x for x in tensors if _held(x) is out)
        return tree_map(_on_card, out) if to_card else out


class Graph:
    """Replaces `torch.cuda.CUDAGraph`: repeats the recorded operations in the same memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        with _disable_current_modes():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for kept, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


@contextmanager
def pretend_card() -> Iterator[Card]:
    """Pretend that there is a GPU, for a build of torch that knows none."""
    card, stream = Card(), SimpleNamespace(wait_stream=lambda other: None)
    stand_ins = {
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: card.wait("synchronizes"),
        "get_rng_state": lambda device=None: None,
        "set_rng_state": lambda state, device=None: None,
        "CUDAGraph": Graph,
        "graph": card.capture,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        # `torch.tensor(..., device="cuda")` then makes a tensor on the CPU and copies it.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(card)
        yield card


def _place() -> str:
    """Return the innermost line of code that is neither torch's nor of this file."""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.endswith(("contextlib.py", __file__)):
            short = name.split("site-packages/")[-1].removeprefix(f"{Path(__file__).parents[1]}/")
            return f"{short}:{line}"
    return "?"


def _moved(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_moved, index))
    return torch.tensor(index, device=CUDA) if isinstance(index, list) else index


def _held(x: Any) -> Any:
    return x.held if isinstance(x, CardTensor) else x


def _on_card(x: Any) -> Any:
    return CardTensor(x) if isinstance(x, torch.Tensor) else x


def _returns_its_argument(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write


def _mixes_devices(func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
    """Check whether a GPU would refuse this. It takes single numbers from main memory."""
    if func in (aten.copy_.default, aten._to_copy.default):
        return False
    if func in INDEXING:  # indices too may be in main memory
        tensors = [args[0], *args[2:3]]
    is_on = {isinstance(x, CardTensor) for x in tensors if x.dim() or isinstance(x, CardTensor)}
    return len(is_on) > 1 or (func in INDEXING and not isinstance(args[0], CardTensor))


def _reason_to_wait(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], to_card: bool
) -> str | None:
    """Return why the host waits for the device, or None."""
    if func is aten._to_copy.default:
        return _reason_of_copy(isinstance(args[0], CardTensor), to_card, kwargs.get("non_blocking"))
    if func is aten.copy_.default:
        to, source = (isinstance(x, CardTensor) for x in args[:2])
        return _reason_of_copy(source, to, len(args) > 2 and args[2])
    if not to_card:
        return None
    if func in INDEXING:
        indices = [x for x in args[1] if x is not None]
        if any(not isinstance(x, CardTensor) for x in indices):
            return "copies indices to the device"
        is_fill = len(indices) == 1 and len(args) > 2 and args[2].numel() == 1
        if any(x.dtype == torch.bool for x in indices) and not is_fill:
            return "counts a mask"
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    return WAITS.get(func)


def _reason_of_copy(from_card: bool, to_card: bool, non_blocking: bool | None) -> str | None:
    if from_card and not to_card:
        return "copies from the device"
    # What is not pinned goes through a buffer of the driver at once: the host need not wait.
    if to_card and not from_card and not non_blocking:
        return "copies to the device"
    return None
