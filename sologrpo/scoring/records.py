"""Judge the completions of an evaluation; read and write its records and results.

Imports neither torch nor a model library, so that old records can be judged again in a second.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rewards.format import has_asked_format, has_trailing_text, is_integer_answer
from rewards.grading import (
    PROMPT_FORMATS,
    answer_boxes,
    judge,
    lenient_is_correct,
    parse_gold,
    visible_text,
)
from sologrpo.errors import InputError
from sologrpo.files import RECORDS, RESULTS, write_atomically

# Why a completion ended.
END_TOKEN, STOP_STRING, LENGTH = "end_token", "stop_string", "length"


@dataclass(frozen=True)
class Problem:
    """A test problem.

    Attributes:
        gold: the raw answer of the data set.
        prompt: as the model sees it, special tokens included.
        kind: of problem, where the data set names kinds.
    """

    index: int
    question_hash: str
    question: str
    gold: str
    prompt_format: str
    prompt: str
    kind: str | None


@dataclass(frozen=True)
class Answer:
    """A completion and the verdicts on it.

    Attributes:
        stop_reason: `end_token`, `stop_string` or `length`.
        truncated: the completion ended by `length`.
        extracted: its answer, in canonical digits; None if it does not give exactly one.
        correct: the strict verdict, the one that training uses.
        lenient_correct: the last number anywhere is the gold answer.
        format_ok: the whole completion has the format that was asked for.
        trailing_text: text follows the answer element.
        integer_answer: the answer element, or box, holds an integer and nothing else.
    """

    completion: str
    completion_tokens: int
    stop_reason: str
    truncated: bool
    extracted: str | None
    correct: bool
    lenient_correct: bool
    format_ok: bool
    trailing_text: bool
    integer_answer: bool


@dataclass(frozen=True)
class Record(Answer, Problem):
    """One problem with its greedy answer, and the sampled ones; a line of `records.jsonl`."""

    samples: tuple[Answer, ...] = ()


class Evaluated(NamedTuple):
    """The evaluation of one model: its records, by problem, and the content of `results.json`."""

    records: list[Record]
    results: dict[str, Any]


# -- judging -------------------------------------------------------------------------------------


def hash_text(text: str) -> str:
    """Return the first 16 digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def judge_answer(text: str, tokens: int, stop_reason: str, gold: str, prompt_format: str) -> Answer:
    """Judge one completion.

    Args:
        text: of the completion.
        tokens: length of the completion.
        stop_reason: `end_token`, `stop_string` or `length`.
        gold: the raw answer of the data set.
        prompt_format: a key of `PROMPT_FORMATS`.

    Raises:
        ValueError: if `gold` has no answer after `####`.

    Example:
        >>> judge_answer("<answer>12</answer> Bye", 9, "end_token", "#### 12", "xml").correct
        True
    """
    verdict = judge(text, gold, prompt_format)
    return Answer(
        completion=text,
        completion_tokens=tokens,
        stop_reason=stop_reason,
        truncated=stop_reason == LENGTH,
        extracted=verdict.extracted,
        correct=verdict.correct,
        lenient_correct=lenient_is_correct(text, gold),
        format_ok=has_asked_format(text, prompt_format),
        trailing_text=has_trailing_text(text),
        integer_answer=_is_integer(text, prompt_format),
    )


def _is_integer(text: str, prompt_format: str) -> bool:
    if prompt_format != "boxed":
        return is_integer_answer(text)
    boxes = answer_boxes(visible_text(text, prompt_format))
    # The last box is the answer, and its content is checked like that of an answer element.
    return bool(boxes) and is_integer_answer(f"<answer>{boxes[-1]}</answer>")


def make_record(problem: Problem, greedy: Answer, samples: Iterable[Answer] = ()) -> Record:
    """Combine a problem and its answers into one record."""
    return Record(**vars(problem), **vars(greedy), samples=tuple(samples))


def judge_again(record: Record) -> Record:
    """Judge the stored completions of a record with the present judge."""

    def again(answer: Answer) -> Answer:
        return judge_answer(
            answer.completion, answer.completion_tokens, answer.stop_reason,
            record.gold, record.prompt_format,
        )  # fmt: skip

    return make_record(_take(Problem, vars(record)), again(record), map(again, record.samples))


# -- files ---------------------------------------------------------------------------------------


def write_evaluated(folder: Path, evaluated: Evaluated) -> None:
    """Write `records.jsonl` and `results.json` of an evaluation."""
    write_records(folder / RECORDS, evaluated.records)
    write_results(folder / RESULTS, evaluated.results)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records, one line each."""
    lines = (json.dumps(asdict(record), ensure_ascii=False) for record in records)
    write_atomically(path, "\n".join(lines) + "\n")


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write `results.json`."""
    write_atomically(path, json.dumps(results, indent=2))


def read_records(path: Path, prompt_format: str | None = None) -> list[Record]:
    """Read `records.jsonl`, also an older file with fewer fields.

    Args:
        path: the file.
        prompt_format: of records that do not name it; default: that of `results.json` next to them.

    Raises:
        InputError: if the file or one of its lines cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}") from error
    prompt_format = prompt_format or read_results(path.with_name(RESULTS)).get("prompt_format")
    records = [
        _parse(line, f"{path}, line {number}", prompt_format)
        for number, line in enumerate(lines, start=1)
        if line
    ]
    if not records:
        raise InputError(f"{path} holds no records: give the {RECORDS} of an evaluation")
    return records


def read_results(path: Path) -> dict[str, Any]:
    """Read `results.json`; empty if the file does not exist.

    Raises:
        InputError: if the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}; delete it") from error
    return results if isinstance(results, dict) else {}


def _parse(line: str, where: str, prompt_format: str | None) -> Record:
    try:
        row = json.loads(line)
        if "prompt_format" not in row and prompt_format is None:
            raise InputError(f"{where} names no prompt_format: give --prompt_format")
        row = {"prompt_format": prompt_format, "prompt": "", "kind": None, "samples": ()} | row
        problem = _take(Problem, {"question_hash": hash_text(row["question"])} | row)
        parse_gold(problem.gold)
        if problem.prompt_format not in PROMPT_FORMATS:
            raise ValueError(f"unknown prompt_format {problem.prompt_format!r}")
        return make_record(problem, _parse_answer(row), map(_parse_answer, row["samples"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is not a record of an evaluation: {error!r}") from error


def _parse_answer(row: dict[str, Any]) -> Answer:
    ended = LENGTH if row["truncated"] else END_TOKEN
    return _take(Answer, {"stop_reason": ended, "integer_answer": False} | row)


Part = TypeVar("Part", Problem, Answer)


def _take(part: type[Part], row: dict[str, Any]) -> Part:
    """Make a part of a record from its fields in `row`."""
    return part(**{field.name: row[field.name] for field in fields(part)})
