"""Trains every case on this process's share of the rows.

    accelerate launch --quiet --multi_gpu --num_processes 2 tests/two_processes.py MODEL OUTPUT

`training/test_two_processes.py` launches it, and `engines/engine_deepspeed.py` with DeepSpeed.
It asks for the CPU itself: with `--cpu`, accelerate starts several processes through MPI only.
Each process writes what it saw to `OUTPUT/<process>.pt`.
"""

import gc
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from trl import ModelConfig

from digits import digit_share
from fixed_rollouts import (
    CapturedGradients,
    G,
    completion_ids,
    config,
    fixed_reward,
    make_trainer,
    problems,
    relative_gap,
)
from scripts import script_environment
from sologrpo.base.errors import RunError
from sologrpo.config.arguments import RunArguments
from sologrpo.plan.number_format import choose_number_format
from sologrpo.plan.preflight import build_policy
from sologrpo.training.callbacks import MetricsFile
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import ROOT

Seen = list[dict[str, Any]]  # by process: what it saw of each case
# What a process measures of itself.
OWN_FIGURES = ("time/", "tokens_per_second/", "tokens/", "memory/", "step_time")
SIGNAL, OTHER_SIGNAL, CONSTANT = [0.0, 1.0, 0.5, 1.0], [0.25, 0.0, 0.0, 1.0], [0.7] * G
WHOLE_GROUPS = SIGNAL + CONSTANT + OTHER_SIGNAL + CONSTANT
# Six rows a process: two completions of the second group are here, two there.
STRADDLING = CONSTANT + SIGNAL + OTHER_SIGNAL
ONE_SIDED = CONSTANT + CONSTANT + SIGNAL + OTHER_SIGNAL


@dataclass(frozen=True)
class Case:
    """Rewards of the rows of all processes, and the settings that are not the defaults."""

    rewards: list[float]
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "dapo-whole": Case(WHOLE_GROUPS, {"loss_type": "dapo"}),
    "dapo-straddling": Case(STRADDLING, {"loss_type": "dapo", "outcome_reward": "fixed"}),
    "dapo-one-sided": Case(ONE_SIDED, {"loss_type": "dapo"}),
    "grpo-straddling": Case(STRADDLING, {"loss_type": "grpo"}),
    "grpo-one-sided": Case(ONE_SIDED, {"loss_type": "grpo"}),
    "dr_grpo-straddling": Case(STRADDLING, {"loss_type": "dr_grpo"}),
    "dr_grpo-other-side": Case(ONE_SIDED[::-1], {"loss_type": "dr_grpo"}),
    "no-signal": Case(CONSTANT * 4),
    "kl": Case(ONE_SIDED, {"loss_type": "grpo", "beta": 0.05}),
    "accumulated": Case(ONE_SIDED, {"gradient_accumulation_steps": 2}),
    "reused": Case(WHOLE_GROUPS, {"num_iterations": 2}),
    "checkpointing": Case(ONE_SIDED, {"gradient_checkpointing": True}),
    # The quantile makes it run as in TRL, which compares the tokens of all processes. Not `bnpo`:
    # TRL divides by the tokens of one process, so its gradient depends on their number.
    "stock-path": Case(STRADDLING, {"top_entropy_quantile": 0.999}),
}


WITH_DEEPSPEED = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


def this_process() -> PartialState:
    # A process that waits in vain should fail the test soon.
    return PartialState(cpu=True, timeout=timedelta(seconds=60))


@dataclass
class DeepSpeedGradients(CapturedGradients):
    """DeepSpeed leaves no gradient in the parameters, and takes its step in the backward pass."""

    trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        engine = self.trainer.model_wrapped
        step = engine.step
        engine.step = lambda: (self.steps.append(full_gradients(engine.module)), step())

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    from deepspeed.utils import safe_get_full_grad

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: safe_get_full_grad(p).clone() for name, p in trained.items()}


def build(case: Case, model_path: Path, output: Path, captured: CapturedGradients) -> Any:
    """Build a trainer of fixed completions and rewards, of which this process has its share."""
    process = this_process()
    rows = len(case.rewards) // process.num_processes
    share = slice(process.process_index * rows, (process.process_index + 1) * rows)
    args = config(
        output,
        use_cpu=True,
        per_device_train_batch_size=rows // case.settings.get("gradient_accumulation_steps", 1),
        max_steps=2,
        logging_steps=1,
        learning_rate=0.01,
        # Plain descent: Adam would turn a gradient that is wrong by a factor into the same step.
        optim="sgd",
        train_token_budget=200,  # one to three rows
        reward_weights=[1.0, 0.5],
        **case.settings,
    )
    rewards = [
        fixed_reward("fixed", case.rewards[share]),
        fixed_reward("squared", [reward**2 for reward in case.rewards[share]]),
    ]
    trainer = make_trainer(SoloGRPOTrainer, model_path, args, rewards, callbacks=[captured])
    ids = completion_ids(len(case.rewards), trainer.processing_class.eos_token_id)[share]
    trainer._generate_single_turn = lambda *args, **kwargs: (ids, None)
    return trainer


