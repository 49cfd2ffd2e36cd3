"""Run directory to `reward_curve.png` and `report.html`: reads files, writes two, trains nothing.

    python -m sologrpo.report runs/x

Every input may be missing or unfinished, as in a run that was just started; the report then says
so in that place. `report.html` is one file without outside resources. Model output reaches it
through an autoescaping template only, and its content policy lets no other script run.
"""

import argparse
import base64
import hashlib
import io
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
import matplotlib as mpl
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sologrpo.errors import InputError, one_line_errors
from sologrpo.files import write_atomically
from sologrpo.statistics import compare_paired, wilson_interval

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Points = list[tuple[int, float]]

TEMPLATES = Path(__file__).parent / "templates"
MAX_TEXT_CHARS = 20_000  # of one prompt or completion, so that a runaway one stays readable
SAMPLED_STEPS = 3  # the latest, the middle and the first logged step: what training changed
SAMPLES_A_STEP = 8  # one group at the usual num_generations of 8
PROBLEMS_A_VERDICT = 8
# A constant reward of eight completions yields advantages up to 0.005 from rounding alone.
ADVANTAGE_NOISE = 0.01
SECRET_KEYS = {"hub_token", "push_to_hub_token"}  # reports are passed on
TIME_PREFIX = "time/"  # seconds of a step by part


# --- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One folder of `eval/`."""

    label: str
    results: Record
    records: list[Record]


@dataclass(frozen=True)
class Run:
    """All that a report shows; `notes` name the files that could not be read whole."""

    name: str
    config: Record
    environment: Record
    metrics: list[Record]
    samples: list[Record]
    evaluations: list[Evaluation]
    notes: list[str] = field(default_factory=list)


def read_metrics(path: Path) -> list[Record]:
    """Rows of a `metrics.jsonl`; none if it is missing. Torn lines are skipped with a warning."""
    rows, notes = _read_json_lines(path)
    for note in notes:
        logger.warning("%s", note)
    return rows


def _read_json_lines(path: Path) -> tuple[list[Record], list[str]]:
    """Rows, and a note for each line that is no JSON object: a writer was stopped in it."""
    rows: list[Record] = []
    notes: list[str] = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_object(line)
        if row is None:
            notes.append(f"{path.name}: line {number} is torn and was skipped")
        else:
            rows.append(row)
    return rows, notes


def _parse_object(line: bytes) -> Record | None:
    try:
        row = json.loads(line)
    except ValueError:  # includes text that is not UTF-8
        return None
    return row if isinstance(row, dict) else None


def _read_mapping(path: Path, parse: Callable[[bytes], Any], notes: list[str]) -> Record:
    """Content of a JSON or YAML file; empty if it is missing or, with a note, unreadable."""
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_bytes())
    except (ValueError, yaml.YAMLError):
        content = None
    if isinstance(content, dict):
        return {str(key): value for key, value in content.items()}
    notes.append(f"{path.name} could not be read")
    return {}


def _read_run(run_dir: Path) -> Run:
    metrics, notes = _read_json_lines(run_dir / "metrics.jsonl")
    return Run(
        name=run_dir.resolve().name,
        config=_read_mapping(run_dir / "config.yaml", yaml.safe_load, notes),
        environment=_read_mapping(run_dir / "environment.json", json.loads, notes),
        metrics=metrics,
        samples=_read_samples(run_dir / "completions", notes),
        evaluations=_read_evaluations(run_dir / "eval", notes),
        notes=notes,
    )


def _read_evaluations(folder: Path, notes: list[str]) -> list[Evaluation]:
    """Evaluations in the order before, after, then any others by name."""
    evaluations = []
    for path in sorted(folder.glob("*/results.json")):
        results = _read_mapping(path, json.loads, notes)
        records, torn = _read_json_lines(path.with_name("records.jsonl"))
        notes += [f"eval/{path.parent.name}/{note}" for note in torn]
        if results:
            evaluations.append(Evaluation(path.parent.name, results, records))
    return sorted(evaluations, key=_before_then_after)


def _before_then_after(evaluation: Evaluation) -> tuple[bool, bool, str]:
    return not _is_baseline(evaluation), "delta" not in evaluation.results, evaluation.label


def _is_baseline(evaluation: Evaluation) -> bool:
    """A merged model has no adapter either, so the label counts before the field."""
    if evaluation.label.startswith("base"):
        return True
    untrained = "adapter" in evaluation.results and not evaluation.results["adapter"]
    return untrained and "delta" not in evaluation.results and "merged" not in evaluation.label


