"""Keep a loss or gradient that is not finite from the weights, and such weights from the disk."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.errors import RunError

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"


class NonfiniteSteps:
    """Leave out steps whose loss or gradient is not finite, and stop after too many.

    Args:
        args: `max_nonfinite_steps` is the number that may be left out.
    """

    def __init__(self, args: SoloGRPOConfig) -> None:
        self._args = args
        self._count = 0

    def check(
        self, model: torch.nn.Module, batch: Mapping[str, Any], value: torch.Tensor, step: int
    ) -> None:
        """Drop the gradients of a step that is not finite.

        Args:
            model: its parameters hold the gradients.
            batch: what the step was trained on; it is saved for study.
            value: of the loss.
            step: optimizer step, counted from 1.

        Raises:
            RunError: if `max_nonfinite_steps` were left out before.
        """
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # A scaled fp16 gradient may overflow: the scaler takes care of that, and scales less.
        if all_finite([value] if self._args.fp16 else [value, *gradients]):
            return
        self._count += 1
        text = f"the loss or a gradient of step {step} is not a finite number"
        if self._args.process_index == 0:
            text += f"; its batch is in {save_batch(batch, Path(self._args.output_dir), step)}"
        if self._count > self._args.max_nonfinite_steps:
            raise RunError(
                f"{text}: lower learning_rate or max_grad_norm, or allow some with "
                "max_nonfinite_steps"
            )
        logger.warning("%s; the step is left out", text)
        for parameter in model.parameters():
            parameter.grad = None  # the optimizer passes over it


class StopAtNonfiniteWeights(TrainerCallback):  # type: ignore[misc]
    """Stop a run whose weights are no longer finite, before they are saved.

    The gradients may all be finite: a learning rate that is too high is enough, and TRL's trainer
    checks nothing.
    """

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **kwargs: Any,
    ) -> None:
        """Check the weights that the step has changed.

        Raises:
            RunError: if one is NaN or infinite.
        """
        if not all_finite(p for p in model.parameters() if p.requires_grad):
            raise RunError(
                f"step {state.global_step} made weights of the adapter NaN or infinite, and they "
                "are not saved: lower learning_rate or max_grad_norm"
            )


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Check that no element is NaN or infinite; waits for the device once."""
    total: torch.Tensor = torch.nn.utils.get_total_norm(tensors)
    return bool(total.isfinite())


def save_batch(batch: Mapping[str, Any], output_dir: Path, step: int) -> Path:
    """Save the tensors that a step was trained on.

    Args:
        batch: as the loss got it: token ids and masks (B, T), advantages (B,), and the log-probs
            of the old policy, if there are any.
        output_dir: of the run.
        step: optimizer step, counted from 1.

    Returns:
        The file, `nonfinite/step-N.safetensors`.
    """
    file = output_dir / FOLDER / f"step-{step}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().cpu().clone()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, file)
    return file
