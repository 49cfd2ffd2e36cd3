"""Keep a loss or gradient that is not finite from the weights, and such weights from the disk."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sologrpo.base.errors import RunError


def check_finite(
    value: torch.Tensor, gradients: list[torch.Tensor], step: int, is_scaled: bool
) -> None:
    """Stop all processes, before weights change, if the loss or a gradient of one is not finite.

    A gradient that is scaled for fp16 may overflow: the scaler leaves that step out, and scales the
    next ones less.
    """
    finite = all_finite([value] if is_scaled else [value, *gradients])
    if not all(gather_object([finite])):
        raise RunError(
            f"the loss or a gradient of step {step} is not a finite number: lower learning_rate or "
            "max_grad_norm"
        )


class StopAtNonfiniteWeights(TrainerCallback):  # type: ignore[misc]
    """Stop a run whose weights are no longer finite, before they are saved.

    All gradients may be finite: a learning rate that is too high is enough.
    """

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **kwargs: Any,
    ) -> None:
        """Check the weights that the step has changed."""
        if not all_finite(p for p in model.parameters() if p.requires_grad):
            raise RunError(
                f"step {state.global_step} made weights of the adapter NaN or infinite, and they "
                "are not saved: lower learning_rate or max_grad_norm"
            )


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Check that no element is NaN or infinite; waits for the device once."""
    total: torch.Tensor = torch.nn.utils.get_total_norm(tensors)
    return bool(total.isfinite())
