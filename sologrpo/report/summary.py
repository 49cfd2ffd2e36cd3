"""Summarize a run: the headline facts, and where the time of a step goes."""

from pathlib import Path
from statistics import fmean

from sologrpo.console import duration
from sologrpo.report.evaluation import before_and_after, score
from sologrpo.report.metrics import TIME_FAMILY, Points, series, smoothing_window
from sologrpo.report.reading import Run
from sologrpo.report.values import Record, Rows, number, percent


def facts(run: Run) -> Rows:
    """List the few numbers at the top of the page; missing ones are left out."""
    reward, accuracy = series(run.metrics, "reward"), series(run.metrics, "eval_accuracy")
    steps, seconds = _last_step(run.metrics), _mean_seconds(run.metrics)
    rows = [
        ("test accuracy", _test_accuracy(run)),
        ("reward, start → end", _start_to_end([value for _, value in reward])),
        ("validation, start → end", _percent_change(accuracy)),
        ("model", Path(str(run.config.get("model_name_or_path") or "")).name),
        ("steps", _steps_of_total(run.metrics) if steps else ""),
        ("seconds per step", number(seconds, 1) if seconds else ""),
        ("time in steps", duration(seconds * steps) if seconds and steps else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _test_accuracy(run: Run) -> str:
    """Format the accuracy before and after on the same problems, or else the last one."""
    comparisons = before_and_after(run.evaluations)["comparisons"]
    if comparisons:
        return f"{percent(comparisons[0]['before'])} → {percent(comparisons[0]['accuracy'])}"
    return percent(score(run.evaluations[-1])["accuracy"]) if run.evaluations else ""


def _start_to_end(values: list[float]) -> str:
    """Format the means of the first and last values, as many as the moving average takes."""
    window = smoothing_window(len(values))
    if not values:
        return ""
    return f"{number(fmean(values[:window]), 2)} → {number(fmean(values[-window:]), 2)}"


def _percent_change(points: Points) -> str:
    return f"{percent(points[0][1])} → {percent(points[-1][1])}" if points else ""


def _last_step(metrics: list[Record]) -> int:
    return max((step for step, _ in series(metrics, "step")), default=0)


def _steps_of_total(metrics: list[Record]) -> str:
    """Format the number of steps, with the planned number where the run is not at its end."""
    steps, progress = _last_step(metrics), series(metrics, "progress")
    if not progress or not 0 < progress[-1][1] < 1:
        return f"{steps:,}"
    return f"{steps:,} of {progress[-1][0] / progress[-1][1]:,.0f}"


def _mean_seconds(metrics: list[Record]) -> float | None:
    """Return the mean time of a step: the sum of its components where they were measured.

    TRL's `step_time`, used otherwise, leaves out the update.
    """
    split = time_split(metrics)
    if split:
        return float(sum(part["seconds"] for part in split))
    values = [value for _, value in series(metrics, "step_time")]
    return fmean(values) if values else None


def time_split(metrics: list[Record]) -> list[Record]:
    """List the components of a step, longest first, with their mean seconds and fraction.

    Args:
        metrics: rows of `metrics.jsonl`, with the components under `time/`.
    """
    keys = {key for row in metrics for key in row if key.startswith(TIME_FAMILY)}
    means = {
        key.removeprefix(TIME_FAMILY).replace("_", " "): fmean(value for _, value in found)
        for key in keys
        if (found := series(metrics, key))
    }
    total = sum(means.values())
    ordered = sorted(means.items(), key=lambda part: (-part[1], part[0]))
    return [
        {"name": name, "seconds": seconds, "share": seconds / total if total else 0.0}
        for name, seconds in ordered
    ]
