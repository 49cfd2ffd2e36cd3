"""Check a CUDA card in ten minutes: `make gpu-check`.

    python benchmarks/gpu_check.py --parts "parity sampling"
    python benchmarks/gpu_check.py --rehearse    # on a CPU, with tiny models

doctor    `sologrpo doctor`
parity    the gradient of a small model compared with stock TRL's, in bf16 and with NF4 weights
memory    planned and measured memory of a step of 1B, 3B and 8B models
sampling  tokens per second of an 8B model, and how many the bandwidth of the memory allows
step      steps of configs/llama3.1-8b.yaml with stock TRL and with our trainer
tests     the tests that need a GPU
vllm      the same steps with TRL and vLLM in bf16, if vllm is installed

Models have random weights. Each part is a separate process, which is ended after its limit: what it
has measured by then stays, and the other parts still run. The table at the end and the JSON file
name no folder of the machine, so both can be posted. The log next to the file has everything that
the parts have printed.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _measure import Row, code_version

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "runs/gpu-check.json"
LABELS = ("shape", "weights", "decoding", "rows", "trainer")  # of a row, in the table
PRINTED = 20  # lines of a part that prints its result
NO_CUDA = (
    "error: torch finds no CUDA device (sologrpo doctor tells why); to try everything on a CPU, "
    "with tiny models: python benchmarks/gpu_check.py --rehearse"
)

# Of each part. Nobody's name on the Hub is looked up.
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
# As in a run (sologrpo/startup.py), unless something else is set.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Part:
    """A process that measures.

    Attributes:
        limit: seconds after which it is ended.
        command: of the process. A file for its rows and the limit are appended.
        prints: it prints its result instead, and nothing is appended.
    """

    limit: float
    command: list[str]
    prints: bool = False


def list_parts(rehearse: bool) -> dict[str, Part]:
    """List all parts in their order; the limits are 570 seconds in all, and 180 more with vLLM.

    Args:
        rehearse: with tiny models, and more time: the CPU may be shared with other processes.
    """
    slack = 4 if rehearse else 1
    worker = [sys.executable, str(ROOT / "benchmarks/_gpu_parts.py")]
    sizes = ["rehearsal" if rehearse else "real"]
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "--tb=line", "--disable-warnings"]
    tests = ["tests/benchmarks/test_benchmarks.py"] if rehearse else []
    return {
        "doctor": Part(slack * 30, [sys.executable, "-m", "sologrpo", "doctor"], prints=True),
        "parity": Part(slack * 60, [*worker, "parity", *sizes]),
        "memory": Part(slack * 120, [*worker, "memory", *sizes]),
        "sampling": Part(slack * 140, [*worker, "sampling", *sizes]),
        "step": Part(slack * 170, [*worker, "step", *sizes]),
        "tests": Part(slack * 50, [*pytest, *tests], prints=True),
        "vllm": Part(slack * 180, [*worker, "vllm", *sizes]),
    }


def run_part(name: str, part: Part, log: Path) -> dict[str, Any]:
    """Run a part; return its rows, and what it found out about the machine."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file, output = Path(folder) / "rows.json", Path(folder) / "output.txt"
        command = part.command if part.prints else [*part.command, str(file), str(part.limit)]
        with output.open("w") as console:
            problem = ended_with(command, part.limit, console)
        data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
        lines = [line.strip() for line in output.read_text(errors="replace").splitlines()]
    with log.open("a") as kept:
        kept.writelines(f"{line}\n" for line in (f"--- {name}", *lines))
    lines = [line for line in lines if line]
    if part.prints:
        data["rows"] = [{"part": name, "result": line} for line in lines[-PRINTED:]]
    if problem:
        last = "" if part.prints else " ".join(lines[-3:])[-400:]
        error = f"{problem}: {last}" if last else problem
        data["rows"].append({"part": name, "error": error})
    return data


def ended_with(command: list[str], limit: float, console: Any) -> str | None:
    """Run a command up to a limit, then end it and all that it started; return the problem."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command, cwd=ROOT, env=ALLOCATOR | os.environ | OFFLINE | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        status = process.wait(timeout=limit)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"ended after its limit of {limit:g} s"
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def without_places(value: Any) -> Any:
    """Remove the folders of this machine, which may hold names, from all texts in a JSON value.

    Example:
        >>> without_places({"error": "no /home/ann/models/x.json, see https://x.org"})
        {'error': 'no x.json, see https://x.org'}
    """
    if isinstance(value, dict):
        return {key: without_places(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_places(part) for part in value]
    if not isinstance(value, str):
        return value
    for place, name in ((ROOT, "."), (Path.home(), "~")):
        if len(str(place)) > 1:
            value = value.replace(str(place), name)
    return re.sub(r"(?<![\w.~/])/(?:[\w.@+-]+/)+", "", value)


def table(rows: list[Row]) -> str:
    """Build the table: part, variant, figures."""
    lines = []
    for row in rows:
        variant = ", ".join(str(row[name]) for name in LABELS if name in row)
        figures = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
            if name not in ("part", "result", *LABELS) and isinstance(value, int | float | str)
        ]
        lines.append(f"{row['part']:<9} {variant:<36} {row.get('result', '')}{'; '.join(figures)}")
    return "\n".join(line.rstrip() for line in lines)


def check(parts: dict[str, Part], out: Path, rehearsal: bool) -> list[Row]:
    """Run all parts, print the table, and return the rows; the file is written after each part."""
    now = datetime.datetime.now(datetime.UTC)
    result: dict[str, Any] = {
        "date": now.date().isoformat(),
        "rehearsal": rehearsal,
        "code": code_version(),
    }
    rows: list[Row] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    log.unlink(missing_ok=True)
    for name, part in parts.items():
        start = time.perf_counter()
        if name == "vllm" and find_spec("vllm") is None:
            rows.append({"part": name, "skipped": "vllm is not installed"})
            continue
        print(f"{name}: at most {part.limit:g} s", end="", flush=True)
        found = run_part(name, part, log)
        print(f", took {time.perf_counter() - start:.0f} s", flush=True)
        rows += without_places(found.pop("rows"))
        result |= {key: found[key] for key in ("machine", "versions", "commit") if key in found}
        out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    about = {**result.get("machine", {}), **result.get("versions", {})}
    print(", ".join(f"{key} {value}" for key, value in {**result, **about}.items()
                    if not isinstance(value, dict)))  # fmt: skip
    print(table(rows))
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the parts that were chosen; the exit status is 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", help="names of parts (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: runs/gpu-check.json)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU too, with tiny models")
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit(NO_CUDA)
    parts = list_parts(args.rehearse)
    names = args.parts.replace(",", " ").split() if args.parts else list(parts)
    if unknown := set(names) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(parts)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `finally` runs
    rows = check({name: parts[name] for name in names}, args.out, args.rehearse)
    failed = sorted({row["part"] for row in rows if "error" in row})
    print(f"results in {args.out}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