def _read_samples(folder: Path, notes: list[str]) -> list[Record]:
    """Completions of a few logged steps, latest step first, the same text only once."""
    files = sorted(folder.glob("*.parquet"), key=lambda path: (len(path.name), path.name))
    samples: list[Record] = []
    seen: set[tuple[str, str]] = set()
    for path in _spread(files, SAMPLED_STEPS):
        try:
            batch = next(pq.ParquetFile(path).iter_batches(batch_size=64), None)
        except pa.ArrowInvalid:  # the trainer is still writing it
            notes.append(f"completions/{path.name} could not be read")
            continue
        fresh = _distinct([_sample(row) for row in batch.to_pylist()] if batch else [], seen)
        samples += fresh[:SAMPLES_A_STEP]
    return samples


def _spread(items: list[Path], count: int) -> list[Path]:
    """Up to `count` evenly spaced items, last one first, the first one among them."""
    last = len(items) - 1
    indices = {round(last * i / (count - 1)) for i in range(count)} if items else set()
    return [items[i] for i in sorted(indices, reverse=True)]


def _distinct(samples: list[Record], seen: set[tuple[str, str]]) -> list[Record]:
    """Samples whose text was not seen: TRL logs a generation batch again at each of its steps."""
    fresh = []
    for sample in samples:
        text = (sample["prompt"], sample["completion"])
        if text not in seen:
            fresh.append(sample)
        seen.add(text)
    return fresh


def _sample(row: Record) -> Record:
    """One row of TRL's completions log: every column it does not name itself is a reward."""
    advantage = _number(row.get("advantage"))
    known = {"step", "prompt", "completion", "advantage"}
    return {
        "step": row.get("step"),
        "prompt": as_text(row.get("prompt")),
        "completion": as_text(row.get("completion")),
        "advantage": advantage,
        "verdict": _sign(advantage),
        "rewards": [(key, value) for key, value in row.items() if key not in known],
    }


def _sign(advantage: float | None) -> str:
    if advantage is None or abs(advantage) < ADVANTAGE_NOISE:
        return "no signal"
    return "above its group" if advantage > 0 else "below its group"


def as_text(value: Any) -> str:
    """Text of a prompt or completion, given as a string or a list of chat messages."""
    if isinstance(value, list):
        messages = [_message_text(message) for message in value]
        lone = len(messages) == 1
        texts = [text if lone else f"[{role}]\n{text}" for role, text in messages]
        value = "\n\n".join(texts)
    return _shorten("" if value is None else str(value), MAX_TEXT_CHARS)


def _message_text(message: Any) -> tuple[str, str]:
    """Role and text of a chat message, whose content may be a list of typed parts."""
    if not isinstance(message, dict):
        return "message", str(message)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return str(message.get("role")), "" if content is None else str(content)


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters]"


