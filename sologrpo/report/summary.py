"""Summarize a run: the headline facts, and where the time of a step goes."""

from pathlib import Path
from statistics import fmean

from sologrpo.base.console import duration
from sologrpo.base.files import BASELINE
from sologrpo.base.logs import Metrics, Points
from sologrpo.report.metrics import REWARD, VALIDATION, smoothing_window
from sologrpo.report.reading import Run
from sologrpo.report.values import Rows, number
from sologrpo.scoring.comparison import Pair
from sologrpo.scoring.table import share

TIMES = "time/"  # seconds by component


def facts(run: Run, pair: Pair | None) -> Rows:
    """List the few numbers at the top of the page; missing ones are left out."""
    steps = run.metrics.get("step", [(0, 0.0)])[-1][0]
    seconds = seconds_per_step(run.metrics)
    rows = [
        ("test accuracy", _test_accuracy(run, pair)),
        ("reward, start → end", _start_to_end(run.metrics.get(REWARD, []))),
        ("validation, start → end", _percent_change(run.metrics.get(VALIDATION, []))),
        ("model", Path(run.settings.model_name_or_path).name),
        ("steps", steps_of_total(run.metrics)),
        ("seconds per step", number(seconds, 1) if seconds else ""),
        ("time in steps", duration(seconds * steps) if seconds else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _test_accuracy(run: Run, pair: Pair | None) -> str:
    """Format the accuracy before and after on the same problems, or else that of one model."""
    if pair is not None and pair.numbers is not None:
        return f"{share(pair.numbers['baseline_accuracy'])} → {share(pair.numbers['accuracy'])}"
    later = [label for label in run.evaluations if not label.startswith(BASELINE)]
    for label in later or run.evaluations:
        return f"{share(run.evaluations[label].results['accuracy'])} ({label})"
    return ""


def _start_to_end(points: Points) -> str:
    """Format the means of the first and last values, as many as the moving average takes."""
    values = [value for _, value in points]
    window = smoothing_window(len(values))
    if not values:
        return ""
    return f"{number(fmean(values[:window]), 2)} → {number(fmean(values[-window:]), 2)}"


def _percent_change(points: Points) -> str:
    return f"{share(points[0][1])} → {share(points[-1][1])}" if points else ""


def steps_of_total(metrics: Metrics) -> str:
    """Format the number of logged steps, with the planned number; empty without any."""
    steps = metrics.get("step", [(0, 0.0)])[-1][0]
    step, progress = metrics.get("progress", [(0, 0.0)])[-1]
    if not steps:
        return ""
    return f"{steps:,} of {step / progress:,.0f}" if progress > 0 else f"{steps:,}"


def seconds_per_step(metrics: Metrics) -> float:
    """Add up the mean seconds of the components of a step."""
    return sum(mean for _, mean in time_split(metrics))


def time_split(metrics: Metrics) -> list[tuple[str, float]]:
    """List the components of a step with their mean seconds, longest first."""
    means = [
        (key.removeprefix(TIMES), fmean(value for _, value in points))
        for key, points in metrics.items()
        if key.startswith(TIMES)
    ]
    return sorted(means, key=lambda part: (-part[1], part[0]))
