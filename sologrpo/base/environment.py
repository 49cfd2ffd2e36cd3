"""Describe where a process runs: versions, device and git commit."""

import platform
import subprocess
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list
from pydantic import Field
from transformers.utils import chat_template_utils

from sologrpo.base.device import describe_device
from sologrpo.base.errors import InputError
from sologrpo.base.files import ENVIRONMENT
from sologrpo.base.schema import Schema, read_json

PACKAGES = ("sologrpo", "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate",
            "datasets")  # fmt: skip


class RunEnvironment(Schema):
    """Describe `environment.json`: where a run was trained, and what a later `--resume` compares.

    Attributes:
        gflops: rates of matrix products by dtype that it was chosen by, in GFLOP/s; empty if it was
            not measured.
        changes: of fingerprints that `--accept_changes` allowed, each with its step.
    """

    python: str
    platform: str
    device: str
    cuda: str | None
    versions: dict[str, str]
    git_commit: str | None
    prompt_date: datetime | None = Field(default=None, strict=False)  # JSON has texts
    dtype: Literal["float32", "bfloat16", "float16"]
    gflops: dict[str, int] = Field(default={})
    fingerprints: dict[str, str]
    changes: list[dict[str, str | int]] = Field(default=[])


def read_environment(directory: Path) -> RunEnvironment | None:
    """Read `environment.json` of a run; None if there is none."""
    path = directory / ENVIRONMENT
    return read_json(path, RunEnvironment) if path.exists() else None


def fix_prompt_date(run: Path | None) -> None:
    """Let chat templates show the date of a run, or today's, for as long as the processes run.

    Llama-3.2's, SmolLM3's and gpt-oss's write the date into every prompt. Their only clock is
    `strftime_now`, which asks `datetime` (transformers 5.23.0, utils/chat_template_utils.py:631).
    TRL's prompts get the same date, and the template that is saved with a model stays as it is.
    """
    recorded = None
    with suppress(InputError):  # it is damaged: who needs the rest of it says so
        recorded = read_environment(run) if run else None
    date = (recorded and recorded.prompt_date) or datetime.now()
    (date,) = broadcast_object_list([date])
    chat_template_utils.datetime = SimpleNamespace(now=lambda: date)


def environment() -> dict[str, Any]:
    """Collect versions, device, git commit and date, to run it again later."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": describe_device(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "git_commit": _git_commit(),
        "prompt_date": chat_template_utils.datetime.now().isoformat(),
    }


def versions() -> dict[str, str]:
    """Look up the versions of the packages that decide the result."""
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
