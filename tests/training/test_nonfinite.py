"""A loss or gradient that is not finite never reaches the weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixed_rollouts import MIXED, CapturedGradients, config, fixed_reward, make_trainer
from scripts import last_line, printed_by, train_without_report
from sologrpo.base.errors import RunError
from sologrpo.training.nonfinite import all_finite
from sologrpo.training.trainer import SoloGRPOTrainer

BAD_STEP = 2
Breaks = Callable[[Any], None]


def nan_in_the_loss(trainer: Any) -> None:
    compute = trainer.compute_loss

    def broken(model: torch.nn.Module, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        if trainer.state.global_step + 1 == BAD_STEP:
            inputs = inputs | {"advantages": inputs["advantages"] * math.nan}
        loss: torch.Tensor = compute(model, inputs, **kwargs)
        return loss

    trainer.compute_loss = broken


def infinity_in_one_gradient(trainer: Any) -> None:
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.state.global_step + 1 == BAD_STEP:
            gradient = gradient.clone()
            gradient.view(-1)[0] = float("inf")
        return gradient

    parameter.register_hook(broken)


BREAKS = pytest.mark.parametrize("break_step", [nan_in_the_loss, infinity_in_one_gradient])


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad
    }


def build(model: Path, output: Path, break_step: Breaks | None, **settings: Any) -> Any:
    args = config(output, max_steps=3, logging_steps=1, **settings)
    trainer = make_trainer(SoloGRPOTrainer, model, args, fixed_reward("reward", MIXED))
    if break_step is not None:
        break_step(trainer)
    return trainer


@BREAKS
def test_the_run_stops_before_its_weights_change(
    break_step: Breaks, tiny_llama: Path, tmp_path: Path
) -> None:
    trainer = build(tiny_llama, tmp_path, break_step)
    with pytest.raises(RunError, match="step 2 is not a finite number: lower learning_rate"):
        trainer.train()
    assert trainer.state.global_step == BAD_STEP - 1
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_all_finite() -> None:
    assert all_finite([torch.tensor(1.0), torch.ones(2, 2)])
    assert all_finite([torch.tensor(0.0)])
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite([torch.tensor(1.0), torch.tensor([0.0, bad])])


# -- fp16, whose scaler needs no GPU ---------------------------------------------------------------


def train_scaled(model: Path, output: Path, break_step: Breaks) -> tuple[Any, list[bool], Any]:
    """Train with a real scaler; the trainer, which steps had a gradient, and the scaler."""
    trainer = build(model, output, break_step)
    captured, scaler = CapturedGradients(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.add_callback(captured)
    trainer.accelerator.scaler, trainer.args.fp16 = scaler, True
    trainer.train()
    moved = [any(bool(g.any()) for g in step.values()) for step in captured.steps]
    return trainer, moved, scaler


def test_the_scaler_does_not_hide_a_loss_that_is_not_finite(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="step 2 is not a finite number"):
        train_scaled(tiny_llama, tmp_path, nan_in_the_loss)


def test_a_gradient_that_overflows_is_left_to_the_scaler(tiny_llama: Path, tmp_path: Path) -> None:
    trainer, moved, scaler = train_scaled(tiny_llama, tmp_path, infinity_in_one_gradient)
    assert moved == [True, True, True]
    assert scaler.get_scale() == 512.0  # it has left the step out, and scales less
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainer", "value"), [("solo", math.nan), ("stock", -math.inf)])
def test_weights_that_are_not_finite_are_never_saved(
    trainer: str,
    value: float,
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    step, steps, run = torch.optim.AdamW.step, [], tmp_path / "run"

    def too_far(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        step(optimizer, *args, **kwargs)
        steps.append(1)
        if len(steps) == BAD_STEP:
            optimizer.param_groups[0]["params"][-1].data.view(-1)[0] = value

    monkeypatch.setattr(torch.optim.AdamW, "step", too_far)
    command = ("--config", config_file, "--max_steps", 3, "--trainer", trainer)
    ended = printed_by(train_without_report(), capfd, *command)
    assert ended.code == 1
    assert last_line(ended).startswith("error: step 2 made weights of the adapter NaN or infinite")
    assert f"{run / 'checkpoint-1'} is complete" in ended
    assert "Traceback" not in ended
    assert sorted(path.name for path in run.rglob("*.safetensors")) == ["adapter_model.safetensors"]
    (saved,) = run.rglob("adapter_model.safetensors")
    assert saved.parent == run / "checkpoint-1"
    assert all_finite(load_file(str(saved)).values())
    monkeypatch.undo()
    assert printed_by(train_without_report(), capfd, *command, "--resume").code == 0
