"""Collect what the page of several runs shows."""

import os.path
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sologrpo.report.charts import draw_accuracies, draw_overlays
from sologrpo.report.evaluation import compare
from sologrpo.report.reading import Evaluation, Run
from sologrpo.report.summary import facts
from sologrpo.report.values import Record, Rows, flatten

# Settings that name the run: they always differ.
OWN_NAMES = {"output_dir", "logging_dir", "run_name"}


def comparison_page(runs: Sequence[Run]) -> Record:
    """Return the values of the template.

    Args:
        runs: at least two, with different names. The others are compared with the first.
    """
    evaluations = [
        replace(evaluation, label=f"{run.name}, {evaluation.label}")
        for run in runs
        for evaluation in run.evaluations
    ]
    return {
        "name": " · ".join(run.name for run in runs),
        "live": None,
        "notes": [f"{run.name}: {note}" for run in runs for note in run.notes],
        "names": [run.name for run in runs],
        "facts": _side_by_side([facts(run) for run in runs]),
        "evaluations": evaluations,
        "accuracies": draw_accuracies(evaluations),
        "against_first": _against_first(runs),
        "chapters": draw_overlays({run.name: run.metrics for run in runs}),
        "config": _differences([flatten(run.config) for run in runs]),
        "environment": _differences([flatten(run.environment) for run in runs]),
    }


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Name runs by their paths, without the folders that all share.

    Args:
        run_dirs: all different.
    """
    paths = [run_dir.resolve() for run_dir in run_dirs]
    shared = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(shared)) for path in paths]


def _side_by_side(columns: Sequence[Rows]) -> list[tuple[str, list[str]]]:
    """Join tables into one with a column a run; a cell is empty where a run lacks the row."""
    tables = [dict(rows) for rows in columns]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [(key, [table.get(key, "") for table in tables]) for key in keys]


def _differences(columns: Sequence[Rows]) -> Record:
    """Return the rows in which the runs differ, and the number of other rows."""
    rows = [row for row in _side_by_side(columns) if row[0] not in OWN_NAMES]
    different = [row for row in rows if len(set(row[1])) > 1]
    return {"rows": different, "alike": len(rows) - len(different)}


def _against_first(runs: Sequence[Run]) -> list[Record]:
    """Compare each trained model with the first run's, where they answered the same problems."""
    first = _trained(runs[0])
    return [
        {**found, "label": f"{run.name} against {runs[0].name}"}
        for run in runs[1:]
        if first and (after := _trained(run)) and (found := compare(first, after))
    ]


def _trained(run: Run) -> Evaluation | None:
    return next((e for e in run.evaluations if not e.baseline), None)
