"""Run directory to plain data for the report: whatever is missing or torn becomes a note."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rewards import OUTCOME_REWARDS
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

logger = logging.getLogger(__name__)

Record = dict[str, Any]

MAX_TEXT_CHARS = 20_000  # of one prompt or completion, so that a runaway one stays readable
# What a page holds of a run's completions: it opens at once on a phone, and can be mailed.
MAX_COMPLETIONS, MAX_STEPS, MAX_CHARS = 800, 40, 600_000
GROUP_SIZE = 8  # TRL's default num_generations, for a run directory without a config
# A constant reward of eight completions yields advantages up to 0.005 from rounding alone.
ADVANTAGE_NOISE = 0.01
RIGHT = 1.0  # every reward that judges the answer gives 1 for a right one
# TRL's own columns of a completions file; the others are rewards and what rewards noted.
TRL_COLUMNS = {"step", "prompt", "completion", "advantage"}


@dataclass(frozen=True)
class Evaluation:
    """One folder of `eval/`."""

    label: str
    results: Record
    records: list[Record]


@dataclass(frozen=True)
class Group:
    """The completions of one prompt at one step."""

    step: Any
    prompt: str
    question: str
    completions: list[Record]


@dataclass(frozen=True)
class Completions:
    """The groups that the page shows, latest step first, and of how many completions they are."""

    groups: list[Group] = field(default_factory=list)
    steps: int = 0
    logged: int = 0
    logged_steps: int = 0

    @property
    def shown(self) -> int:
        """Number of completions in the groups."""
        return sum(len(group.completions) for group in self.groups)


@dataclass(frozen=True)
class Run:
    """All that a report shows; `notes` name the files that could not be read whole."""

    name: str
    config: Record
    environment: Record
    metrics: list[Record]
    completions: Completions
    evaluations: list[Evaluation]
    precisions: Record
    notes: list[str] = field(default_factory=list)


def read_run(run_dir: Path) -> Run:
    """Read whatever a run directory holds. Any file may be missing or unfinished."""
    metrics, notes = _read_json_lines(run_dir / METRICS)
    config = _read_mapping(run_dir / RUN_CONFIG, yaml.safe_load, notes)
    return Run(
        name=run_dir.resolve().name,
        config=config,
        environment=_read_mapping(run_dir / ENVIRONMENT, json.loads, notes),
        metrics=metrics,
        completions=_read_completions(run_dir / COMPLETIONS, _Scoring(config, metrics), notes),
        evaluations=_read_evaluations(run_dir / EVALUATIONS, notes),
        precisions=_read_mapping(run_dir / EVALUATIONS / PRECISION_TABLE, json.loads, notes),
        notes=notes,
    )


def read_metrics(path: Path) -> list[Record]:
    """Rows of a `metrics.jsonl`; none if it is missing. Torn lines are skipped with a warning."""
    rows, notes = _read_json_lines(path)
    for note in notes:
        logger.warning("%s", note)
    return rows


def _read_json_lines(path: Path) -> tuple[list[Record], list[str]]:
    """Rows, and a note for each line that is no JSON object: a writer was stopped in it."""
    rows: list[Record] = []
    notes: list[str] = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_object(line)
        if row is None:
            notes.append(f"{path.name}: line {number} is torn and was skipped")
        else:
            rows.append(row)
    return rows, notes


def _parse_object(line: bytes) -> Record | None:
    try:
        row = json.loads(line)
    except ValueError:  # includes text that is not UTF-8
        return None
    return row if isinstance(row, dict) else None


def _read_mapping(path: Path, parse: Callable[[bytes], Any], notes: list[str]) -> Record:
    """Content of a JSON or YAML file; empty if it is missing or, with a note, unreadable."""
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_bytes())
    except (ValueError, yaml.YAMLError):
        content = None
    if isinstance(content, dict):
        return {str(key): value for key, value in content.items()}
    notes.append(f"{path.name} could not be read")
    return {}


# --- evaluations -----------------------------------------------------------------------------


def _read_evaluations(folder: Path, notes: list[str]) -> list[Evaluation]:
    """Evaluations in the order before, after, then any others by name."""
    evaluations = []
    for path in sorted(folder.glob(f"*/{RESULTS}")):
        results = _read_mapping(path, json.loads, notes)
        records, torn = _read_json_lines(path.with_name(RECORDS))
        notes += [f"eval/{path.parent.name}/{note}" for note in torn]
        if results:
            evaluations.append(Evaluation(path.parent.name, results, records))
    return sorted(evaluations, key=_before_then_after)


def _before_then_after(evaluation: Evaluation) -> tuple[bool, bool, str]:
    return not is_baseline(evaluation), "delta" not in evaluation.results, evaluation.label


def is_baseline(evaluation: Evaluation) -> bool:
    """Whether it is of the untrained model.

    A merged model has no adapter either, so the label counts before the field.
    """
    if evaluation.label.startswith("base"):
        return True
    results = evaluation.results
    settings = results.get("settings")
    hashed = settings.get("adapter_hash", True) if isinstance(settings, dict) else True
    untrained = not results.get("adapter", hashed)
    return untrained and "delta" not in results and "merged" not in evaluation.label


# --- completions -----------------------------------------------------------------------------


class _Scoring:
    """Which columns of a completions file are rewards, what they weigh, which one judges."""

    def __init__(self, config: Record, metrics: list[Record]) -> None:
        logged = {key for row in metrics for key in row if is_reward_part(key)}
        self._names = {reward_name(key) for key in logged}
        self._weights = config.get("reward_weights")
        self._outcome = config.get("outcome_reward")
        self.group_size = _whole(config.get("num_generations")) or GROUP_SIZE

    def rewards(self, row: Record) -> dict[str, float | None]:
        """Scores of a row by reward, in the config's order."""
        return {key: finite(value) for key, value in row.items() if self._is_reward(key, value)}

    def _is_reward(self, key: str, value: Any) -> bool:
        if key in TRL_COLUMNS:
            return False
        return key in self._names if self._names else value is None or finite(value) is not None

    def total(self, rewards: dict[str, float | None]) -> float | None:
        """Weighted sum, as it was before any gate; nothing where no reward could judge."""
        weights = self._weights if isinstance(self._weights, list) else [1.0] * len(rewards)
        factors = [finite(weight) for weight in weights]
        if len(factors) != len(rewards) or None in factors:
            return None
        parts = zip(factors, rewards.values(), strict=True)
        judged = [
            weight * score for weight, score in parts if weight is not None and score is not None
        ]
        return sum(judged) if judged else None

    def verdict(self, rewards: dict[str, float | None]) -> str:
        """Right or wrong by the reward that judges the answer, as the trainer counts it."""
        judges = OUTCOME_REWARDS if self._outcome is None else (self._outcome,)
        name = next((name for name in rewards if name in judges), None)
        score = None if name is None else rewards[name]
        if score is None:
            return "not judged"
        return "right" if score >= RIGHT else "wrong"


