"""Several runs on one page: what the template of the comparison is given."""

from collections.abc import Callable, Sequence
from pathlib import Path

from sologrpo.report.charts import draw_overlays, styles
from sologrpo.report.evaluation import compare, score
from sologrpo.report.reading import Evaluation, Record, Run, is_baseline

Rows = list[tuple[str, str]]

# They name the run, so they differ always and say nothing.
OWN_NAMES = {"output_dir", "logging_dir", "run_name"}


def comparison_page(
    runs: Sequence[Run], facts_of: Callable[[Run], Rows], table_of: Callable[[Record], Rows]
) -> Record:
    """Runs side by side.

    Args:
        runs: at least two, with different names.
        facts_of: names and values of a run's headline.
        table_of: dotted names and printable values of a config or an environment.
    """
    return {
        "name": " · ".join(run.name for run in runs),
        "notes": [f"{run.name}: {note}" for run in runs for note in run.notes],
        "runs": [(run.name, *style) for run, style in zip(runs, styles(), strict=False)],
        "facts": _side_by_side([facts_of(run) for run in runs]),
        "scores": [
            {**score(evaluation), "label": f"{run.name}, {evaluation.label}"}
            for run in runs
            for evaluation in run.evaluations
        ],
        "against_first": _against_first(runs),
        "chapters": draw_overlays([(run.name, run.metrics) for run in runs]),
        "config": _differences([table_of(run.config) for run in runs]),
        "environment": _differences([table_of(run.environment) for run in runs]),
    }


def named_apart(run_dirs: Sequence[Path]) -> list[str]:
    """Names of the runs: the folder's, with as many of its parents as tell it from the others."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    depth = 1
    while len({path[-depth:] for path in parts}) < len({*parts}):
        depth += 1
    return ["/".join(path[-depth:]) for path in parts]


def _side_by_side(columns: Sequence[Rows]) -> list[tuple[str, list[str]]]:
    """Rows of a table with a column a run; empty where a run lacks the row."""
    tables = [dict(rows) for rows in columns]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [(key, [table.get(key, "") for table in tables]) for key in keys]


def _differences(columns: Sequence[Rows]) -> Record:
    """Rows in which the runs differ, and how many are alike."""
    rows = [row for row in _side_by_side(columns) if row[0] not in OWN_NAMES]
    different = [row for row in rows if len(set(row[1])) > 1]
    return {"rows": different, "alike": len(rows) - len(different)}


def _against_first(runs: Sequence[Run]) -> list[Record]:
    """Each run's trained model against the first run's, where they answered the same problems."""
    first = _trained(runs[0])
    return [
        {**found, "label": f"{run.name} against {runs[0].name}"}
        for run in runs[1:]
        if first and (after := _trained(run)) and (found := compare(first, after))
    ]


def _trained(run: Run) -> Evaluation | None:
    return next((e for e in run.evaluations if not is_baseline(e)), None)