def train(case: Case, model_path: Path, output: Path) -> dict[str, Any]:
    """Make two steps."""
    captured = DeepSpeedGradients() if WITH_DEEPSPEED else CapturedGradients()
    trainer = captured.trainer = build(case, model_path, output, captured)
    trainer.train()
    adapter = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {
        "gradients": captured.steps,
        "adapter": {name: p.detach() for name, p in adapter.items()},
        "logs": trainer.state.log_history[:2],
    }


def stop_at_nan(model_path: Path, output: Path) -> str:
    """Train where the loss of the last process is NaN; return why this process stopped."""
    trainer = build(Case(STRADDLING), model_path, output, CapturedGradients())
    if this_process().is_last_process:
        compute = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, **kwargs: compute(
            model, inputs | {"advantages": inputs["advantages"] * math.nan}, **kwargs
        )
    with pytest.raises(RunError) as stopped:
        trainer.train()
    return str(stopped.value)


def sample_and_validate(model_path: Path, output: Path) -> dict[str, Any]:
    """Validate, then train on one group of sampled completions that all processes share."""
    size = 16
    args = config(
        output,
        use_cpu=True,
        num_generations=size,
        per_device_train_batch_size=size // this_process().num_processes,
    )
    trainer = make_trainer(
        SoloGRPOTrainer,
        model_path,
        args,
        digit_share,
        eval_dataset=problems(5),
        callbacks=[MetricsFile()],
    )
    validation = trainer.evaluate()
    trainer.train()
    completions = [completion[0]["content"] for completion in trainer._logs["completion"]]
    return {"validation": validation, "completions": completions}


def choose_format(model_path: Path, output: Path) -> tuple[str | None, dict[str, int]]:
    """Choose the number format where bf16 is fast in the first process, and slow in the others."""
    rate = 50 if this_process().process_index else 400
    rates = {"float32": 100, "bfloat16": rate}
    run, args = RunArguments(), config(output, bf16=None)
    lora = {"use_peft": True, "lora_target_modules": "all-linear"}
    model = ModelConfig(str(model_path), dtype="auto", **lora)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sologrpo.plan.number_format.gemm_rates", lambda *_: rates)
        gflops = choose_number_format(run, args, model, build_policy(model))
    return model.dtype, gflops


def launch(model_path: Path, output: Path, *options: str, **environment: str) -> Seen:
    """Run this file in two processes, with these options of `accelerate launch`."""
    # Port 0: any that is free.
    launcher = ["accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *options, __file__, str(model_path), str(output)],
        env=script_environment(**environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(output / f"{process}.pt") for process in range(2)]


def assert_trained_as_one(name: str, both: Seen, model_path: Path, output: Path) -> None:
    """Compare what two processes saw of a case with the training of this process alone."""
    first, second = (seen[name] for seen in both)
    for parameter, value in first["adapter"].items():
        assert torch.equal(value, second["adapter"][parameter]), parameter

    alone = train(CASES[name], model_path, output)
    assert len(alone["gradients"]) == len(first["gradients"]) == 2
    pairs = zip(alone["gradients"], first["gradients"], strict=True)
    for expected, got in pairs:
        if name == "no-signal":
            assert not any(torch.count_nonzero(gradient) for gradient in got.values())
        else:
            assert min(float(gradient.norm()) for gradient in expected.values()) > 1e-6
            assert relative_gap(expected, got) < 1e-5
    assert relative_gap(alone["adapter"], first["adapter"]) < 1e-6
    for expected, got in zip(alone["logs"], first["logs"], strict=True):
        assert _global_figures(got) == pytest.approx(_global_figures(expected), rel=1e-4, abs=1e-6)


def _global_figures(logs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if not name.startswith(OWN_FIGURES)}


def main() -> None:
    """Run everything and write what this process saw."""
    gc.freeze()  # each training ends in a full collection, whose half second goes to the imports
    model_path, output = Path(sys.argv[1]), Path(sys.argv[2])
    seen = {name: train(case, model_path, output) for name, case in CASES.items()}
    seen["sampled"] = sample_and_validate(model_path, output)
    seen["stopped"] = stop_at_nan(model_path, output)
    seen["format"] = choose_format(model_path, output)
    torch.save(seen, output / f"{this_process().process_index}.pt")


if __name__ == "__main__":
    main()