def is_reward_part(key: str) -> bool:
    """Whether a metric is the mean of one reward."""
    return key.startswith("rewards/") and key.endswith("/mean")


def reward_name(key: str) -> str:
    """The reward of such a metric."""
    return key.removeprefix("rewards/").removesuffix("/mean")


def _read_completions(folder: Path, scoring: _Scoring, notes: list[str]) -> Completions:
    """Whole groups from evenly spread steps, as many as fit; the same text only once."""
    rows_of = _count_rows(folder, notes)
    if not rows_of:
        return Completions()
    files = list(rows_of)
    wanted = _groups_that_fit(files[-1], scoring.group_size)
    chosen = spread(files, min(MAX_STEPS, wanted))
    groups: list[Group] = []
    seen: set[tuple[str, ...]] = set()
    for path in chosen:
        rows = _first_rows(path, wanted // len(chosen) * scoring.group_size)
        groups += _groups(rows, scoring, seen)
    return Completions(
        groups=_with_questions(groups),
        steps=len({group.step for group in groups}),
        logged=sum(rows_of.values()),
        logged_steps=len(files),
    )


def _count_rows(folder: Path, notes: list[str]) -> dict[Path, int]:
    """Number of completions in each file that can be read, in the order of the steps."""
    rows_of = {}
    for path in sorted(folder.glob("*.parquet"), key=lambda path: (len(path.name), path.name)):
        try:
            rows_of[path] = pq.read_metadata(path).num_rows
        except pa.ArrowInvalid:  # the trainer is still writing it
            notes.append(f"completions/{path.name} could not be read")
    return rows_of


def _groups_that_fit(path: Path, group_size: int) -> int:
    """How many groups of the length of those in `path` the page has room for, at least one."""
    rows = _first_rows(path, 4 * group_size)
    chars = fmean(len(as_text(row.get("completion"))) for row in rows) if rows else 0
    of_one = group_size * chars + max((len(as_text(row.get("prompt"))) for row in rows), default=0)
    return max(1, min(MAX_COMPLETIONS // group_size, int(MAX_CHARS / max(of_one, 1))))


def _first_rows(path: Path, count: int) -> list[Record]:
    batch = next(pq.ParquetFile(path).iter_batches(batch_size=count), None)
    return batch.to_pylist() if batch else []


def spread(items: Sequence[Path], count: int) -> list[Path]:
    """Up to `count` evenly spaced items, last one first, the first one among them."""
    last = len(items) - 1
    indices = {round(last * i / max(count - 1, 1)) for i in range(count)} if items else set()
    return [items[last - i] for i in sorted(indices)]


def _groups(rows: list[Record], scoring: _Scoring, seen: set[tuple[str, ...]]) -> list[Group]:
    """Rows by prompt, best advantage first.

    A group that was seen is left out: TRL logs a generation batch again at each of its steps.
    """
    groups: dict[str, Group] = {}
    for row in rows:
        prompt = as_text(row.get("prompt"))
        question = _last_message(row.get("prompt"))
        group = groups.setdefault(prompt, Group(row.get("step"), prompt, question, []))
        group.completions.append(_completion(row, scoring))
    fresh = []
    for group in groups.values():
        texts = (group.prompt, *(completion["text"] for completion in group.completions))
        if texts not in seen:
            fresh.append(group)
        seen.add(texts)
        group.completions.sort(key=lambda completion: -(completion["advantage"] or 0.0))
    return fresh


def _completion(row: Record, scoring: _Scoring) -> Record:
    rewards = scoring.rewards(row)
    advantage = finite(row.get("advantage"))
    noted = {key: row[key] for key in row if key not in TRL_COLUMNS and key not in rewards}
    return {
        "text": as_text(row.get("completion")),
        "verdict": scoring.verdict(rewards),
        "signal": _signal(advantage),
        "advantage": advantage,
        "reward": scoring.total(rewards),
        "rewards": list(rewards.items()),
        "noted": [(key, as_text(value)) for key, value in noted.items()],
    }


def _signal(advantage: float | None) -> str:
    if advantage is None or abs(advantage) < ADVANTAGE_NOISE:
        return "no signal"
    return "above its group" if advantage > 0 else "below its group"


def _last_message(prompt: Any) -> str:
    """Text of a chat's last message; empty for a prompt that is plain text."""
    return as_text(prompt[-1:]) if isinstance(prompt, list) else ""


def _with_questions(groups: list[Group]) -> list[Group]:
    """The question of a plain-text prompt is what it does not share with the other prompts."""
    texts = [group.prompt for group in groups if not group.question]
    head = _shared_start(texts)
    tail = _shared_start([text[len(head) :][::-1] for text in texts])
    return [
        group
        if group.question
        else replace(
            group, question=group.prompt[len(head) : len(group.prompt) - len(tail)].strip()
        )
        for group in groups
    ]


def _shared_start(texts: list[str]) -> str:
    """What different texts begin with, up to a white space: a word that differs is kept whole."""
    first, last = min(texts, default=""), max(texts, default="")
    if first == last:
        return ""
    # What the first and the last in the alphabet share, all share.
    end = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    shared = first[:end]
    return shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]


# --- values ----------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """Text of a prompt or completion, given as a string or a list of chat messages.

    Example:
        >>> as_text([{"role": "assistant", "content": "6 * 7 = 42"}])
        '6 * 7 = 42'
    """
    if isinstance(value, list):
        messages = [_message_text(message) for message in value]
        lone = len(messages) == 1
        texts = [text if lone else f"[{role}]\n{text}" for role, text in messages]
        value = "\n\n".join(texts)
    return shorten("" if value is None else str(value), MAX_TEXT_CHARS)


def _message_text(message: Any) -> tuple[str, str]:
    """Role and text of a chat message, whose content may be a list of typed parts."""
    if not isinstance(message, dict):
        return "message", str(message)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return str(message.get("role")), "" if content is None else str(content)


def shorten(text: str, limit: int) -> str:
    """Text of at most `limit` characters, and how many more there were."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters]"


def finite(value: Any) -> float | None:
    """A finite number or nothing: TRL logs null, and Python's JSON has NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def fair_shares(counts: Iterable[int], limit: int) -> list[int]:
    """How many of each count to take, at most `limit` in all: small ones whole, others alike.

    Example:
        >>> fair_shares([3, 500, 20, 500], 123)
        [3, 50, 20, 50]
    """
    counts = list(counts)
    shares = [0] * len(counts)
    ascending = sorted(range(len(counts)), key=counts.__getitem__)
    for done, index in enumerate(ascending):
        shares[index] = min(counts[index], limit // (len(counts) - done))
        limit -= shares[index]
    return shares
