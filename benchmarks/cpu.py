"""SoloGRPO compared with stock TRL on a CPU: `make bench`, or a part of it.

    python benchmarks/cpu.py --parts "goals grid" --minutes 30

goals  training steps on the batches that docs/performance.md gives goals for
grid   training steps on about 30 kinds of batches, chosen by a seed

Each row is measured in a separate process, in which both contenders take turns. The row is written
to a JSON file at once, and measured again only if the code in `sologrpo/` has changed since, so an
interrupted benchmark continues where it stopped. The last line names the worst cell.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `sologrpo`, whether or not the project is installed

from _grid import FIXED, REHEARSAL, Bench, Cell, Sizes, grid, measure_cell, one_line  # noqa: E402
from _measure import Report, Row, code_version, cpu_name, earlier_rows  # noqa: E402

from sologrpo.startup import cpu_environment  # noqa: E402

RESULTS = ROOT / "benchmarks/results/cpu.json"
REHEARSED = ROOT / "runs/bench-rehearsal.json"
MODEL = ROOT / "models/SmolLM2-135M-Instruct"

START = 25.0  # seconds for imports, and for loading two models
OVERDUE = 5  # times the estimate, after which a process is ended
END = 10.0  # seconds for a job to end the processes that it has started


@dataclass(frozen=True)
class Job:
    """A cell to be measured, and the labels of its row."""

    part: str
    labels: dict[str, Any]
    cell: Cell

    @property
    def seconds(self) -> float:
        """Estimate the seconds on two cores, to plan with."""
        # Of stock TRL a step that does not count and two that do; all of ours take less than one.
        return START + 4 * self.cell.seconds

    def is_of(self, row: Row) -> bool:
        """Check whether a row is that of this job."""
        return {"part": self.part, **self.labels}.items() <= row.items()


def list_jobs(seed: int) -> list[Job]:
    """List all jobs, in the order in which they run."""
    return [
        *(Job("goals", cell.labels(), cell) for cell in FIXED),
        *(Job("grid", cell.labels() | {"seed": seed}, cell) for cell in grid(seed)),
    ]


PARTS = ("goals", "grid")


def run_job(job: Job, place: int, args: argparse.Namespace) -> bool:
    """Run the job at a place of the list in a separate process; return True if it succeeded."""
    command = [
        sys.executable, str(Path(__file__)), "--worker", str(place), "--seed", str(args.seed),
        "--model", str(args.model), "--out", str(args.out),
    ]  # fmt: skip
    if args.rehearse:
        command.append("--rehearse")
    process = subprocess.Popen(command, env=environment(), cwd=ROOT)
    limit = OVERDUE * job.seconds
    try:
        return process.wait(timeout=limit) == 0
    except subprocess.TimeoutExpired:
        print(f"{job.part} {job.labels}: ended after {limit:.0f} s")
        return False
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job; it ends the processes that it has started."""
    process.terminate()
    try:
        process.wait(timeout=END)
    except subprocess.TimeoutExpired:  # in the middle of a long call
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    """Build the environment of a job, with only these settings of glibc's allocator."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ours.pop("GLIBC_TUNABLES", None)
    ours |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return cpu_environment(ours)


def work(job: Job, args: argparse.Namespace) -> bool:
    """Measure one row in this process; return True if it succeeded."""
    from sologrpo.base.console import quiet_libraries

    quiet_libraries()
    settings = settings_of(args)
    kept = [row for row in earlier_rows(args.out, settings) if not job.is_of(row)]
    report = Report(args.out, settings, float("inf"), kept)
    report.set("date", datetime.datetime.now(datetime.UTC).date().isoformat())
    sizes = REHEARSAL if args.rehearse else Sizes()
    with tempfile.TemporaryDirectory(prefix="sologrpo-bench-") as folder:
        bench = Bench(report, args.model, sizes, Path(folder), args.seed)
        return report.variant(
            job.part, partial(measure_cell, bench, cell=job.cell), **job.labels, code=code_version()
        )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the settings that all rows of a file have in common."""
    sizes = REHEARSAL if args.rehearse else Sizes()
    return {"cpu": cpu_name(), "model": args.model.name, **asdict(sizes)}


def is_measured(job: Job, rows: list[Row], code: str) -> bool:
    """Check whether a row of this job exists that the same code gave."""
    return any(job.is_of(row) and row["code"] == code and "error" not in row for row in rows)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="which parts (default: all)")
    add("--minutes", type=float, default=float("inf"), help="stop when they are over; run the "
        "same command again to continue")  # fmt: skip
    add("--seed", type=int, default=0, help="of the cells of the grid and their lengths")
    add("--again", action="store_true", help="measure again what is measured already")
    add("--model", type=Path, default=MODEL, help="folder of the policy; `make model` fetches it")
    add("--out", type=Path, help="results (default: benchmarks/results/cpu.json)")
    add("--rehearse", action="store_true", help="tiny sizes, to check that all parts work")
    add("--worker", type=int, help=argparse.SUPPRESS)  # place in `list_jobs`
    args = parser.parse_args(argv)
    args.parts = args.parts.replace(",", " ").split()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    args.model = args.model.resolve()
    if not (args.model / "config.json").is_file():
        parser.error(f"no model in {args.model}: make model fetches SmolLM2-135M-Instruct")
    args.out = (args.out or (REHEARSED if args.rehearse else RESULTS)).resolve()
    return args


def main() -> None:
    """Run the jobs of all chosen parts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `finally` runs
    args = parse_args()
    jobs = list_jobs(args.seed)
    if args.worker is not None:
        sys.exit(0 if work(jobs[args.worker], args) else 1)
    rows, code = earlier_rows(args.out, settings_of(args)), code_version()
    todo = [
        (place, job)
        for place, job in enumerate(jobs)
        if job.part in args.parts and (args.again or not is_measured(job, rows, code))
    ]
    estimate = sum(job.seconds for _, job in todo) / 60
    print(f"seed {args.seed}: {len(todo)} rows to measure, about {estimate:.0f} min", flush=True)
    failed = measure_all(todo, args)
    rows = [row for row in earlier_rows(args.out, settings_of(args)) if "ratio" in row]
    if rows:
        print(f"worst cell: {one_line(min(rows, key=lambda row: row['ratio']['solo']))}")
    if failed:
        sys.exit("failed: " + "; ".join(f"{job.part} {job.labels}" for job in failed))


def measure_all(todo: list[tuple[int, Job]], args: argparse.Namespace) -> list[Job]:
    """Run jobs one after another, as far as the time allows; return those that failed."""
    start, planned, pace, failed = time.perf_counter(), 0.0, 1.0, []
    for done, (place, job) in enumerate(todo):
        elapsed = time.perf_counter() - start
        if elapsed + pace * job.seconds > 60 * args.minutes:
            print(f"time is up: {len(todo) - done} rows are left; the same command continues")
            break
        if not run_job(job, place, args):
            failed.append(job)
            continue
        row = next(row for row in earlier_rows(args.out, settings_of(args)) if job.is_of(row))
        print(one_line(row), flush=True)
        planned += job.seconds
        pace = (time.perf_counter() - start) / planned
    return failed


if __name__ == "__main__":
    main()
