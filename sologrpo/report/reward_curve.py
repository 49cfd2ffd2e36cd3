"""Draw `reward_curve.png` with matplotlib, for READMEs and model cards."""

import io
from itertools import cycle

import matplotlib as mpl
from matplotlib.figure import Figure

from sologrpo.base.logs import Metrics
from sologrpo.report.charts import COLOURS, VALIDATION_COLOUR
from sologrpo.report.metrics import VALIDATION, lines_of, load_chapters, smoothed


def draw_reward_curve(metrics: Metrics, title: str) -> bytes:
    """Draw the rewards over steps, as dots and moving averages, and the validation accuracy."""
    panel = next(panel for panels in load_chapters().values() for panel in panels)
    with mpl.rc_context({"text.parse_math": False, "font.size": 10.5}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel="step", ylabel="mean reward per step")
        axes.grid(alpha=0.25)
        for (key, label), colour in zip(lines_of(panel, metrics, {}).items(), cycle(COLOURS)):
            if points := metrics.get(key):
                axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.3)
                axes.plot(*zip(*smoothed(key, points), strict=True), color=colour, label=label)
        if validation := metrics.get(VALIDATION):
            right = axes.twinx()
            right.set(ylim=(-0.02, 1.02), ylabel="validation accuracy")
            label = "validation accuracy (right)"
            right.plot(*zip(*validation, strict=True), "o-", color=VALIDATION_COLOUR, label=label)
        if metrics:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        else:
            axes.text(0.5, 0.5, "no steps logged yet", ha="center", transform=axes.transAxes)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=200, metadata={"Software": None})
    return picture.getvalue()
