"""The device: which one, which number format is fast on it, and the allocator on CPU."""

import ctypes
import os
import platform

import torch

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def fast_dtype() -> torch.dtype:
    """Choose the dtype that this device multiplies natively and that trains well.

    bf16 on cards since Ampere and on CPUs with AMX, fp16 on older cards, fp32 on other CPUs: with
    AVX512-BF16 alone bf16 is 1.7 times slower in a matrix product, 1.6 times in a forward and
    backward pass of SmolLM2-135M; where it is emulated, 7 and 15 times (docs/LOG.md).
    """
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def describe_device() -> str:
    """Name the device in one line."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"CPU, {torch.get_num_threads()} threads"


def one_device() -> int | str:
    """Name the one device that holds all weights, for a `device_map`."""
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def prepare_cpu() -> None:
    """On a CPU, use all cores and keep freed memory; nothing to do on a GPU."""
    if not torch.cuda.is_available():
        _use_all_cores()
        _reuse_freed_memory()


def _use_all_cores() -> None:
    # `accelerate launch` sets OMP_NUM_THREADS=1 for its processes. That is right for several
    # processes on one machine, but leaves all cores but one idle for a single process.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and os.environ.get("WORLD_SIZE", "1") == "1" and torch.get_num_threads() == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def _reuse_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of handing it back to the kernel.

    A training step on CPU allocates and frees the same gigabytes again and again; by default each
    large block is mapped again and its pages are zeroed by the kernel, which was a third of the
    CPU time (docs/LOG.md). No effect without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_ARENA_MAX, 1)  # the backward thread takes what the forward thread gave back
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 256 * 2**20)
