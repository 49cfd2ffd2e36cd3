"""Curves of the report: `reward_curve.png`, and small SVG charts that the page can read out."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sologrpo.files import write_atomically
from sologrpo.report.reading import Record, finite, is_reward_part, reward_name

Points = list[tuple[int, float]]

# Told apart in print, in the dark and by most colour-blind readers; dashes tell a second round.
COLOURS = ("#2f6fde", "#e07b00", "#0f9d70", "#c9408f", "#8458d6", "#8a7a00")
VALIDATION_COLOUR = "#d33a2c"
DASHES = ("-", "--", ":")
# Stands for the page's text colour in a drawing, so that one SVG serves light and dark.
INK = "#010203"
MAX_POINTS = 400  # of one line of a chart: more than it has pixels
ALMOST_ZERO = 1e-12
TIME_PREFIX = "time/"  # seconds of a step by part


@dataclass(frozen=True)
class Line:
    """One series of a panel.

    Attributes:
        key: name of the metric.
        label: its name in the legend.
        smooth: draw the moving average.
        strong: draw it thicker, and the single steps as dots.
    """

    key: str
    label: str
    smooth: bool = True
    strong: bool = False


@dataclass(frozen=True)
class Panel:
    """One small plot over training steps.

    Attributes:
        hint: what to look for, in one sentence.
        percent: the values are shares.
        right: a line with a scale of its own, 0 to 100 %, on the right.
        compared: how many of the lines, the first ones, are worth a chart where runs are compared.
    """

    title: str
    lines: tuple[Line, ...]
    hint: str = ""
    percent: bool = False
    right: Line | None = None
    compared: int = 1


VALIDATION = Line("eval_accuracy", "validation accuracy", smooth=False)

# Metric names are TRL's and ours: docs/metrics.md explains each.
HELD_OUT = Panel(
    "Validation, greedy",
    (
        Line("eval_accuracy", "accuracy", smooth=False),
        Line("eval_accuracy_lenient", "read leniently", smooth=False),
        Line("eval_format_rate", "format as asked", smooth=False),
    ),
    "Held-out problems. If reward rises and this does not, the reward is being gamed.",
    percent=True,
    compared=3,
)
NO_SIGNAL = Panel(
    "Groups without signal",
    (
        Line("frac_reward_zero_std", "all rewards equal"),
        Line("degenerate/all_right", "all right"),
        Line("degenerate/all_wrong", "all wrong"),
    ),
    "A group whose completions all earn the same teaches nothing.",
    percent=True,
)
SPREAD = Panel("Spread of rewards", (Line("reward_std", "standard deviation"),))
LENGTH = Panel(
    "Completion length (tokens)",
    (
        Line("completions/mean_length", "mean"),
        Line("completions/mean_terminated_length", "mean of those that ended"),
        Line("completions/max_length", "longest"),
    ),
)
TRUNCATED = Panel(
    "Truncated completions",
    (Line("completions/clipped_ratio", "truncated"),),
    "A cut-off answer is wrong: if this stays high, raise max_completion_length.",
    percent=True,
)
POLICY = (
    Panel(
        "Entropy (nats a token)",
        (Line("entropy", "entropy"),),
        "Near 0 all completions of a group are alike.",
    ),
    Panel("KL from the reference model (nats a token)", (Line("kl", "KL"),)),
    Panel(
        "Clipped tokens",
        (
            Line("clip_ratio/region_mean", "clipped"),
            Line("clip_ratio/low_mean", "ratio too low"),
            Line("clip_ratio/high_mean", "ratio too high"),
        ),
        "Tokens without gradient, because their probability had moved too far.",
        percent=True,
    ),
    Panel("Gradient norm", (Line("grad_norm", "gradient norm"),)),
    Panel("Loss", (Line("loss", "loss"),), "Near 0 by design: no measure of progress.", compared=0),
    Panel("Learning rate", (Line("learning_rate", "learning rate", smooth=False),)),
)
COST = (
    Panel(
        "Tokens a second",
        (Line("tokens_per_second/sampling", "sampling"),
         Line("tokens_per_second/training", "training")),
        compared=2,
    ),
    Panel(
        "Peak memory (GiB)",
        (Line("memory/peak_gib", "CUDA device", smooth=False),
         Line("memory/peak_rss_gib", "main memory", smooth=False)),
        compared=2,
    ),
)  # fmt: skip


def chapters(metrics: list[Record], labels: Record) -> list[tuple[str, list[Panel]]]:
    """Panels by question that they answer.

    Args:
        metrics: rows of `metrics.jsonl`, which tell the names of the run's own rewards.
        labels: what to call a reward, where it is not its name.
    """
    rewards = _reward_lines(metrics, labels)
    advantage = Panel(
        "Part of the advantage by reward",
        _family(metrics, "advantage_share/"),
        "The reward for the answer should lead once the format is learned.",
        percent=True,
        compared=0,
    )
    hacking = Panel(
        "Signs of reward hacking",
        _family(metrics, "hacking/"),
        "Shares of the completions, not scored. Read a few where one climbs.",
        percent=True,
        compared=0,
    )
    reward = Panel("Reward", rewards, "Mean over the completions of a step.", right=VALIDATION)
    seconds = Panel("Seconds a step", _time_lines(metrics))
    return [
        ("Does it learn?", [replace(reward, compared=len(rewards)), HELD_OUT]),
        ("Is there a signal?", [NO_SIGNAL, advantage, SPREAD]),
        ("What does it write?", [LENGTH, TRUNCATED, hacking]),
        ("Is the policy sound?", [*POLICY]),
        ("What does it cost?", [seconds, *COST]),
    ]


def _reward_lines(metrics: list[Record], labels: Record) -> tuple[Line, ...]:
    """The reward and each of its parts; a single part is the reward itself."""
    keys = sorted({key for row in metrics for key in row if is_reward_part(key)})
    names = [(key, reward_name(key)) for key in keys if series(metrics, key)]
    parts = [Line(key, labels.get(name, name)) for key, name in names]
    total = Line("reward", "reward", strong=True)
    return (total, *(parts if len(parts) > 1 else []))


def _family(metrics: list[Record], prefix: str) -> tuple[Line, ...]:
    """A line for each metric whose name starts so."""
    keys = sorted({key for row in metrics for key in row if key.startswith(prefix)})
    return tuple(Line(key, key.removeprefix(prefix).replace("_", " ")) for key in keys)


def _time_lines(metrics: list[Record]) -> tuple[Line, ...]:
    """The step, and its parts where they were measured and take any time."""
    parts = [line for line in _family(metrics, TIME_PREFIX) if any(_values(metrics, line.key))]
    return (Line("step_time", "step"), *(parts if len(parts) > 1 else []))


def _values(metrics: list[Record], key: str) -> list[float]:
    return [value for _, value in series(metrics, key)]


# --- numbers ---------------------------------------------------------------------------------


def series(metrics: list[Record], key: str) -> Points:
    """Steps and finite values of one metric; a step that was redone after a resume counts once.

    Example:
        >>> series([{"step": 2, "kl": 0.5}, {"step": 1, "kl": 0.1}, {"step": 3, "kl": None}], "kl")
        [(1, 0.1), (2, 0.5)]
    """
    points: dict[int, float] = {}
    for row in metrics:
        step, value = finite(row.get("step")), finite(row.get(key))
        if step is not None and value is not None:
            points[int(step)] = value
    return sorted(points.items())


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window - 1` before it (fewer at the start)."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def window_of(count: int) -> int:
    """Width of the moving average in logged steps: 1 of 3, 7 of 50, 31 of 1,000."""
    return max(1, math.isqrt(count))


# --- reward_curve.png ------------------------------------------------------------------------


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
    window = window_of(len(series(metrics, "reward")))
    averaged = {"reward": f"reward (mean of {window} logged steps)"} if window > 1 else {}
    for line, colour in zip(_reward_lines(metrics, {}), cycle(COLOURS), strict=False):
        named = replace(line, label=averaged.get(line.key, line.label))
        _draw_line(axes, series(metrics, line.key), named, colour)
    validation = series(metrics, VALIDATION.key)
    if validation:
        _draw_validation(axes, validation, "validation accuracy (right)")
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
        right = _right_axis(axes, COLOURS[5])
        right.set_ylabel("completion length (tokens)", color=COLOURS[5])
        line = Line("completions/mean_length", "completion length (right)")
        _draw_line(right, length, line, COLOURS[5])
        right.set_ylim(bottom=0)


# --- charts of the page ----------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A line with its numbers and its looks."""

    line: Line
    points: Points
    colour: str
    dash: str = "-"


