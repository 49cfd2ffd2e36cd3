"""Clock, memory peaks, alternation and the report that the benchmarks share.

A benchmark is a list of variants. Each one runs inside `Report.variant`, which writes the row to
the JSON file at once, keeps the error of a variant that fails, and leaves out what no longer fits
into the time budget: one broken variant must not cost the others.
"""

import gc
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
Row = dict[str, Any]
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "triton")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Drop dead objects and release cached blocks of the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peaks() -> None:
    """Reset the peak counters to what is allocated now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def allocated_gib() -> float | None:
    """Return GiB allocated now; None on a CPU, where it is not counted."""
    return round(torch.cuda.memory_allocated() / GIB, 3) if torch.cuda.is_available() else None


def peak_gib() -> dict[str, float | None]:
    """Return the peaks since `reset_peaks`, in GiB; None on a CPU."""
    if not torch.cuda.is_available():
        return {"peak_allocated_gib": None, "peak_reserved_gib": None}
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
    }


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Run `function`; return its seconds, GPU work included, and its result."""
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - start, result


class PhaseClock:
    """Exclusive time and memory peak of nested phases.

    Entering a phase inside another one stops the outer clock, so seconds add up to the wall clock.
    Peaks are reset at every border: each phase owns the peak that was reached inside it.
    """

    def __init__(self) -> None:
        self._stack = ["other"]
        self._phases: dict[str, dict[str, Any]] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was measured and start now."""
        self._phases = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
        synchronize()
        reset_peaks()
        self._last = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Charge the time so far to the current phase and start `phase`."""
        self._charge()
        self._phases[phase]["calls"] += 1
        self._stack.append(phase)

    def leave(self) -> None:
        """Return to the phase around the current one."""
        self._charge()
        self._stack.pop()

    def wrap(self, owner: Any, method: str, phase: str) -> None:
        """Measure every call of `owner.method` as `phase`, as long as `owner` lives."""
        inner = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return inner(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, method, measured)

    def take(self) -> dict[str, dict[str, Any]]:
        """Return the phases measured so far, and restart."""
        self._charge()
        phases = {
            name: {**values, "seconds": round(values["seconds"], 4)}
            for name, values in self._phases.items()
        }
        self.restart()
        return phases

    def _charge(self) -> None:
        synchronize()
        now = time.perf_counter()
        phase = self._phases[self._stack[-1]]
        phase["seconds"] += now - self._last
        for key, peak in peak_gib().items():
            if peak is not None:
                phase[key] = max(phase.get(key, 0.0), peak)
        reset_peaks()
        self._last = now


def alternate(
    runs: Mapping[str, Callable[[int], Row]], repeats: int, seconds: float, at_least: int = 1
) -> dict[str, list[Row]]:
    """Run A, B, A, B, ..., so that a slow machine slows down both.

    Args:
        runs: what to measure by name; each is called with the number of the round.
        seconds: no round begins that would probably end later than this.
        at_least: rounds that begin anyway.
    """
    start = time.perf_counter()
    measured: dict[str, list[Row]] = {name: [] for name in runs}
    for i in range(repeats):
        for name, run in runs.items():
            measured[name].append(run(i))
        elapsed = time.perf_counter() - start
        if i + 1 >= at_least and elapsed * (i + 2) / (i + 1) > seconds:
            break
    return measured


def compare(measured: dict[str, list[Row]], key: str) -> Row:
    """Return all values, medians, and ratios to the first contender.

    Example:
        >>> compare({"stock": [{"s": 8.0}, {"s": 6.0}], "solo": [{"s": 2.0}, {"s": 1.5}]}, "s")
        {'s': {'stock': [8.0, 6.0], 'solo': [2.0, 1.5]}, 'median': {'stock': 7.0, 'solo': 1.75}, \
'ratio': {'solo': 4.0}}
    """
    values = {name: [round(row[key], 4) for row in rows] for name, rows in measured.items()}
    medians = {name: statistics.median(numbers) for name, numbers in values.items()}
    first, *others = medians
    ratios = {name: round(medians[first] / medians[name], 3) for name in others}
    return {key: values, "median": medians, "ratio": ratios}


def earlier_rows(path: Path, settings: dict[str, Any]) -> list[Row]:
    """Return the rows of a report; none if machine, versions or settings were others."""
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    now = {"machine": describe_machine(), "versions": _versions(), "settings": settings}
    if {name: data[name] for name in now} != json.loads(json.dumps(now, default=str)):
        print(f"{path.name}: measured elsewhere or under other settings; its rows are dropped")
        return []
    rows: list[Row] = data["rows"]
    return rows


class Report:
    """The JSON file of a benchmark: machine, settings, and a row for every variant."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        time_budget: float,
        rows: list[Row] | None = None,
    ) -> None:
        self.path = path
        self._deadline = time.perf_counter() + time_budget
        self._start = time.perf_counter()
        self.data: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": _versions(),
            "settings": settings,
            "rows": rows or [],
        }
        self.flush()

    def time_left(self) -> float:
        """Return the seconds until no further variant starts."""
        return self._deadline - time.perf_counter()

    def flush(self) -> None:
        """Write the file atomically."""
        self.data["elapsed_s"] = round(time.perf_counter() - self._start, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        os.replace(partial, self.path)

    def set(self, key: str, value: Any) -> None:
        """Store one fact about the whole run."""
        self.data[key] = value
        self.flush()

    def variant(
        self, part: str, measure: Callable[[Row], None], needs: float = 5.0, **labels: Any
    ) -> bool:
        """Measure one variant into a row, unless fewer than `needs` seconds are left.

        `measure` fills the row as it goes, so that a failure keeps what came before it; the
        error is recorded and goes no further. Returns whether the variant succeeded.
        """
        row: Row = {"part": part, **labels}
        self.data["rows"].append(row)
        start = time.perf_counter()
        if self.time_left() < needs:
            row["skipped"] = "time"
        else:
            try:
                measure(row)
            except Exception as error:
                row["error"] = _describe(error)
            row["wall_s"] = round(time.perf_counter() - start, 2)
            free_memory()
        self.flush()
        state = row.get("error") or row.get("skipped") or "ok"
        name = " ".join(str(value) for value in labels.values() if value is not None)
        print(f"[{self.data['elapsed_s']:6.1f} s] {part}: {name}: {state[:300]}", flush=True)
        return state == "ok"


def describe_machine() -> dict[str, Any]:
    """Name the device that the numbers belong to."""
    machine: dict[str, Any] = {"cpus": os.cpu_count(), "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / GIB, 1),
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        }
    else:
        machine |= {"device": "cpu", "threads": torch.get_num_threads()}
    return machine


def cpu_name() -> str:
    """Return the name of the processor, from /proc/cpuinfo if available."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def driver_version() -> str | None:
    """Ask nvidia-smi for the version of the driver, which torch does not know."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0]


def code_version() -> str:
    """Compute a short hash of the code that is measured."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "sologrpo").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def copy_bandwidth(repeats: int = 10) -> float:
    """Measure the bandwidth of copies in the memory: bytes per second, read plus written."""
    on_gpu = torch.cuda.is_available()
    source = torch.ones(2**28 if on_gpu else 2**22, device="cuda" if on_gpu else "cpu")
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source))[0] for _ in range(repeats))
    return 2 * source.nbytes / best


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe(error: Exception) -> str:
    """Format type, message and innermost frames, to debug a run that cannot be repeated."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:600]} [{where}]"
