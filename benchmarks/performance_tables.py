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
FORMATS = {"float32": "fp32", "bfloat16": "bf16"}
CELLS = ("goals", "grid")  # the parts whose rows are cells


def tables(data: Data | None) -> str:
    """Build all tables as Markdown, except those of parts that were not measured."""
    if data is None or not data["rows"]:
        return NOTHING
    sections: list[tuple[str, Callable[[list[Row]], str]]] = [
        ("Goals", goals_table),
        ("The training part, cell by cell", cells_table),
        ("The whole step at the quickstart's shapes", whole_step_table),
        ("The whole step as users get it", user_table),
        ("Sampling", sampling_table),
        ("Evaluation", evaluation_table),
        ("The quickstart, and stock TRL until the same reward", run_table),
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
    machine, settings = data["machine"], data["settings"]
    names = ("torch", "transformers", "trl", "peft")
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in names)
    codes = {row["code"] for row in data["rows"]}
    changed = f" The rows come from {len(codes)} versions of the code." if len(codes) > 1 else ""
    return (
        f"Measured {data['date']} on {machine['threads']} threads of an {settings['cpu']} "
        f"({machine['cpus']} CPUs), no GPU; Python {machine['python']}, {versions}; "
        f"{settings['model']}. Seconds and rates are medians, with the least and the most in "
        f"brackets; a ratio is how many times faster ours is.{changed}"
    )


# --- rows -----------------------------------------------------------------------------------------


def rows_of(rows: Iterable[Row], part: str, **labels: Any) -> list[Row]:
    """Select the rows of a part that were measured and have these labels."""
    wanted = {"part": part, **labels}.items()
    return [row for row in rows if wanted <= row.items() and "error" not in row]


def one(rows: Iterable[Row], part: str, **labels: Any) -> Row | None:
    """Return the only such row, or None."""
    found = rows_of(rows, part, **labels)
    return found[0] if found else None


def unmeasured(rows: Iterable[Row]) -> list[str]:
    """Describe the rows that failed."""
    hidden = ("error", "wall_s", "code")
    return [
        ", ".join(str(v) for k, v in row.items() if k not in hidden and not isinstance(v, dict))
        for row in rows
        if "error" in row
    ]


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


# --- cells ----------------------------------------------------------------------------------------


