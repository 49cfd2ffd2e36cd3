"""Run directory: resolved config, environment, and the decision to start or to go on."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout
from trl import ModelConfig

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import load_run_config, recorded_dtype
from sologrpo.environment import environment
from sologrpo.errors import InputError
from sologrpo.files import ADAPTER, ENVIRONMENT, LOCK, METRICS, RUN_CONFIG, write_atomically
from sologrpo.model.loading import dtype_name, pick_dtype
from sologrpo.training.checkpoint import (
    checkpoints_of,
    generation_state_file,
    last_whole_checkpoint,
    step_of,
    why_not_whole,
)

# Beginnings of keys that a resumed run must leave as they are: the checkpoint's weights, optimizer
# and place in the data mean nothing under others.
FIXED = (
    "model_name_or_path", "model_revision", "load_in_", "bnb_4bit", "use_bnb_nested_quant", "dtype",
    "lora_", "use_dora", "use_rslora", "optim", "trainer", "seed", "shuffle_dataset",
    "dataset_name", "dataset_config", "dataset_train_split", "max_train_examples",
    "num_validation_examples", "max_prompt_tokens", "prompt_format", "system_prompt",
    "worked_examples", "per_device_train_batch_size", "gradient_accumulation_steps",
    "generation_batch_size", "steps_per_generation", "num_generations", "num_iterations",
)  # fmt: skip
# Beginnings of keys that do not touch the training, and may change without a word.
FREE = (
    "output_dir", "resume", "dry_run", "rehearse", "traceback", "reward_timeout", "save_",
    "logging_", "log_", "eval_", "do_", "report_to", "run_name", "project", "trackio_", "hub_",
    "push_to_hub", "disable_tqdm", "num_completions_to_print", "num_generations_eval",
    "per_device_eval_batch_size", "dataset_test_split", "trust_remote_code", "dataloader_",
    "local_rank",
)  # fmt: skip


class OpenedRun(NamedTuple):
    """The checkpoint to go on from, or None; and the lock, which holds as long as it is kept."""

    checkpoint: Path | None
    lock: FileLock | None


def open_run_directory(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> OpenedRun:
    """Make the run directory, or decide from which checkpoint to go on; keep others out of it.

    `--resume` may stand in every command line: where there is no run yet, or none that reached its
    first checkpoint, training starts from the beginning. What a run that was cut short left behind
    its last whole checkpoint is taken out of the way, because those steps are run again.

    Raises:
        InputError: if the directory already holds a run and `--resume` is not given, if that run
            cannot be gone on with under these settings, or if another process is training there.
            Nothing in the directory is touched then.
    """
    directory = Path(args.output_dir)
    used = (directory / RUN_CONFIG).exists() or bool(checkpoints_of(directory))
    if used and not run.resume:
        raise InputError(
            f"{directory} already holds a run: add --resume to go on with it, or give another "
            "--output_dir"
        )
    checkpoint = last_whole_checkpoint(directory)
    if checkpoint is not None:
        _check_can_go_on(checkpoint, run, args, model)
    elif run.resume and (directory / ADAPTER).exists():
        raise InputError(f"--resume: {directory} holds a finished run without checkpoints")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make output_dir {directory}: {error.strerror}") from error
    if args.process_index != 0:
        return OpenedRun(checkpoint, None)
    lock = _lock(directory)
    if run.resume:
        _clear_behind(checkpoint, directory)
        _say(f"going on from {checkpoint}" if checkpoint else
             f"{directory} has no checkpoint yet: starting from the beginning")  # fmt: skip
    return OpenedRun(checkpoint, lock)


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
        _say(f"cannot lock {directory} ({error}): start no second run there")
        return None
    return lock


def _check_can_go_on(
    checkpoint: Path, run: RunArguments, args: SoloGRPOConfig, model: ModelConfig
) -> None:
    """Refuse settings under which the checkpoint means nothing; name the others that differ."""
    if run.trainer == "solo" and not generation_state_file(checkpoint, args).is_file():
        raise InputError(
            f"--resume: {checkpoint} does not say where in a generation batch it was saved; it was "
            "made with save_only_model or another number of processes"
        )
    if not (checkpoint.parent / RUN_CONFIG).exists():  # killed before it was written
        return
    _check_dtype(checkpoint.parent, model)
    before = load_run_config(checkpoint.parent)
    now = yaml.safe_load(yaml.safe_dump(resolved_config(run, args, model)))
    keys = sorted(key for key in before.keys() & now.keys() if not key.startswith(FREE))
    changed = [key for key in keys if before[key] != now[key]]
    refused = [key for key in changed if key.startswith(FIXED)]
    if refused:
        were = ", ".join(f"{key} {before[key]}" for key in refused)
        raise InputError(
            f"--resume: the run was started with {were}: give the same, or another --output_dir"
        )
    if changed and args.process_index == 0:
        differ = ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed)
        _say(f"other settings from step {step_of(checkpoint)} on: {differ}")


def _check_dtype(directory: Path, model: ModelConfig) -> None:
    """Refuse another machine's choice where `dtype` is `auto`."""
    before, now = recorded_dtype(directory), dtype_name(pick_dtype(model.dtype))
    if before not in (None, now):
        raise InputError(
            f"--resume: the run's weights are {before}, and dtype {model.dtype} is {now} on this "
            f"machine: add --dtype {before}, or give another --output_dir"
        )


def _clear_behind(checkpoint: Path | None, directory: Path) -> None:
    """Take away what was written later than the checkpoint, or everything without one."""
    step = -1 if checkpoint is None else step_of(checkpoint)
    for partial in (path for path in checkpoints_of(directory) if step_of(path) > step):
        # Not left where it is: the next save would write into it, and rotation would count it.
        aside = partial.with_name(f"partial-{partial.name}")
        _say(f"{partial} is not whole, {why_not_whole(partial)}: moved to {aside.name}")
        shutil.rmtree(aside, ignore_errors=True)
        partial.rename(aside)
    for table in (directory / "completions").glob("completions_*.parquet"):
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


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def saying_how_to_go_on(args: SoloGRPOConfig) -> Iterator[None]:
    """If the training within stops or breaks off, say what is saved and how to go on from it.

    Ctrl-C becomes exit code 130 here: a traceback would bury the line.
    """
    try:
        yield
    except BaseException as error:
        if args.process_index == 0:
            what = "stopped" if isinstance(error, SystemExit) else "broken off"
            checkpoint = last_whole_checkpoint(Path(args.output_dir))
            if checkpoint:
                _say(f"{what}; {checkpoint} is whole: go on with --resume")
            else:
                _say(f"{what} before the first checkpoint (save_steps)")
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from error
        raise


def save_run_description(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> None:
    """Write `config.yaml`, what was asked for, and `environment.json`, what it resolved to."""
    directory = Path(args.output_dir)
    text = yaml.safe_dump(resolved_config(run, args, model), sort_keys=True, allow_unicode=True)
    write_atomically(directory / RUN_CONFIG, text)
    facts = environment() | {"dtype": dtype_name(pick_dtype(model.dtype))}
    write_atomically(directory / ENVIRONMENT, json.dumps(facts, indent=2))


def resolved_config(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> dict[str, Any]:
    """Every setting with its value, as plain YAML types; tokens masked."""
    merged = {**vars(run), **args.to_dict(), **vars(model)}
    return {key: _plain(value) for key, value in merged.items() if not key.startswith("_")}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(getattr(value, "value", value))
