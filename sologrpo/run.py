"""Run directory: resolved config, environment, and the decision to start or to go on."""

import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig

from sologrpo.config import RUN_CONFIG, RunArguments, SoloGRPOConfig
from sologrpo.device import describe_device
from sologrpo.errors import InputError

PACKAGES = ("sologrpo", "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate",
            "datasets")  # fmt: skip
METRICS = "metrics.jsonl"


def open_run_directory(run: RunArguments, args: SoloGRPOConfig) -> str | None:
    """Make the run directory, or decide from which checkpoint to go on.

    Returns:
        The checkpoint folder to resume from, or None for a fresh run.

    Raises:
        InputError: if the directory already holds a run and `--resume` is not given, or the other
            way round. Nothing in it is touched then.
    """
    directory = Path(args.output_dir)
    used = (directory / RUN_CONFIG).exists()
    if run.resume:
        checkpoint = get_last_checkpoint(str(directory)) if directory.is_dir() else None
        if checkpoint is None:
            raise InputError(f"--resume: {directory} has no checkpoint to go on from")
        return str(checkpoint)
    if used:
        raise InputError(
            f"{directory} already holds a run: add --resume to go on with it, or give another "
            "--output_dir"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make output_dir {directory}: {error.strerror}") from error
    return None


def save_run_description(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> None:
    """Write `config.yaml` (every setting, resolved) and `environment.json`."""
    directory = Path(args.output_dir)
    text = yaml.safe_dump(resolved_config(run, args, model), sort_keys=True, allow_unicode=True)
    write_atomically(directory / RUN_CONFIG, text)
    write_atomically(directory / "environment.json", json.dumps(environment(), indent=2))


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


def environment() -> dict[str, Any]:
    """Versions, device and git commit: what a later reader needs to run it again."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": describe_device(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "git_commit": _git_commit(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that decide the result."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "not installed"
    return found


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    commit = done.stdout.strip()
    return commit if re.fullmatch(r"[0-9a-f]{40,64}", commit) else None


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
