"""Write the tables of docs/performance.md from benchmarks/results/cpu.json.

    python benchmarks/performance_tables.py

The tables are between two marks; everything else in the document is left as it is. Without
results, a sentence replaces them. No figure in the tables is typed by hand.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/cpu.json"
GUIDE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"
NOTHING = "No results yet: `make bench` writes them."

Row = dict[str, Any]
Data = dict[str, Any]
ALLOCATORS = ("plain", "tuned")


def tables(data: Data | None) -> str:
    """Build all tables as Markdown, except those of parts that were not measured."""
    if data is None or not data["rows"]:
        return NOTHING
    sections: list[tuple[str, Callable[[list[Row]], str]]] = [
        ("One step: the training part", training_table),
        ("One step: sampling and training", whole_step_table),
        ("Sharing prompts in the training forward", sharing_table),
        ("A reference model, and two steps on one batch", variants_table),
        ("Sampling", sampling_table),
        ("Evaluation", evaluation_table),
        ("Peak memory of one complete step", memory_table),
        ("How the cost of a training step grows", growth_table),
        ("The quickstart until it reaches a given reward", run_table),
    ]
    parts = [describe(data)]
    for title, make in sections:
        text = make(data["rows"])
        if text:
            parts.append(f"### {title}\n\n{text}")
    parts += [f"Not measured: {problem}." for problem in unmeasured(data["rows"])]
    return "\n\n".join(parts)


def describe(data: Data) -> str:
    """Describe machine, versions and settings in a paragraph."""
    machine, sizes = data["machine"], data["settings"]
    names = ("torch", "transformers", "trl", "peft")
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in names)
    return (
        f"Measured {data['date']} on {machine['threads']} threads of an {sizes['cpu']} "
        f"({machine['cpus']} CPUs), no GPU; Python {machine['python']}, {versions}. "
        f"{sizes['model']} in {sizes['dtype']}; {sizes['prompts']} prompts x "
        f"{sizes['generations']} completions per step, stock in micro-batches of "
        f"{sizes['micro_batch']}. Seconds and rates are medians; a ratio is how many times "
        "faster ours is."
    )


# --- rows -----------------------------------------------------------------------------------------


def rows_of(rows: Iterable[Row], part: str, **labels: Any) -> list[Row]:
    """Select the rows of a part that were measured and have these labels."""
    wanted = {"part": part, **labels}.items()
    return [row for row in rows if wanted <= row.items() and not {"error", "skipped"} & row.keys()]


def one(rows: Iterable[Row], part: str, **labels: Any) -> Row | None:
    """Return the only such row, or None."""
    found = rows_of(rows, part, **labels)
    return found[0] if found else None


def unmeasured(rows: Iterable[Row]) -> list[str]:
    """Describe the rows that were skipped or failed."""
    descriptions = []
    for row in rows:
        if {"error", "skipped"} & row.keys():
            labels = [str(v) for k, v in row.items() if k not in ("error", "skipped", "wall_s")]
            reason = "failed" if "error" in row else "no time was left"
            descriptions.append(f"{', '.join(labels)} ({reason})")
    return descriptions


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Build a table; empty without rows.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in body]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else ""


def number(value: float | None) -> str:
    """Format a number with three digits, or None as a dash.

    >>> number(12.345), number(0.01234), number(1234.5), number(None)
    ('12.3', '0.0123', '1234', '-')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    """Format a ratio, how many times faster.

    >>> times(2.0), times(None)
    ('**2.00x**', '-')
    """
    return "-" if value is None else f"**{value:.2f}x**"


def percent(share: float) -> str:
    """Format a share.

    >>> percent(0.75)
    '75 %'
    """
    return f"{100 * share:.0f} %"


# --- tables ---------------------------------------------------------------------------------------


def _medians(row: Row | None, key: str = "median") -> dict[str, float]:
    return {} if row is None else row[key]