def _number(value: Any) -> float | None:
    """A finite number or nothing: TRL logs null, and Python's JSON has NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


# --- curves ----------------------------------------------------------------------------------

COLOURS = ("#2f6fde", "#e07b00", "#0f9d70", "#c9408f", "#8458d6", "#8a7a00")
VALIDATION_COLOUR = "#d33a2c"
# Stands for the page's text colour in a drawing, so that one SVG serves light and dark.
INK = "#010203"


@dataclass(frozen=True)
class Line:
    """One series of a panel; `smooth` adds a moving average and fades the raw values."""

    key: str
    label: str
    smooth: bool = True


@dataclass(frozen=True)
class Panel:
    """One small plot over training steps."""

    title: str
    lines: tuple[Line, ...]
    percent: bool = False


# Metric names are TRL's; a panel without data is left out.
PANELS = (
    Panel(
        "Validation, greedy",
        (
            Line("eval_accuracy", "accuracy", smooth=False),
            Line("eval_format_rate", "format as asked", smooth=False),
        ),
        percent=True,
    ),
    Panel(
        "Groups without signal, truncated completions",
        (
            Line("frac_reward_zero_std", "groups with equal rewards"),
            Line("completions/clipped_ratio", "truncated completions"),
        ),
        percent=True,
    ),
    Panel(
        "Completion length (tokens)",
        (
            Line("completions/mean_length", "mean"),
            Line("completions/mean_terminated_length", "mean of those that ended"),
        ),
    ),
    Panel("Spread of rewards", (Line("reward_std", "standard deviation"),)),
    Panel("Entropy (nats a token)", (Line("entropy", "entropy"),)),
    Panel("KL from the reference model (nats a token)", (Line("kl", "KL"),)),
    Panel("Clipped tokens", (Line("clip_ratio/region_mean", "clipped"),), percent=True),
    Panel("Loss", (Line("loss", "loss"),)),
    Panel("Gradient norm", (Line("grad_norm", "gradient norm"),)),
    Panel("Learning rate", (Line("learning_rate", "learning rate", smooth=False),)),
    Panel("Seconds a step", (Line("step_time", "step time"),)),
)


def draw_reward_curve(metrics: list[Record], path: Path, title: str) -> None:
    """Draw reward, its parts and validation over steps, signal and length below, as a PNG.

    1,800 x 1,400 pixels, made to be read at half that width.
    """
    with mpl.rc_context({"text.parse_math": False, "font.size": 10.5}):
        figure = Figure(figsize=(9, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        figure.suptitle(title, fontsize=14, fontweight="bold")
        _draw_rewards(top, metrics)
        _draw_health(bottom, metrics)
        if metrics:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=200, metadata={"Software": None})
    write_atomically(path, picture.getvalue())


def _draw_rewards(axes: Axes, metrics: list[Record]) -> None:
    _tidy(axes)
    axes.set_ylabel("mean reward a step")
    for line, colour in zip(_reward_lines(metrics), _cycle(COLOURS), strict=False):
        _draw_line(axes, series(metrics, line.key), line, colour, emphasis=line.key == "reward")
    validation = series(metrics, "eval_accuracy")
    if validation:
        right = _right_axis(axes, "validation accuracy", VALIDATION_COLOUR)
        right.set_ylim(0, 1)
        _as_percent(right)
        line = Line("eval_accuracy", "validation accuracy (right)", smooth=False)
        _draw_line(right, validation, line, VALIDATION_COLOUR)
    if not axes.lines:
        axes.text(0.5, 0.5, "no steps logged yet", ha="center", transform=axes.transAxes)


def _draw_health(axes: Axes, metrics: list[Record]) -> None:
    _tidy(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("share")
    axes.set_ylim(-0.03, 1.03)
    _as_percent(axes)
    degenerate = Line("frac_reward_zero_std", "groups with equal rewards (no signal)")
    _draw_line(axes, series(metrics, degenerate.key), degenerate, COLOURS[4])
    length = series(metrics, "completions/mean_length")
    if length:
        right = _right_axis(axes, "completion length (tokens)", COLOURS[5])
        line = Line("completions/mean_length", "completion length (right)")
        _draw_line(right, length, line, COLOURS[5])
        right.set_ylim(bottom=0)


def _right_axis(axes: Axes, label: str, colour: str) -> Axes:
    right = axes.twinx()
    right.set_ylabel(label, color=colour)
    right.tick_params(axis="y", colors=colour)
    for side in ("top", "left"):
        right.spines[side].set_visible(False)
    return right


def series(metrics: list[Record], key: str) -> Points:
    """Steps and finite values of one metric; a step that was redone after a resume counts once."""
    points: dict[int, float] = {}
    for row in metrics:
        step, value = _number(row.get("step")), _number(row.get(key))
        if step is not None and value is not None:
            points[int(step)] = value
    return sorted(points.items())


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window - 1` before it (fewer at the start)."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _window(count: int) -> int:
    """Width of the moving average in logged steps: 1 of 3, 7 of 50, 31 of 1,000."""
    return max(1, math.isqrt(count))


def _reward_lines(metrics: list[Record]) -> list[Line]:
    """The reward and each of its parts; a single part is the reward itself."""
    keys = sorted({key for row in metrics for key in row if _is_reward_part(key)})
    parts = [
        Line(key, key[len("rewards/") : -len("/mean")]) for key in keys if series(metrics, key)
    ]
    window = _window(len(series(metrics, "reward")))
    total = Line("reward", f"reward (mean of {window} logged steps)" if window > 1 else "reward")
    return [total, *(parts if len(parts) > 1 else [])]


def _is_reward_part(key: str) -> bool:
    return key.startswith("rewards/") and key.endswith("/mean")


def _draw_line(
    axes: Axes, points: Points, line: Line, colour: str, *, emphasis: bool = False
) -> None:
    """Draw nothing without points; dots for what was not averaged or matters most."""
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not line.smooth:
        marker = "o" if len(points) <= 30 else ""
        axes.plot(steps, values, color=colour, label=line.label, marker=marker, markersize=4)
        return
    if emphasis or len(points) == 1:
        stride = math.ceil(len(points) / 500)  # keeps the SVG of a long run small
        axes.plot(steps[::stride], values[::stride], ".", color=colour, alpha=0.5, markersize=5)
    average = moving_average(values, _window(len(values)))
    width = 2.4 if emphasis else 1.6
    axes.plot(steps, average, color=colour, label=line.label, linewidth=width)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _as_percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _cycle(colours: Sequence[str]) -> Iterable[str]:
    while True:
        yield from colours


def _charts(metrics: list[Record]) -> list[Record]:
    """Title, legend and SVG of every panel that has data."""
    reward = Panel("Reward, mean a step", tuple(_reward_lines(metrics)))
    steps = [step for step, _ in series(metrics, "step")]
    return [chart for panel in (reward, *PANELS) if (chart := _chart(panel, metrics, steps))]


def _chart(panel: Panel, metrics: list[Record], steps: list[int]) -> Record | None:
    drawn = [
        (line, points, colour)
        for line, colour in zip(panel.lines, _cycle(COLOURS), strict=False)
        if (points := series(metrics, line.key))
    ]
    if not drawn:
        return None
    legend = [(line.label, colour) for line, _, colour in drawn]
    return {"title": panel.title, "legend": legend, "svg": _panel_svg(panel, drawn, steps)}


def _panel_svg(panel: Panel, drawn: list[tuple[Line, Points, str]], steps: list[int]) -> Markup:
    """One panel over all logged steps as inline SVG, its text real text in the page's colour."""
    with mpl.rc_context(
        {
            "axes.edgecolor": INK,
            "grid.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "text.color": INK,
            "text.parse_math": False,
            "font.size": 9.5,
            "svg.fonttype": "none",
            "svg.hashsalt": panel.title,  # the same input gives the same file
        }
    ):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        axes = figure.subplots()
        _tidy(axes)
        axes.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
        if panel.percent:
            axes.set_ylim(-0.03, 1.03)
            _as_percent(axes)
        for line, points, colour in drawn:
            _draw_line(axes, points, line, colour, emphasis=line.key == "reward")
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    return _inline_svg(picture.getvalue())


