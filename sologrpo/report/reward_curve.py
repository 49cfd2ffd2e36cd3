"""Draw `reward_curve.png` with matplotlib, for READMEs and model cards."""

import io
from itertools import cycle

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sologrpo.report.charts import COLOURS, MAX_MARKED_POINTS, VALIDATION_COLOUR
from sologrpo.report.metrics import (
    REWARD,
    VALIDATION,
    Metrics,
    Points,
    lines_of,
    load_chapters,
    smoothed,
    smoothing_window,
)

NO_SIGNAL, LENGTH = "frac_reward_zero_std", "completions/mean_length"


def draw_reward_curve(metrics: Metrics, title: str) -> bytes:
    """Draw the reward and validation over steps and, below, signal and length.

    Args:
        metrics: points by metric.
        title: printed as it is, without TeX.

    Returns:
        A PNG of 1,800 x 1,400 pixels, to be shown at half that width.
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
    return picture.getvalue()


def _draw_rewards(axes: Axes, metrics: Metrics) -> None:
    _tidy(axes, "mean reward per step")
    window = smoothing_window(len(metrics.get(REWARD, [])))
    name = f"reward (mean of {window} logged steps)" if window > 1 else "reward"
    panel = next(panel for panels in load_chapters().values() for panel in panels)
    lines = lines_of(panel, metrics, {}) | {REWARD: name}
    for (key, label), colour in zip(lines.items(), cycle(COLOURS), strict=False):
        _draw_line(axes, key, metrics.get(key, []), label, colour)
    validation = metrics.get(VALIDATION, [])
    if validation:
        right = _right_axis(axes, "validation accuracy", VALIDATION_COLOUR)
        label = "validation accuracy (right)"
        _draw_line(right, VALIDATION, validation, label, VALIDATION_COLOUR)
        _as_percent(right)
    if not axes.lines:
        axes.text(0.5, 0.5, "no steps logged yet", ha="center", transform=axes.transAxes)


def _draw_health(axes: Axes, metrics: Metrics) -> None:
    _tidy(axes, "share")
    axes.set_xlabel("step")
    _as_percent(axes)
    no_signal = metrics.get(NO_SIGNAL, [])
    _draw_line(axes, NO_SIGNAL, no_signal, "groups with equal rewards (no signal)", COLOURS[4])
    length = metrics.get(LENGTH, [])
    if length:
        right = _right_axis(axes, "completion length (tokens)", COLOURS[5])
        _draw_line(right, LENGTH, length, "completion length (right)", COLOURS[5])
        right.set_ylim(bottom=0)


def _draw_line(axes: Axes, key: str, points: Points, label: str, colour: str) -> None:
    """Draw the moving average of a metric, with dots for the single steps of the reward."""
    if not points:
        return
    if key == REWARD or len(points) == 1:
        axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.5, markersize=5)
    curve = zip(*smoothed(key, points), strict=True)
    marker = "o" if key == VALIDATION and len(points) <= MAX_MARKED_POINTS else ""
    width = 2.4 if key == REWARD else 1.6
    axes.plot(*curve, color=colour, label=label, linewidth=width, marker=marker, markersize=4)


def _right_axis(axes: Axes, label: str, colour: str) -> Axes:
    right = axes.twinx()
    right.set_ylabel(label, color=colour)
    right.tick_params(axis="y", colors=colour)
    right.spines[["top", "left"]].set_visible(False)
    return right


def _as_percent(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _tidy(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
