"""Measure the share of the device's speed that the training passes use."""

import time
from functools import cache

import torch

from sologrpo.model.trial import Model

# Tokens of the product that is timed, and how often: the best counts.
PROBE_TOKENS, PROBES = 1024, 5


def least_seconds(model: Model, dtype: torch.dtype, computed: int, scored: int) -> float:
    """Estimate the seconds of training passes if matrix products were all that takes time.

    Args:
        model: with its adapter.
        dtype: that it computes in.
        computed: tokens that pass through the layers.
        scored: tokens that the LM head sees.
    """
    width = model.config.get_text_config().hidden_size
    fastest = fastest_product(width, model.device, dtype)
    return useful_operations(model, computed, scored) / fastest


def useful_operations(model: Model, computed: int, scored: int) -> int:
    """Count the operations of the matrix products that a forward and backward pass needs.

    Two for each weight of a linear layer and each token in the forward pass, two for the gradient
    of the layer's input, and two for that of the weight where it is trained. What gradient
    checkpointing computes again, attention and experts of a mixture do not count.

    Args:
        model: with its adapter.
        computed: tokens that pass through the layers.
        scored: tokens that the LM head sees.
    """
    head = model.get_output_embeddings()
    total = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            tokens = scored if module is head else computed
            per_weight = 6 if module.weight.requires_grad else 4
            total += per_weight * module.in_features * module.out_features * tokens
    return total


@cache
def fastest_product(width: int, device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a square matrix product, once per process.

    Args:
        width: of the model, and of the product.
        device: of the model.
        dtype: that the model computes in.
    """
    x = torch.ones(PROBE_TOKENS, width, device=device, dtype=dtype)
    weight = torch.ones(width, width, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(PROBES):
        _wait_for(device)
        start = time.perf_counter()
        x @ weight
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * PROBE_TOKENS * width**2 / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
