"""Checkpoints: write, check, choose and rotate them, train from one, stop with one.

The lines named here are those of transformers 5.23.0 (trainer.py) and TRL 1.16.0 (grpo_trainer.py).
"""

import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from accelerate import PartialState
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME as STATE
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from sologrpo.base.errors import LIBRARY_ERRORS
from sologrpo.base.files import CHECKPOINT
from sologrpo.base.manifest import damage, write_manifest
from sologrpo.config.schedule import optimizer_steps
from sologrpo.startup import stopped_by

_FOLDER = re.compile(CHECKPOINT.format(r"(\d+)"))


# -- closing and choosing a checkpoint -----------------------------------------------------------


class FinishCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Write each checkpoint's manifest, and only then delete older checkpoints, by step.

    transformers' rotation (trainer.py:3417) is turned off in `args`: it comes before the manifest,
    so that a killed process may leave none complete, and goes by the time of modification, which
    deletes each new checkpoint once the clock was set back.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._limit, args.save_total_limit = args.save_total_limit, None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look for the best checkpoint in this directory only, which may have been moved."""
        if state.best_model_checkpoint is not None:
            name = Path(state.best_model_checkpoint).name
            state.best_model_checkpoint = str(Path(args.output_dir) / name)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the manifest once all processes have written their files; then rotate."""
        PartialState().wait_for_everyone()
        if not args.should_save:
            return
        checkpoint = Path(args.output_dir) / CHECKPOINT.format(state.global_step)
        # A pickle with paths and settings of this machine, which nothing reads.
        (checkpoint / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        write_manifest(checkpoint)
        # Keeps `best_model_checkpoint` as transformers does.
        rotate_checkpoints(args.output_dir, self._limit, state.best_model_checkpoint)


def checkpoints_of(directory: Path) -> list[Path]:
    """List the folders `checkpoint-N` of a run, complete or not, the latest step first."""
    found = [
        path for path in directory.glob(CHECKPOINT.format("*")) if _FOLDER.fullmatch(path.name)
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps taken when the checkpoint was saved.

    >>> step_of(Path("runs/quickstart/checkpoint-16"))
    16
    """
    return int(checkpoint.name.rpartition("-")[2])


def last_complete_checkpoint(
    directory: Path, obstacle: Callable[[Path], str | None] = lambda checkpoint: None
) -> Path | None:
    """Find the latest complete checkpoint, one without an obstacle if there is any."""
    latest = None
    for checkpoint in checkpoints_of(directory):
        if incomplete_reason(checkpoint) is None:
            if obstacle(checkpoint) is None:
                return checkpoint
            latest = latest or checkpoint
    return latest


def incomplete_reason(checkpoint: Path) -> str | None:
    """Name the first file that an interrupted save left out, or that was damaged since."""
    if (reason := damage(checkpoint)) is not None:
        return reason
    for file in sorted(checkpoint.glob("*.pt*")):  # a manifest can be forged
        try:
            with safe_globals():
                torch.load(file, "meta", weights_only=True)
        except (UnpicklingError, EOFError, *LIBRARY_ERRORS):
            return f"{file.name} is damaged"
    step = TrainerState.load_from_json(str(checkpoint / STATE)).global_step
    return None if step == step_of(checkpoint) else f"its {STATE} is that of step {step}"


def unusable_reason(checkpoint: Path, trainer: str, args: TrainingArguments) -> str | None:
    """Name what a complete checkpoint lacks to be resumed with these settings."""
    file = generation_state_file(checkpoint, args)
    if trainer == "solo" and not file.is_file():
        return f"it has no {file.name}: save_only_model or another number of processes"
    zero = args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage > 0
    saved = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    if saved != (now := args.world_size if zero else 0):
        return f"it has the optimizer of {saved} DeepSpeed processes, and these are {now}"
    best = best_checkpoint(checkpoint, args)
    reason = None if best is None else incomplete_reason(best)
    return None if reason is None else f"{best} was the best so far, and {reason}"


def best_checkpoint(checkpoint: Path, args: TrainingArguments) -> Path | None:
    """Return the best checkpoint up to this one, if the run wants it and it is still there."""
    if not args.load_best_model_at_end:
        return None
    best = TrainerState.load_from_json(str(checkpoint / STATE)).best_model_checkpoint
    path = None if best is None else checkpoint.parent / Path(best).name
    return path if path is not None and path.is_dir() else None


def set_aside(checkpoints: Iterable[Path], obstacle: Callable[[Path], str | None]) -> None:
    """Rename checkpoints that the run cannot resume from to `partial-checkpoint-N`.

    They cannot stay: the next save would write into them, and rotation would count them.
    """
    for checkpoint in checkpoints:
        aside = checkpoint.with_name(f"partial-{checkpoint.name}")
        reason = incomplete_reason(checkpoint) or obstacle(checkpoint)
        print(f"{checkpoint} is incomplete, {reason}: moved to {aside.name}", file=sys.stderr)
        if aside.is_symlink() or aside.is_file():
            aside.unlink()
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)


# -- the position inside a generation batch ------------------------------------------------------


def save_generation_state(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Complete a checkpoint that transformers is writing, before its manifest is written."""
    torch.save(_generation_state(trainer), generation_state_file(checkpoint, trainer.args))


def load_generation_state(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Put back what `save_generation_state` saved, before the first step."""
    file = generation_state_file(checkpoint, trainer.args)
    state = torch.load(file, map_location=trainer.args.device, weights_only=True)
    trainer._step = state["step"]
    trainer._buffered_inputs = state["buffered_inputs"]
    for name, log in state["logs"].items():
        if isinstance(log, dict):
            for column, values in log.items():
                trainer._logs[name][column].extend(values)
        else:
            trainer._logs[name].extend(log)
    trainer._metrics["train"].update(state["metrics"])
    trainer._tr_loss += state["loss"]
    trainer._globalstep_last_logged = state["last_logged"]


def generation_state_file(checkpoint: Path, args: TrainingArguments) -> Path:
    """Return where this process keeps its generation state: one file a process."""
    process = f"_{args.process_index}" if args.world_size > 1 else ""
    return checkpoint / f"generation_state{process}.pt"


def _generation_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """Collect what a run needs to resume inside a generation batch, and between two log lines.

    TRL keeps the completions of a generation batch for several optimizer steps (`_prepare_inputs`,
    1522-1551) and loses them with the process: a run that resumes within would sample again, from
    the later model, and count its steps from there.
    """
    every = trainer.args.steps_per_generation * trainer.num_iterations
    used_up = trainer._step % every == 0  # the next step samples a new batch in any case
    logs = {} if used_up else {k: v for k, v in trainer._logs.items() if k != "images"}
    return {
        "step": trainer._step,
        "buffered_inputs": None if used_up else _portable(trainer._buffered_inputs),
        "logs": _portable(logs),
        # What has not been logged yet, with logging_steps > 1.
        "metrics": _portable(trainer._metrics["train"]),
        "loss": trainer._tr_loss.item(),
        "last_logged": trainer._globalstep_last_logged,
    }


def _portable(value: Any) -> Any:
    """Convert to types that load without running code: what a reward logged may be of any."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_portable(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return _portable(value.item()) if hasattr(value, "item") else str(value)


# -- training from a checkpoint ------------------------------------------------------------------


class EpochSampler(RepeatSampler):  # type: ignore[misc]
    """TRL's sampler, told the epoch: the order of its prompts is that of the seed and the epoch.

    TRL draws the order of every epoch from a generator that lives with the process, so that a run
    resumed in the third epoch would take the prompts in the order of the first. The orders are
    TRL's own. accelerate calls `set_epoch` before each epoch.
    """

    @classmethod
    def like(cls, sampler: RepeatSampler) -> Self:
        """Create one that draws as TRL's sampler does."""
        return cls(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Bring the generator to where it is at the start of this epoch, counted from 0."""
        if not self.shuffle:
            return
        self.generator.manual_seed(self.seed)
        for _ in range(epoch):
            torch.randperm(self.num_samples, generator=self.generator)


def train_from(trainer: GRPOTrainer, checkpoint: Path | None) -> None:
    """Train, from a checkpoint if there is one; of a finished run only load the trained weights.

    transformers, resumed at the last checkpoint of a finished run, would take a step too many.
    """
    planned = optimizer_steps(trainer.args, len(trainer.train_dataset))
    if checkpoint is not None and step_of(checkpoint) >= planned:
        trainer._load_from_checkpoint(str(best_checkpoint(checkpoint, trainer.args) or checkpoint))
        return
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


class FollowSchedule(TrainerCallback):  # type: ignore[misc]
    """Resume at the learning rate of the settings.

    A checkpoint restores that of the settings it was saved with (trainer.py:3959), which is 0 at
    the end of a schedule. If no setting has changed, the two are equal.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Repeat the last step of the schedule."""
        schedule = kwargs["lr_scheduler"]
        schedule = getattr(schedule, "scheduler", schedule)  # accelerate's, with DeepSpeed
        if state.global_step and isinstance(schedule, LambdaLR):
            schedule.base_lrs = [args.learning_rate for _ in schedule.base_lrs]
            schedule.last_epoch -= 1
            schedule.step()


@contextmanager
def print_resume_hint(args: TrainingArguments) -> Iterator[None]:
    """Print which checkpoint is complete if the training within stops or fails.

    Ctrl-C becomes exit code 130, because its traceback would bury the line.
    """
    try:
        yield
    except BaseException as error:
        if args.process_index == 0:
            what = "stopped" if isinstance(error, SystemExit) else "failed"
            checkpoint = last_complete_checkpoint(Path(args.output_dir))
            hint = (
                f"{what}; {checkpoint} is complete: resume with --resume"
                if checkpoint
                else f"{what} before the first checkpoint (save_steps)"
            )
            print(hint, file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from error
        raise


class StopWithCheckpoint(TrainerCallback):  # type: ignore[misc]
    """On SIGTERM or Ctrl-C finish the optimizer step, save a checkpoint and stop training.

    To be used within `startup.finishing_step`, where a second Ctrl-C raises `KeyboardInterrupt`.
    """

    def exit_if_stopped(self, state: TrainerState) -> None:
        """Exit if a signal cut training short: 0 after SIGTERM, 130 after Ctrl-C as shells do."""
        if (number := stopped_by()) is not None and state.global_step < state.max_steps:
            raise SystemExit(130 if number == signal.SIGINT else 0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save and stop after this step."""
        self._save_and_stop(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save and stop after a validation, before which a checkpoint is never saved."""
        self._save_and_stop(control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop after a checkpoint during which the signal came: it need not be saved again."""
        if stopped_by() is not None:
            control.should_training_stop = True

    def _save_and_stop(self, control: TrainerControl) -> None:
        if stopped_by() is not None:
            control.should_save = control.should_training_stop = True