def _inline_svg(document: str) -> Markup:
    """Strip what a stand-alone SVG file needs and an SVG in HTML does not."""
    body = document[document.index("<svg ") :]
    before, _, rest = body.partition("<metadata>")
    body = before + rest.partition("</metadata>")[2] if rest else body
    for name in ("xmlns:xlink", "xmlns"):
        head, _, tail = body.partition(f' {name}="')
        body = head + tail.partition('"')[2] if tail else body
    # matplotlib has escaped the labels, and nothing else in the drawing comes from a file.
    return Markup(body.replace(INK, "currentColor"))


# --- before and after ------------------------------------------------------------------------


def _score_row(evaluation: Evaluation) -> Record:
    """One row of the headline table; numbers as fractions, nothing where they are missing."""
    results = evaluation.results
    accuracy, n = _number(results.get("accuracy")), _number(results.get("n"))
    return {
        "label": evaluation.label,
        "n": n,
        "accuracy": accuracy,
        "interval": _interval(results.get("accuracy_ci95")) or _wilson(accuracy, n),
        "lenient": _number(results.get("accuracy_lenient")),
        "format": _number(results.get("format_rate")),
        "truncated": _number(results.get("truncated_rate")),
        "tokens": _number(results.get("mean_completion_tokens")),
        "precision": results.get("precision"),
        "model": results.get("model"),
    }


def _interval(value: Any) -> tuple[float, float] | None:
    ends = [_number(end) for end in value] if isinstance(value, list) and len(value) == 2 else []
    low, high = ends or (None, None)
    return None if low is None or high is None else (low, high)


def _wilson(accuracy: float | None, n: float | None) -> tuple[float, float] | None:
    if accuracy is None or n is None or n < 1 or not 0 <= accuracy <= 1:
        return None
    return wilson_interval(round(accuracy * n), int(n))


def _pairs(before: Evaluation, after: Evaluation) -> list[tuple[Record, Record]]:
    """Records of the same problem, by index; a different question there is another problem."""
    earlier = {record.get("index"): record for record in before.records}
    found = [(earlier.get(record.get("index")), record) for record in after.records]
    return [(b, a) for b, a in found if b and b.get("question") == a.get("question")]


