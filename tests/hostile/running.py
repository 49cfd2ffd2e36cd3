"""Run cases, several at a time, and sum up what was found."""

import datetime
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cases import CALLS, REAL, Case, controls, draw, settings_of
from judge import faults
from sandbox import QUESTIONS, build, copy, resumed_adapter, snapshot
from scripts import launch_command
from server import ROOT, Ended, Job, Server, Servers

# The Hub of a machine without a network: nothing answers there.
NO_HUB = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}

IMPORTS = 60.0  # seconds that a separate process may take longer


@dataclass
class Result:
    """A case, how it ended, and what was wrong with that."""

    case: Case
    ended: Ended
    faults: list[str]
    seed: int

    def __str__(self) -> str:
        case, ended = self.case, self.ended
        last = (ended.err.strip() or ended.out.strip() or "nothing").splitlines()[-1]
        return (
            f"{', '.join(self.faults)}: {case.command} ({case.kind}: {case.what}), exit "
            f"{ended.code} after {ended.seconds} s: {last[:300]!r}"
            f"{f'; bad: {case.bad}' if case.bad else ''}\n"
            f"    again: python tests/hostile --seed {self.seed} --case {case.number}"
        )


class Range:
    """Run cases in copies of one folder, on one server or several."""

    def __init__(self, scratch: Path, servers: Servers, timeout: float) -> None:
        self.scratch, self.timeout = scratch, timeout
        for command in CALLS:
            settings_of(command)  # captures parsers, which threads cannot do at the same time
        self.servers = servers
        (made,) = self.servers.map(self._make, ["original"])
        self.original, self.adapter = made

    def _make(self, server: Server, name: str) -> tuple[Path, str]:
        original = build(self.scratch / name, server)
        return original, resumed_adapter(original, self.scratch / "resumed", server)

    def run(self, seed: int, numbers: Iterable[int], keep: bool = False) -> Iterator[Result]:
        """Draw and run cases; yield their results in order."""
        return self.servers.map(
            lambda server, number: self._run(server, seed, number, keep), numbers
        )

    def run_controls(self) -> Iterator[Result]:
        """Run what has to succeed."""
        return self.servers.map(lambda server, case: self._run(server, 0, case, False), controls())

    def _run(self, server: Server, seed: int, drawn: Case | int, keep: bool) -> Result:
        box = copy(self.original, self.scratch / f"case-{id(server)}" / "box")
        case = draw(seed, drawn, box / "home") if isinstance(drawn, int) else drawn
        before = snapshot(box)
        ended = server.run(self._job(case, box))
        found = faults(case, ended, before, snapshot(box), self.adapter)
        if not keep:
            shutil.rmtree(box.parent)
        return Result(case, ended, found, seed)

    def _job(self, case: Case, box: Path) -> Job:
        job = Job(case.argv, str(box / "home"), str(box.parent / "printed"), self.timeout)
        if case.command == "chat":
            job.stdin = QUESTIONS
        if case.real:
            job.environment, job.timeout = NO_HUB, IMPORTS + self.timeout
            job.command = [sys.executable, "-m", "sologrpo"]
            if case.command == "train":
                job.argv, job.command = case.argv[1:], launch_command()
            elif case.command == "evaluate":
                job.argv, job.command = case.argv[1:], [sys.executable, f"{ROOT}/evaluate.py"]
        return job


def seed_of_the_day() -> int:
    """Return `HOSTILE_SEED`, or else today's date as a number."""
    return int(os.environ.get("HOSTILE_SEED") or f"{datetime.date.today():%Y%m%d}")


def quick_numbers(count: int) -> Sequence[int]:
    """Number cases of which one is a separate process, for tests that have to be fast."""
    return [REAL, *islice((n for n in range(1, count * 2) if n % REAL), count - 1)]


def table(results: Sequence[Result]) -> str:
    """Sum up: cases by command and kind, and what was found."""
    kinds = sorted({result.case.kind for result in results})
    lines = [["command", *kinds, "all"]]
    for command in sorted({result.case.command for result in results}):
        count = Counter(r.case.kind for r in results if r.case.command == command)
        lines.append([command, *(str(count[kind] or "") for kind in kinds), str(count.total())])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    bad = sum(result.case.bad is not None for result in results)
    real = sum(result.case.real for result in results)
    exits = dict(Counter(result.ended.code for result in results))
    found = dict(Counter(fault for result in results for fault in result.faults))
    slowest = max(results, key=lambda result: result.ended.seconds)
    return (
        f"{text}\n{len(results)} command lines, {bad} known to be bad, {real} typed as in the "
        f"README; exits {exits}; found: {found or 'nothing'}; slowest {slowest.ended.seconds} s: "
        f"{slowest.case.command}, {slowest.case.what}"
    )
