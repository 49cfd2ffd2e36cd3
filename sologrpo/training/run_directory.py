"""Run directory: resolved config, environment, and the decision to start or to resume."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from filelock import FileLock
from trl import ModelConfig

from sologrpo.base.environment import RunEnvironment, environment
from sologrpo.base.errors import InputError, printable
from sologrpo.base.files import (
    ADAPTER,
    COMPLETIONS,
    ENVIRONMENT,
    METRICS,
    RUN_CONFIG,
    WARNINGS,
    inside,
    make_folder,
    write_atomically,
)
from sologrpo.base.locking import lock_folder
from sologrpo.base.logs import remove_later
from sologrpo.base.redact import count_redacted, redact
from sologrpo.base.schema import read_json, read_yaml
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.model.loading import dtype_name, pick_dtype
from sologrpo.training.checkpoint import (
    checkpoints_of,
    last_complete_checkpoint,
    set_aside,
    step_of,
    unusable_reason,
)

# Beginnings of keys that must not change when a run is resumed: the checkpoint's weights, optimizer
# and position in the data mean nothing under others. What `dtype` resolved to is compared apart,
# because `auto` may be spelled out.
FIXED = (
    "model_name_or_path", "model_revision", "load_in_", "bnb_4bit", "use_bnb_nested_quant",
    "lora_", "use_dora", "use_rslora", "optim", "trainer", "seed", "shuffle_dataset",
    "dataset_name", "dataset_config", "dataset_train_split", "max_train_examples",
    "num_validation_examples", "max_prompt_tokens", "prompt_format", "system_prompt",
    "worked_examples", "per_device_train_batch_size", "gradient_accumulation_steps",
    "generation_batch_size", "steps_per_generation", "num_generations", "num_iterations",
    "adam_", "weight_decay",
)  # fmt: skip
# Beginnings of keys that do not affect training, and may change silently.
FREE = (
    "output_dir", "resume", "dry_run", "traceback", "reward_timeout", "reward_workers",
    "accept_changes", "save_",
    "logging_", "log_", "eval_", "do_", "report_to", "run_name", "project", "trackio_", "hub_",
    "push_to_hub", "disable_tqdm", "num_completions_to_print", "num_generations_eval",
    "per_device_eval_batch_size", "dataset_test_split", "trust_remote_code", "dataloader_",
    "local_rank",
)  # fmt: skip


@dataclass(frozen=True)
class OpenedRun:
    """Hold an opened run directory: no other process trains there as long as this object lives.

    The lock is None in other processes and on some file systems.
    """

    directory: Path
    checkpoint: Path | None
    lock: FileLock | None
    settings: dict[str, Any]
    environment: RunEnvironment

    @property
    def adapter(self) -> Path:
        """Return the folder of the trained adapter."""
        return self.directory / ADAPTER

    def describe(self) -> None:
        """Write the settings to `config.yaml`, and what they met here to `environment.json`."""
        text = yaml.safe_dump(self.settings, sort_keys=True, allow_unicode=True)
        write_atomically(self.directory / RUN_CONFIG, text)
        facts = self.environment.model_dump_json(indent=2)
        write_atomically(self.directory / ENVIRONMENT, facts)


def open_run_directory(
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    gflops: dict[str, int],
    fingerprints: dict[str, str],
) -> OpenedRun:
    """Make the run directory, or choose the checkpoint to resume from; keep other processes out.

    Every command line may contain `--resume`: without a complete checkpoint, training starts from
    the beginning. What an interrupted run left after it is removed or renamed: those steps are
    repeated.

    Raises:
        InputError: if `--resume` is missing where a run is, or impossible with these settings, or
            another process is training there. The directory is left untouched then.
    """
    directory = Path(args.output_dir)
    used = (directory / RUN_CONFIG).exists() or bool(checkpoints_of(directory))
    if used and not run.resume:
        raise InputError(
            f"{directory} already holds a run: add --resume to continue it, or give another "
            "--output_dir"
        )
    obstacle = partial(unusable_reason, trainer=run.trainer, args=args)
    checkpoint = last_complete_checkpoint(directory, obstacle)
    dtype = dtype_name(pick_dtype(model.dtype))
    facts = {"dtype": dtype, "gflops": gflops, "fingerprints": fingerprints}
    now = RunEnvironment.model_validate(environment() | facts)
    settings = resolved_config(run, args, model)
    if checkpoint is not None:
        if (reason := obstacle(checkpoint)) is not None:
            raise InputError(
                f"--resume: {checkpoint} cannot be used with these settings, {reason}: give those "
                "of the run, or another --output_dir"
            )
        now = _check_can_resume(checkpoint, settings, now, run.accept_changes)
    elif run.resume and (directory / ADAPTER).exists():
        raise InputError(
            f"--resume: {directory} holds a finished run without complete checkpoints: give "
            "another --output_dir"
        )
    PartialState().wait_for_everyone()  # the first process must not write while others still look
    make_folder(directory)
    for name in (ADAPTER, COMPLETIONS, METRICS, WARNINGS):
        path = inside(directory, name)
        if path.suffix and path.exists() and not path.is_file():  # a pipe would wait for a reader
            raise InputError(f"{path} is not a file: remove it, or give another --output_dir")
    lock = lock_folder(directory, "trains") if args.process_index == 0 else None
    if run.resume and args.process_index == 0:
        step = -1 if checkpoint is None else step_of(checkpoint)
        later = [path for path in checkpoints_of(directory) if step_of(path) > step]
        set_aside(later, obstacle)
        remove_later(directory, step)
        _print(f"resuming from {checkpoint}" if checkpoint else
               f"{directory} has no checkpoint yet: starting from the beginning")  # fmt: skip
    return OpenedRun(directory, checkpoint, lock, settings, now)


def _check_can_resume(
    checkpoint: Path, settings: dict[str, Any], now: RunEnvironment, accept_changes: bool
) -> RunEnvironment:
    """Return what to record of a resumed run: `now`, with the changes that were accepted."""
    directory, step = checkpoint.parent, step_of(checkpoint)
    if not (directory / RUN_CONFIG).exists() and not (directory / ENVIRONMENT).exists():
        return now  # a checkpoint alone, such as one from the Hub
    try:
        before = read_json(directory / ENVIRONMENT, RunEnvironment)
        saved = _read_settings(directory, settings)
    except InputError as error:
        if accept_changes:
            _print(f"not compared: {error}")
            return now
        raise InputError(
            f"--resume: {error}: add --accept_changes to resume without comparing, or give another "
            "--output_dir"
        ) from error
    if before.dtype != now.dtype:
        raise InputError(
            f"--resume: the run's weights are {before.dtype}, and dtype {settings['dtype']} is "
            f"{now.dtype} on this machine: add --dtype {before.dtype}, or give another "
            "--output_dir"
        )
    _check_settings(saved, settings, step, accept_changes)
    return _check_fingerprints(before, now, step, accept_changes)


def _read_settings(directory: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    before = read_yaml(directory / RUN_CONFIG, dict[str, Any])
    lacking = [key for key in now if key.startswith(FIXED) and key not in before]
    if lacking:  # a file that is cut short may still be YAML
        raise InputError(f"{directory / RUN_CONFIG} is damaged: it lacks {lacking[0]}")
    return before


def _check_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], step: int, accept_changes: bool
) -> None:
    compared = sorted(key for key in before.keys() & now.keys() if not key.startswith(FREE))
    changed = [key for key in compared if before[key] != now[key]]
    refused = [key for key in changed if key.startswith(FIXED)]
    if refused:
        were = ", ".join(f"{key} {_one_line(before[key])}" for key in refused)
        raise InputError(
            f"--resume: the run was started with {were}: give the same, or another --output_dir"
        )
    lacking = [key for key in changed if count_redacted(before[key]) > count_redacted(now[key])]
    if lacking and not accept_changes:
        raise InputError(
            f"--resume: {lacking[0]} held a secret, which is not recorded and not given now: give "
            "it again, or add --accept_changes to continue without it"
        )
    if changed:
        differ = (f"{key} {_one_line(before[key])} -> {_one_line(now[key])}" for key in changed)
        _print(f"settings changed from step {step}: {', '.join(differ)}")


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def _check_fingerprints(
    before: RunEnvironment, now: RunEnvironment, step: int, accept_changes: bool
) -> RunEnvironment:
    # Rewards that were added or removed are a change of the settings.
    both = before.fingerprints.keys() & now.fingerprints.keys()
    changed = sorted(name for name in both if before.fingerprints[name] != now.fingerprints[name])
    if changed and not accept_changes:
        raise InputError(
            f"--resume: changed since the run was started: {', '.join(changed)}: restore what was "
            "there, add --accept_changes to continue with what is there now, or give another "
            "--output_dir"
        )
    if changed:
        _print(f"changed from step {step}, and accepted: {', '.join(changed)}")
    changes = [
        {"step": step, "what": name, "before": before.fingerprints[name],
         "now": now.fingerprints[name]}
        for name in changed
    ]  # fmt: skip
    kept = {"gflops": before.gflops, "changes": [*before.changes, *changes]}
    return now.model_copy(update=kept)


def _print(line: str) -> None:
    if PartialState().is_main_process:
        print(printable(line), file=sys.stderr)


def resolved_config(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> dict[str, Any]:
    """Collect every setting with its value, as plain YAML types; secrets hidden."""
    merged = {**vars(run), **args.to_dict(), **vars(model), "hub_token": None}  # in HF_TOKEN
    del merged["origins"]  # not a setting: where each came from in this command
    public = {key: value for key, value in merged.items() if not key.startswith("_")}
    plain: dict[str, Any] = json.loads(json.dumps(public, default=str))  # enumerations by value
    return {key: redact(value, key) for key, value in plain.items()}
