"""Read a run directory into plain data. Missing and damaged files become notes, never errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sologrpo.base.errors import InputError
from sologrpo.base.files import (
    BASELINE,
    COMPLETIONS,
    ENVIRONMENT,
    EVALUATIONS,
    FORMAT_TABLE,
    METRICS,
    RESULTS,
    RUN_CONFIG,
    WARNINGS,
)
from sologrpo.base.logs import Metrics, Warned, read_metrics, read_warnings
from sologrpo.base.schema import (
    Schema,
    advising,
    looked_in,
    parse,
    read_json,
    read_yaml,
    shown,
)
from sologrpo.report.completions import Completions, Settings, read_groups
from sologrpo.report.values import Record, read_or_note
from sologrpo.scoring.formats import TRAINED, compare_formats
from sologrpo.scoring.records import Evaluated, read_evaluated


class _PromptFormat(Schema):
    role: str
    label: str
    baseline: str


class _PromptFormats(Schema):
    """Describe what is read of a `prompt_formats.json`: the evaluations that belong together."""

    prompt_formats: Annotated[dict[str, _PromptFormat], Field(min_length=1)]


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
    evaluations: dict[str, Evaluated]  # by label
    prompt_formats: Record  # content of `prompt_formats.json`, by file name
    notes: list[str]


def read_run(run_dir: Path, evaluated_in: Path | None = None) -> Run:
    """Read a run directory, in which any file may be missing or unfinished.

    `evaluated_in` is the folder with `eval/`, if it is another one.
    """
    if not run_dir.is_dir():
        where = f"{run_dir}{looked_in(run_dir)}"
        raise InputError(f"{where} is not a run directory: name one that train.py made")
    return read_files(run_dir, evaluated_in)


def read_files(run_dir: Path, evaluated_in: Path | None = None) -> Run:
    """Read what there is of a run directory, which may not exist yet."""
    notes: list[str] = []
    read = partial(read_or_note, notes=notes)
    no_config: tuple[Record, Settings] = ({}, Settings())
    config, settings = read(_read_config, run_dir / RUN_CONFIG, no_config)
    folder = (evaluated_in or run_dir) / EVALUATIONS
    labels = sorted((path.parent.name for path in folder.glob(f"*/{RESULTS}")), key=_order)
    found = {label: read(read_evaluated, folder / label, None) for label in labels}
    evaluated = {label: evaluation for label, evaluation in found.items() if evaluation}
    return Run(
        name=run_dir.resolve().name,
        config=config,
        settings=settings,
        environment=read(partial(read_json, schema=dict[str, Any]), run_dir / ENVIRONMENT, {}),
        metrics=read(read_metrics, run_dir / METRICS, {}),
        warnings=read(read_warnings, run_dir / WARNINGS, []),
        completions=read_groups(run_dir / COMPLETIONS, settings, notes),
        evaluations=evaluated,
        prompt_formats={
            path.name: table
            for path in sorted(folder.glob(FORMAT_TABLE.format("*")), key=lambda path: path.stem)
            if (table := read(partial(_compare_formats, evaluated=evaluated), path, None))
        },
        notes=notes,
    )


def _read_config(path: Path) -> tuple[Record, Settings]:
    config = read_yaml(path, dict[str, Any])
    return config, parse(Settings, config, path)


def _order(label: str) -> tuple[bool, bool, str]:
    """Put baselines first, then the trained model, then labels of the user's own."""
    return not label.startswith(BASELINE), not label.startswith("trained"), label


def _compare_formats(path: Path, evaluated: Mapping[str, Evaluated]) -> Record:
    """Compare the evaluations that a table names; its own figures may be older than they are."""
    rows = read_json(path, _PromptFormats).prompt_formats
    labels = [label for row in rows.values() for label in (row.baseline, row.label)]
    trained = [name for name, row in rows.items() if row.role == TRAINED]
    with advising("evaluate again with --prompt_formats"):
        for label in labels:
            if label not in evaluated:
                raise InputError(f"{path} needs the evaluation {shown(label)}")
        return compare_formats({label: evaluated[label] for label in labels}, trained)
