"""The log of an evaluation that is under way: every batch is kept, so that none is done twice.

One line a batch, behind a first line with the settings. A line is written at once, and a line that
was cut off by a crash is dropped, so a batch is there as a whole or not at all, and whoever goes on
makes the same batches as one who was never interrupted.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sologrpo.errors import InputError
from sologrpo.files import write_atomically


class Done(NamedTuple):
    """One completion of one problem: number 0 is the greedy one, 1 to K are sampled."""

    problem: int
    number: int
    text: str
    tokens: int
    stop_reason: str


class CompletionLog:
    """Completions of an evaluation, by (index of the problem, number of the completion).

    Args:
        path: the file; made anew unless it is gone on with.
        settings: what decides the completions, as plain JSON values.
        resume: go on with the file if there is one.

    Attributes:
        done: what is there so far.
        seconds: spent on it.

    Raises:
        InputError: if the file was begun under other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self._path = path
        self.done: dict[tuple[int, int], Done] = {}
        self.seconds = 0.0
        whole = _whole_lines(path) if resume else []
        if whole:
            check_same_settings(json.loads(whole[0])["settings"], settings)
            for line in whole[1:]:
                batch = json.loads(line)
                self._keep([Done(*row) for row in batch["done"]], batch["seconds"])
        lines = whole or [json.dumps({"settings": settings})]
        write_atomically(path, "".join(line + "\n" for line in lines))

    def append(self, batch: Sequence[Done], seconds: float) -> None:
        """Keep a batch that is done, in the file too."""
        seconds = round(seconds, 3)
        line = json.dumps({"seconds": seconds, "done": batch})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._keep(batch, seconds)

    def _keep(self, batch: Sequence[Done], seconds: float) -> None:
        self.done |= {(done.problem, done.number): done for done in batch}
        self.seconds += seconds

    def close(self) -> None:
        """Delete the file, once the results stand in others."""
        self._path.unlink(missing_ok=True)


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    # What follows the last line break is the line at which the process was killed.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return [line for line in lines if line]


def check_same_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to mix completions of two different evaluations.

    Raises:
        InputError: naming what differs.
    """
    changed = [key for key in dict(before) | dict(now) if before.get(key) != now.get(key)]
    if changed:
        were = ", ".join(f"{key} {before.get(key)}, not {now.get(key)}" for key in changed)
        raise InputError(
            f"--resume: the evaluation was started with {were}: give the same, another --label, or "
            "leave --resume out to start again"
        )
