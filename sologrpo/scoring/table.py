"""What `evaluate.py` prints: sample completions, and the table of results."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sologrpo.console import print_line
from sologrpo.scoring.records import Record

ROWS = (
    ("accuracy", "accuracy (strict)"),
    ("accuracy_ci95", "  95 % interval"),
    ("accuracy_lenient", "accuracy (lenient: last number)"),
    ("accuracy_lenient_ci95", "  95 % interval"),
    ("format_rate", "format as asked"),
    ("integer_rate", "integer answer"),
    ("trailing_text_rate", "trailing text"),
    ("truncated_rate", "cut off"),
    ("no_answer_rate", "no answer"),
)
LENGTHS = (
    ("all", "tokens: mean / p50 / p95"),
    ("right", "  when right"),
    ("wrong", "  when wrong"),
)
SPEED = (("seconds", "seconds"), ("tokens_per_second", "tokens a second"))


def print_samples(console: Console, records: Sequence[Record], count: int = 10) -> None:
    """Print a few problems with the completion and the verdict."""
    for record in records[:count]:
        verdict = "right" if record.correct else "wrong"
        print_line(console, f"[{verdict}] {record.question}")
        completion = " ".join(record.completion.split())
        gold = record.gold.rsplit("####", 1)[-1].strip()
        judged = f"(judged: {record.extracted}, gold: {gold})"
        print_line(console, f"    {completion[:160]}  {judged}")


def print_table(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one column a model, the paired comparison under it; `-` for what was not measured."""
    columns = list(results.values())
    table = Table(title=f"{columns[0]['n']} test problems, greedy")
    table.add_column("")
    for label in results:
        table.add_column(label, justify="right")
    for key, title in ROWS:
        table.add_row(title, *(_cell(result.get(key)) for result in columns))
    for kind in columns[0]["by_kind"]:
        accuracies = (result["by_kind"][kind]["accuracy"] for result in columns)
        table.add_row(f"  {kind}", *map(_cell, accuracies))
    lengths = [result.get("completion_tokens", {}) for result in columns]
    for key, title in LENGTHS:
        table.add_row(title, *(_lengths(found.get(key)) for found in lengths))
    for key, title in SPEED:
        table.add_row(title, *(f"{r[key]:.1f}" if key in r else "-" for r in columns))
    _add_sampled(table, columns)
    console.print(table)
    for label, result in results.items():
        if "both_right" in result:
            print_line(console, paired_line(label, result))


def _add_sampled(table: Table, columns: Sequence[Mapping[str, Any]]) -> None:
    if not all("sampled" in result for result in columns):
        return
    sampled = [result["sampled"] for result in columns]
    table.add_section()
    table.add_row(f"{sampled[0]['num_samples']} samples a problem")
    for name in sampled[0]["scores"]:
        table.add_row(name, *(_cell(result["scores"][name]) for result in sampled))
        table.add_row("  95 % interval", *(_cell(r["scores_ci95"][name]) for r in sampled))
    table.add_row("cut off", *(_cell(result["truncated_rate"]) for result in sampled))


def _cell(value: Any) -> str:
    if value is None:  # results of an older version
        return "-"
    if isinstance(value, Sequence):
        return f"{value[0]:.1%} to {value[1]:.1%}"
    return f"{value:.1%}"


def _lengths(lengths: Mapping[str, float] | None) -> str:
    return (
        "-" if lengths is None else " / ".join(f"{lengths[k]:.0f}" for k in ("mean", "p50", "p95"))
    )


def paired_line(label: str, result: Mapping[str, Any]) -> str:
    """The paired comparison in one sentence."""
    low, high = result["delta_ci95"]
    return (
        f"{label} against {result.get('baseline', 'baseline')}, same problems: "
        f"{100 * result['delta']:+.1f} points "
        f"(95 % interval {100 * low:+.1f} to {100 * high:+.1f}), {result['newly_right']} newly "
        f"right, {result['newly_wrong']} newly wrong, {result['both_right']} both right, "
        f"{result['both_wrong']} both wrong, exact McNemar p = {result['mcnemar_p']:.2g}"
    )


def print_precisions(
    console: Console, table: Mapping[str, Mapping[str, Any]], trained: str
) -> None:
    """Print one row a precision: accuracy, and what differs from the precision that was trained."""
    n = table[trained]["n"]
    shown = Table(
        title=f"{n} test problems, greedy; each form against {trained}, which was trained"
    )
    for title in ("precision", "accuracy", "95 % interval", "difference", "95 % interval",
                  "newly right / wrong", "McNemar p", "outputs that differ"):  # fmt: skip
        # On 80 columns too, as in a log file, every name and figure is whole.
        is_name = title == "precision"
        shown.add_column(
            title, justify="left" if is_name else "right", no_wrap=is_name, overflow="fold"
        )
    for name, row in table.items():
        low, high = row["delta_ci95"]
        against = ("-",) * 4 if name == trained else (
            f"{100 * row['delta']:+.1f}", f"{100 * low:+.1f} to {100 * high:+.1f}",
            f"{row['newly_right']} / {row['newly_wrong']}", f"{row['mcnemar_p']:.2g}",
        )  # fmt: skip
        shown.add_row(
            name, _cell(row["accuracy"]), _cell(row["accuracy_ci95"]), *against,
            _cell(row["differing_rate"]),
        )  # fmt: skip
    console.print(shown)
