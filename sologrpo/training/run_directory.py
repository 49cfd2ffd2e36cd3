"""Run directory: resolved config, environment, and the decision to start or to resume."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from rich.console import Console
from trl import ModelConfig

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import load_run_config, recorded_dtype, without_credentials
from sologrpo.environment import environment
from sologrpo.errors import InputError
from sologrpo.files import (
    ADAPTER,
    COMPLETIONS,
    ENVIRONMENT,
    LOCK,
    METRICS,
    RUN_CONFIG,
    write_atomically,
)
from sologrpo.model.loading import dtype_name, pick_dtype
from sologrpo.training.checkpoint import (
    checkpoints_of,
    generation_state_file,
    last_complete_checkpoint,
    set_aside_incomplete,
    step_of,
)
from sologrpo.training.tracking import prepare_trackers

# Beginnings of keys that must not change when a run is resumed: the checkpoint's weights, optimizer
# and position in the data mean nothing under others. `_check_dtype` compares what `dtype` resolved
# to, because `auto` may be spelled out.
FIXED = (
    "model_name_or_path", "model_revision", "load_in_", "bnb_4bit", "use_bnb_nested_quant",
    "lora_", "use_dora", "use_rslora", "optim", "trainer", "seed", "shuffle_dataset",
    "dataset_name", "dataset_config", "dataset_train_split", "max_train_examples",
    "num_validation_examples", "max_prompt_tokens", "prompt_format", "system_prompt",
    "worked_examples", "per_device_train_batch_size", "gradient_accumulation_steps",
    "generation_batch_size", "steps_per_generation", "num_generations", "num_iterations",
)  # fmt: skip
# Beginnings of keys that do not affect training, and may change silently.
FREE = (
    "output_dir", "resume", "dry_run", "rehearse", "traceback", "reward_timeout", "reward_workers",
    "accept_changes", "save_",
    "logging_", "log_", "eval_", "do_", "report_to", "run_name", "project", "trackio_", "hub_",
    "push_to_hub", "disable_tqdm", "num_completions_to_print", "num_generations_eval",
    "per_device_eval_batch_size", "dataset_test_split", "trust_remote_code", "dataloader_",
    "local_rank",
)  # fmt: skip


@dataclass(frozen=True)
class OpenedRun:
    """Hold an opened run directory: no other process trains there.

    Attributes:
        directory: `output_dir`.
        checkpoint: to resume from; None to start from the beginning.
        lock: lasts as long as this object; None in other processes and on some file systems.
        settings: every setting with its value.
        dtype: number format of the weights.
    """

    directory: Path
    checkpoint: Path | None
    lock: FileLock | None
    settings: dict[str, Any]
    dtype: str

    @property
    def adapter(self) -> Path:
        """Return the folder of the trained adapter."""
        return self.directory / ADAPTER

    def describe(self) -> None:
        """Write the settings to `config.yaml`, and what they met here to `environment.json`."""
        text = yaml.safe_dump(self.settings, sort_keys=True, allow_unicode=True)
        write_atomically(self.directory / RUN_CONFIG, text)
        facts = environment() | {"dtype": self.dtype}
        write_atomically(self.directory / ENVIRONMENT, json.dumps(facts, indent=2))


def open_run_directory(
    run: RunArguments, args: SoloGRPOConfig, model: ModelConfig, console: Console
) -> OpenedRun:
    """Make the run directory, or choose the checkpoint to resume from; keep other processes out.

    Every command line may contain `--resume`: without a run there, or without a complete
    checkpoint, training starts from the beginning. What an interrupted run left after its last
    complete checkpoint is removed or renamed, because those steps are repeated.

    Args:
        run: `resume` is used.
        args: `output_dir` is the directory.
        model: compared with the settings of the run to resume.
        console: for warnings.

    Raises:
        InputError: if the directory already holds a run and `--resume` is missing, if that run
            cannot be resumed with these settings, if another process is training there, or if a
            tracker needs a login. The directory is left untouched then.
    """
    directory = Path(args.output_dir)
    used = (directory / RUN_CONFIG).exists() or bool(checkpoints_of(directory))
    if used and not run.resume:
        raise InputError(
            f"{directory} already holds a run: add --resume to continue it, or give another "
            "--output_dir"
        )
    checkpoint = last_complete_checkpoint(directory)
    if checkpoint is not None:
        _check_can_resume(checkpoint, run, args, model)
    elif run.resume and (directory / ADAPTER).exists():
        raise InputError(
            f"--resume: {directory} holds a finished run without checkpoints: give another "
            "--output_dir"
        )
    prepare_trackers(args, console)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make output_dir {directory}: {error.strerror}") from error
    settings, dtype = resolved_config(run, args, model), dtype_name(pick_dtype(model.dtype))
    lock = _lock(directory) if args.process_index == 0 else None
    if run.resume and args.process_index == 0:
        set_aside_incomplete(directory, checkpoint)
        _remove_later_logs(directory, -1 if checkpoint is None else step_of(checkpoint))
        _print(f"resuming from {checkpoint}" if checkpoint else
               f"{directory} has no checkpoint yet: starting from the beginning")  # fmt: skip
    return OpenedRun(directory, checkpoint, lock, settings, dtype)


def _lock(directory: Path) -> FileLock | None:
    """Keep other processes from training here; the system lifts the lock when this one ends."""
    lock = FileLock(directory / LOCK, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise InputError(
            f"{directory} is in use: another process trains there; wait for it, or give another "
            "--output_dir"
        ) from error
    except PermissionError as error:
        raise InputError(f"cannot write into output_dir {directory}: {error.strerror}") from error
    except (OSError, NotImplementedError) as error:  # some network file systems
        _print(f"cannot lock {directory} ({error}): start no second run there")
        return None
    return lock


def _check_can_resume(
    checkpoint: Path, run: RunArguments, args: SoloGRPOConfig, model: ModelConfig
) -> None:
    """Refuse settings under which the checkpoint means nothing; name the others that differ."""
    if run.trainer == "solo" and not generation_state_file(checkpoint, args).is_file():
        raise InputError(
            f"--resume: {checkpoint} lacks its position in the generation batch; it was "
            "made with save_only_model or another number of processes: give another --output_dir"
        )
    if not (checkpoint.parent / RUN_CONFIG).exists():  # killed before it was written
        return
    _check_dtype(checkpoint.parent, model)
    before = load_run_config(checkpoint.parent)
    now = yaml.safe_load(yaml.safe_dump(resolved_config(run, args, model)))
    changed = _changed_keys(before, now)
    refused = [key for key in changed if key.startswith(FIXED)]
    if refused:
        were = ", ".join(f"{key} {before[key]}" for key in refused)
        raise InputError(
            f"--resume: the run was started with {were}: give the same, or another --output_dir"
        )
    if changed and args.process_index == 0:
        differ = ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed)
        _print(f"settings changed from step {step_of(checkpoint)}: {differ}")


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    keys = sorted(key for key in before.keys() & now.keys() if not key.startswith(FREE))
    return [key for key in keys if before[key] != now[key]]


def _check_dtype(directory: Path, model: ModelConfig) -> None:
    """Refuse another number format, also one that `auto` resolves to on this machine."""
    before, now = recorded_dtype(directory), dtype_name(pick_dtype(model.dtype))
    if before not in (None, now):
        raise InputError(
            f"--resume: the run's weights are {before}, and dtype {model.dtype} is {now} on this "
            f"machine: add --dtype {before}, or give another --output_dir"
        )


def _remove_later_logs(directory: Path, step: int) -> None:
    """Delete the metrics and completions of later steps, and a line that a kill cut short."""
    for table in (directory / COMPLETIONS).glob("completions_*.parquet"):
        if int(table.stem.rpartition("_")[2]) > step:
            table.unlink()
    metrics = directory / METRICS
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        write_atomically(metrics, "".join(line for line in lines if _is_kept(line, step)))


def _is_kept(line: str, step: int) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:  # the line at which the process was killed
        return False
    return bool(row["step"] <= step)


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def resolved_config(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> dict[str, Any]:
    """Collect every setting with its value, as plain YAML types; tokens masked.

    Args:
        run: our settings.
        args: TRL's and those of our trainer.
        model: TRL's, of the model.
    """
    merged = {**vars(run), **args.to_dict(), **vars(model)}
    public = {key: value for key, value in merged.items() if not key.startswith("_")}
    plain: dict[str, Any] = json.loads(json.dumps(public, default=str))  # enumerations by value
    return {key: without_credentials(value) if isinstance(value, str) else value
            for key, value in plain.items()}  # fmt: skip