def _comparison(before: Evaluation | None, after: Evaluation) -> Record | None:
    """Paired comparison from `results.json`, else from the records if they pair up wholly."""
    return _stated_comparison(after) or (_own_comparison(before, after) if before else None)


def _stated_comparison(after: Evaluation) -> Record | None:
    results = after.results
    delta, interval = _number(results.get("delta")), _interval(results.get("delta_ci95"))
    if delta is None or interval is None:
        return None
    return {
        "label": after.label,
        "n": _number(results.get("n")),
        "before": _number(results.get("baseline_accuracy")),
        "after": _number(results.get("accuracy")),
        "delta": delta,
        "low": interval[0],
        "high": interval[1],
        "p": _number(results.get("mcnemar_p")),
    }


def _own_comparison(before: Evaluation, after: Evaluation) -> Record | None:
    pairs = _pairs(before, after)
    if not pairs or {len(before.records), len(after.records)} != {len(pairs)}:
        return None
    paired = compare_paired([_right(b) for b, _ in pairs], [_right(a) for _, a in pairs])
    return {
        "label": after.label,
        "n": paired.n,
        "before": paired.baseline_accuracy,
        "after": paired.accuracy,
        "delta": paired.delta,
        "low": paired.delta_ci95[0],
        "high": paired.delta_ci95[1],
        "p": paired.mcnemar_p,
    }


def _right(record: Record) -> bool:
    return record.get("correct") is True


def _verdict_sentence(comparison: Record) -> str:
    """The comparison in plain words."""
    points = abs(100 * comparison["delta"])
    interval = f"{100 * comparison['low']:+.1f} to {100 * comparison['high']:+.1f} points"
    if comparison["low"] > 0:
        return f"Accuracy rose by {points:.1f} points (95 % interval {interval})."
    if comparison["high"] < 0:
        return f"Accuracy fell by {points:.1f} points (95 % interval {interval})."
    return f"No clear difference: the 95 % interval, {interval}, contains 0."


def _kinds(evaluations: list[Evaluation]) -> list[Record]:
    """Rows of the table by kind: one cell an evaluation, empty where it lacks the kind."""
    tables = [_mapping(evaluation.results.get("by_kind")) for evaluation in evaluations]
    kinds = sorted({kind for table in tables for kind in table})
    return [
        {"kind": kind, "cells": [_kind_cell(_mapping(table.get(kind))) for table in tables]}
        for kind in kinds
    ]


def _kind_cell(entry: Record) -> Record:
    accuracy, n = _number(entry.get("accuracy")), _number(entry.get("n"))
    return {"accuracy": accuracy, "n": n, "interval": _wilson(accuracy, n)}


def _mapping(value: Any) -> Record:
    return value if isinstance(value, dict) else {}


VERDICTS = {
    (False, True): "newly right",
    (True, False): "newly wrong",
    (False, False): "still wrong",
    (True, True): "still right",
}


def _changed(before: Evaluation, after: Evaluation) -> Record:
    """Count of every verdict, and a few problems of each, changed ones first."""
    pairs = _pairs(before, after)
    named = [(VERDICTS[_right(b), _right(a)], b, a) for b, a in pairs]
    problems = [
        _problem(*entry)
        for verdict in VERDICTS.values()
        for entry in [entry for entry in named if entry[0] == verdict][:PROBLEMS_A_VERDICT]
    ]
    tally = Counter(verdict for verdict, _, _ in named)
    counts = [(verdict, tally[verdict]) for verdict in VERDICTS.values()]
    return {"before": before.label, "after": after.label, "counts": counts, "problems": problems}


def _problem(verdict: str, before: Record, after: Record) -> Record:
    answers = [("before", _answer(before)), ("after", _answer(after))]
    question = as_text(after.get("question"))
    return {
        "verdict": verdict,
        "question": question,
        "gold": as_text(after.get("gold")),
        "answers": answers,
    }


def _answer(record: Record) -> Record:
    """One model's answer to a problem, with what the judge said of it in words."""
    flags = ["right" if _right(record) else "wrong"]
    if not _right(record) and record.get("lenient_correct") is True:
        flags.append("right if read leniently")
    if record.get("format_ok") is False:
        flags.append("format broken")
    if record.get("truncated") is True:
        flags.append("truncated")
    return {
        "flags": flags,
        "extracted": record.get("extracted"),
        "tokens": _number(record.get("completion_tokens")),
        "completion": as_text(record.get("completion")),
    }


