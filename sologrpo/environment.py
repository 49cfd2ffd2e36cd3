"""Versions, device and git commit of a run."""

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sologrpo.device import describe_device

PACKAGES = ("sologrpo", "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate",
            "datasets")  # fmt: skip


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