def cells_of(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """Select the cells with these labels, the worst ratio first."""
    found = [row for part in CELLS for row in rows_of(rows, part, **labels)]
    return sorted(found, key=lambda row: row["ratio"]["solo"])


def name_cell(row: Row) -> str:
    """Describe the batch of a cell in a few words.

    >>> name_cell({"prompt": 30, "limit": 200, "group": 8, "signal": 0.5, "dtype": "bfloat16",
    ...            "beta": 0.02, "loss_type": "grpo", "name": "ragged"})
    'ragged: 30 + 200 tokens, G 8, signal 50 %, bf16, beta 0.02, grpo'
    """
    name = f"{row['name']}: " if "name" in row else ""
    return (
        f"{name}{row['prompt']} + {row['limit']} tokens, G {row['group']}, "
        f"signal {percent(row['signal'])}, {FORMATS[row['dtype']]}, beta {row['beta']:g}, "
        f"{row['loss_type']}"
    )


def gemm_share(row: Row) -> float:
    """Compute the FLOP/s of our matrix products, as a share of the rate of a large one."""
    return row["gemm_flop"]["solo"] / row["median"]["solo"] / row["gemm_peak"]


def memory_share(row: Row) -> float:
    """Compute our peak memory as a share of stock's."""
    return row["peak_gib"]["solo"] / row["peak_gib"]["stock"]


def spread(values: Sequence[float], unit: Callable[[float], str]) -> str:
    """Format a median with the least and the most.

    >>> spread([3.0, 1.0, 2.0], number)
    '2 (1-3)'
    """
    return f"{unit(statistics.median(values))} ({number(min(values))}-{number(max(values))})"


def ratio_with_spread(row: Row, key: str) -> str:
    """Format the ratio of the medians, with the least and the most of any round."""
    seconds = row[key]
    rounds = [a / b for a, b in zip(seconds["stock"], seconds["solo"], strict=True)]
    ratio = statistics.median(seconds["stock"]) / statistics.median(seconds["solo"])
    return f"{times(ratio)} ({min(rounds):.2f}-{max(rounds):.2f})"


def gap(row: Row) -> str:
    """Format the gap between the gradients; in bf16, how far both are from that in fp32."""
    if "from_fp32" not in row:
        return f"{row['gradient_gap']:.1e}"
    return " and ".join(f"{row['from_fp32'][name]:.1e}" for name in ("stock", "solo"))


def cells_table(rows: list[Row]) -> str:
    """Build the table of all cells."""
    body = [
        [
            name_cell(row),
            ratio_with_spread(row, "training_s"),
            *(spread(row["training_s"][name], number) for name in ("stock", "solo")),
            f"{row['gemm_flop']['stock'] / row['gemm_flop']['solo']:.2f}x",
            percent(gemm_share(row)),
            *(number(row["peak_gib"][name]) for name in ("stock", "solo")),
            gap(row),
            str(len(row["training_s"]["stock"])),
        ]
        for row in cells_of(rows)
    ]
    head = [
        "Batch", "ratio", "stock, s", "ours, s", "less work", "GEMM peak", "stock, GiB",
        "ours, GiB", "gradient gap", "rounds",
    ]  # fmt: skip
    return markdown(head, body)


def whole_step_table(rows: list[Row]) -> str:
    """Build the table of the cells in which both trainers sample."""
    body = [
        [
            f"{FORMATS[row['dtype']]}, signal {percent(row['signal'])}",
            *(ratio_with_spread(row, key) for key in ("step_s", "sampling_s", "training_s")),
            *(spread(row["step_s"][name], number) for name in ("stock", "solo")),
        ]
        for row in cells_of(rows, name="quickstart")
    ]
    head = ["", "whole step", "sampling", "training part", "stock, s", "ours, s"]
    return markdown(head, body)


# --- goals ----------------------------------------------------------------------------------------


def goals_table(rows: list[Row]) -> str:
    """Build the table of the goals, and what was measured."""
    body = [[goal, least, reached(rows) or "not measured"] for goal, least, reached in GOALS]
    return markdown(["Against stock TRL", "goal", "measured"], body)


def _ratios(key: str, **labels: Any) -> Callable[[list[Row]], str]:
    """Read the ratio of a fixed cell, in both number formats."""

    def reached(rows: list[Row]) -> str:
        return ", ".join(
            f"{ratio_with_spread(row, key)} in {FORMATS[row['dtype']]}"
            for dtype in FORMATS
            for row in cells_of(rows, **labels, dtype=dtype)
        )

    return reached


def _worst_cell(rows: list[Row]) -> str:
    cells = cells_of(rows)
    return f"{times(cells[0]['ratio']['solo'])}: {name_cell(cells[0])}" if cells else ""


def _evaluation(rows: list[Row]) -> str:
    return ", ".join(
        f"{times(row['ratio']['solo'])} in {FORMATS[row['dtype']]}"
        for row in rows_of(rows, "evaluation")
    )


def _training_minutes(rows: list[Row]) -> str:
    row = one(rows, "run", trainer="solo")
    return f"**{row['seconds'] / 60:.1f} min**" if row else ""


def _gemm_share(rows: list[Row]) -> str:
    found = []
    for dtype, name in FORMATS.items():
        shares = [gemm_share(row) for row in cells_of(rows, dtype=dtype)]
        if shares:
            middle, least, most = statistics.median(shares), min(shares), max(shares)
            found.append(f"**{percent(middle)}** ({percent(least)}-{percent(most)}) in {name}")
    return ", ".join(found)


def _memory(rows: list[Row]) -> str:
    cells = sorted(cells_of(rows), key=memory_share)
    return f"**{percent(memory_share(cells[-1]))}**: {name_cell(cells[-1])}" if cells else ""


def _quickstart(key: str, signal: float) -> Callable[[list[Row]], str]:
    return _ratios(key, name="quickstart", signal=signal)


GOALS: tuple[tuple[str, str, Callable[[list[Row]], str]], ...] = (
    ("training part, worst cell", "1.0x", _worst_cell),
    ("short ragged prompts, all groups with signal", "1.8x", _ratios("training_s", name="ragged")),
    ("quickstart's shapes, all groups with signal", "6x", _quickstart("training_s", 1.0)),
    ("quickstart's shapes, a quarter with signal", "20x", _quickstart("training_s", 0.25)),
    ("whole step, all groups with signal", "5x", _quickstart("step_s", 1.0)),
    ("whole step, a quarter with signal", "9x", _quickstart("step_s", 0.25)),
    ("greedy evaluation, the notebook's loop", "6x", _evaluation),
    ("quickstart's training", "8 min at most", _training_minutes),
    ("share of the GEMM peak in the training part, median of the cells", "60 %", _gemm_share),
    ("peak memory, worst cell", "100 % of stock's at most", _memory),
)


# --- other parts ----------------------------------------------------------------------------------


def user_table(rows: list[Row]) -> str:
    """Build the table of whole steps, one process per row."""
    names = {"stock": "a script with TRL's defaults", "solo": "`train.py`"}
    stock = one(rows, "user", contender="stock")
    body = [
        [
            f"{names[row['contender']]}, signal {percent(row['signal'])}",
            spread(row["step_s"], number),
            times(stock["median"] / row["median"]) if stock and row is not stock else "-",
            number(row["peak_gib"]),
        ]
        for row in rows_of(rows, "user")
    ]
    return markdown(["Process", "whole step, s", "ratio", "peak memory, GiB"], body)


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
            FORMATS[row["dtype"]],
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
    head = ["Format", "problems", "notebook's loop, s", "ours, s", "ratio", "equal completions",
            "right", "repeats"]  # fmt: skip
    return markdown(head, body)


def run_table(rows: list[Row]) -> str:
    """Build the table of complete runs."""
    names = {"stock": "`--trainer stock`", "solo": "SoloGRPO"}
    body = [
        [
            names[row["trainer"]],
            number(row.get("reached_s")),
            number(row["seconds"]),
            str(len(row["reward"])),
            number(row["seconds"] / len(row["reward"])),
            number(row["peak_gib"]),
        ]
        for row in rows_of(rows, "run")
    ]
    head = ["Run", "reward reached after, s", "ended after, s", "steps", "s per step",
            "peak memory, GiB"]  # fmt: skip
    return markdown(head, body)


def one_line(row: Row) -> str:
    """Format the figures of a row for the terminal."""
    if row["part"] in CELLS:
        return (
            f"{ratio_with_spread(row, 'training_s').replace('*', '')}  {name_cell(row)}; stock "
            f"{number(row['median']['stock'])} s, ours {number(row['median']['solo'])} s, gradient "
            f"gap {gap(row)}, memory {percent(memory_share(row))} of stock's, "
            f"{percent(gemm_share(row))} of the GEMM peak"
        )
    shown = ("ratio", "median", "seconds", "reached_s", "peak_gib")
    return "  ".join(f"{key} {row[key]}" for key in shown if key in row)


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
    data = read_results()
    print(goals_table(data["rows"]) if data else NOTHING)
    print(f"wrote the tables of {GUIDE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
