"""Log the completions of an unfinished evaluation, so that `--resume` continues it.

The first line of the log holds the settings, every other line one batch. A batch is written as
soon as it is generated. A last line that a crash left incomplete is dropped, so the resumed
evaluation generates the same batches as one that was never interrupted.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sologrpo.errors import InputError
from sologrpo.files import RECORDS, RESULTS, write_atomically
from sologrpo.sampling.generation import Completion
from sologrpo.schema import Number, Schema, advising, parse, parse_json, read_bytes, shown
from sologrpo.scoring.comparison import (
    ADAPTER_HASH,
    Differences,
    compare_settings,
    differing,
    without_hashes,
)
from sologrpo.scoring.records import Count, Record, StopReason, read_records, read_results

LOG = "completions.partial.jsonl"


class _Head(Schema):
    settings: dict[str, Any]


class _Batch(Schema):
    seconds: Number
    # Index, number, text, token count and stop reason of each completion.
    done: list[Annotated[tuple[Count, Count, str, Count, StopReason], Field(strict=False)]]


# By (index of the problem, number): number 0 is the greedy completion, 1 to K are sampled.
Completions = Mapping[tuple[int, int], Completion]


class CompletionLog:
    """Completions of an evaluation, in memory and in a file.

    Args:
        path: the file; overwritten unless `resume`.
        settings: everything that decides the completions, as JSON values.
        resume: read the file if it exists, and continue it.

    Attributes:
        completions: by (index of the problem, number of the completion).
        seconds: spent on generating them.

    Raises:
        InputError: if the file is damaged, or was started with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self._path = path
        self.completions: dict[tuple[int, int], Completion] = {}
        self.seconds = 0.0
        lines = _complete_lines(path) if resume else []
        if lines:
            with advising("delete it, or leave out --resume to start again"):
                before, batches = _parse(lines, path)
            check_same_settings(before, settings)
            for batch in batches:
                self._keep({row[:2]: Completion(*row[2:]) for row in batch.done}, batch.seconds)
        lines = lines or [json.dumps({"settings": settings})]
        write_atomically(path, "".join(line + "\n" for line in lines))

    def append(self, batch: Completions, seconds: float) -> None:
        """Add a batch, and write it to the file.

        Args:
            batch: the completions.
            seconds: that it took to generate them.
        """
        seconds = round(seconds, 3)
        rows = [(*key, *astuple(completion)) for key, completion in batch.items()]
        # Half a surrogate pair, which a tokenizer can emit, becomes "?", as in the records.
        with self._path.open("a", encoding="utf-8", errors="replace") as file:
            line = json.dumps({"seconds": seconds, "done": rows}, ensure_ascii=False)
            file.write(line + "\n")
        self._keep(batch, seconds)

    def _keep(self, batch: Completions, seconds: float) -> None:
        self.completions |= batch
        self.seconds += seconds

    def describe_speed(self) -> dict[str, float]:
        """Return the seconds of generation (loading excluded) and completion tokens per second."""
        tokens = sum(completion.token_count for completion in self.completions.values())
        seconds = round(self.seconds, 3)
        return {"seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}

    def delete(self) -> None:
        """Delete the file, once the records are written."""
        self._path.unlink(missing_ok=True)


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # Text after the last line break is the line during which the process was killed.
    lines = read_bytes(path).decode("utf-8", "replace").split("\n")[:-1]
    return [line for line in lines if line]


def _parse(lines: Sequence[str], path: Path) -> tuple[dict[str, Any], list[_Batch]]:
    """Parse the settings and the batches of a log."""
    wheres = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    head, *batches = (parse_json(*line) for line in zip(lines, wheres, strict=True))
    return parse(_Head, head, wheres[0]).settings, [
        parse(_Batch, batch, where) for batch, where in zip(batches, wheres[1:], strict=True)
    ]


def open_log(folder: Path, identity: Mapping[str, Any], resume: bool) -> CompletionLog:
    """Open the log of an evaluation.

    Args:
        folder: `eval/<label>`.
        identity: from `describe_identity`.
        resume: continue an earlier evaluation. A finished one has records instead of a log; their
            completions are taken over.

    Raises:
        InputError: if the earlier evaluation had other settings.
    """
    results = read_results(folder / RESULTS) if resume else {}
    finished = bool(results) and not (folder / LOG).exists()
    log = CompletionLog(folder / LOG, identity, resume)
    if finished:
        log.append(_completions_of(read_records(folder / RECORDS)), results["seconds"])
    return log


def _completions_of(records: Sequence[Record]) -> Completions:
    return {
        (r.index, number): Completion(a.completion, a.completion_tokens, a.stop_reason)
        for r in records
        for number, a in enumerate((r, *r.samples))
    }


def check_same_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to mix completions of two different evaluations.

    Raises:
        InputError: with every setting that differs.
    """
    if changed := differing(before, now):
        raise InputError(
            f"--resume: the evaluation was started with {_listed(changed)}: use the same settings "
            "or another --label, or leave out --resume to start again"
        )


def _listed(changed: Differences) -> str:
    both = without_hashes(changed).items()
    return ", ".join(f"{key} {shown(was)}, not {shown(now)}" for key, (was, now) in both)


def check_place(
    folder: Path, identity: Mapping[str, Any], adapter: Path | None, resume: bool
) -> None:
    """Refuse to continue, or to replace, another evaluation than this one.

    What may be replaced is an evaluation that this one can be compared with, of the same adapter or
    of one that was in the same place: it was trained further.

    Args:
        folder: `eval/<label>`.
        identity: of this evaluation, as far as it is known.
        adapter: folder of the adapter.
        resume: continue what is there.
    """
    results, lines = read_results(folder / RESULTS), _complete_lines(folder / LOG)
    before = results.get("settings", {})
    if resume and lines:
        before = _parse(lines[:1], folder / LOG)[0]
    known = {key: before.get(key) for key in identity}
    if resume and before:
        check_same_settings(known, identity)
    elif results:
        changed = compare_settings(known, identity)
        places = {place and Path(place).resolve() for place in (results["adapter"], adapter)}
        if len(places) > 1 and known[ADAPTER_HASH] != identity[ADAPTER_HASH]:
            changed[ADAPTER_HASH] = (known[ADAPTER_HASH], identity[ADAPTER_HASH])
        if changed:
            raise InputError(
                f"{folder} holds another evaluation, with {_listed(changed)}: give another "
                "--output_dir, or remove that folder"
            )
