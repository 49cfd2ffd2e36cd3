"""Judge the completions of an earlier evaluation again: `sologrpo evaluate --regrade FILE`.

The present judge reads every stored completion, and the verdicts that changed are printed. This
needs no model and does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from sologrpo.console import Terminal, print_line
from sologrpo.errors import InputError
from sologrpo.files import RECORDS, RESULTS
from sologrpo.scoring.records import (
    Answer,
    Record,
    judge_again,
    read_records,
    read_results,
    write_records,
    write_results,
)
from sologrpo.scoring.summary import compare, summarise
from sologrpo.scoring.table import print_table

VERDICTS = ("correct", "lenient_correct", "extracted", "format_ok", "trailing_text")
CHANGES_SHOWN = 10


@dataclass
class RegradeArguments:
    """The options of `evaluate.py --regrade`."""

    regrade: str
    write: bool = False
    traceback: bool = False


class Change(NamedTuple):
    """A completion on which the judge changed its verdict."""

    problem: int  # index
    old: Answer
    new: Answer


def regrade(argv: Sequence[str]) -> None:
    """Run `evaluate.py --regrade FILE [--write]`.

    Args:
        argv: the whole command line.

    Raises:
        InputError: for an unknown option, or if the file does not hold records.
    """
    from sologrpo.command_line import Parser  # imports transformers, which scoring does without

    (args,) = Parser(RegradeArguments).parse(argv)
    file = Path(args.regrade).resolve()
    before = read_records(file)
    after = [judge_again(record) for record in before]
    console = Terminal()
    _print_changes(console, before, after)
    if args.write:
        shown = _judge_results_again(file.parent, after) if file.name == RECORDS else {}
        write_records(file, after)
        print_line(console, f"written  {file}")
        if shown:
            write_results(file.with_name(RESULTS), shown[file.parent.name])
            print_table(console, shown)


def _find_changes(before: Sequence[Record], after: Sequence[Record]) -> list[Change]:
    """Find the answers, greedy and sampled, of which any verdict changed."""
    return [
        Change(was.index, old, new)
        for was, now in zip(before, after, strict=True)
        for old, new in zip((was, *was.samples), (now, *now.samples), strict=True)
        if any(getattr(old, name) != getattr(new, name) for name in VERDICTS)
    ]


def _print_changes(console: Console, before: Sequence[Record], after: Sequence[Record]) -> None:
    changes = _find_changes(before, after)
    for index, old, new in changes[:CHANGES_SHOWN]:
        differences = ", ".join(
            f"{name} {getattr(old, name)} -> {getattr(new, name)}"
            for name in VERDICTS
            if getattr(old, name) != getattr(new, name)
        )
        print_line(console, f"[{index}] {differences}")
    if len(changes) > CHANGES_SHOWN:
        print_line(console, f"... and {len(changes) - CHANGES_SHOWN} more")
    judged = sum(1 + len(record.samples) for record in before)
    newly_right = sum(new.correct and not old.correct for _, old, new in changes)
    newly_wrong = sum(old.correct and not new.correct for _, old, new in changes)
    print_line(
        console,
        f"{judged} completions judged again, {len(changes)} verdicts changed: "
        f"{newly_right} newly right, {newly_wrong} newly wrong",
    )
    n = len(before)
    was, now = (sum(record.correct for record in records) for records in (before, after))
    print_line(console, f"accuracy {was / n:.1%} -> {now / n:.1%} ({was} -> {now} of {n} right)")


def _judge_results_again(folder: Path, after: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Work out the results of an evaluation from records that were judged again.

    Args:
        folder: of the evaluation.
        after: its records. Those of its baseline are judged again here.

    Returns:
        By label, the results of the baseline, if they are still there, and of the evaluation; empty
        if the folder holds records alone.

    Raises:
        InputError: if the baseline has other problems.
    """
    results = read_results(folder / RESULTS)
    if not results:
        return {}
    results |= summarise(after)
    shown = {folder.name: results}
    if "baseline" not in results:
        return shown
    baseline = folder.with_name(results["baseline"])
    if before := read_results(baseline / RESULTS):
        file = baseline / RECORDS
        records = [judge_again(record) for record in read_records(file)]
        if [r.question_hash for r in records] != [r.question_hash for r in after]:
            raise InputError(f"{file} holds other problems: evaluate both models again")
        results |= compare(records, after)
        shown = {baseline.name: before | summarise(records)} | shown
    return shown