def training_table(rows: list[Row]) -> str:
    """Build the table of the training part, by the share of degenerate groups."""
    shares = sorted({row["degenerate"] for row in rows_of(rows, "step", case="training")})
    body = []
    for share in shares:
        found = {
            name: one(rows, "step", case="training", degenerate=share, allocator=name)
            for name in ALLOCATORS
        }
        plain, tuned = (_medians(found[name]) for name in ALLOCATORS)
        ratios = [_medians(found[name], "ratio").get("solo") for name in ALLOCATORS]
        gaps = [row["gradient_gap"]["solo"] for row in found.values() if row is not None]
        repeats = [len(row["training_s"]["stock"]) for row in found.values() if row is not None]
        body.append([
            percent(share),
            number(plain.get("stock")), number(plain.get("solo")), times(ratios[0]),
            number(tuned.get("stock")), number(tuned.get("solo")), times(ratios[1]),
            times(_quotient(plain.get("stock"), tuned.get("solo"))),
            f"{max(gaps):.1e}", str(min(repeats)),
        ])  # fmt: skip
    head = [
        "Groups without signal", "stock, plain, s", "ours, plain, s", "ratio, plain",
        "stock, tuned, s", "ours, tuned, s", "ratio, tuned", "stock plain / ours tuned",
        "gradient gap", "repeats",
    ]  # fmt: skip
    return markdown(head, body)


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def whole_step_table(rows: list[Row]) -> str:
    """Build the table of complete steps, each contender with its own sampling."""
    body = []
    for share in sorted({row["degenerate"] for row in rows_of(rows, "step", case="training")}):
        plain, tuned = (_whole_step(rows, share, name) for name in ALLOCATORS)
        if not plain and not tuned:
            continue
        body.append([
            percent(share),
            *(number(step.get(name)) for step in (plain, tuned) for name in ("stock", "solo")),
            times(_quotient(plain.get("stock"), plain.get("solo"))),
            times(_quotient(tuned.get("stock"), tuned.get("solo"))),
            times(_quotient(plain.get("stock"), tuned.get("solo"))),
        ])  # fmt: skip
    head = [
        "Groups without signal", "stock, plain, s", "ours, plain, s", "stock, tuned, s",
        "ours, tuned, s", "ratio, plain", "ratio, tuned", "stock plain / ours tuned",
    ]  # fmt: skip
    return markdown(head, body)


def _whole_step(rows: list[Row], share: float, allocator: str) -> dict[str, float]:
    training = one(rows, "step", case="training", degenerate=share, allocator=allocator)
    sampling = one(rows, "step", case="sampling", allocator=allocator)
    if training is None or sampling is None:
        return {}
    return {
        name: training["median"][name] + statistics.median(sampling["seconds"][name])
        for name in ("stock", "solo")
    }


def sharing_table(rows: list[Row]) -> str:
    """Build the table of our training part with and without `share_prompts`."""
    body = [
        [
            number(row["median"]["solo"]),
            number(row["median"]["solo_unshared"]),
            times(_quotient(row["median"]["solo_unshared"], row["median"]["solo"])),
            f"{row['gradient_gap']['solo']:.1e}",
            f"{row['gradient_gap']['solo_unshared']:.1e}",
            f"{row['repeat_gap']:.1e}" if "repeat_gap" in row else "-",
            str(len(row["training_s"]["solo"])),
        ]
        for row in rows_of(rows, "sharing")
    ]
    head = ["shared, s", "not shared, s", "shared is faster", "gap, shared", "gap, not shared",
            "gap, stock to itself", "repeats"]  # fmt: skip
    return markdown(head, body)


def variants_table(rows: list[Row]) -> str:
    """Build the table of the training part with a KL term, and off-policy."""
    body = [
        [
            f"`{row['variant']}`",
            number(row["median"]["stock"]),
            number(row["median"]["solo"]),
            times(row["ratio"]["solo"]),
            f"{row['gradient_gap']['solo']:.1e}",
            str(len(row["training_s"]["stock"])),
        ]
        for row in rows_of(rows, "variants")
    ]
    head = ["Config", "stock, s", "ours, s", "ratio", "gradient gap", "repeats"]
    return markdown(head, body)


