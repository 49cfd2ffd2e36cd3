"""Prepare the process, and describe where it runs: versions, device and git commit."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sologrpo.console import quiet_libraries
from sologrpo.device import describe_device, prepare_cpu

PACKAGES = ("sologrpo", "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate",
            "datasets")  # fmt: skip


def prepare_process() -> None:
    """Silence progress bars of libraries, and set up the threads and the memory of a CPU."""
    quiet_libraries()
    prepare_cpu()


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
