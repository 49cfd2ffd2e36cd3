"""Read complete groups of sampled completions from evenly spread steps, with verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rewards import OUTCOME_REWARDS
from sologrpo.report.metrics import reward_of
from sologrpo.report.values import Record, as_text, finite

# A page with this much opens fast on a phone, and can be mailed.
MAX_COMPLETIONS, MAX_STEPS, MAX_CHARS = 800, 40, 600_000
GROUP_SIZE = 8  # TRL's default num_generations, for a run directory without a config
# A constant reward of eight completions yields advantages up to 0.005 from rounding alone.
ADVANTAGE_NOISE = 0.01
RIGHT = 1.0  # every reward that judges the answer gives 1 for a right one
# TRL's own columns of a completions file; the others are rewards and what rewards logged.
TRL_COLUMNS = {"step", "prompt", "completion", "advantage"}
DAMAGED = (pa.ArrowException, OSError, ValueError)  # raised for a Parquet file that is unfinished


@dataclass(frozen=True)
class Group:
    """The completions of one prompt at one step."""

    step: Any
    prompt: str
    question: str
    completions: list[Record]


@dataclass(frozen=True)
class Completions:
    """The groups on the page, latest step first, and how much the run logged in total."""

    groups: list[Group] = field(default_factory=list)
    logged: int = 0
    logged_steps: int = 0


class Scoring:
    """Tells which columns of a completions file are rewards, and which of them judges.

    Args:
        config: content of `config.yaml`.
        metrics: rows of `metrics.jsonl`, which name the rewards of the run.
    """

    def __init__(self, config: Record, metrics: list[Record]) -> None:
        self._names = {name for row in metrics for key in row if (name := reward_of(key))}
        weights = config.get("reward_weights")
        self._weights = [finite(w) for w in weights] if isinstance(weights, list) else None
        outcome = config.get("outcome_reward")
        self._judges = OUTCOME_REWARDS if outcome is None else (outcome,)
        size = config.get("num_generations")
        self.group_size = size if type(size) is int and size > 0 else GROUP_SIZE

    def rewards(self, row: Record) -> dict[str, float | None]:
        """Return the scores of a completion by reward, in the config's order."""
        return {key: finite(value) for key, value in row.items() if self._is_reward(key, value)}

    def _is_reward(self, key: str, value: Any) -> bool:
        if key in TRL_COLUMNS:
            return False
        return key in self._names if self._names else value is None or finite(value) is not None

    def total(self, rewards: dict[str, float | None]) -> float | None:
        """Return the weighted sum before any gate; None where no reward gave a score."""
        weights = [1.0] * len(rewards) if self._weights is None else self._weights
        if len(weights) != len(rewards) or None in weights:
            return None
        pairs = zip(weights, rewards.values(), strict=True)
        scored = [
            weight * score for weight, score in pairs if weight is not None and score is not None
        ]
        return sum(scored) if scored else None

    def verdict(self, rewards: dict[str, float | None]) -> str:
        """Return "right", "wrong" or "not judged" by the reward that judges the answer."""
        scores = [score for name, score in rewards.items() if name in self._judges]
        if not scores or scores[0] is None:
            return "not judged"
        return "right" if scores[0] >= RIGHT else "wrong"