# --- page ------------------------------------------------------------------------------------


def write_report(run_dir: Path) -> Path:
    """Write `reward_curve.png` and `report.html` into a run directory; returns the page's path."""
    if not run_dir.is_dir():
        raise InputError(f"{run_dir} is not a run directory: name one that train.py made")
    run = _read_run(run_dir)
    draw_reward_curve(run.metrics, run_dir / "reward_curve.png", run.name)
    path = run_dir / "report.html"
    write_atomically(path, _render(run))
    return path


def _render(run: Run) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (percent, number, in_points, p_value, first_line)
    environment.filters.update({f.__name__: f for f in formats})
    return environment.get_template("report.html.j2").render(_page(run))


def _page(run: Run) -> Record:
    """All that the template is given."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    return {
        "name": run.name,
        "notes": run.notes,
        "tiles": _tiles(run),
        "scores": [_score_row(evaluation) for evaluation in run.evaluations],
        "kinds": _kinds(run.evaluations),
        **_before_and_after(run.evaluations),
        "charts": _charts(run.metrics),
        "samples": run.samples,
        "time_split": _time_split(run.metrics),
        "config": _table(run.config),
        "environment": _table(run.environment),
        "style": Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _before_and_after(evaluations: list[Evaluation]) -> Record:
    """Every later evaluation against the baseline; what changed for the first with records."""
    before = next(filter(_is_baseline, evaluations), None)
    later = [evaluation for evaluation in evaluations if not _is_baseline(evaluation)]
    comparisons = [found for after in later if (found := _comparison(before, after))]
    changed = [_changed(before, after) for after in later if before and _pairs(before, after)]
    return {
        "comparisons": comparisons,
        "verdict": _verdict_sentence(comparisons[0]) if comparisons else None,
        "changed": changed[0] if changed else None,
    }


def _tiles(run: Run) -> list[tuple[str, str]]:
    """Name and value of the few numbers at the top."""
    reward, accuracy = series(run.metrics, "reward"), series(run.metrics, "eval_accuracy")
    seconds = series(run.metrics, "step_time")
    tiles = [
        ("model", str(run.config.get("model_name_or_path") or "")),
        ("steps", f"{reward[-1][0]:,}" if reward else ""),
        ("reward, start → end", _start_to_end([value for _, value in reward])),
        ("validation, start → end", _percent_change(accuracy)),
        ("seconds a step", number(fmean(value for _, value in seconds), 1) if seconds else ""),
    ]
    return [(name, value) for name, value in tiles if value]


def _start_to_end(values: list[float]) -> str:
    """Means of as many first and last values as the moving average takes."""
    window = _window(len(values))
    if not values:
        return ""
    return f"{number(fmean(values[:window]), 2)} → {number(fmean(values[-window:]), 2)}"


def _percent_change(points: Points) -> str:
    return f"{percent(points[0][1])} → {percent(points[-1][1])}" if points else ""


def _time_split(metrics: list[Record]) -> list[Record]:
    """Mean seconds a step by part, longest first, and its share of all parts."""
    keys = {key for row in metrics for key in row if key.startswith(TIME_PREFIX)}
    means = {
        key.removeprefix(TIME_PREFIX): fmean(value for _, value in found)
        for key in keys
        if (found := series(metrics, key))
    }
    total = sum(means.values())
    parts = sorted(means.items(), key=lambda part: (-part[1], part[0]))
    return [
        {"name": name, "seconds": seconds, "share": seconds / total if total else 0.0}
        for name, seconds in parts
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
            rows.append((f"{prefix}{key}", _shorten(text, MAX_TEXT_CHARS)))
    return rows


def percent(value: float | None) -> str:
    """Fraction as a percentage with one decimal."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def in_points(value: float) -> str:
    """Difference of two fractions in percentage points."""
    return f"{100 * value:+.1f}"


def number(value: Any, digits: int = 0) -> str:
    """Number with thousands commas; other values as they are."""
    found = _number(value)
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


@one_line_errors
def main() -> None:
    """Command line: write the report of each run directory named."""
    parser = argparse.ArgumentParser(
        prog="python -m sologrpo.report", description=write_report.__doc__
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="such as runs/x")
    for run_dir in parser.parse_args().run_dirs:
        print(write_report(run_dir))


if __name__ == "__main__":
    main()
