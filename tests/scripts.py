"""Run `train.py` and `evaluate.py` as a user does: in this process, or in a separate one."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rewards import RewardSpecError
from sologrpo.base.errors import InputError
from tiny import ROOT


class Printed(str):
    """The stderr of a script, with its exit code and stdout as attributes."""

    code: int
    stdout: str


def load_script(name: str) -> ModuleType:
    """Load `train.py` or `evaluate.py` as a new module."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_without_report() -> ModuleType:
    """`train.py` without the report at its end, which takes longer than steps of a tiny model."""
    module = load_script("train")
    module.write_report = lambda directory: directory / "report.html"  # type: ignore[attr-defined]
    return module


def exit_code(module: ModuleType, *arguments: object) -> int:
    """Run a script with these arguments, in this process."""
    name = Path(str(module.__file__)).name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            module.main()
        except SystemExit as error:
            return int(error.code or 0)
    return 0


def run_here(name: str, *arguments: object) -> Printed:
    """Run a script with these arguments, in this process; capture what Python prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code(load_script(name), *arguments)
    printed = Printed(err.getvalue())
    printed.code, printed.stdout = code, out.getvalue()
    return printed


def printed_by(
    module: ModuleType, capfd: pytest.CaptureFixture[str], *arguments: object
) -> Printed:
    """Run a script with these arguments, in this process; capture what it prints."""
    capfd.readouterr()
    code = exit_code(module, *arguments)
    captured = capfd.readouterr()
    printed = Printed(captured.err)
    printed.code, printed.stdout = code, captured.out
    return printed


def script_environment(**more: str) -> dict[str, str]:
    """Return the environment in which a script finds the project and `tiny`, on one core."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def launch_command(*arguments: object) -> list[str]:
    """Return the command that launches `train.py` as the documents do; run it in `ROOT`."""
    accelerate = Path(sys.executable).parent / "accelerate"
    one_device = ROOT / "configs" / "accelerate" / "one_device.yaml"
    command = [accelerate, "launch", "--quiet", "--config_file", one_device, ROOT / "train.py"]
    return list(map(str, [*command, *arguments]))


def command_of(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a script with these arguments, in a separate process."""
    return [sys.executable, str(ROOT / f"{name}.py"), *map(str, arguments)]


def run_script(name: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script in a separate process; `options` are those of `subprocess.run`."""
    return subprocess.run(
        command_of(name, *arguments), capture_output=True, text=True, check=False, timeout=240,
        **{"env": script_environment()} | options,
    )  # fmt: skip


def refusal(attempt: Callable[[], object]) -> str | None:
    """Return the one line that this input is refused with, or None if it is accepted."""
    try:
        attempt()
    except (InputError, RewardSpecError) as error:
        line = str(error)
        assert line.strip(), "an empty line"
        assert "\n" not in line, line
        return line
    return None


def steps_of(run: Path) -> list[int]:
    """The steps that a run has taken, in order."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["step"] for row in map(json.loads, lines) if "reward" in row]


def last_line(text: str) -> str:
    """The last line that is not blank."""
    return text.strip().splitlines()[-1]
