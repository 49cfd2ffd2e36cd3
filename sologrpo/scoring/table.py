"""Print the results of an evaluation: sample completions, and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sologrpo.console import print_line
from sologrpo.scoring.records import Evaluated, Record

Results = Mapping[str, Any]

SAMPLES_SHOWN, CHARACTERS_SHOWN = 10, 160
INTERVAL = "95 % interval"
ROWS = (
    ("accuracy", "accuracy (strict)"),
    ("accuracy_ci95", f"  {INTERVAL}"),
    ("accuracy_lenient", "accuracy (lenient: last number)"),
    ("accuracy_lenient_ci95", f"  {INTERVAL}"),
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
SPEED = (("seconds", "seconds"), ("tokens_per_second", "tokens per second"))


def print_results(console: Console, evaluated: Mapping[str, Evaluated]) -> None:
    """Print sample completions of the last model, then the table of all models.

    Args:
        console: to print on.
        evaluated: by label.
    """
    last = list(evaluated.values())[-1]
    for record in last.records[:SAMPLES_SHOWN]:
        _print_sample(console, record)
    print_table(console, {label: results for label, (_, results) in evaluated.items()})


def _print_sample(console: Console, record: Record) -> None:
    verdict = "right" if record.correct else "wrong"
    completion = " ".join(record.completion.split())[:CHARACTERS_SHOWN]
    gold = record.gold.rsplit("####", 1)[-1].strip()
    print_line(console, f"[{verdict}] {record.question}")
    print_line(console, f"    {completion}  (judged: {record.extracted}, gold: {gold})")


def print_table(console: Console, results: Mapping[str, Results]) -> None:
    """Print one column per model, then the paired comparison.

    Args:
        console: to print on.
        results: contents of `results.json`, by label.
    """
    columns = list(results.values())
    table = Table(title=f"{columns[0]['n']} test problems, greedy")
    table.add_column("")
    for label in results:
        table.add_column(label, justify="right")
    for row in score_rows(columns):
        table.add_row(*row)
    for kind in columns[0]["by_kind"]:
        table.add_row(f"  {kind}", *(_share(r["by_kind"][kind]["accuracy"]) for r in columns))
    for key, title in LENGTHS:
        table.add_row(title, *(_length(result["completion_tokens"][key]) for result in columns))
    for key, title in SPEED:
        table.add_row(title, *(f"{result[key]:.1f}" for result in columns))
    if all("sampled" in result for result in columns):
        _add_sampled(table, [result["sampled"] for result in columns])
    console.print(table)
    for label, result in results.items():
        if "baseline" in result:
            print_line(console, paired_line(label, result))


def score_rows(columns: Sequence[Results]) -> list[list[str]]:
    """Return one row per score: its title, and then its value for each model."""
    return [[title, *(_share(result[key]) for result in columns)] for key, title in ROWS]


def _add_sampled(table: Table, columns: Sequence[Results]) -> None:
    table.add_section()
    table.add_row(f"{columns[0]['num_samples']} samples per problem")
    for name in columns[0]["scores"]:
        table.add_row(name, *(_share(result["scores"][name]) for result in columns))
        table.add_row(f"  {INTERVAL}", *(_share(result["scores_ci95"][name]) for result in columns))
    table.add_row("cut off", *(_share(result["truncated_rate"]) for result in columns))


def _share(value: float | Sequence[float]) -> str:
    """Write a share, or an interval of shares, in percent."""
    if isinstance(value, Sequence):
        return f"{value[0]:.1%} to {value[1]:.1%}"
    return f"{value:.1%}"


def _points(delta: float) -> str:
    """Write a difference of shares in percentage points."""
    return f"{100 * delta:+.1f}"


def _length(lengths: Mapping[str, float] | None) -> str:
    if lengths is None:
        return "-"
    return " / ".join(f"{lengths[key]:.0f}" for key in ("mean", "p50", "p95"))


def paired_line(label: str, result: Results) -> str:
    """Write the paired comparison of `results.json` in one sentence."""
    low, high = result["delta_ci95"]
    return (
        f"{label} against {result['baseline']}, same problems: "
        f"{_points(result['delta'])} points ({INTERVAL} {_points(low)} to {_points(high)}), "
        f"{result['newly_right']} newly right, {result['newly_wrong']} newly wrong, "
        f"{result['both_right']} both right, {result['both_wrong']} both wrong, "
        f"exact McNemar p = {result['mcnemar_p']:.2g}"
    )


def print_precisions(console: Console, comparison: Results) -> None:
    """Print one row per precision: its accuracy, and the comparison with the trained one.

    Args:
        console: to print on. At 80 columns, as in a log file, names and numbers stay complete.
        comparison: from `compare_precisions`.
    """
    trained, rows = comparison["trained"], comparison["precisions"]
    title = f"{rows[trained]['n']} test problems, greedy; each precision against {trained}, trained"
    table = Table(title=title)
    table.add_column("precision", no_wrap=True)
    for heading in ("accuracy", INTERVAL, "difference", INTERVAL, "newly right / wrong",
                    "McNemar p", "outputs that differ"):  # fmt: skip
        table.add_column(heading, justify="right", overflow="fold")
    for name, row in rows.items():
        compared = ("-",) * 4 if name == trained else _comparison(row)
        table.add_row(
            name, _share(row["accuracy"]), _share(row["accuracy_ci95"]), *compared,
            _share(row["differing_rate"]),
        )  # fmt: skip
    console.print(table)


def _comparison(row: Results) -> tuple[str, str, str, str]:
    low, high = row["delta_ci95"]
    return (
        _points(row["delta"]), f"{_points(low)} to {_points(high)}",
        f"{row['newly_right']} / {row['newly_wrong']}", f"{row['mcnemar_p']:.2g}",
    )  # fmt: skip
