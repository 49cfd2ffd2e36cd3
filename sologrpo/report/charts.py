"""Draw the interactive charts of the page with Plotly.

Only the figures are made here, as JSON; Plotly's JavaScript draws them in the reader's browser.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import plotly.graph_objects as go

from sologrpo.base.files import BASELINE
from sologrpo.base.logs import Metrics, Points
from sologrpo.report.metrics import (
    REWARD,
    UNSMOOTHED,
    VALIDATED,
    VALIDATION,
    Panel,
    is_zero,
    lines_of,
    load_chapters,
    smoothed,
)
from sologrpo.report.values import Record, label, spread
from sologrpo.scoring.records import Evaluated
from sologrpo.scoring.statistics import wilson_interval

# Distinct in print, in the dark and for most colour-blind readers.
COLOURS = ("#2f6fde", "#e07b00", "#0f9d70", "#c9408f", "#8458d6", "#8a7a00")
VALIDATION_COLOUR, NEUTRAL_COLOUR = "#d33a2c", "#7d8899"
STYLES = [(colour, dash) for dash in ("solid", "dash", "dot") for colour in COLOURS]
MAX_POINTS = 400  # of one line: more than a chart has pixels
MAX_MARKED_POINTS = 30  # a line with more of them gets no markers
HEIGHT, ROW_HEIGHT = 250, 24  # pixels, of a chart and of a row of text in it

Curve = tuple[str, str, Points]  # metric, name in the legend, values by step


def draw_chapters(
    metrics: Metrics, labels: dict[str, str]
) -> tuple[dict[str, list[Record]], list[str]]:
    """Draw the charts by chapter; name those left out because they are zero at every step."""
    drawn: dict[str, list[Record]] = {}
    zero = []
    for chapter, panels in load_chapters().items():
        for panel in panels:
            lines = lines_of(panel, metrics, labels)
            curves = [(key, name, metrics.get(key, [])) for key, name in lines.items()]
            if not any(points for _, _, points in curves):
                continue
            if all(is_zero(points) for _, _, points in curves):
                zero.append(panel.title)
                continue
            right = metrics.get(panel.right, []) if panel.right else []
            validated = dict(metrics.get(VALIDATED, []))
            chart = _line_chart(panel, curves, right, validated)
            drawn.setdefault(chapter, []).append(chart)
    return drawn, zero


def draw_accuracies(evaluated: Mapping[str, Evaluated]) -> Record:
    """Draw accuracies as dots with their intervals on a scale of 0 to 100 %."""
    values = [e.results["accuracy"] for e in evaluated.values()]
    ends = [e.results["accuracy_ci95"] for e in evaluated.values()]
    above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
    below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
    colours = [NEUTRAL_COLOUR if e.startswith(BASELINE) else COLOURS[0] for e in evaluated]
    trace = go.Scatter(
        x=values,
        y=[*range(len(evaluated))],
        error_x={"array": above, "arrayminus": below, "color": NEUTRAL_COLOUR},
        mode="markers",
        marker={"size": 12, "color": colours},
        hovertemplate="%{x:.1%}<extra></extra>",
    )
    layout = {
        "height": 60 + 2 * ROW_HEIGHT * len(evaluated),
        "margin": {"l": 24, "r": 24},
        "xaxis": {"range": [0, 1], "dtick": 0.25, "tickformat": ".0%"},
        "yaxis": {
            "range": [len(evaluated) - 0.5, -0.7],
            "tickvals": [*range(len(evaluated))],
            "ticktext": [*map(label, evaluated)],
            "ticklabelposition": "inside top",
            "ticklabelshift": 6,
        },
    }
    return _chart("Accuracy on the test problems", "", [trace], layout)


def _line_chart(
    panel: Panel,
    curves: Sequence[Curve],
    right: Points,
    validated: Mapping[int, float],
) -> Record:
    """Draw curves over training steps; `validated` has the number of problems by step."""
    styled = list(zip(curves, cycle(STYLES), strict=False))
    traces = [t for curve, style in styled for t in _traces(*curve, *style, panel.percent)]
    if panel.right and right:
        name = "validation accuracy"
        traces += _traces(panel.right, name, right, VALIDATION_COLOUR, "solid", percent=True)
        traces[-1].yaxis = "y2"
        traces[-1].error_y = _error_bars(right, validated)
    elif curves[0][0] == VALIDATION:
        traces[0].error_y = _error_bars(curves[0][2], validated)
    steps = [step for trace in traces for step in trace.x]
    rows = len({trace.name for trace in traces}) // 2
    layout: Record = {
        "height": HEIGHT + ROW_HEIGHT * rows,
        "hovermode": "x unified",
        "showlegend": rows > 0,
        "xaxis": {
            "unifiedhovertitle": {"text": "step %{x}"},
            "dtick": 1 if max(steps) - min(steps) < 8 else None,
        },
        "yaxis2": {
            "overlaying": "y",
            "side": "right",
            "range": [-0.03, 1.03],
            "tickmode": "auto",
            "tickformat": ".0%",
            "tickfont": {"color": VALIDATION_COLOUR},
            "showgrid": False,
        },
    }
    if panel.percent:
        highest = max(value for _, _, points in curves for _, value in points)
        top = 1.0 if highest > 0.25 else 1.15 * highest
        layout["yaxis"] = {"tickformat": ".3~%", "range": [-0.03 * top, 1.03 * top]}
    return _chart(panel.title, panel.hint, traces, layout)


def _traces(
    key: str, name: str, points: Points, colour: str, dash: str, percent: bool
) -> list[go.Scatter]:
    """Draw the line, whose hover text is the single step, and for the reward the steps as dots."""
    if not points:
        return []
    logged = spread(points, MAX_POINTS)
    marked = len(points) == 1 or (key.startswith(UNSMOOTHED) and len(points) <= MAX_MARKED_POINTS)
    name = label(name)
    curve = go.Scatter(
        **_xy(spread(smoothed(key, points), MAX_POINTS)),
        name=name,
        mode="lines+markers" if marked else "lines",
        line={"color": colour, "dash": dash, "width": 3 if key == REWARD else 2},
        customdata=_xy(logged)["y"],
        hovertemplate="%{customdata:.3~%}" if percent else "%{customdata:.4~g}",
    )
    if key != REWARD:
        return [curve]
    marker = {"color": colour, "size": 4, "opacity": 0.5}
    quiet = {"name": name, "hoverinfo": "skip", "showlegend": False}
    return [go.Scatter(**_xy(logged), mode="markers", marker=marker, **quiet), curve]


def _error_bars(points: Points, validated: Mapping[int, float]) -> Record:
    """Return the intervals of validated shares as error bars of the line that draws them."""
    shown = spread(points, MAX_POINTS)
    ends = [
        wilson_interval(value * n, n) if (n := validated.get(step)) else (value, value)
        for step, value in shown
    ]
    return {
        "array": [high - value for (_, value), (_, high) in zip(shown, ends, strict=True)],
        "arrayminus": [value - low for (_, value), (low, _) in zip(shown, ends, strict=True)],
        "thickness": 1,
        "width": 3,
    }


def _xy(points: Points) -> dict[str, list[Any]]:
    return {"x": [step for step, _ in points], "y": [float(f"{value:.4g}") for _, value in points]}


def _chart(title: str, hint: str, traces: Iterable[go.Scatter], layout: Record) -> Record:
    figure = go.Figure([*traces], {"margin": {"l": 8, "r": 8}, **layout})
    figure.update_layout(
        template="none",
        margin={"t": 8, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"namelength": -1},
    )
    still = {"automargin": True, "fixedrange": True, "zeroline": False, "exponentformat": "e"}
    figure.update_xaxes(still)
    figure.update_yaxes(still)
    return {"title": title, "hint": hint, "figure": figure.to_plotly_json()}
