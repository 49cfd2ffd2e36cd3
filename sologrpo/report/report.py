"""Run directory to `reward_curve.png` and `report.html`: reads files, writes two, trains nothing.

    python -m sologrpo.report.report runs/x                 # runs/x/report.html
    python -m sologrpo.report.report runs/x runs/y runs/z   # runs/comparison.html

Every input may be missing or unfinished, as in a run that was just started; the report then says
so in that place. A page is one file without outside resources. Model output reaches it through an
autoescaping template only, and its content policy lets no other script run.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from sologrpo.errors import InputError, one_line_errors
from sologrpo.files import REPORT, REWARD_CURVE, write_atomically
from sologrpo.report.charts import (
    COLOURS,
    TIME_PREFIX,
    Points,
    draw_chapters,
    draw_reward_curve,
    moving_average,
    series,
    window_of,
)
from sologrpo.report.comparison import comparison_page, named_apart
from sologrpo.report.evaluation import before_and_after, kinds, precisions, rates, score
from sologrpo.report.reading import (
    MAX_TEXT_CHARS,
    Record,
    Run,
    as_text,
    finite,
    read_metrics,
    read_run,
    shorten,
)

__all__ = [
    "as_text",
    "draw_reward_curve",
    "moving_average",
    "read_metrics",
    "series",
    "write_comparison",
    "write_report",
]

TEMPLATES = Path(__file__).parent / "templates"
SECRET_KEYS = {"hub_token", "push_to_hub_token"}  # reports are passed on
# What tells one recipe from another; the page shows them without a click.
RECIPE = (
    "model_name_or_path", "load_in_4bit", "lora_r", "lora_alpha", "dataset_name", "prompt_format",
    "rewards", "reward_weights", "outcome_reward", "num_generations", "generation_batch_size",
    "num_iterations", "max_completion_length", "temperature", "learning_rate", "beta", "loss_type",
    "scale_rewards", "max_steps", "num_train_epochs", "seed",
)  # fmt: skip


def write_report(run_dir: Path) -> Path:
    """Write `reward_curve.png` and `report.html` into a run directory; returns the page's path.

    Raises:
        InputError: if there is no such directory.

    Example:
        >>> write_report(Path("runs/nowhere"))
        Traceback (most recent call last):
        sologrpo.errors.InputError: runs/nowhere is not a run directory: name one that train.py made
    """
    run = _read(run_dir)
    draw_reward_curve(run.metrics, run_dir / REWARD_CURVE, run.name)
    path = run_dir / REPORT
    write_atomically(path, _render("report.html.j2", _page(run)))
    return path


def write_comparison(run_dirs: Sequence[Path], path: Path | None = None) -> Path:
    """Write one page with several runs: curves laid over each other, settings that differ.

    Args:
        run_dirs: two or more run directories, all different. The first is what the others are
            held against.
        path: where the page goes; without it `comparison.html` beside the first run directory.

    Returns:
        Path of the page.

    Raises:
        InputError: if one is no directory, or named twice.
    """
    if len({run_dir.resolve() for run_dir in run_dirs}) < len(run_dirs):
        raise InputError("a run directory is named twice: name each once")
    names = named_apart(run_dirs)
    runs = [replace(_read(path), name=name) for path, name in zip(run_dirs, names, strict=True)]
    path = path or run_dirs[0].resolve().parent / "comparison.html"
    write_atomically(path, _render("comparison.html.j2", comparison_page(runs, _facts, _table)))
    return path


def _read(run_dir: Path) -> Run:
    if not run_dir.is_dir():
        raise InputError(f"{run_dir} is not a run directory: name one that train.py made")
    return read_run(run_dir)


def _render(template: str, page: Record) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (percent, number, in_points, p_value, first_line)
    environment.filters.update({f.__name__: f for f in formats})
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    return environment.get_template(template).render(
        **page,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


# --- page of one run -------------------------------------------------------------------------


def _page(run: Run) -> Record:
    """All that the template is given."""
    drawn, flat = draw_chapters(run.metrics, _weighted_names(run.config))
    recipe = {key: run.config[key] for key in RECIPE if run.config.get(key) is not None}
    return {
        "name": run.name,
        "notes": run.notes,
        "facts": _facts(run),
        "scores": [score(evaluation) for evaluation in run.evaluations],
        "rates": rates(run.evaluations),
        "kinds": kinds(run.evaluations),
        "precisions": precisions(run.precisions),
        "results": [(e.label, _table(e.results)) for e in run.evaluations],
        **before_and_after(run.evaluations),
        "chapters": drawn,
        "flat": flat,
        "window": window_of(len(series(run.metrics, "reward"))),
        "completions": run.completions,
        "time_split": _time_split(run.metrics),
        "recipe": _table(recipe),
        "config": _table(run.config),
        "environment": _table(run.environment),
    }


def _weighted_names(config: Record) -> Record:
    """What to call each reward where it has a weight: `strict_format (weight 0.2)`."""
    names, weights = config.get("rewards"), config.get("reward_weights")
    if not isinstance(names, list) or not isinstance(weights, list) or len(names) != len(weights):
        return {}
    labels = {}
    for entry, weight in zip(names, weights, strict=True):
        name = str(next(iter(entry), "") if isinstance(entry, dict) else entry).rsplit(":", 1)[-1]
        labels[name] = f"{name} (weight {weight})"
    return labels


def _facts(run: Run) -> list[tuple[str, str]]:
    """Name and value of the few numbers at the top."""
    reward, accuracy = series(run.metrics, "reward"), series(run.metrics, "eval_accuracy")
    steps, seconds = _steps(run.metrics), _mean_seconds(run.metrics)
    facts = [
        ("test accuracy", _test_accuracy(run)),
        ("reward, start → end", _start_to_end([value for _, value in reward])),
        ("validation, start → end", _percent_change(accuracy)),
        ("model", Path(str(run.config.get("model_name_or_path") or "")).name),
        ("steps", _steps_of_plan(run.metrics) if steps else ""),
        ("seconds a step", number(seconds, 1) if seconds else ""),
        ("time in steps", _duration(seconds * steps) if seconds and steps else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _test_accuracy(run: Run) -> str:
    """Before and after, of the same problems where they were compared."""
    comparisons = before_and_after(run.evaluations)["comparisons"]
    if comparisons:
        return f"{percent(comparisons[0]['before'])} → {percent(comparisons[0]['after'])}"
    return percent(score(run.evaluations[-1])["accuracy"]) if run.evaluations else ""


def _start_to_end(values: list[float]) -> str:
    """Means of as many first and last values as the moving average takes."""
    window = window_of(len(values))
    if not values:
        return ""
    return f"{number(fmean(values[:window]), 2)} → {number(fmean(values[-window:]), 2)}"


def _percent_change(points: Points) -> str:
    return f"{percent(points[0][1])} → {percent(points[-1][1])}" if points else ""


def _steps(metrics: list[Record]) -> int:
    return max((step for step, _ in series(metrics, "step")), default=0)


def _steps_of_plan(metrics: list[Record]) -> str:
    """Steps made, and of how many where the run is not at its end."""
    steps, progress = _steps(metrics), series(metrics, "progress")
    if not progress or not 0 < progress[-1][1] < 1:
        return f"{steps:,}"
    return f"{steps:,} of {progress[-1][0] / progress[-1][1]:,.0f}"


def _mean_seconds(metrics: list[Record]) -> float | None:
    """Seconds of a step: all its parts where they were measured, else TRL's, without the update."""
    split = _time_split(metrics)
    if split:
        return float(sum(part["seconds"] for part in split))
    values = [value for _, value in series(metrics, "step_time")]
    return fmean(values) if values else None


