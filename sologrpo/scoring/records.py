"""Judge the completions of an evaluation; read and write its records and results."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from rewards.format import has_asked_format, has_trailing_text, is_integer_answer
from rewards.grading import (
    answers_in,
    format_of,
    judge,
    lenient_is_correct,
    parse_gold,
    visible_text,
)
from sologrpo.base.errors import InputError
from sologrpo.base.files import RECORDS, RESULTS, UNFINISHED, write_atomically
from sologrpo.base.schema import (
    Number,
    Schema,
    advising,
    one_of,
    parse,
    read_json,
    read_json_lines,
)
from sologrpo.prompts import OPEN, PROMPT_FORMATS
from sologrpo.scoring.statistics import Comparison, Interval

# Why a completion ended.
END_TOKEN, STOP_STRING, LENGTH = "end_token", "stop_string", "length"
START_AGAIN = "delete it, or leave out --resume to start again"


def _with_gold(answer: str) -> str:
    parse_gold(answer)
    return answer


Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Gold = Annotated[str, AfterValidator(_with_gold)]
StopReason = Annotated[str, one_of(END_TOKEN, STOP_STRING, LENGTH)]
Format = Annotated[str, one_of(*PROMPT_FORMATS)]


class Problem(Schema):
    """A test problem, with the raw answer of the data set and special tokens in its prompt."""

    index: Count
    question_hash: str
    question: str
    gold: Gold
    prompt_format: Format
    prompt: str
    kind: str | None


class Answer(Schema):
    """A completion and the verdicts on it.

    Attributes:
        extracted: its answer, in canonical digits; None if it does not give exactly one.
        correct: the strict verdict, the one that training uses.
        lenient_correct: the last number anywhere is the gold answer.
        integer_answer: the answer element, or box, holds an integer and nothing else.
    """

    completion: str
    completion_tokens: Count
    stop_reason: StopReason
    truncated: bool
    extracted: str | None
    correct: bool
    lenient_correct: bool
    format_ok: bool
    trailing_text: bool
    integer_answer: bool


class Record(Answer, Problem):
    """One problem with its greedy answer, and the sampled ones; a line of `records.jsonl`."""

    samples: tuple[Answer, ...] = Field((), strict=False)


class Scores(Schema):
    """The accuracy on a kind of problem."""

    n: Annotated[int, Field(ge=1)]
    accuracy: Share


class Lengths(Schema):
    """Completion lengths in tokens."""

    mean: float
    p50: float
    p95: float


class Sampled(Schema):
    """The scores of sampled completions."""

    num_samples: Count
    scores: dict[str, Share]
    scores_ci95: dict[str, Interval]
    truncated_rate: Share


class Results(Schema):
    """Describe what is read of `results.json` again."""

    n: Annotated[int, Field(ge=1)]
    accuracy: Share
    accuracy_ci95: Interval
    accuracy_lenient: Share
    accuracy_lenient_ci95: Interval
    format_rate: Share
    integer_rate: Share
    trailing_text_rate: Share
    truncated_rate: Share
    no_answer_rate: Share
    by_kind: dict[str, Scores]
    completion_tokens: dict[str, Lengths | None]
    sampled: Sampled | None = None  # where --num_samples asked for it
    seconds: float
    tokens_per_second: float
    settings: dict[str, Any]
    adapter: str | None
    precision: str
    prompt_format: str
    split: str
    max_completion_length: int


class Unfinished(Schema):
    """Content of `unfinished.json`; the seconds were spent on the records that are there."""

    settings: dict[str, Any]
    seconds: Number


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

    >>> judge_answer("<answer>12</answer> Bye", 9, "end_token", "#### 12", "xml").correct
    True
    """
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair becomes "?", as on disk
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
    if format_of(prompt_format).mark == OPEN:
        return is_integer_answer(text)
    answers = answers_in(visible_text(text, prompt_format), prompt_format)
    # The last one is the answer, and its content is checked like that of an answer element.
    return bool(answers) and is_integer_answer(f"<answer>{answers[-1]}</answer>")


