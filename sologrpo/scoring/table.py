"""Name the figures of an evaluation, and print them: sample completions, and tables."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sologrpo.base.console import print_line
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
    columns = list(results.values())
    table = Table(title=f"{columns[0]['n']} test problems, greedy")
    table.add_column("")
    for label in results:
        table.add_column(label, justify="right")
    for row in score_rows(columns):
        table.add_row(*row)
    for kind in columns[0]["by_kind"]:
        table.add_row(f"  {kind}", *(share(r["by_kind"][kind]["accuracy"]) for r in columns))
    for row in cost_rows(columns):
        table.add_row(*row)
    table.add_section()
    for row in sampled_rows(columns):
        table.add_row(*row)
    console.print(table)


def score_rows(columns: Sequence[Results]) -> list[list[str]]:
    """Return one row per score: its title, and then its value for each model."""
    return [[title, *(share(result[key]) for result in columns)] for key, title in ROWS]


def cost_rows(columns: Sequence[Results]) -> list[list[str]]:
    """Return the rows of lengths and times, as `score_rows`."""
    lengths = [
        [title, *(_length(result["completion_tokens"].get(key)) for result in columns)]
        for key, title in LENGTHS
    ]
    return lengths + [[title, *(f"{r[key]:,.1f}" for r in columns)] for key, title in SPEED]


def sampled_rows(columns: Sequence[Results]) -> list[list[str]]:
    """Return the rows of sampled completions, as `score_rows`; a model without any has no cells."""
    found = [result.get("sampled") or {"scores": {}, "scores_ci95": {}} for result in columns]
    names = dict.fromkeys(name for sampled in found for name in sampled["scores"])
    rows = []
    for name in names:
        rows.append([f"{name}, sampled", *(_cell(each["scores"], name) for each in found)])
        rows.append([f"  {INTERVAL}", *(_cell(each["scores_ci95"], name) for each in found)])
    if rows:
        rows.append(["cut off, sampled", *(_cell(each, "truncated_rate") for each in found)])
        rows.append(["samples per problem", *(str(each.get("num_samples", "")) for each in found)])
    return rows


def _cell(shares: Mapping[str, Any], name: str) -> str:
    return share(shares[name]) if name in shares else ""


def share(value: float | Sequence[float]) -> str:
    """Write a share, or an interval of shares, in percent."""
    if isinstance(value, Sequence):
        return f"{value[0]:.1%} to {value[1]:.1%}"
    return f"{value:.1%}"


def points(delta: float) -> str:
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
        f"{points(result['delta'])} points ({INTERVAL} {points(low)} to {points(high)}), "
        f"{result['newly_right']} newly right, {result['newly_wrong']} newly wrong, "
        f"{result['both_right']} both right, {result['both_wrong']} both wrong, "
        f"exact McNemar p = {result['mcnemar_p']:.2g}"
    )


def print_ending(
    console: Console,
    evaluated: Mapping[str, Evaluated],
    run: Path,
    files: Mapping[str, Path | None],
) -> None:
    """Print what to copy at the end: the accuracy before and after, paths, the next commands.

    The trained model is the last of `evaluated`, which is empty after several prompts.
    """
    if evaluated:
        print_line(console, f"accuracy  {_accuracy(evaluated)}")
    for name, path in files.items():
        print_line(console, f"{name:8}  {path}")
    print_line(console, f"next      {shlex.join(['sologrpo', 'chat', '--run', str(run)])}")
    merged = Path("out", run.resolve().name)
    export = ["sologrpo", "export", "--run", str(run), "--save_merged", str(merged)]
    print_line(console, f"          {shlex.join(export)}")


def _accuracy(evaluated: Mapping[str, Evaluated]) -> str:
    for pair in pair_with_baselines(evaluated):
        if pair.numbers is not None:
            change, delta = _change(pair.numbers, "accuracy", " "), points(pair.numbers["delta"])
            low, high = map(points, pair.numbers["delta_ci95"])
            return f"{change}: {delta} points ({INTERVAL} {low} to {high})"
    result = [*evaluated.values()][-1].results
    return f"{share(result['accuracy'])} ({INTERVAL} {share(result['accuracy_ci95'])})"


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
            f"{points(row['delta'])}\n{points(low)} to {points(high)}",
            f"{row['mcnemar_p']:.2g}",
            _change(row, "accuracy_lenient"), _change(row, "truncated_rate"),
        )  # fmt: skip
    console.print(table)
    print_line(console, comparison["verdict"])


def _change(row: Results, rate: str, gap: str = "\n") -> str:
    return f"{share(row[f'baseline_{rate}'])} ->{gap}{share(row[rate])}"
