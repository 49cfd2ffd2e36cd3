"""Draw `reward_curve.png` with matplotlib, for READMEs and model cards."""

import io
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sologrpo.files import write_atomically
from sologrpo.report.charts import COLOURS, MAX_MARKED_POINTS, VALIDATION_COLOUR
from sologrpo.report.metrics import (
    LENGTH,
    NO_SIGNAL,
    REWARD,
    REWARDS,
    UNSMOOTHED,
    VALIDATION,
    lines_of,
    series,
    smoothed,
    smoothing_window,
)
from sologrpo.report.values import Record


def draw_reward_curve(metrics: list[Record], path: Path, title: str) -> None:
    """Draw the reward and validation over steps and, below, signal and length, as a PNG.

    The picture has 1,800 x 1,400 pixels, to be shown at half that width.

    Args:
        metrics: rows of `metrics.jsonl`.
        path: where the picture goes.
        title: printed as it is, without TeX.
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
    lines = lines_of(REWARDS, metrics, {})
    window = smoothing_window(len(series(metrics, REWARD)))
    if window > 1:
        lines[REWARD] = f"reward (mean of {window} logged steps)"
    for (key, label), colour in zip(lines.items(), cycle(COLOURS), strict=False):
        _draw_line(axes, metrics, key, label, colour)
    if series(metrics, VALIDATION):
        right = _right_axis(axes, "validation accuracy", VALIDATION_COLOUR)
        _as_share(right)
        _draw_line(right, metrics, VALIDATION, "validation accuracy (right)", VALIDATION_COLOUR)
    if not axes.lines:
        axes.text(0.5, 0.5, "no steps logged yet", ha="center", transform=axes.transAxes)


def _draw_health(axes: Axes, metrics: list[Record]) -> None:
    _tidy(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("fraction of groups")
    _as_share(axes)
    _draw_line(axes, metrics, NO_SIGNAL, "groups with equal rewards (no signal)", COLOURS[4])
    if series(metrics, LENGTH):
        right = _right_axis(axes, "completion length (tokens)", COLOURS[5])
        _draw_line(right, metrics, LENGTH, "completion length (right)", COLOURS[5])
        right.set_ylim(bottom=0)


def _draw_line(axes: Axes, metrics: list[Record], key: str, label: str, colour: str) -> None:
    """Draw the moving average of a metric, with dots for single steps of the reward."""
    points = series(metrics, key)
    if not points:
        return
    if key == REWARD or len(points) == 1:
        axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.5, markersize=5)
    marker = "o" if key.startswith(UNSMOOTHED) and len(points) <= MAX_MARKED_POINTS else ""
    curve = zip(*smoothed(key, points), strict=True)
    width = 2.4 if key == REWARD else 1.6
    axes.plot(*curve, color=colour, label=label, linewidth=width, marker=marker, markersize=4)


def _right_axis(axes: Axes, label: str, colour: str) -> Axes:
    right = axes.twinx()
    right.set_ylabel(label, color=colour)
    right.tick_params(axis="y", colors=colour)
    right.spines[["top", "left"]].set_visible(False)
    return right


def _as_share(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
