"""Check whether this machine can train: `sologrpo doctor`, or `make doctor` in a checkout.

Prints one line per requirement: `ok`, `warning` (training works, but slower or not with every
recipe) or `error` (it does not work), and how to fix it. Exits with 1 if there is an error. Changes
nothing and shows no token.
"""

import os
import platform
import shutil
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from sologrpo.base.console import Terminal, gibibytes, print_line, quiet_libraries
from sologrpo.base.errors import one_line_errors
from sologrpo.base.text import one_line, shortened
from sologrpo.command_line import Parser

Status = Literal["ok", "warning", "error"]

# For the quickstart: its model and two copies of it, two checkpoints, the report.
MIN_FREE_MEMORY = 8 * 2**30
MIN_FREE_DISK = 5 * 2**30
# A 4-bit 8B model in training, docs/configuration.md; below it only smaller models fit.
COMFORTABLE_GPU = 15 * 2**30
REINSTALL = "pip install --upgrade sologrpo, or make clean setup in a checkout"
COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was found, and what to do about it."""

    status: Status
    text: str
    fix: str = ""


def check_packages() -> Finding:
    """Check the installed versions against the package's requirements."""
    wrong = []
    for requirement in map(Requirement, metadata.requires("sologrpo") or []):
        if requirement.marker is not None:  # of an extra
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if installed not in requirement.specifier:
            wrong.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    if wrong:
        return Finding("error", "; ".join(wrong), REINSTALL)
    return Finding("ok", f"Python {platform.python_version()} and its packages are as required")


def check_torch() -> Finding:
    """Check PyTorch and its device."""
    import torch

    from sologrpo.base.device import default_dtype, describe_device

    text = f"{torch.__version__} on {describe_device()}"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is not None:
            return Finding(
                "error", f"{text}, although an NVIDIA driver is installed",
                "install a CUDA build of torch that supports the driver: https://pytorch.org",
            )  # fmt: skip
        return Finding("warning", text, "the quickstart runs here; larger models need a GPU")
    total = torch.cuda.get_device_properties(0).total_memory
    free, _ = torch.cuda.mem_get_info(0)
    text += f", {str(default_dtype()).removeprefix('torch.')}, {gibibytes(free)} free"
    if free < 0.9 * total:
        return Finding("warning", text, "another process holds GPU memory: nvidia-smi lists it")
    if total < COMFORTABLE_GPU:
        return Finding("warning", text, "use a model of 3B or less, in 4 bits")
    return Finding("ok", text)


def check_bitsandbytes() -> Finding:
    """Check a matrix product with NF4 weights against the same in fp32."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(4, 64, device=device)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
    expected = x @ weight.to(device).T
    error = float((layer.to(device)(x) - expected).norm() / expected.norm())
    text = f"{metadata.version('bitsandbytes')}, NF4 product on {device} {error:.0%} off"
    if error > 0.2:  # rounding normal weights to four bits costs about a tenth
        return Finding("error", text, "load_in_4bit: false, or another version of bitsandbytes")
    return Finding("ok", text)


def check_memory() -> Finding:
    """Check the free main memory."""
    memory = psutil.virtual_memory()
    text = f"{gibibytes(memory.available)} of {gibibytes(memory.total)} free"
    if memory.available < MIN_FREE_MEMORY:
        return Finding(
            "warning",
            text,
            f"the quickstart needs {gibibytes(MIN_FREE_MEMORY)}: close other programs",
        )
    return Finding("ok", text)


def check_disk(folder: Path) -> Finding:
    """Check the disk that runs are written to."""
    free = shutil.disk_usage(folder).free
    text = f"{gibibytes(free)} free under {folder}"
    if free < MIN_FREE_DISK:
        return Finding("warning", text, "make room, or choose another disk with --output_dir")
    if not os.access(folder, os.W_OK):
        return Finding("error", f"{folder} cannot be written to", "start from another folder")
    return Finding("ok", text)


def check_hub() -> Finding:
    """Check the Hub token and its owner."""
    import huggingface_hub

    from sologrpo.base.hub import HTTPError, explain_failure, unreachable

    if huggingface_hub.get_token() is None:
        return Finding("ok", "no token; needed for gated models and to push (hf auth login)")
    if problem := unreachable():
        return Finding("warning", f"token not checked: {problem}", "train from local files")
    try:
        return Finding("ok", f"logged in as {huggingface_hub.whoami()['name']}")
    except HTTPError as error:
        return Finding("error", explain_failure(error, "your account"), "hf auth login")


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": check_packages,
    "torch": check_torch,
    "bitsandbytes": check_bitsandbytes,
    "memory": check_memory,
    "disk": lambda: check_disk(Path.cwd()),
    "hub": check_hub,
}


def examine(check: Callable[[], Finding]) -> Finding:
    """Run a check; an exception is an error and does not stop the other checks."""
    try:
        return check()
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        return Finding("error", shortened(reason, 300), REINSTALL)


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Print the result of each check; exit with 1 if one of them is an error."""
    Parser(
        prog="sologrpo doctor",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    ).parse_args(argv)
    quiet_libraries()
    console = Terminal()
    statuses = []
    for name, check in CHECKS.items():
        found = examine(check)
        statuses.append(found.status)
        colour = COLOURS[found.status]
        console.print(f"{name:<13}[{colour}]{found.status:<8}[/]", end="", markup=True)
        print_line(console, found.text)
        if found.fix:
            print_line(console, f"{'':21}-> {found.fix}")
    if "error" in statuses:
        sys.exit(1)