def draw_chapters(metrics: list[Record], labels: Record) -> tuple[list[Record], list[str]]:
    """Charts of one run by chapter, and the titles of panels that are zero at every step."""
    drawn, flat = [], []
    for title, panels in chapters(metrics, labels):
        charts = []
        for panel in panels:
            curves = _curves([(line, series(metrics, line.key)) for line in panel.lines])
            if curves and all(_is_flat(curve.points) for curve in curves):
                flat.append(panel.title)
                continue
            if panel.right and (points := series(metrics, panel.right.key)):
                curves.append(Curve(panel.right, points, VALIDATION_COLOUR))
            if curves:
                charts.append(_chart(panel, curves))
        if charts:
            drawn.append({"title": title, "charts": charts})
    return drawn, flat


def draw_overlays(runs: Sequence[tuple[str, list[Record]]]) -> list[Record]:
    """One chart a metric with a line for each of the named runs that logged it, by chapter."""
    everything = [row for _, metrics in runs for row in metrics]
    drawn = []
    for title, panels in chapters(everything, {}):
        lines = [(panel, line) for panel in panels for line in panel.lines[: panel.compared]]
        charts = [chart for panel, line in lines if (chart := _overlay(panel, line, runs))]
        if charts:
            drawn.append({"title": title, "charts": charts})
    return drawn


