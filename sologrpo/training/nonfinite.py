"""Keep a loss or gradient that is not finite from the weights, and such weights from the disk."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.errors import RunError

logger = logging.getLogger(__name__)

FOLDER = "nonfinite"


class NonfiniteSteps:
    """Give steps whose loss or gradient is not finite a gradient of zero; stop after too many.

    Args:
        args: `max_nonfinite_steps` is the number of steps without a stop.
    """

    def __init__(self, args: SoloGRPOConfig) -> None:
        self._args = args
        self._count = 0

    def check(
        self,
        gradients: list[torch.Tensor],
        batch: Mapping[str, Any],
        value: torch.Tensor,
        step: int,
    ) -> None:
        """Set the gradients to zero if they, or those of another process, are not finite.

        Args:
            gradients: of this process, which are changed in place.
            batch: what the step was trained on; it is saved for study.
            value: of the loss.
            step: optimizer step, counted from 1.

        Raises:
            RunError: if there were `max_nonfinite_steps` of them before.
        """
        # A scaled fp16 gradient may overflow: the scaler takes care of that, and scales less.
        finite = all_finite([value] if self._args.fp16 else [value, *gradients])
        if all(gather_object([finite])):
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
        logger.warning("%s; it counts as zero", text)
        for gradient in gradients:
            gradient.zero_()


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
