"""Trains every case on this process's share of the rows; `test_two_processes.py` launches it.

    accelerate launch --quiet --multi_gpu --num_processes 2 tests/two_processes.py MODEL OUTPUT

It asks for the CPU itself: with `--cpu`, accelerate starts several processes through MPI only.
Each process writes what it saw to `OUTPUT/<process>.pt`.
"""

import gc
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from digits import digit_share
from fixed_rollouts import (
    CapturedGradients,
    G,
    completion_ids,
    config,
    fixed_reward,
    make_trainer,
    problems,
)
from sologrpo.training.callbacks import MetricsFile
from sologrpo.training.trainer import SoloGRPOTrainer

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
    "dapo-straddling": Case(STRADDLING, {"loss_type": "dapo"}),
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


def this_process() -> PartialState:
    # A process that waits in vain should fail the test soon.
    return PartialState(cpu=True, timeout=timedelta(seconds=60))


def train(case: Case, model_path: Path, output: Path) -> dict[str, Any]:
    """Make two steps on fixed completions and rewards, of which this process has its share."""
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
        train_token_budget=200,  # one to three rows
        reward_weights=[1.0, 0.5],
        **case.settings,
    )
    captured = CapturedGradients()
    rewards = [
        fixed_reward("fixed", case.rewards[share]),
        fixed_reward("squared", [reward**2 for reward in case.rewards[share]]),
    ]
    trainer = make_trainer(SoloGRPOTrainer, model_path, args, rewards, callbacks=[captured])
    ids = completion_ids(len(case.rewards), trainer.processing_class.eos_token_id)[share]
    trainer._generate_single_turn = lambda *args, **kwargs: (ids, None)
    adapter = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    # Plain descent: Adam would turn a gradient that is wrong by a factor into the same step.
    trainer.optimizer = torch.optim.SGD(adapter.values(), lr=args.learning_rate)
    trainer.train()
    return {
        "gradients": captured.steps,
        "adapter": {name: p.detach() for name, p in adapter.items()},
        "logs": trainer.state.log_history[:2],
    }


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


def main() -> None:
    """Run everything and write what this process saw."""
    gc.freeze()  # each training ends in a full collection, whose half second goes to the imports
    model_path, output = Path(sys.argv[1]), Path(sys.argv[2])
    seen = {name: train(case, model_path, output) for name, case in CASES.items()}
    seen["sampled"] = sample_and_validate(model_path, output)
    torch.save(seen, output / f"{this_process().process_index}.pt")


if __name__ == "__main__":
    main()
