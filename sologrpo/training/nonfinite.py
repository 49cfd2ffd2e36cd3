"""A loss or gradient that is not a number must not reach the weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = "nonfinite"


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no element is NaN or infinite; waits for the device once."""
    total: torch.Tensor = torch.nn.utils.get_total_norm(tensors)
    return bool(total.isfinite())


def save_batch(inputs: Mapping[str, Any], output_dir: Path, step: int) -> Path:
    """Keep what a step was trained on for study: its tensors, on the CPU.

    Args:
        inputs: the batch as the loss got it: token ids and masks (B, T), advantages (B,), and the
            log-probs under the old policy, if there are any.
        output_dir: of the run.
        step: optimizer step, counted from 1.

    Returns:
        The file, `nonfinite/step-N.safetensors`.
    """
    file = output_dir / FOLDER / f"step-{step}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().cpu().clone()
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, file)
    return file