def _duration(seconds: float) -> str:
    """Time as a person says it.

    >>> _duration(59), _duration(816), _duration(100_000)
    ('59 s', '14 min', '27 h 47 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _time_split(metrics: list[Record]) -> list[Record]:
    """Mean seconds a step by part, longest first, and its share of all parts."""
    keys = {key for row in metrics for key in row if key.startswith(TIME_PREFIX)}
    means = {
        key.removeprefix(TIME_PREFIX).replace("_", " "): fmean(value for _, value in found)
        for key in keys
        if (found := series(metrics, key))
    }
    total = sum(means.values())
    parts = sorted(means.items(), key=lambda part: (-part[1], part[0]))
    return [
        {
            "name": name,
            "seconds": seconds,
            "share": seconds / total if total else 0.0,
            "colour": COLOURS[place % len(COLOURS)],
        }
        for place, (name, seconds) in enumerate(parts)
    ]


def _table(mapping: Record, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and values of a nested mapping, without what must stay secret."""
    rows: list[tuple[str, str]] = []
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            rows += _table(value, f"{prefix}{key}.")
        elif key in SECRET_KEYS and value:
            rows.append((f"{prefix}{key}", "(hidden)"))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            rows.append((f"{prefix}{key}", shorten(text, MAX_TEXT_CHARS)))
    return rows


# --- how values are written ------------------------------------------------------------------


def percent(value: float | None) -> str:
    """Fraction as a percentage with one decimal."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def in_points(value: float) -> str:
    """Difference of two fractions in percentage points."""
    return f"{100 * value:+.1f}"


def number(value: Any, digits: int = 0) -> str:
    """Number with thousands commas; other values as they are."""
    found = finite(value)
    if found is None:
        return "n/a" if value is None else str(value)
    return f"{found:,.{digits}f}"


def p_value(value: float | None) -> str:
    """Two significant digits, as far as anyone needs to know."""
    if value is None:
        return "n/a"
    return "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def first_line(text: Any, limit: int = 110) -> str:
    """Text on one line for a summary, cut with an ellipsis."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


# --- command line ----------------------------------------------------------------------------


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Command line: the report of one run directory, or the comparison of several."""
    from sologrpo.command_line import Parser  # loads transformers, which reports do without

    parser = Parser(
        prog="sologrpo report",
        description="Write report.html into a run directory, or one page that compares several.",
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="such as runs/x")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="page of several runs (default: comparison.html beside the first)",
    )
    arguments = parser.parse_args(argv)
    if len(arguments.run_dirs) > 1:
        print(write_comparison(arguments.run_dirs, arguments.output))
    elif arguments.output:
        raise InputError("--output is for several run directories; one keeps its report.html")
    else:
        print(write_report(arguments.run_dirs[0]))


if __name__ == "__main__":
    main()