def _overlay(panel: Panel, line: Line, runs: Sequence[tuple[str, list[Record]]]) -> Record | None:
    curves = _curves(
        [(Line(line.key, name, line.smooth), series(metrics, line.key)) for name, metrics in runs]
    )
    if all(_is_flat(curve.points) for curve in curves):
        return None
    lone = panel.compared == 1 or line.strong
    hint = panel.hint if line is panel.lines[0] else ""
    title = panel.title if lone else f"{panel.title}: {line.label}"
    return _chart(Panel(title, (), hint, panel.percent), curves)


def _curves(lines: Sequence[tuple[Line, Points]]) -> list[Curve]:
    """Lines that have points; what is not there leaves its colour unused."""
    styled = zip(lines, styles(), strict=False)
    return [Curve(line, points, *style) for (line, points), style in styled if points]


def _is_flat(points: Points) -> bool:
    return all(abs(value) < ALMOST_ZERO for _, value in points)


def _chart(panel: Panel, curves: Sequence[Curve]) -> Record:
    """What the template needs of one chart: words, drawing, and the numbers to read out."""
    steps = [step for curve in curves for step, _ in curve.points]
    span = (min(steps) - 0.5, max(steps) + 0.5)
    svg, box = _draw(panel, curves, span)
    return {
        "title": panel.title,
        "hint": panel.hint,
        "legend": [(curve.line.label, curve.colour, curve.dash != "-") for curve in curves],
        "svg": svg,
        "data": {"box": box, "span": span, "lines": [_numbers(panel, curve) for curve in curves]},
    }


def _numbers(panel: Panel, curve: Curve) -> Record:
    points = [(step, float(f"{value:.4g}")) for step, value in _thinned(curve.points)]
    return {
        "label": curve.line.label,
        "colour": curve.colour,
        "percent": panel.percent or curve.line is panel.right,
        "points": points,
    }


