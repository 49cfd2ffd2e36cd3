"""SoloGRPO compared with stock TRL on a CPU: `make bench`, or a part of it.

    python benchmarks/cpu.py --parts step,sampling

step        one training step on the same completions, for several shares of groups without signal
sharing     the same with and without prompts shared by a group
variants    the same with a reference model, and with two steps on one batch
sampling    completion tokens per second
evaluation  greedy answers to test problems, compared with a widely copied loop
memory      peak memory of a process that takes one complete step
growth      a step as the group, the completions and the model grow
run         the quickstart until it reaches a given reward

Each part runs in separate processes, because glibc reads its settings when a process starts:
`plain` is glibc's default, `tuned` is what `train.py` sets on a CPU. Both contenders always share
one process and take turns in it. Rows are written to a JSON file as they are measured; measuring a
part again replaces its rows. `python benchmarks/performance_tables.py` writes the tables.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `sologrpo`, whether or not the project is installed

from _measure import Report, earlier_rows  # noqa: E402
from _sizes import SMOKE, Bench, Sizes  # noqa: E402
from reward_throughput import cpu_name  # noqa: E402

from sologrpo.startup import cpu_environment  # noqa: E402

RESULTS = ROOT / "benchmarks/results/cpu.json"
SMOKE_RESULTS = ROOT / "runs/bench-smoke.json"
MODEL = ROOT / "models/SmolLM2-135M-Instruct"

GRACE = 90.0  # seconds for loading, and for finishing a variant after the budget is spent
END = 10.0  # seconds for a job to end the processes that it has started


@dataclass(frozen=True)
class Job:
    """A part under one setting of the allocator, and its seconds."""

    part: str
    allocator: str
    seconds: float
    contender: str | None = None

    def labels(self) -> dict[str, Any]:
        """Labels of its rows."""
        labels = {"allocator": self.allocator}
        return labels if self.contender is None else {**labels, "contender": self.contender}


# An hour and twenty minutes without the runs, and half an hour for them, on two slow cores.
JOBS = (
    Job("step", "plain", 900),
    Job("step", "tuned", 900),
    Job("sharing", "tuned", 360),
    Job("variants", "tuned", 800),
    Job("sampling", "tuned", 200),
    Job("evaluation", "tuned", 600),
    Job("memory", "plain", 330, "stock"),
    Job("memory", "plain", 100, "solo"),
    Job("memory", "tuned", 100, "solo"),
    Job("growth", "tuned", 400),
    Job("run", "tuned", 1800),
)
PARTS = tuple(dict.fromkeys(job.part for job in JOBS))


def run_job(job: Job, args: argparse.Namespace, samples: Path) -> bool:
    """Run one job in a separate process; return True if it succeeded."""
    command = [
        sys.executable, str(Path(__file__)), "--worker", str(JOBS.index(job)),
        "--samples", str(samples), "--model", str(args.model), "--out", str(args.out),
    ]  # fmt: skip
    if args.smoke:
        command.append("--smoke")
    print(f"== {job.part}, {', '.join(job.labels().values())} ==", flush=True)
    process = subprocess.Popen(command, env=environment(job.allocator), cwd=ROOT)
    try:
        return process.wait(timeout=job.seconds + GRACE) == 0
    except subprocess.TimeoutExpired:
        print(f"{job.part}: ended after {job.seconds + GRACE:.0f} s; its rows so far are kept")
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


def environment(allocator: str) -> dict[str, str]:
    """Build the environment of a job, with only these settings of glibc's allocator."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ours.pop("GLIBC_TUNABLES", None)
    ours |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return cpu_environment(ours) if allocator == "tuned" else ours


def work(job: Job, args: argparse.Namespace) -> bool:
    """Measure one job in this process; return True if every variant succeeded."""
    from _cpu_generation import part_evaluation, part_sampling
    from _cpu_run import part_run
    from _cpu_training import part_growth, part_memory, part_sharing, part_step, part_variants

    from sologrpo.console import quiet_libraries

    parts = {
        "step": part_step, "sharing": part_sharing, "variants": part_variants,
        "sampling": part_sampling, "evaluation": part_evaluation, "memory": part_memory,
        "growth": part_growth, "run": part_run,
    }  # fmt: skip
    quiet_libraries()
    sizes = SMOKE if args.smoke else Sizes()
    settings = {"cpu": cpu_name(), "model": args.model.name, "dtype": "float32", **asdict(sizes)}
    kept = earlier_rows(args.out, settings, {"part": job.part, **job.labels()})
    report = Report(args.out, settings, job.seconds, kept)
    report.set("date", datetime.datetime.now(datetime.UTC).date().isoformat())
    parts[job.part](Bench(report, args.model, sizes, args.samples, job.labels()))
    return not any("error" in row for row in report.data["rows"][len(kept) :])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="which parts (default: all)")
    add("--model", type=Path, default=MODEL, help="folder of the policy; `make model` fetches it")
    add("--out", type=Path, help="results (default: benchmarks/results/cpu.json)")
    add("--smoke", action="store_true", help="tiny sizes, to check that all parts work")
    add("--worker", type=int, help=argparse.SUPPRESS)  # place in `JOBS`
    add("--samples", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parts = args.parts.replace(",", " ").split()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    args.model = args.model.resolve()
    if not (args.model / "config.json").is_file():
        parser.error(f"no model in {args.model}: make model fetches SmolLM2-135M-Instruct")
    args.out = (args.out or (SMOKE_RESULTS if args.smoke else RESULTS)).resolve()
    return args


def main() -> None:
    """Run the jobs of all chosen parts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `finally` runs
    args = parse_args()
    if args.worker is not None:
        sys.exit(0 if work(JOBS[args.worker], args) else 1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sologrpo-bench-") as folder:
        samples = Path(folder) / "completions.json"
        jobs = [job for job in JOBS if job.part in args.parts]
        failed = [job for job in jobs if not run_job(job, args, samples)]
    print(f"all parts: {time.perf_counter() - start:.0f} s")
    if failed:
        sys.exit("failed: " + "; ".join(" ".join([j.part, *j.labels().values()]) for j in failed))


if __name__ == "__main__":
    main()
