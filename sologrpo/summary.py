"""What the scripts print: sample completions, the table, and nothing of the libraries' noise."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import transformers
from rich.console import Console
from rich.table import Table

from sologrpo.evaluation import Record

ROWS = (
    ("accuracy", "accuracy (strict)"),
    ("accuracy_ci95", "  95 % interval"),
    ("accuracy_lenient", "accuracy (lenient: last number)"),
    ("format_rate", "format as asked"),
    ("trailing_text_rate", "trailing text"),
    ("truncated_rate", "cut off"),
    ("mean_completion_tokens", "mean tokens"),
)


def quiet_libraries() -> None:
    """Show warnings, but no progress bars of loading and no deprecation that is TRL's to mend."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    # TRL 1.16 still sets the old name of activation_checkpointing.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")


def print_samples(console: Console, records: Sequence[Record], count: int = 10) -> None:
    """Print a few problems with the completion and the verdict."""
    for record in records[:count]:
        verdict = "right" if record.correct else "wrong"
        console.print(
            f"[{verdict}] {record.question}", highlight=False, markup=False, soft_wrap=True
        )
        completion = " ".join(record.completion.split())
        gold = record.gold.rsplit("####", 1)[-1].strip()
        console.print(
            f"    {completion[:160]}  (judged: {record.extracted}, gold: {gold})",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def print_table(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one column a model, the paired comparison under it."""
    n = next(iter(results.values()))["n"]
    table = Table(title=f"{n} test problems, greedy")
    table.add_column("")
    for label in results:
        table.add_column(label, justify="right")
    for key, title in ROWS:
        table.add_row(title, *(_cell(key, result[key]) for result in results.values()))
    for kind in next(iter(results.values()))["by_kind"]:
        accuracies = (result["by_kind"][kind]["accuracy"] for result in results.values())
        table.add_row(f"  {kind}", *(f"{accuracy:.1%}" for accuracy in accuracies))
    console.print(table)
    for label, result in results.items():
        if "delta" in result:
            console.print(paired_line(label, result), highlight=False, soft_wrap=True)


def _cell(key: str, value: Any) -> str:
    if key == "accuracy_ci95":
        return f"{value[0]:.1%} to {value[1]:.1%}"
    return f"{value:.1f}" if key == "mean_completion_tokens" else f"{value:.1%}"


def paired_line(label: str, result: Mapping[str, Any]) -> str:
    """The paired comparison in one sentence."""
    low, high = result["delta_ci95"]
    return (
        f"{label} against baseline, same problems: {100 * result['delta']:+.1f} points "
        f"(95 % interval {100 * low:+.1f} to {100 * high:+.1f}), {result['newly_right']} newly "
        f"right, {result['newly_wrong']} newly wrong, exact McNemar p = {result['mcnemar_p']:.2g}"
    )
