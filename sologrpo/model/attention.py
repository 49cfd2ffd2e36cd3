"""Attention along a tree of tokens, in place of transformers' `sdpa` where a pass is given one.

Shapes: B rows, N tokens of a row, H heads of keys and values, Q heads of queries for each of them,
D width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SDPA = "sdpa"
# Arguments of attention that computes something else; a tree would leave them out.
_OTHER_KINDS = ("softcap", "s_aux", "position_bias", "sliding_window")


class Tree(Protocol):
    """Tokens that attend to some of the others."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Turn query (B, H * Q, N, D), key and value (B, H, N, D) into (B, N, H * Q, D)."""


def along(tree: Tree) -> dict[str, Any]:
    """Build the arguments of a model's forward pass that make attention follow a tree.

    Without a mask, transformers reads from the positions where rows begin. A mask of four
    dimensions it hands on as it is.
    """
    return {"tree": tree, "attention_mask": torch.ones(1, 1, 1, 1)}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend along the tree, which replaces the mask; without one, as transformers' `sdpa` does.

    Shapes are those of `Tree.attend`. Nothing is returned in place of the attention weights.
    """
    if tree is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    other = [name for name in _OTHER_KINDS if kwargs.get(name) is not None]
    if other:
        raise NotImplementedError(f"attention with {', '.join(other)} along a tree of tokens")
    kind = query.device.type  # the meta device has no autocast
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # as for torch's own attention
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return tree.attend(module, query, key, value, scaling), None


@contextmanager
def tree_attention_enabled(config: PretrainedConfig) -> Iterator[None]:
    """Have a model with any attention implementation follow trees, inside the context."""
    before = config._attn_implementation
    config._attn_implementation = SDPA
    try:
        yield
    finally:
        config._attn_implementation = before


class _Probe:
    """A tree of one token, which attends to itself."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        self.calls.append(int(module.layer_idx))  # type: ignore[arg-type]
        return value.repeat_interleave(query.size(1) // value.size(1), dim=1).transpose(1, 2)


_FOLLOWING: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def follows_trees(model: PreTrainedModel | PeftModel) -> bool:
    """Check whether a tree reaches the attention of every layer, once each.

    Some models hand nothing on; DiffLlama attends twice in a layer. The first check of a model
    computes one token with it.
    """
    if model not in _FOLLOWING:
        _FOLLOWING[model] = _reaches_every_layer(model)
    return _FOLLOWING[model]


@torch.no_grad()
def _reaches_every_layer(model: PreTrainedModel | PeftModel) -> bool:
    if not (model._supports_sdpa and model._supports_attention_backend):
        return False
    config, probe = model.config.get_text_config(), _Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with tree_attention_enabled(config), torch.random.fork_rng(devices):  # dropout draws numbers
        try:
            model(input_ids=token, position_ids=token, use_cache=False, **along(probe))
        except (TypeError, NotImplementedError):  # it takes no such argument, or is of another kind
            return False
    return sorted(probe.calls) == list(range(int(config.num_hidden_layers)))


AttentionInterface.register(SDPA, attention)

# cuDNN builds a plan for every new shape, for tens of milliseconds, and here every batch has new
# ones. Flash attention, or memory-efficient attention, needs none.
torch.backends.cuda.enable_cudnn_sdp(False)
