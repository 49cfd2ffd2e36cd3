"""Read a run directory into plain data. Missing and damaged files become notes, never errors."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field

from sologrpo.errors import InputError
from sologrpo.files import (
    COMPLETIONS,
    ENVIRONMENT,
    EVALUATIONS,
    FORMAT_TABLE,
    METRICS,
    RECORDS,
    RESULTS,
    RUN_CONFIG,
    WARNINGS,
)
from sologrpo.report.completions import Completions, Settings, read_completions
from sologrpo.report.metrics import Metrics
from sologrpo.report.values import Record, read_or_note
from sologrpo.schema import Schema, looked_in, parse, parse_json, read_json, read_text, read_yaml
from sologrpo.scoring import records
from sologrpo.scoring.records import Share, read_records, read_results
from sologrpo.scoring.statistics import Comparison

T = TypeVar("T")


class Warned(Schema):
    """A warning that the diagnosis printed during the run."""

    step: int
    topic: str
    text: str


class PromptFormat(Comparison):
    """A trained model under one prompt, against its baseline."""

    role: str
    label: str
    baseline: str
    baseline_accuracy_lenient: Share
    accuracy_lenient: Share
    baseline_truncated_rate: Share
    truncated_rate: Share


class PromptFormats(Schema):
    """The content of a `prompt_formats.json`: whether the gain travels, and a row per prompt."""

    verdict: str
    n: int
    split: str
    prompt_formats: dict[str, PromptFormat]


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
    warnings: list[Warned]
    completions: Completions
    evaluations: list[Evaluation]
    prompt_formats: dict[str, PromptFormats]  # by file name
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
    return read_files(run_dir)


def read_files(run_dir: Path) -> Run:
    """Read what there is of a run directory, which may not exist yet."""
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
        warnings=read(_read_warnings, run_dir / WARNINGS, []),
        completions=read_completions(run_dir / COMPLETIONS, settings, notes),
        evaluations=sorted(filter(None, evaluations), key=_order),
        prompt_formats={
            path.name: table
            for path in sorted(folder.glob(FORMAT_TABLE.format("*")), key=lambda path: path.stem)
            if (table := read(partial(read_json, schema=PromptFormats), path, None))
        },
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
    for row in _read_lines(path, _Row):
        for name, value in row:
            if value is not None:
                points[name][row.step] = value
    return {name: sorted(found.items()) for name, found in points.items()}


def _read_warnings(path: Path) -> list[Warned]:
    """Read the latest warning of each topic: a resumed run warns again."""
    return [*{warned.topic: warned for warned in _read_lines(path, Warned)}.values()]


def _read_lines(path: Path, schema: type[T]) -> list[T]:
    """Read the complete lines of a log; the trainer may be writing the last one."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        where = f"{path}, line {number}"
        rows.append(parse(schema, parse_json(line, where), where))
    return rows


def _read_evaluation(path: Path) -> Evaluation:
    label = path.parent.name
    answers = read_records(path.with_name(RECORDS))
    return Evaluation(label, label.startswith("baseline"), read_results(path), answers)


def _order(evaluation: Evaluation) -> tuple[bool, bool]:
    """Put the baseline first, then what was compared with it, then the others."""
    return not evaluation.baseline, "baseline" not in evaluation.results
