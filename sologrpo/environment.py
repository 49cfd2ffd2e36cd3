"""Describe where a process runs: versions, device and git commit."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from sologrpo.device import describe_device
from sologrpo.files import ENVIRONMENT
from sologrpo.schema import Schema, read_json

PACKAGES = ("sologrpo", "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate",
            "datasets")  # fmt: skip


class RunEnvironment(Schema):
    """Describe `environment.json`: where a run was trained, and what a later `--resume` compares.

    Attributes:
        dtype: number format of the weights.
        gflops: rates of matrix products by dtype that it was chosen by, in GFLOP/s; empty if it was
            not measured.
        fingerprints: of what the run is made from, by name.
        changes: of fingerprints that `--accept_changes` allowed, each with its step.
    """

    python: str
    platform: str
    device: str
    cuda: str | None
    versions: dict[str, str]
    git_commit: str | None
    dtype: Literal["float32", "bfloat16", "float16"]
    gflops: dict[str, int] = Field(default={})
    fingerprints: dict[str, str]
    changes: list[dict[str, str | int]] = Field(default=[])


def read_environment(directory: Path) -> RunEnvironment | None:
    """Read `environment.json` of a run; None if there is none.

    Raises:
        InputError: if the file is damaged.
    """
    path = directory / ENVIRONMENT
    return read_json(path, RunEnvironment) if path.exists() else None


def environment() -> dict[str, Any]:
    """Collect versions, device and git commit, to run it again later."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": describe_device(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "git_commit": _git_commit(),
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
