"""Judge the completions of an earlier evaluation again: `evaluate.py --regrade records.jsonl`.

Reads the records, judges every stored completion by today's judge, and says what changed. Needs no
model and loads no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rewards.grading import PROMPT_FORMATS
from sologrpo.console import print_line
from sologrpo.errors import InputError
from sologrpo.files import RECORDS, RESULTS, write_atomically
from sologrpo.scoring.records import (
    Answer,
    Record,
    compare,
    judge_again,
    read_records,
    read_results,
    summarise,
    write_records,
)
from sologrpo.scoring.table import print_table

VERDICTS = ("correct", "lenient_correct", "extracted", "format_ok", "trailing_text")
SHOWN = 10  # changed verdicts that are printed


@dataclass
class RegradeArguments:
    """The options of `evaluate.py --regrade`."""

    regrade: str
    prompt_format: str | None = field(default=None, metadata={"choices": sorted(PROMPT_FORMATS)})
    write: bool = False
    traceback: bool = False


def regrade(argv: Sequence[str]) -> None:
    """Run `evaluate.py --regrade FILE [--prompt_format NAME] [--write]`.

    Raises:
        InputError: if the file holds no records.
    """
    from sologrpo.command_line import Parser  # loads transformers, which scoring does without

    (args,) = Parser(RegradeArguments).parse(argv)
    file = Path(args.regrade)
    before = read_records(file, args.prompt_format)
    after = [judge_again(record) for record in before]
    console = Console()
    _print_changes(console, before, after)
    was, now = (sum(record.correct for record in records) for records in (before, after))
    console.print(
        f"accuracy {was / len(before):.1%} -> {now / len(after):.1%} ({was} -> {now} of "
        f"{len(after)} right)",
        highlight=False,
    )
    if args.write:
        write_records(file, after)
        _update_results(file, after)
        console.print(f"written  {file}", highlight=False)
        _print_results(console, file.with_name(RESULTS))


def changed_verdicts(before: Record, after: Record) -> list[tuple[Answer, Answer]]:
    """The answers of a problem, greedy and sampled, of which any verdict changed."""
    pairs = zip((before, *before.samples), (after, *after.samples), strict=True)
    return [
        (old, new)
        for old, new in pairs
        if any(getattr(old, name) != getattr(new, name) for name in VERDICTS)
    ]


def _print_changes(console: Console, before: list[Record], after: list[Record]) -> None:
    changed = [
        (record, old, new)
        for record, judged in zip(before, after, strict=True)
        for old, new in changed_verdicts(record, judged)
    ]
    answers = sum(1 + len(record.samples) for record in before)
    right, wrong = (
        sum(new.correct is verdict and old.correct is not verdict for _, old, new in changed)
        for verdict in (True, False)
    )
    for record, old, new in changed[:SHOWN]:
        differ = ", ".join(
            f"{name} {getattr(old, name)} -> {getattr(new, name)}"
            for name in VERDICTS
            if getattr(old, name) != getattr(new, name)
        )
        print_line(console, f"[{record.index}] {differ}")
    if len(changed) > SHOWN:
        console.print(f"... and {len(changed) - SHOWN} more")
    print_line(
        console,
        f"{answers} completions judged again, {len(changed)} verdicts changed: "
        f"{right} newly right, {wrong} newly wrong",
    )


def _print_results(console: Console, path: Path) -> None:
    """The table of `evaluate.py`, of these results and of what they are compared with."""
    results = read_results(path)
    baseline = path.parent.parent / str(results.get("baseline", "baseline")) / RESULTS
    shown = {path.parent.name: results}
    if "delta" in results and baseline != path and baseline.is_file():
        shown = {baseline.parent.name: read_results(baseline)} | shown
    if results:
        print_table(console, shown)


def _update_results(records_file: Path, after: list[Record]) -> None:
    """Put the new counts into `results.json`, where the records are those of one."""
    path = records_file.with_name(RESULTS)
    results = read_results(path)
    if records_file.name != RECORDS or not results:
        return
    results |= summarise(after)
    results |= _compared_again(results, path.parent.parent, after)
    write_atomically(path, json.dumps(results, indent=2))


def _compared_again(results: dict[str, Any], folder: Path, after: list[Record]) -> dict[str, Any]:
    """The paired comparison, with the baseline's completions judged by today's judge as well."""
    baseline_file = folder / str(results.get("baseline", "baseline")) / RECORDS
    if "delta" not in results or not baseline_file.is_file():
        return {}
    baseline = [judge_again(r) for r in read_records(baseline_file, after[0].prompt_format)]
    if [r.question_hash for r in baseline] != [r.question_hash for r in after]:
        raise InputError(f"{baseline_file} holds other problems: evaluate both again")
    return compare(baseline, after)
