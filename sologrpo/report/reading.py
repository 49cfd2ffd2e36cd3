"""Read a run directory into plain data. Missing and damaged files become notes, never errors."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from sologrpo.errors import InputError
from sologrpo.files import (
    COMPLETIONS,
    ENVIRONMENT,
    EVALUATIONS,
    METRICS,
    PRECISION_TABLE,
    RECORDS,
    RESULTS,
    RUN_CONFIG,
)
from sologrpo.report.completions import Completions, Settings, read_completions
from sologrpo.report.metrics import Metrics
from sologrpo.report.values import Record, read_or_note
from sologrpo.schema import Schema, looked_in, parse, parse_json, read_json, read_text, read_yaml
from sologrpo.scoring import records
from sologrpo.scoring.records import Share, read_records, read_results
from sologrpo.scoring.statistics import Comparison, Interval


class Precision(Comparison):
    """The adapter in one numeric form, against the trained one."""

    accuracy_ci95: Interval
    differing_rate: Share


class Precisions(Schema):
    """The content of `precisions.json`; `trained` is one of the forms."""

    trained: str
    precisions: dict[str, Precision]


@dataclass(frozen=True)
class Evaluation:
    """One folder of `eval/`: the content of `results.json`, and the records."""

    label: str
    baseline: bool
    results: Record
    records: list[records.Record]


@dataclass(frozen=True)
class Run:
    """The content of a run directory; `notes` tell which files could not be read."""

    name: str
    config: Record
    settings: Settings
    environment: Record
    metrics: Metrics
    completions: Completions
    evaluations: list[Evaluation]
    precisions: Precisions | None
    notes: list[str]


def read_run(run_dir: Path) -> Run:
    """Read a run directory, in which any file may be missing or unfinished.

    Args:
        run_dir: as `train.py` writes it.

    Raises:
        InputError: if there is no such directory.
    """
    if not run_dir.is_dir():
        where = f"{run_dir}{looked_in(run_dir)}"
        raise InputError(f"{where} is not a run directory: name one that train.py made")
    notes: list[str] = []
    read = partial(read_or_note, notes=notes)
    no_config: tuple[Record, Settings] = ({}, Settings())
    config, settings = read(_read_config, run_dir / RUN_CONFIG, no_config)
    folder = run_dir / EVALUATIONS
    evaluations = [
        read(_read_evaluation, path, None) for path in sorted(folder.glob(f"*/{RESULTS}"))
    ]
    return Run(
        name=run_dir.resolve().name,
        config=config,
        settings=settings,
        environment=read(partial(read_json, schema=dict[str, Any]), run_dir / ENVIRONMENT, {}),
        metrics=read(_read_metrics, run_dir / METRICS, {}),
        completions=read_completions(run_dir / COMPLETIONS, settings, notes),
        evaluations=sorted(filter(None, evaluations), key=_order),
        precisions=read(partial(read_json, schema=Precisions), folder / PRECISION_TABLE, None),
        notes=notes,
    )


def _read_config(path: Path) -> tuple[Record, Settings]:
    config = read_yaml(path, dict[str, Any])
    return config, parse(Settings, config, path)


class _Row(Schema):
    """A row of `metrics.jsonl`: the step, and values by metric."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None] = Field(init=False)

    step: int


def _read_metrics(path: Path) -> Metrics:
    """Read the points of each metric. A step that was trained again after a resume counts once."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    # The trainer may be writing the last line, which has no line break yet.
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        where = f"{path}, line {number}"
        row = parse(_Row, parse_json(line, where), where)
        for name, value in row:
            if value is not None:
                points[name][row.step] = value
    return {name: sorted(found.items()) for name, found in points.items()}


def _read_evaluation(path: Path) -> Evaluation:
    label = path.parent.name
    answers = read_records(path.with_name(RECORDS))
    return Evaluation(label, label.startswith("baseline"), read_results(path), answers)


def _order(evaluation: Evaluation) -> tuple[bool, bool]:
    """Put the baseline first, then what was compared with it, then the others."""
    return not evaluation.baseline, "baseline" not in evaluation.results
