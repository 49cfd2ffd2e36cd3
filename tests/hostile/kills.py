"""`kill -9` at random moments of training, evaluation and export; each is resumed to its end.

Training is started as in the README, with `accelerate launch` and the shipped recipes. The others
are forks, so that no kill is spent on the seconds of importing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox import RECIPES, RUN, Entry, copy, snapshot
from scripts import launch_command
from server import Ended, Job, Server, Servers

# With `auto`, the engine of a 4-bit run is the one that was faster in its first step. All are
# launched alike, because `accelerate launch` and a plain process have other numbers of threads.
STEPS = 6
TIMEOUT = 240.0  # seconds
KILLED = -9
ATTEMPTS = 20  # kills that come after the end do not count


@dataclass(frozen=True)
class Work:
    """A command that is killed.

    Attributes:
        name: as reported.
        argv: arguments of `sologrpo`.
        again: added to `argv` after a kill.
        begins: path that appears when the work begins; empty for a fork.
        results: suffixes of the files that must be the same bits.
        below: folders of those.
    """

    name: str
    argv: tuple[str, ...]
    again: tuple[str, ...]
    begins: str
    results: tuple[str, ...]
    below: tuple[str, ...]


def works() -> dict[str, list[Work]]:
    """Return what is killed, by command."""
    # A folder of separate: --resume refuses the results that other settings left in the run's.
    output = "out/evaluation"
    return {
        "train": [
            Work(
                f"train {recipe}",
                ("train", "--config", f"configs/{recipe}.yaml", "--output_dir", "runs/new",
                 "--max_steps", str(STEPS)),
                ("--resume",), "runs/new", (".safetensors", ".parquet"),
                ("runs/new/adapter", "runs/new/completions"),
            )
            for recipe in RECIPES
        ],
        "evaluate": [
            Work("evaluate", ("evaluate", "--run", RUN, "--output_dir", output), ("--resume",), "",
                 ("records.jsonl",), (f"{output}/eval",)),
        ],
        "export": [
            Work("export", ("export", "--run", RUN, "--save_merged", "out/new", "--save_4bit",
                            "out/new4"), (), "",
                 (".safetensors",), ("out/new", "out/new4")),
        ],
    }  # fmt: skip


@dataclass(frozen=True)
class Killed:
    """Record the seconds after which a work was killed, and what differs at its end."""

    work: str
    moments: tuple[float, ...]
    difference: str


class Killer:
    """Kill works in copies of a folder, on several servers at a time."""

    def __init__(self, original: Path, scratch: Path, servers: Servers) -> None:
        self._original, self._scratch, self._servers = original, scratch, servers

    def kill(self, seed: int, command: str, kills: int) -> list[Killed]:
        """Kill one command this many times, and resume it after each."""
        rng = random.Random(f"{seed} {command}")
        plan = []
        while kills > 0:
            times = min(kills, rng.randint(1, 2))
            plan.append((rng.choice(works()[command]), times, rng.random()))
            kills -= times
        return list(self._servers.map(self._kill, plan))

    def _kill(self, server: Server, item: tuple[Work, int, float]) -> Killed:
        work, times, seed = item
        rng = random.Random(seed)
        folder = self._scratch / f"{work.name.replace(' ', '-')}-{seed}"
        whole, seconds = self._uninterrupted(work, folder / "whole", server)
        moments: list[float] = []
        for attempt in range(ATTEMPTS):
            if not moments:
                home, argv = copy(self._original, folder / str(attempt)) / "home", work.argv
            elif len(moments) == times:
                break
            moment = round(rng.uniform(0, seconds), 3)
            if server.run(self._job(work, argv, home, moment)).code == KILLED:
                moments.append(moment)
                argv = (*work.argv, *work.again)
            else:  # at its end before the kill: from the start
                moments = []
        ended = server.run(self._job(work, argv, home, None))
        return Killed(work.name, tuple(moments), _difference(work, ended, home, whole))

    def _uninterrupted(
        self, work: Work, folder: Path, server: Server
    ) -> tuple[dict[str, Entry], float]:
        home = copy(self._original, folder) / "home"
        ended = server.run(self._job(work, work.argv, home, None))
        assert ended.code == 0, ended
        seconds = _seconds_of_files(home / work.begins) if work.begins else ended.seconds
        return _results(work, home), seconds

    def _job(self, work: Work, argv: Sequence[str], home: Path, moment: float | None) -> Job:
        job = Job([*argv], str(home), str(home.parent), TIMEOUT, kill_after=moment)
        if work.begins:
            job.argv, job.command = job.argv[1:], launch_command()
            job.kill_when = str(home / work.begins)
        return job


def _seconds_of_files(folder: Path) -> float:
    """Return the seconds between the first and the last file, which leaves the imports out."""
    times = [path.stat().st_mtime for path in folder.rglob("*") if path.is_file()]
    return max(times) - min(times)


def _results(work: Work, home: Path) -> dict[str, Entry]:
    return {
        path: entry for path, entry in snapshot(home).items()
        if path.startswith(tuple(f"{folder}/" for folder in work.below))
        and path.endswith(work.results)
    }  # fmt: skip


def _difference(work: Work, ended: Ended, home: Path, whole: dict[str, Entry]) -> str:
    if ended.code != 0:
        return f"exit {ended.code}: {ended.err[-2000:]}"
    found = _results(work, home)
    different = [path for path in {*found, *whole} if found.get(path) != whole.get(path)]
    return ", ".join(sorted(different)) if found else "no results"
