"""Choose the charts that a report draws of the metrics, and smooth their lines."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import yaml

from sologrpo.base.logs import Metrics, Points

REWARD, VALIDATION, VALIDATED = "reward", "eval_accuracy", "eval_n"
UNSMOOTHED = ("eval_", "memory/", "learning_rate")  # drawn as they are, not as moving averages
ALMOST_ZERO = 1e-12


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
    """List the lines of a chart, names in the legend by metric; `labels` rename rewards."""
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
    """Return the means of each point and those before it; of a few metrics, the points."""
    if key.startswith(UNSMOOTHED):
        return points
    values, window = [value for _, value in points], smoothing_window(len(points))
    return [
        (step, fmean(values[max(0, end - window) : end]))
        for end, (step, _) in enumerate(points, start=1)
    ]


def is_zero(points: Points) -> bool:
    """Return whether a metric is zero at every step."""
    return all(abs(value) < ALMOST_ZERO for _, value in points)
