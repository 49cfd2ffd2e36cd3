"""Turn `metrics.jsonl` into series, and list the charts that a report draws of them.

Metric names are TRL's and ours: docs/metrics.md explains each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sologrpo.report.values import Record, finite

Points = list[tuple[int, float]]

REWARD, VALIDATION = "reward", "eval_accuracy"
NO_SIGNAL, LENGTH = "frac_reward_zero_std", "completions/mean_length"
TIME_PREFIX = "time/"  # seconds of a step by component
UNSMOOTHED = ("eval_", "memory/", "learning_rate")  # drawn as they are, not as moving averages
ALMOST_ZERO = 1e-12


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart over training steps.

    Attributes:
        lines: names in the legend by metric.
        family: prefix of further metrics, one line each.
        hint: what to look for, in one sentence.
        percent: the values are fractions.
        compared: number of lines, from the first, that are charted when runs are compared.
        right: a metric with a separate scale, 0 to 100 %, on the right.
    """

    title: str
    lines: dict[str, str] = field(default_factory=dict)
    family: str | None = None
    hint: str = ""
    percent: bool = False
    compared: int | None = 1
    right: str | None = None


REWARDS = Panel(
    title="Reward",
    lines={REWARD: "reward"},
    family="rewards/",
    hint="Mean over the completions of a step.",
    compared=None,  # all
    right=VALIDATION,
)
SECONDS = Panel(title="Seconds a step", lines={"step_time": "step"}, family=TIME_PREFIX)
CHAPTERS = {
    "Does it learn?": [
        REWARDS,
        Panel(
            title="Validation, greedy",
            lines={
                VALIDATION: "accuracy",
                "eval_accuracy_lenient": "read leniently",
                "eval_format_rate": "format as asked",
            },
            hint="Held-out problems. If reward rises and this does not, the reward is being gamed.",
            percent=True,
            compared=3,
        ),
    ],
    "Is there a signal?": [
        Panel(
            title="Groups without signal",
            lines={
                NO_SIGNAL: "all rewards equal",
                "degenerate/all_right": "all right",
                "degenerate/all_wrong": "all wrong",
            },
            hint="A group whose completions all earn the same teaches nothing.",
            percent=True,
        ),
        Panel(
            title="Part of the advantage by reward",
            family="advantage_share/",
            hint="The reward for the answer should lead once the format is learned.",
            percent=True,
            compared=0,
        ),
        Panel(title="Spread of rewards", lines={"reward_std": "standard deviation"}),
    ],
    "What does it write?": [
        Panel(
            title="Completion length (tokens)",
            lines={
                LENGTH: "mean",
                "completions/mean_terminated_length": "mean of those that ended",
                "completions/max_length": "longest",
            },
        ),
        Panel(
            title="Truncated completions",
            lines={"completions/clipped_ratio": "truncated"},
            hint="A cut-off answer is wrong: if this stays high, raise max_completion_length.",
            percent=True,
        ),
        Panel(
            title="Signs of reward hacking",
            family="hacking/",
            hint="Fractions of the completions, not scored. Read a few where one climbs.",
            percent=True,
            compared=0,
        ),
    ],
    "Is the policy sound?": [
        Panel(
            title="Entropy (nats a token)",
            lines={"entropy": "entropy"},
            hint="Near 0 all completions of a group are alike.",
        ),
        Panel(title="KL from the reference model (nats a token)", lines={"kl": "KL"}),
        Panel(
            title="Clipped tokens",
            lines={
                "clip_ratio/region_mean": "clipped",
                "clip_ratio/low_mean": "ratio too low",
                "clip_ratio/high_mean": "ratio too high",
            },
            hint="Tokens without gradient, because their probability had moved too far.",
            percent=True,
        ),
        Panel(title="Gradient norm", lines={"grad_norm": "gradient norm"}),
        Panel(
            title="Loss",
            lines={"loss": "loss"},
            hint="Near 0 by design: it does not measure progress.",
            compared=0,
        ),
        Panel(title="Learning rate", lines={"learning_rate": "learning rate"}),
    ],
    "What does it cost?": [
        SECONDS,
        Panel(
            title="Tokens a second",
            lines={
                "tokens_per_second/sampling": "sampling",
                "tokens_per_second/training": "training",
            },
            compared=2,
        ),
        Panel(
            title="Peak memory (GiB)",
            lines={"memory/peak_gib": "CUDA device", "memory/peak_rss_gib": "main memory"},
            compared=2,
        ),
    ],
}


def lines_of(panel: Panel, metrics: list[Record], labels: dict[str, str]) -> dict[str, str]:
    """List the lines of a chart: names in the legend by metric.

    A family of one is left out where the chart has other lines: it is the same number again.

    Args:
        metrics: rows of `metrics.jsonl`, which name the metrics of a family.
        labels: what to call a reward instead of its name.
    """
    if panel.family is None:
        return panel.lines
    family = {}
    for key in sorted({key for row in metrics for key in row if key.startswith(panel.family)}):
        points = series(metrics, key)
        if is_reward_part(key) and points:
            family[key] = labels.get(reward_name(key), reward_name(key))
        elif panel is not REWARDS and points and not (panel is SECONDS and is_zero(points)):
            family[key] = key.removeprefix(panel.family).replace("_", " ")
    return panel.lines | (family if len(family) > 1 or not panel.lines else {})


def reward_labels(config: Record) -> dict[str, str]:
    """Name each reward that has a weight: `strict_format (weight 0.2)`."""
    names, weights = config.get("rewards"), config.get("reward_weights")
    if not isinstance(names, list) or not isinstance(weights, list) or len(names) != len(weights):
        return {}
    labels = {}
    for entry, weight in zip(names, weights, strict=True):
        name = str(next(iter(entry), "") if isinstance(entry, dict) else entry).rsplit(":", 1)[-1]
        labels[name] = f"{name} (weight {weight})"
    return labels


def is_reward_part(key: str) -> bool:
    """Return whether a metric is the mean of one reward."""
    return key.startswith("rewards/") and key.endswith("/mean")


def reward_name(key: str) -> str:
    """Return the reward of such a metric."""
    return key.removeprefix("rewards/").removesuffix("/mean")


# --- numbers ---------------------------------------------------------------------------------


def series(metrics: list[Record], key: str) -> Points:
    """Collect the finite values of one metric by step.

    A step that was trained again after a resume counts once.

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
    """Average each value with the `window - 1` values before it (fewer at the start)."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def smoothing_window(count: int) -> int:
    """Choose the width of the moving average: 1 of 3 logged steps, 7 of 50, 31 of 1,000."""
    return max(1, math.isqrt(count))


def smoothed(key: str, points: Points) -> Points:
    """Return the points that are drawn of a metric: moving averages, but for a few metrics."""
    if key.startswith(UNSMOOTHED):
        return points
    averages = moving_average([value for _, value in points], smoothing_window(len(points)))
    return [(step, value) for (step, _), value in zip(points, averages, strict=True)]


def is_zero(points: Points) -> bool:
    """Return whether a metric is zero at every step."""
    return all(abs(value) < ALMOST_ZERO for _, value in points)
