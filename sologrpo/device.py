"""The device: which one, and which number format is fast on it."""

import torch


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