def make_record(problem: Problem, greedy: Answer, samples: Iterable[Answer] = ()) -> Record:
    """Combine a problem and its answers into one record."""
    return Record(**dict(problem), **dict(greedy), samples=tuple(samples))


# -- files ---------------------------------------------------------------------------------------


class RecordLog:
    """Records of an evaluation, appended to `records.jsonl` as they come.

    Until `finish` writes the results, `unfinished.json` holds what decides the completions, and the
    seconds spent. A line that a crash left incomplete is dropped.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self._folder = folder
        self.settings = dict(settings)
        before = read_unfinished(folder) if resume else None
        self.records: list[Record] = []
        self.seconds = 0.0
        if before is not None:
            self.seconds = before.seconds
            with advising(START_AGAIN):
                self.records = read_json_lines(folder / RECORDS, Record, unfinished=True)
        # In this order, no settings are ever next to records that others have made.
        write_atomically(folder / RECORDS, _lines(self.records))
        self._write_unfinished()
        (folder / RESULTS).unlink(missing_ok=True)

    def append(self, records: Sequence[Record], seconds: float) -> None:
        """Append the records of a batch, which took these seconds."""
        # Half a surrogate pair, which a tokenizer can emit, becomes "?".
        with (self._folder / RECORDS).open("a", encoding="utf-8", errors="replace") as file:
            file.write(_lines(records))
        self.records += records
        self.seconds = round(self.seconds + seconds, 3)
        self._write_unfinished()

    def finish(self, evaluated: "Evaluated") -> None:
        """Write the records in order, and the results."""
        write_evaluated(self._folder, evaluated)
        (self._folder / UNFINISHED).unlink()

    def _write_unfinished(self) -> None:
        unfinished = {"settings": self.settings, "seconds": self.seconds}
        write_atomically(self._folder / UNFINISHED, json.dumps(unfinished, indent=2))


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(r.model_dump(), ensure_ascii=False) + "\n" for r in records)


def write_evaluated(folder: Path, evaluated: Evaluated) -> None:
    """Write `records.jsonl` and `results.json` of an evaluation."""
    write_atomically(folder / RECORDS, _lines(evaluated.records))
    write_atomically(folder / RESULTS, json.dumps(evaluated.results, indent=2))


def read_unfinished(folder: Path) -> Unfinished | None:
    """Read what is known of an evaluation that may have ended early; None without one."""
    if (folder / UNFINISHED).exists():
        with advising(START_AGAIN):
            return read_json(folder / UNFINISHED, Unfinished)
    results = read_results(folder / RESULTS)
    if not results:
        return None
    return Unfinished(settings=results["settings"], seconds=results["seconds"])


def read_records(path: Path) -> list[Record]:
    """Read `records.jsonl`."""
    return read_json_lines(path, Record)


def read_results(path: Path) -> dict[str, Any]:
    """Read `results.json`; empty if the file does not exist."""
    if not path.exists():
        return {}
    with advising("delete it, and evaluate again"):
        results = read_json(path, dict[str, Any])
        parse(Results, results, path)
    return results


def read_evaluated(folder: Path) -> Evaluated:
    """Read an evaluation, without paired figures: the other side may have changed since."""
    records, results = read_records(folder / RECORDS), read_results(folder / RESULTS)
    n, right = len(records), sum(record.correct for record in records)
    if (results["n"], results["accuracy"]) != (n, right / n):
        raise InputError(
            f"{folder} is damaged: {RESULTS} says {results['accuracy']:.1%} of {results['n']}, "
            f"{RECORDS} {right / n:.1%} of {n}: evaluate again"
        )
    paired = Comparison.model_fields.keys() - Results.model_fields.keys() | {"baseline"}
    return Evaluated(records, {k: v for k, v in results.items() if k not in paired})
