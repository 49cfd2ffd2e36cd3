"""Records of an evaluation: problem, completion, verdicts; judged, counted, written and read.

Needs no torch and no model, so that old records can be judged again in a second.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

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
from sologrpo.files import RESULTS, write_atomically
from sologrpo.scoring.statistics import (
    clustered_interval,
    compare_paired,
    majority_share,
    pass_at_k,
    percentile,
    wilson_interval,
)

# Why a completion ended.
END_TOKEN, STOP_STRING, LENGTH = "end_token", "stop_string", "length"


@dataclass(frozen=True)
class Problem:
    """What was asked. `prompt` is what the model saw, special tokens included."""

    index: int
    question_hash: str
    question: str
    gold: str
    prompt_format: str
    prompt: str
    kind: str | None


@dataclass(frozen=True)
class Answer:
    """One completion and what was found in it.

    Attributes:
        stop_reason: `end_token`, `stop_string` or `length`.
        truncated: it ended by `length`.
        extracted: the value it answers, in canonical digits; None if it gives no single one.
        correct: the strict verdict, which is the one that training goes by.
        lenient_correct: the last number anywhere is the gold answer.
        format_ok: the whole completion has the shape that was asked for.
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


def hash_text(text: str) -> str:
    """Short name of a text: the first 16 digits of its SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def judge_answer(text: str, tokens: int, stop_reason: str, gold: str, prompt_format: str) -> Answer:
    """Judge one completion.

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
    # The last box is the answer; the rule for what is in it is the one for an answer element.
    return bool(boxes) and is_integer_answer(f"<answer>{boxes[-1]}</answer>")


def make_record(problem: Problem, greedy: Answer, samples: Iterable[Answer] = ()) -> Record:
    """Put together one line of `records.jsonl`."""
    return Record(**vars(problem), **vars(greedy), samples=tuple(samples))


def judge_again(record: Record) -> Record:
    """Judge the stored completions by today's judge."""

    def again(answer: Answer) -> Answer:
        return judge_answer(
            answer.completion, answer.completion_tokens, answer.stop_reason,
            record.gold, record.prompt_format,
        )  # fmt: skip

    problem = Problem(**{field.name: getattr(record, field.name) for field in fields(Problem)})
    return make_record(problem, again(record), map(again, record.samples))


# -- counting ------------------------------------------------------------------------------------


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Count what `results.json` reports; every rate is a share of all records."""
    n = len(records)
    correct, lenient = sum(r.correct for r in records), sum(r.lenient_correct for r in records)
    summary = {
        "n": n,
        "accuracy": correct / n,
        "accuracy_ci95": list(wilson_interval(correct, n)),
        "accuracy_lenient": lenient / n,
        "accuracy_lenient_ci95": list(wilson_interval(lenient, n)),
        "format_rate": mean(record.format_ok for record in records),
        "trailing_text_rate": mean(record.trailing_text for record in records),
        "integer_rate": mean(record.integer_answer for record in records),
        "truncated_rate": mean(record.truncated for record in records),
        "no_answer_rate": mean(record.extracted is None for record in records),
        "mean_completion_tokens": mean(record.completion_tokens for record in records),
        "completion_tokens": {
            "all": _lengths(records),
            "right": _lengths([record for record in records if record.correct]),
            "wrong": _lengths([record for record in records if not record.correct]),
        },
        "by_kind": accuracy_by_kind(records),
    }
    if records[0].samples:
        summary["sampled"] = summarise_samples(records)
    return summary


def compare(before: Sequence[Record], after: Sequence[Record]) -> dict[str, Any]:
    """Compare two models on the same problems: the paired fields of `results.json`."""
    return asdict(compare_paired([r.correct for r in before], [r.correct for r in after]))


def _lengths(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Tokens of the completions; None where there are none."""
    tokens = [answer.completion_tokens for answer in answers]
    if not tokens:
        return None
    return {"mean": mean(tokens), "p50": percentile(tokens, 50), "p95": percentile(tokens, 95)}


def accuracy_by_kind(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Accuracy of each kind of problem, where the data set names kinds; otherwise empty."""
    kinds = sorted({record.kind for record in records if record.kind is not None})
    groups = {kind: [r.correct for r in records if r.kind == kind] for kind in kinds}
    return {kind: {"n": len(group), "accuracy": mean(group)} for kind, group in groups.items()}


def summarise_samples(records: Sequence[Record]) -> dict[str, Any]:
    """pass@k for k = 1, 2, 4, ... and maj@K of the sampled answers, with intervals by problem."""
    K = len(records[0].samples)
    right = [sum(sample.correct for sample in record.samples) for record in records]
    scores = {
        f"pass@{k}": [pass_at_k(K, count, k) for count in right] for k in powers_of_two(K)
    } | {f"maj@{K}": [_majority(record.samples) for record in records]}
    # pass@1 averages K samples a problem; the others are one number a problem already.
    samples = {name: K if name == "pass@1" else 1 for name in scores}
    return {
        "num_samples": K,
        "scores": {name: mean(values) for name, values in scores.items()},
        "scores_ci95": {
            name: list(clustered_interval(values, samples[name])) for name, values in scores.items()
        },
        "truncated_rate": mean(s.truncated for record in records for s in record.samples),
        "completion_tokens": _lengths([s for record in records for s in record.samples]),
    }


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`.

    >>> powers_of_two(6)
    [1, 2, 4]
    """
    return [2**i for i in range(limit.bit_length())]


def _majority(samples: Sequence[Answer]) -> float:
    return majority_share([s.extracted for s in samples], [s.correct for s in samples])


# -- files ---------------------------------------------------------------------------------------


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write `records.jsonl` whole."""
    lines = (json.dumps(asdict(record), ensure_ascii=False) for record in records)
    write_atomically(path, "\n".join(lines) + "\n")


def read_records(path: Path, prompt_format: str | None = None) -> list[Record]:
    """Read `records.jsonl`, also one of an older version that had fewer fields.

    Args:
        path: the file.
        prompt_format: of records that do not name it; by default `results.json` beside them does.

    Raises:
        InputError: if the file cannot be read as records; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    prompt_format = prompt_format or read_results(path.with_name(RESULTS)).get("prompt_format")
    records = [
        _parse(line, f"{path}, line {number}", prompt_format)
        for number, line in enumerate(lines, start=1)
        if line
    ]
    if not records:
        raise InputError(f"{path} holds no records")
    return records


def read_results(path: Path) -> dict[str, Any]:
    """Read `results.json`; empty if there is none.

    Raises:
        InputError: if it is damaged.
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
        text = row["question"]
        known = {"prompt_format": prompt_format, "prompt": "", "kind": None} | row
        known = {"question_hash": hash_text(text), "samples": ()} | known
        problem = Problem(**{field.name: known[field.name] for field in fields(Problem)})
        parse_gold(problem.gold)
        if problem.prompt_format not in PROMPT_FORMATS:
            raise ValueError(f"unknown prompt_format {problem.prompt_format!r}")
        return make_record(problem, _stored(known), map(_stored, known["samples"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is no record of evaluate.py: {error!r}") from error


def _stored(row: dict[str, Any]) -> Answer:
    ended = LENGTH if row["truncated"] else END_TOKEN
    known: dict[str, Any] = {"stop_reason": ended, "integer_answer": False} | row
    return Answer(**{field.name: known[field.name] for field in fields(Answer)})
