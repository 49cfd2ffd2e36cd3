"""Judge the completions of an earlier evaluation again: `sologrpo evaluate --regrade FILE`.

The present judge reads every stored completion, and the verdicts that changed are printed. This
needs no model and does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from rewards.grading import PROMPT_FORMATS
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
    prompt_format: str | None = field(default=None, metadata={"choices": sorted(PROMPT_FORMATS)})
    write: bool = False
    traceback: bool = False


class Change(NamedTuple):
    """A completion on which the judge changed its verdict."""

    problem: int  # index
    old: Answer
    new: Answer


def regrade(argv: Sequence[str]) -> None:
    """Run `evaluate.py --regrade FILE [--prompt_format NAME] [--write]`.

    Args:
        argv: the whole command line.

    Raises:
        InputError: for an unknown option, or if the file does not hold records.
    """
    from sologrpo.command_line import Parser  # imports transformers, which scoring does without

    (args,) = Parser(RegradeArguments).parse(argv)
    file = Path(args.regrade)
    before = read_records(file, args.prompt_format)
    after = [judge_again(record) for record in before]
    console = Terminal()
    _print_changes(console, before, after)
    if args.write:
        write_records(file, after)
        _update_results(file, after)
        print_line(console, f"written  {file}")
        _print_results(console, file.with_name(RESULTS))


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


def _print_results(console: Console, path: Path) -> None:
    """Print the table of these results, and of their baseline."""
    results = read_results(path)
    baseline = path.parent.parent / str(results.get("baseline", "baseline")) / RESULTS
    shown = {path.parent.name: results}
    if "delta" in results and baseline != path and baseline.is_file():
        shown = {baseline.parent.name: read_results(baseline)} | shown
    if results:
        print_table(console, shown)


def _update_results(records_file: Path, after: list[Record]) -> None:
    """Write the new numbers into `results.json`, if the records are those of an evaluation."""
    path = records_file.with_name(RESULTS)
    results = read_results(path)
    if records_file.name != RECORDS or not results:
        return
    results |= summarise(after)
    results |= _compare_again(results, path.parent.parent, after)
    write_results(path, results)


def _compare_again(results: dict[str, Any], folder: Path, after: list[Record]) -> dict[str, Any]:
    """Repeat the paired comparison, with the baseline's completions judged again too."""
    baseline_file = folder / str(results.get("baseline", "baseline")) / RECORDS
    if "delta" not in results or not baseline_file.is_file():
        return {}
    baseline = [judge_again(r) for r in read_records(baseline_file, after[0].prompt_format)]
    if [r.question_hash for r in baseline] != [r.question_hash for r in after]:
        raise InputError(f"{baseline_file} holds other problems: evaluate both models again")
    return compare(baseline, after)
