"""Read a run directory into plain data. Missing and damaged files become notes, never errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from sologrpo.report.completions import Completions, Scoring, read_completions
from sologrpo.report.values import Record
from sologrpo.schema import looked_in, parse, parse_json, read_bytes, read_json, read_yaml


@dataclass(frozen=True)
class Evaluation:
    """One folder of `eval/`."""

    label: str
    results: Record
    records: list[Record]


@dataclass(frozen=True)
class Run:
    """The content of a run directory; `notes` name the files that could not be read."""

    name: str
    config: Record
    environment: Record
    metrics: list[Record]
    completions: Completions
    evaluations: list[Evaluation]
    precisions: Record
    notes: list[str] = field(default_factory=list)


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
    metrics = _read_json_lines(run_dir / METRICS, METRICS, notes)
    config = _read_mapping(run_dir / RUN_CONFIG, read_yaml, notes)
    return Run(
        name=run_dir.resolve().name,
        config=config,
        environment=_read_mapping(run_dir / ENVIRONMENT, read_json, notes),
        metrics=metrics,
        completions=read_completions(run_dir / COMPLETIONS, Scoring(config, metrics), notes),
        evaluations=_read_evaluations(run_dir / EVALUATIONS, notes),
        precisions=_read_mapping(run_dir / EVALUATIONS / PRECISION_TABLE, read_json, notes),
        notes=notes,
    )


def _read_json_lines(path: Path, name: str, notes: list[str]) -> list[Record]:
    """Read the objects of a JSON Lines file, with a note for each line that is not an object."""
    rows: list[Record] = []
    try:
        lines = read_bytes(path).splitlines() if path.exists() else []
    except InputError:
        notes.append(f"{name} could not be read")
        return rows
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8", "replace")
            rows.append(parse(dict[str, Any], parse_json(text, name), name))
        except InputError:
            notes.append(f"{name}: line {number} is damaged and was skipped")
    return rows


def _read_mapping(
    path: Path, read: Callable[[Path, type[Record]], Record], notes: list[str]
) -> Record:
    """Read a JSON or YAML file; empty if it is missing or, with a note, damaged."""
    try:
        return read(path, dict[str, Any]) if path.exists() else {}
    except InputError:
        notes.append(f"{path.name} could not be read")
        return {}


def _read_evaluations(folder: Path, notes: list[str]) -> list[Evaluation]:
    """Read all evaluations: the baseline first, then those compared with it, then by name."""
    evaluations = []
    for path in sorted(folder.glob(f"*/{RESULTS}")):
        label = path.parent.name
        results = _read_mapping(path, read_json, notes)
        records = _read_json_lines(path.with_name(RECORDS), f"eval/{label}/{RECORDS}", notes)
        if results:
            evaluations.append(Evaluation(label, results, records))
    return sorted(
        evaluations, key=lambda e: (not is_baseline(e), "delta" not in e.results, e.label)
    )


def is_baseline(evaluation: Evaluation) -> bool:
    """Return whether an evaluation is of the untrained model.

    A merged model has no adapter either, so the label counts before the field.
    """
    if evaluation.label.startswith("base"):
        return True
    results = evaluation.results
    settings = results.get("settings")
    hashed = settings.get("adapter_hash", True) if isinstance(settings, dict) else True
    untrained = not results.get("adapter", hashed)
    return untrained and "delta" not in results and "merged" not in evaluation.label