def styles() -> Iterator[tuple[str, str]]:
    """Colour and dash of the first, second, … line."""
    while True:
        for dash in DASHES:
            for colour in COLOURS:
                yield colour, dash


def _thinned(points: Sequence[tuple[int, float]]) -> Points:
    """At most `MAX_POINTS` of the points, evenly spread, the last among them."""
    return list(points[:: -max(1, math.ceil(len(points) / MAX_POINTS))])[::-1]


def _draw(
    panel: Panel, curves: Sequence[Curve], span: tuple[float, float]
) -> tuple[Markup, list[float]]:
    """Inline SVG, its text real text in the page's colour, and where in it the plot lies.

    The place is left, top, width, height as shares of the drawing.
    """
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
        figure = Figure(figsize=(4.6, 2.4), layout="constrained")
        axes = figure.subplots()
        _tidy(axes)
        axes.set_xlim(*span)
        for curve in curves:
            if curve.line is panel.right:
                _draw_validation(axes, curve.points)
            else:
                _draw_line(axes, curve.points, curve.line, curve.colour, curve.dash)
        if panel.percent:
            _fit_shares(axes, max(value for curve in curves for _, value in curve.points))
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
        place = axes.get_position()
    box = [place.x0, 1 - place.y1, place.width, place.height]
    return _inline_svg(picture.getvalue()), [round(share, 4) for share in box]


def _inline_svg(document: str) -> Markup:
    """Strip what a stand-alone SVG file needs and an SVG in HTML does not."""
    body = document[document.index("<svg ") :]
    before, _, rest = body.partition("<metadata>")
    body = before + rest.partition("</metadata>")[2] if rest else body
    for name in ("xmlns:xlink", "xmlns"):
        head, _, tail = body.partition(f' {name}="')
        body = head + tail.partition('"')[2] if tail else body
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # every drawing has the same ones
    # A hundredth of a point is less than anyone can see, and half the size.
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    # matplotlib has escaped the labels, and nothing else in the drawing comes from a file.
    return Markup(body.replace(INK, "currentColor"))


# --- drawing ---------------------------------------------------------------------------------


def _draw_line(axes: Axes, points: Points, line: Line, colour: str, dash: str = "-") -> None:
    """Draw nothing without points; dots for what was not averaged or matters most."""
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not line.smooth:
        marker = "o" if len(points) <= 30 else ""
        axes.plot(steps, values, dash, color=colour, label=line.label, marker=marker, markersize=4)
        return
    if line.strong or len(points) == 1:
        dots = _thinned(points)
        axes.plot(*zip(*dots, strict=True), ".", color=colour, alpha=0.5, markersize=5)
    average = _thinned(
        list(zip(steps, moving_average(values, window_of(len(values))), strict=True))
    )
    width = 2.4 if line.strong else 1.6
    axes.plot(*zip(*average, strict=True), dash, color=colour, label=line.label, linewidth=width)


def _draw_validation(axes: Axes, points: Points, label: str = "") -> None:
    right = _right_axis(axes, VALIDATION_COLOUR)
    if label:
        right.set_ylabel("validation accuracy", color=VALIDATION_COLOUR)
    right.set_ylim(-0.03, 1.03)
    _as_percent(right)
    _draw_line(right, points, Line(VALIDATION.key, label, smooth=False), VALIDATION_COLOUR)


def _right_axis(axes: Axes, colour: str) -> Axes:
    right = axes.twinx()
    right.tick_params(axis="y", colors=colour)
    for side in ("top", "left"):
        right.spines[side].set_visible(False)
    return right


def _fit_shares(axes: Axes, highest: float) -> None:
    """Show 0 to 100 %, or less where all shares are small."""
    top = 1.0 if highest > 0.25 else 1.15 * highest
    axes.set_ylim(-0.03 * top, 1.03 * top)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _as_percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