def sampling_table(rows: list[Row]) -> str:
    """Build the table of useful completion tokens per second."""
    body = [
        [
            f"{row['rows']} x up to {row['limit']} tokens",
            number(row["median"]["stock"]),
            number(row["median"]["solo"]),
            times(row["ratio"]["solo"]),
            str(len(row["tokens_per_s"]["stock"])),
        ]
        for row in rows_of(rows, "sampling")
    ]
    return markdown(["Completions", "stock, tokens/s", "ours, tokens/s", "ratio", "repeats"], body)


def evaluation_table(rows: list[Row]) -> str:
    """Build the table of the notebook's loop and ours."""
    body = [
        [
            str(row["problems"]),
            number(row["median"]["notebook"]),
            number(row["median"]["solo"]),
            times(row["ratio"]["solo"]),
            f"{row['equal_completions']} of {row['problems']}",
            f"{row['right']['notebook']} and {row['right']['solo']}",
            str(len(row["seconds"]["notebook"])),
        ]
        for row in rows_of(rows, "evaluation")
    ]
    head = ["Problems", "notebook's loop, s", "ours, s", "ratio", "equal completions", "right",
            "repeats"]  # fmt: skip
    return markdown(head, body)


def memory_table(rows: list[Row]) -> str:
    """Build the table of peak memory, one process per row."""
    names = {"stock": "stock TRL", "solo": "SoloGRPO"}
    body = [
        [
            f"{names[row['contender']]}, {row['allocator']}",
            number(row["before_gib"]),
            number(row["peak_gib"]),
        ]
        for row in rows_of(rows, "memory")
    ]
    return markdown(["Process", "before the step, GiB", "peak, GiB"], body)


def growth_table(rows: list[Row]) -> str:
    """Build the table of the series of growing sizes."""
    words = {"generations": "completions of a prompt", "tokens": "tokens of a completion",
             "shape": "model"}  # fmt: skip
    body = [
        [
            f"{words[row['series']]}: {row[row['series']]}",
            str(row["prompt_tokens"] + row["completion_tokens"]),
            number(row["median"]["stock"]),
            number(row["median"]["solo"]),
            times(row["ratio"]["solo"]),
            str(len(row["training_s"]["stock"])),
        ]
        for row in rows_of(rows, "growth")
    ]
    head = ["What grows", "tokens of the step", "stock, s", "ours, s", "ratio", "repeats"]
    return markdown(head, body)


def run_table(rows: list[Row]) -> str:
    """Build the table of the time until a reward is reached."""
    names = {"stock": "`--trainer stock`", "solo": "SoloGRPO"}
    found = {row["trainer"]: row for row in rows_of(rows, "run")}
    body = [
        [
            names[trainer],
            "yes" if row["reached"] else "no, stopped",
            str(row["steps"]),
            number(row["seconds"]),
            number(row["seconds"] / row["steps"]),
        ]
        for trainer, row in found.items()
    ]
    table = markdown(["Run", "reached", "steps", "seconds", "seconds per step"], body)
    if len(found) == 2 and all(row["reached"] for row in found.values()):
        ratio = found["stock"]["seconds"] / found["solo"]["seconds"]
        table += f"\n\nOurs is {times(ratio)} as fast."
    return table


# --- the document ---------------------------------------------------------------------------------


def read_results(file: Path = RESULTS) -> Data | None:
    """Read the results of `cpu.py`; None if it has not run."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def replace_between_marks(text: str, new: str) -> str:
    """Replace the generated section of a document.

    Raises:
        ValueError: if the marks are missing or in the wrong order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs {BEGIN}, and {END} after it")
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def main() -> None:
    """Rewrite the section of the guide."""
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(replace_between_marks(text, tables(read_results())), encoding="utf-8")
    print(f"wrote the tables of {GUIDE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
