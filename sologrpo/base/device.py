"""The device: which one, and which number format is fast on it."""

import math
import time
from collections.abc import Sequence
from functools import cache

import torch

# Rows of the measured products: tokens of a training pass, and completions sampled at once.
TRAINED_ROWS, DECODED_ROWS = 512, 64
LARGEST_SIDE = 1536  # of a measured weight; larger products reach the same rate
MEASURED_SECONDS = 0.6  # at least one round, in about this time
# By how much bf16 must be faster than fp32, which is exact.
BF16_ADVANTAGE = 1.15


def default_dtype() -> torch.dtype:
    """Choose the dtype where none is configured: bf16 or fp16 on a GPU, fp32 on a CPU.

    bf16 on cards since Ampere, fp16 on older ones. The flags of a CPU do not tell: with AVX512-BF16
    but no AMX, bf16 was four times as fast as fp32 on one machine, and slower on another
    (docs/LOG.md). A run on a CPU measures it instead (`gemm_rates`).
    """
    if not torch.cuda.is_available():
        return torch.float32
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


@cache
def gemm_rates(hidden: int, intermediate: int) -> dict[str, int]:
    """Measure a model's matrix products on this CPU, once per process: GFLOP/s by name of dtype."""
    hidden, intermediate = min(hidden, LARGEST_SIDE), min(intermediate, LARGEST_SIDE)
    shapes = [(intermediate, hidden), (hidden, intermediate), (hidden, hidden)]
    # Ones, because random numbers would come from the generator that the run seeds.
    operands = {
        name: [
            [torch.ones(size, dtype=getattr(torch, name))
             for size in ((out, into), (TRAINED_ROWS, into), (TRAINED_ROWS, out))]
            for out, into in shapes
        ]
        for name in ("float32", "bfloat16")
    }  # fmt: skip
    seconds = dict.fromkeys(operands, math.inf)
    end = time.perf_counter() + MEASURED_SECONDS
    while math.inf in seconds.values() or time.perf_counter() < end:
        for name, layer in operands.items():
            seconds[name] = min(seconds[name], _seconds_of_a_step(layer))
    operations = 3 * 2 * TRAINED_ROWS * sum(map(math.prod, shapes))
    return {name: round(operations / best / 1e9) for name, best in seconds.items()}


def _seconds_of_a_step(layer: Sequence[Sequence[torch.Tensor]]) -> float:
    """Time products in the proportions of a step: each token is decoded and trained on once.

    The backward pass of a frozen weight is one product, which gives the gradient of its input.
    """
    start = time.perf_counter()
    for weight, x, gradient in layer:
        torch.nn.functional.linear(x, weight)
        torch.mm(gradient, weight)
        for _ in range(TRAINED_ROWS // DECODED_ROWS):
            torch.nn.functional.linear(x[:DECODED_ROWS], weight)
    return time.perf_counter() - start


def faster_dtype(gflops: dict[str, int]) -> str:
    """Choose fp32 or bf16 by the rates of `gemm_rates`; a close call goes to fp32.

    >>> faster_dtype({"float32": 160, "bfloat16": 600})
    'bfloat16'
    >>> faster_dtype({"float32": 160, "bfloat16": 180})
    'float32'
    """
    is_faster = gflops["bfloat16"] > BF16_ADVANTAGE * gflops["float32"]
    return "bfloat16" if is_faster else "float32"


def gpu_gibibytes() -> float:
    """Return the memory of the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


def describe_device() -> str:
    """Name the device in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_properties(0).name}, {gpu_gibibytes():.0f} GiB"
    return f"CPU, {torch.get_num_threads()} threads"


def one_device() -> int | str:
    """Name the one device that holds all weights, for a `device_map`."""
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
