"""Choose the charts that a report draws of the metrics, and smooth their lines."""

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean

import yaml

Points = list[tuple[int, float]]  # step and value, sorted by step
Metrics = dict[str, Points]  # by name; `step` is among them

REWARD, VALIDATION, VALIDATED = "reward", "eval_accuracy", "eval_n"
UNSMOOTHED = ("eval_", "memory/", "learning_rate")  # drawn as they are, not as moving averages
ALMOST_ZERO = 1e-12
Z95 = NormalDist().inv_cdf(0.975)
NOISE_STEPS, MIN_NOISE_STEPS = 10, 4  # logged steps that the spread is measured over, at least


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart over training steps. `templates/charts.yaml` explains the fields."""

    title: str
    lines: dict[str, str] = field(default_factory=dict)
    family: str | None = None
    hint: str = ""
    percent: bool = False
    right: str | None = None


def load_chapters() -> dict[str, list[Panel]]:
    """Load the charts by the question that they answer."""
    path = Path(__file__).parent / "templates" / "charts.yaml"
    chapters = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {title: [Panel(**panel) for panel in panels] for title, panels in chapters.items()}


def lines_of(panel: Panel, metrics: Metrics, labels: dict[str, str]) -> dict[str, str]:
    """List the lines of a chart: names in the legend by metric.

    Args:
        panel: the chart.
        metrics: of the run; they name the members of a family.
        labels: what to call a reward instead of its name.
    """
    family = {
        key: labels.get(found[1], found[1])
        for key in sorted(metrics)
        if panel.family and (found := re.fullmatch(panel.family, key, re.DOTALL))
    }
    # A single component is the same number again.
    return panel.lines | (family if len(family) > 1 or not panel.lines else {})


def smoothing_window(count: int) -> int:
    """Choose the width of the moving average: 1 of 3 logged steps, 7 of 50, 31 of 1,000."""
    return max(1, math.isqrt(count))


def smoothed(key: str, points: Points) -> Points:
    """Return the points that are drawn of a metric: the mean of each and those before it.

    Args:
        key: name of the metric; a few are not averaged.
        points: all its points.
    """
    if key.startswith(UNSMOOTHED):
        return points
    values, window = [value for _, value in points], smoothing_window(len(points))
    return [
        (step, fmean(values[max(0, end - window) : end]))
        for end, (step, _) in enumerate(points, start=1)
    ]


def intervals(points: Points) -> list[tuple[int, float, float]]:
    """Compute 95 % intervals of a moving average: step, low and high, once it can be done.

    The noise of a step comes from the differences of successive steps (von Neumann's estimate),
    because the spread of the values themselves would count a rising reward as noise.
    """
    values, window = [value for _, value in points], smoothing_window(len(points))
    found = []
    for end in range(MIN_NOISE_STEPS, len(values) + 1):
        recent = values[max(0, end - max(window, NOISE_STEPS)) : end]
        noise = fmean((b - a) ** 2 for a, b in pairwise(recent)) / 2
        averaged = values[max(0, end - window) : end]
        half = Z95 * math.sqrt(noise / len(averaged))
        mean = fmean(averaged)
        found.append((points[end - 1][0], mean - half, mean + half))
    return found


def is_zero(points: Points) -> bool:
    """Return whether a metric is zero at every step."""
    return all(abs(value) < ALMOST_ZERO for _, value in points)