def read_completions(folder: Path, scoring: Scoring, notes: list[str]) -> Completions:
    """Read as many complete groups as fit on a page.

    Args:
        folder: `completions/` of a run directory, with one Parquet file a step.
        scoring: the run's rewards.
        notes: gets a line for each file that cannot be read.
    """
    counts = _count_rows(folder, notes)
    if not counts:
        return Completions()
    files = list(counts)
    wanted = _count_groups_that_fit(_first_rows(files[-1], 4 * scoring.group_size, []), scoring)
    chosen = _spread(files, min(MAX_STEPS, wanted))
    groups: list[Group] = []
    seen: set[tuple[str, ...]] = set()
    for path in chosen:
        rows = _first_rows(path, wanted // len(chosen) * scoring.group_size, notes)
        groups += _new_groups(rows, scoring, seen)
    return Completions(_with_questions(groups), sum(counts.values()), len(files))


def _count_rows(folder: Path, notes: list[str]) -> dict[Path, int]:
    """Count the completions in each readable file, in the order of the steps."""
    counts = {}
    for path in sorted(folder.glob("*.parquet"), key=lambda path: (len(path.name), path.name)):
        try:
            counts[path] = pq.read_metadata(path).num_rows
        except DAMAGED:  # or the trainer is still writing it
            notes.append(f"completions/{path.name} could not be read")
    return counts


def _first_rows(path: Path, count: int, notes: list[str]) -> list[Record]:
    try:
        batch = next(pq.ParquetFile(path).iter_batches(batch_size=count), None)
        return batch.to_pylist() if batch else []
    except DAMAGED:
        notes.append(f"completions/{path.name} could not be read")
        return []


def _count_groups_that_fit(rows: list[Record], scoring: Scoring) -> int:
    """Count how many groups as long as those of `rows` fit on the page, at least one."""
    chars = fmean(len(as_text(row.get("completion"))) for row in rows) if rows else 0
    prompt = max((len(as_text(row.get("prompt"))) for row in rows), default=0)
    by_length = int(MAX_CHARS / max(scoring.group_size * chars + prompt, 1))
    return max(1, min(MAX_COMPLETIONS // scoring.group_size, by_length))


def _spread(items: Sequence[Path], count: int) -> list[Path]:
    """Choose up to `count` evenly spaced items, last one first, the first one among them."""
    last = len(items) - 1
    indices = {round(last * i / max(count - 1, 1)) for i in range(count)}
    return [items[last - i] for i in sorted(indices)]


def _new_groups(rows: list[Record], scoring: Scoring, seen: set[tuple[str, ...]]) -> list[Group]:
    """Group rows by prompt, best advantage first, without the groups already seen.

    TRL logs a generation batch again at each step that it is used for.
    """
    groups: dict[str, Group] = {}
    for row in rows:
        prompt = as_text(row.get("prompt"))
        question = _last_message(row.get("prompt"))
        group = groups.setdefault(prompt, Group(row.get("step"), prompt, question, []))
        group.completions.append(_completion(row, scoring))
    new = []
    for group in groups.values():
        texts = (group.prompt, *(completion["text"] for completion in group.completions))
        if texts not in seen:
            new.append(group)
        seen.add(texts)
        group.completions.sort(key=lambda completion: -(completion["advantage"] or 0.0))
    return new


def _completion(row: Record, scoring: Scoring) -> Record:
    rewards = scoring.rewards(row)
    advantage = finite(row.get("advantage"))
    logged = {key: row[key] for key in row if key not in TRL_COLUMNS and key not in rewards}
    return {
        "text": as_text(row.get("completion")),
        "verdict": scoring.verdict(rewards),
        "signal": _signal(advantage),
        "advantage": advantage,
        "reward": scoring.total(rewards),
        "rewards": list(rewards.items()),
        "logged": [(key, as_text(value)) for key, value in logged.items()],
    }


def _signal(advantage: float | None) -> str:
    if advantage is None or abs(advantage) < ADVANTAGE_NOISE:
        return "no signal"
    return "above its group" if advantage > 0 else "below its group"


def _last_message(prompt: Any) -> str:
    """Return the text of a chat's last message; empty for a plain-text prompt."""
    return as_text(prompt[-1:]) if isinstance(prompt, list) else ""


def _with_questions(groups: list[Group]) -> list[Group]:
    """Fill in the question of plain-text prompts: the part in which the prompts differ."""
    texts = [group.prompt for group in groups if not group.question]
    head = len(_shared_start(texts))
    tail = len(_shared_start([text[head:][::-1] for text in texts]))
    return [
        replace(g, question=g.question or g.prompt[head : len(g.prompt) - tail].strip())
        for g in groups
    ]


def _shared_start(texts: list[str]) -> str:
    """Return the common start of different texts, up to a space so that no word is cut."""
    first, last = min(texts, default=""), max(texts, default="")
    if first == last:
        return ""
    # The prefix of the alphabetically first and last text is that of all of them.
    pairs = enumerate(zip(first, last, strict=False))
    shared = first[: next((i for i, (a, b) in pairs if a != b), len(first))]
    return shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
