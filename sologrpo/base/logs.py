"""Write and read what a run logs: its metrics, its warnings, and the completions that it sampled.

A row or a file belongs to a step. TRL writes the completions, in one Parquet file per step. The
readers raise `InputError` for what is damaged.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, Field

from sologrpo.base.errors import InputError
from sologrpo.base.files import COMPLETIONS, METRICS, WARNINGS, write_atomically
from sologrpo.base.schema import Schema, parse, parse_json, read_text

T = TypeVar("T")
Points = list[tuple[int, float]]  # step and value, sorted by step
Metrics = dict[str, Points]  # by name; `step` is among them

_COMPLETIONS_OF = re.compile(r"completions_(\d+)\.parquet")


class Warned(Schema):
    """A warning that the diagnosis printed during the run."""

    step: int
    topic: str
    text: str


class _Step(Schema):
    step: int


class _Row(_Step):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None] = Field(init=False)


# -- metrics and warnings ------------------------------------------------------------------------


def append_metrics(run_dir: Path, step: int, values: Mapping[str, Any]) -> None:
    """Append a row to `metrics.jsonl`, with null for numbers that are not finite: JSON has none."""
    row = {"step": step, **{name: _finite(value) for name, value in values.items()}}
    _append(run_dir / METRICS, row)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_warning(run_dir: Path, warned: Warned) -> None:
    """Append a row to `warnings.jsonl`."""
    _append(run_dir / WARNINGS, warned.model_dump())


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> Metrics:
    """Read the points of each metric. A step that was trained again after a resume counts once."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for row in _read_lines(path, _Row):
        for name, value in row:
            if value is not None:
                points[name][row.step] = value
    return {name: sorted(found.items()) for name, found in points.items()}


def read_warnings(path: Path) -> list[Warned]:
    """Read the latest warning of each topic: a resumed run warns again."""
    return [*{warned.topic: warned for warned in _read_lines(path, Warned)}.values()]


def _read_lines(path: Path, schema: type[T]) -> list[T]:
    """Read the complete lines of a log; the trainer may be writing the last one."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        where = f"{path}, line {number}"
        rows.append(parse(schema, parse_json(line, where), where))
    return rows


# -- completions ---------------------------------------------------------------------------------


def count_completions(path: Path) -> int:
    """Count the completions of a step, from the end of its file."""
    with _naming(path):
        return int(pq.read_metadata(path).num_rows)


def read_completions(path: Path) -> list[dict[str, Any]]:
    """Read the completions of a step, with their columns as TRL and the rewards logged them."""
    with _naming(path):
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} could not be read") from error


# -- resume --------------------------------------------------------------------------------------


def remove_later(run_dir: Path, step: int) -> None:
    """Delete the metrics, warnings and completions of later steps, and lines that are damaged."""
    for table in (run_dir / COMPLETIONS).glob("*.parquet"):
        number = _COMPLETIONS_OF.fullmatch(table.name)
        if number and int(number[1]) > step and table.is_file():
            table.unlink()
    for log in (run_dir / METRICS, run_dir / WARNINGS):
        if log.is_file():
            lines = log.read_bytes().decode("utf-8", "replace").split("\n")
            kept = [line for line in lines if _is_kept(line, step)]
            if kept:
                write_atomically(log, "".join(f"{line}\n" for line in kept))
            else:
                log.unlink()


def _is_kept(line: str, step: int) -> bool:
    """Check that a line of a log is one, up to this step. A kill may cut the last short."""
    try:
        return parse(_Step, parse_json(line, "log"), "log").step <= step
    except InputError:
        return False
