"""Print the results of an evaluation: sample completions, and tables."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sologrpo.console import print_line
from sologrpo.scoring.comparison import Pair, pair_with_baselines
from sologrpo.scoring.records import Evaluated, Record

Results = Mapping[str, Any]

SAMPLES_SHOWN, CHARACTERS_SHOWN = 10, 160
INTERVAL = "95 % interval"
LENIENT = ("accuracy_lenient", "accuracy (lenient: last number)")
RATES = (
    ("format_rate", "format as asked"),
    ("integer_rate", "integer answer"),
    ("trailing_text_rate", "trailing text"),
    ("truncated_rate", "cut off"),
    ("no_answer_rate", "no answer"),
)
ROWS = (
    ("accuracy", "accuracy (strict)"),
    ("accuracy_ci95", f"  {INTERVAL}"),
    LENIENT,
    ("accuracy_lenient_ci95", f"  {INTERVAL}"),
    *RATES,
)
LENGTHS = (
    ("all", "tokens: mean / p50 / p95"),
    ("right", "  when right"),
    ("wrong", "  when wrong"),
)
SPEED = (("seconds", "seconds"), ("tokens_per_second", "tokens per second"))


def print_results(console: Console, evaluated: Mapping[str, Evaluated]) -> None:
    """Print sample completions of the last model, the table of all models, and the comparison."""
    last = list(evaluated.values())[-1]
    for record in last.records[:SAMPLES_SHOWN]:
        _print_sample(console, record)
    _print_table(console, {label: results for label, (_, results) in evaluated.items()})
    for pair in pair_with_baselines(evaluated):
        print_line(console, paired_line(pair))


def _print_sample(console: Console, record: Record) -> None:
    verdict = "right" if record.correct else "wrong"
    completion = " ".join(record.completion.split())[:CHARACTERS_SHOWN]
    gold = record.gold.rsplit("####", 1)[-1].strip()
    print_line(console, f"[{verdict}] {record.question}")
    print_line(console, f"    {completion}  (judged: {record.extracted}, gold: {gold})")


def _print_table(console: Console, results: Mapping[str, Results]) -> None:
    """Print one column per model."""
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


def paired_line(pair: Pair) -> str:
    """Write a comparison in one sentence, or the settings that prevent it."""
    if (result := pair.numbers) is None:
        return pair.apart()
    low, high = result["delta_ci95"]
    return (
        f"{pair.label} against {pair.baseline}, same problems: "
        f"{_points(result['delta'])} points ({INTERVAL} {_points(low)} to {_points(high)}), "
        f"{result['newly_right']} newly right, {result['newly_wrong']} newly wrong, "
        f"{result['both_right']} both right, {result['both_wrong']} both wrong, "
        f"exact McNemar p = {result['mcnemar_p']:.2g}"
    )


def print_ending(
    console: Console,
    evaluated: Mapping[str, Evaluated],
    run: Path,
    files: Mapping[str, Path | None],
    exported: bool,
) -> None:
    """Print what to copy at the end: the accuracy before and after, paths, the next commands.

    Args:
        evaluated: the trained model last; empty after several prompts.
        files: of the run, by name.
        exported: a model was saved already.
    """
    if evaluated:
        print_line(console, f"accuracy  {_accuracy(evaluated)}")
    for name, path in files.items():
        print_line(console, f"{name:8}  {path}")
    print_line(console, f"next      {shlex.join(['sologrpo', 'chat', '--run', str(run)])}")
    if not exported:
        merged = Path("out", run.resolve().name)
        export = ["sologrpo", "export", "--run", str(run), "--save_merged", str(merged)]
        print_line(console, f"          {shlex.join(export)}")


def _accuracy(evaluated: Mapping[str, Evaluated]) -> str:
    for pair in pair_with_baselines(evaluated):
        if pair.numbers is not None:
            change, delta = _change(pair.numbers, "accuracy", " "), _points(pair.numbers["delta"])
            low, high = map(_points, pair.numbers["delta_ci95"])
            return f"{change}: {delta} points ({INTERVAL} {low} to {high})"
    result = [*evaluated.values()][-1].results
    return f"{_share(result['accuracy'])} ({INTERVAL} {_share(result['accuracy_ci95'])})"


def print_formats(console: Console, comparison: Results) -> None:
    """Print one row per prompt, of two lines to fit into 80 columns, and if the gain travels."""
    title = f"{comparison['n']} test problems, greedy; base model -> trained model"
    table = Table(title=title)
    table.add_column("prompt")
    for heading in ("strict", f"gain,\n{INTERVAL}", "McNemar p", "lenient", "cut off"):
        table.add_column(heading, justify="right")
    for name, row in comparison["prompt_formats"].items():
        low, high = row["delta_ci95"]
        table.add_row(
            f"{name}\n  {row['role']}", _change(row, "accuracy"),
            f"{_points(row['delta'])}\n{_points(low)} to {_points(high)}",
            f"{row['mcnemar_p']:.2g}",
            _change(row, "accuracy_lenient"), _change(row, "truncated_rate"),
        )  # fmt: skip
    console.print(table)
    print_line(console, comparison["verdict"])


def _change(row: Results, rate: str, gap: str = "\n") -> str:
    return f"{_share(row[f'baseline_{rate}'])} ->{gap}{_share(row[rate])}"
