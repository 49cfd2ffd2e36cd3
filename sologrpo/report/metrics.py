"""Turn `metrics.jsonl` into series, and choose the charts that a report draws of them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import yaml

from sologrpo.report.values import Record, finite

Points = list[tuple[int, float]]

REWARD, VALIDATION = "reward", "eval_accuracy"
REWARD_FAMILY, TIME_FAMILY = "rewards/", "time/"  # scores by reward, seconds by component
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
    compared: int | None = 1
    right: str | None = None


def load_chapters() -> dict[str, list[Panel]]:
    """Load the charts by the question that they answer."""
    path = Path(__file__).parent / "templates" / "charts.yaml"
    chapters = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {title: [Panel(**panel) for panel in panels] for title, panels in chapters.items()}


def lines_of(panel: Panel, metrics: list[Record], labels: dict[str, str]) -> dict[str, str]:
    """List the lines of a chart: names in the legend by metric.

    Args:
        panel: the chart.
        metrics: rows of `metrics.jsonl`, which name the metrics of a family.
        labels: what to call a reward instead of its name.
    """
    family = _family(panel.family, metrics, labels) if panel.family else {}
    # A single component is the same number again.
    return panel.lines | (family if len(family) > 1 or not panel.lines else {})


def _family(prefix: str, metrics: list[Record], labels: dict[str, str]) -> dict[str, str]:
    """List the logged metrics that start with a prefix, with their names in the legend.

    Times that are zero at every step are left out.
    """
    names = {}
    for key in sorted({key for row in metrics for key in row if key.startswith(prefix)}):
        points, reward = series(metrics, key), reward_of(key)
        if reward and points:
            names[key] = labels.get(reward, reward)
        elif prefix == TIME_FAMILY and is_zero(points):
            continue
        elif prefix != REWARD_FAMILY and points:
            names[key] = key.removeprefix(prefix).replace("_", " ")
    return names


def reward_labels(config: Record) -> dict[str, str]:
    """Name each reward that has a weight: `strict_format (weight 0.2)`.

    Args:
        config: content of `config.yaml`; without `rewards` and `reward_weights` of one length, no
            reward is named.
    """
    names, weights = config.get("rewards"), config.get("reward_weights")
    if not isinstance(names, list) or not isinstance(weights, list) or len(names) != len(weights):
        return {}
    labels = {}
    for entry, weight in zip(names, weights, strict=True):
        name = str(next(iter(entry), "") if isinstance(entry, dict) else entry).rsplit(":", 1)[-1]
        labels[name] = f"{name} (weight {weight})"
    return labels


def reward_of(key: str) -> str | None:
    """Return the reward whose mean a metric is: `format` of `rewards/format/mean`."""
    found = re.fullmatch(f"{REWARD_FAMILY}(.+)/mean", key, re.DOTALL)
    return found[1] if found else None


# --- numbers ---------------------------------------------------------------------------------


def series(metrics: list[Record], key: str) -> Points:
    """Collect the finite values of one metric by step.

    A step that was trained again after a resume counts once.

    Args:
        metrics: rows of `metrics.jsonl`, in any order.
        key: name of the metric.

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
    """Average each value with those before it.

    Args:
        values: of consecutive logged steps.
        window: number of values to average; fewer are at the start.
    """
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def smoothing_window(count: int) -> int:
    """Choose the width of the moving average: 1 of 3 logged steps, 7 of 50, 31 of 1,000."""
    return max(1, math.isqrt(count))


def smoothed(key: str, points: Points) -> Points:
    """Return the points that are drawn of a metric: moving averages, but for a few metrics.

    Args:
        key: name of the metric, which decides whether it is averaged.
        points: all its points, sorted by step.
    """
    if key.startswith(UNSMOOTHED):
        return points
    averages = moving_average([value for _, value in points], smoothing_window(len(points)))
    return [(step, value) for (step, _), value in zip(points, averages, strict=True)]


def is_zero(points: Points) -> bool:
    """Return whether a metric is zero at every step."""
    return all(abs(value) < ALMOST_ZERO for _, value in points)
