"""Gradient checkpointing stays on: a model left in evaluation mode would silently train without."""

from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer

from digits import digit_share
from fixed_rollouts import config, make_trainer, problems
from sologrpo.training.trainer import SoloGRPOTrainer

STEPS = 3


def off(trainer: Any) -> list[str]:
    """List modules in evaluation mode, and layers that keep all of their activations."""
    modules = list(trainer.model.named_modules())
    layers = [(n, m) for n, m in modules if isinstance(m, GradientCheckpointingLayer)]
    assert len(layers) == 2
    evaluating = [name for name, module in modules if not module.training]
    return evaluating + [name for name, layer in layers if not layer.gradient_checkpointing]


def build(path: Path, output: Path, **settings: Any) -> tuple[Any, list[list[str]], list[Any]]:
    """A trainer, what is off before each of its losses, and what is off after each validation."""
    args = config(
        output, gradient_checkpointing=True, max_steps=STEPS, max_completion_length=4, **settings
    )
    trainer = make_trainer(SoloGRPOTrainer, path, args, digit_share, eval_dataset=problems(2))
    losses, validations = [], []
    compute_loss, evaluate = trainer.compute_loss, trainer.evaluate

    def look_and_compute(*args: Any, **kwargs: Any) -> Any:
        losses.append(off(trainer))
        return compute_loss(*args, **kwargs)

    def evaluate_and_look(*args: Any, **kwargs: Any) -> Any:
        scores = evaluate(*args, **kwargs)
        validations.append(off(trainer))
        return scores

    trainer.compute_loss, trainer.evaluate = look_and_compute, evaluate_and_look
    return trainer, losses, validations


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling_engine": "adapter"},
        {"sampling_engine": "merged"},
        {"sampling_engine": "auto", "bf16": True},  # which tests merged weights first
        {"sampling_engine": "adapter", "num_iterations": 2},  # which scores with the old policy
        {"sampling_engine": "adapter", "repetition_penalty": 1.1},  # which TRL samples
    ],
)
def test_after_sampling(settings: dict[str, Any], tiny_llama: Path, tmp_path: Path) -> None:
    trainer, losses, _ = build(tiny_llama, tmp_path, **settings)
    trainer.train()
    assert losses == [[]] * STEPS


def test_after_validation(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer, losses, validations = build(tiny_llama, tmp_path, **settings)
    trainer.train()
    assert losses == validations == [[]] * STEPS
