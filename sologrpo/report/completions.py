"""Read complete groups of sampled completions from evenly spread steps, with verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from rewards import OUTCOME_REWARDS, name_of_spec
from sologrpo.base.logs import count_completions, read_completions
from sologrpo.base.schema import Schema, parse
from sologrpo.report.values import Record, read_or_note, shorten, spread

# A page with this much opens fast on a phone, and can be mailed.
MAX_COMPLETIONS, MAX_STEPS, MAX_CHARS = 800, 40, 600_000
# A constant reward of eight completions yields advantages up to 0.005 from rounding alone.
ADVANTAGE_NOISE = 0.01
RIGHT = 1.0  # every reward that judges the answer gives 1 for a right one


class Settings(Schema):
    """The settings of a run that the page computes with; the others it only lists."""

    model_name_or_path: str = ""
    rewards: list[str | dict[str, Any]] = Field(default_factory=list)
    reward_weights: list[float] | None = None
    outcome_reward: str | None = None
    num_generations: Annotated[int, Field(ge=1)] = 8

    def weights(self) -> dict[str, float]:
        """Return the weight of each reward, in the config's order."""
        names = map(name_of_spec, self.rewards)
        return dict(zip(names, self.reward_weights or repeat(1.0), strict=False))

    def labels(self) -> dict[str, str]:
        """Name each reward with its weight: `strict_format (weight 0.2)`."""
        return {name: f"{name} (weight {weight:g})" for name, weight in self.weights().items()}

    def total(self, scores: dict[str, float | None]) -> float | None:
        """Return the weighted sum before any gate; None where no reward gave a score."""
        weights = self.weights()
        weighted = [weights[name] * score for name, score in scores.items() if score is not None]
        return sum(weighted) if weighted else None

    def judge(self, scores: dict[str, float | None]) -> str | None:
        """Name the reward that judges the answer; None if there is none."""
        judges = [self.outcome_reward] if self.outcome_reward else OUTCOME_REWARDS
        return next((name for name in judges if name in scores), None)

    def verdict(self, scores: dict[str, float | None]) -> str:
        """Return "right", "wrong" or "not judged" by the reward that judges the answer."""
        judge = self.judge(scores)
        score = None if judge is None else scores[judge]
        if score is None:
            return "not judged"
        return "right" if score >= RIGHT else "wrong"


@dataclass(frozen=True)
class Group:
    """The completions of one prompt at one step."""

    step: int
    prompt: str
    question: str
    completions: list[Record]


@dataclass(frozen=True)
class Completions:
    """The groups on the page, latest step first, and how much the run logged in total."""

    groups: list[Group]
    logged: int
    logged_steps: int


class _Message(Schema):
    role: str
    content: str


class _Row(Schema):
    """A completion as TRL logs it; the other columns are rewards and what rewards logged."""

    model_config = ConfigDict(extra="allow")

    step: int
    prompt: str | list[_Message]
    completion: str | list[_Message]
    advantage: float | None

    def prompt_text(self) -> str:
        if isinstance(self.prompt, str):
            return shorten(self.prompt)
        return shorten("\n\n".join(f"[{m.role}]\n{m.content}" for m in self.prompt))

    def completion_text(self) -> str:
        if isinstance(self.completion, str):
            return shorten(self.completion)
        return shorten("\n\n".join(message.content for message in self.completion))


def read_groups(folder: Path, settings: Settings, notes: list[str]) -> Completions:
    """Read as many complete groups as fit on a page.

    `notes` gets a line for each file that cannot be read; the trainer may be writing it.
    """
    paths = sorted(folder.glob("*.parquet"), key=lambda path: (len(path.name), path.name))
    counts = {path: read_or_note(count_completions, path, 0, notes) for path in paths}
    logged = [path for path, count in counts.items() if count]
    chosen = spread(logged, MAX_STEPS)[::-1]
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for path in chosen:
        rows: list[_Row] = read_or_note(_read_rows, path, [], notes)
        wanted = max(1, MAX_COMPLETIONS // len(chosen) // settings.num_generations)
        for group in _by_prompt(rows[: wanted * settings.num_generations]):
            # TRL logs a generation batch again at each step that it is used for.
            texts = (group[0].prompt_text(), *(row.completion_text() for row in group))
            groups.setdefault(texts, group)
    chars = sum(len(text) for texts in groups for text in texts)
    fitting = max(1, len(groups) * MAX_CHARS // max(chars, MAX_CHARS))
    shown = spread(list(groups.values()), fitting)
    return Completions(_describe(shown, settings), sum(counts.values()), len(logged))


def _read_rows(path: Path) -> list[_Row]:
    return parse(list[_Row], read_completions(path), path)


def _by_prompt(rows: Sequence[_Row]) -> list[list[_Row]]:
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.prompt_text(), []).append(row)
    return list(groups.values())


def _describe(groups: Sequence[list[_Row]], settings: Settings) -> list[Group]:
    prompts = [rows[0].prompt for rows in groups]
    frame = _frame([prompt for prompt in prompts if isinstance(prompt, str)])
    return [
        Group(
            step=rows[0].step,
            prompt=rows[0].prompt_text(),
            question=_question(rows[0].prompt, frame),
            completions=[
                _completion(row, settings)
                for row in sorted(rows, key=lambda row: -(row.advantage or 0.0))
            ],
        )
        for rows in groups
    ]


def _completion(row: _Row, settings: Settings) -> Record:
    columns: Record = row.model_extra or {}
    rewards = {name: columns[name] for name in settings.weights() if name in columns}
    reason = f"{settings.judge(rewards)}/reason"
    return {
        "text": row.completion_text(),
        "verdict": settings.verdict(rewards),
        "reason": columns.get(reason),
        "signal": _signal(row.advantage),
        "advantage": row.advantage,
        "reward": settings.total(rewards),
        "rewards": rewards,
        "logged": {name: columns[name] for name in columns if name not in {*rewards, reason}},
    }


def _signal(advantage: float | None) -> str:
    if advantage is None or abs(advantage) < ADVANTAGE_NOISE:
        return "no signal"
    return "above its group" if advantage > 0 else "below its group"


def _question(prompt: str | list[_Message], frame: tuple[int, int]) -> str:
    """Return the last message of a chat, or the part of a text in which the prompts differ."""
    if isinstance(prompt, str):
        return prompt[frame[0] : len(prompt) - frame[1]].strip()
    return prompt[-1].content if prompt else ""


def _frame(prompts: list[str]) -> tuple[int, int]:
    """Return the lengths of the common start and end of text prompts."""
    head = _shared_start(prompts)
    return head, _shared_start([prompt[head:][::-1] for prompt in prompts])


def _shared_start(texts: list[str]) -> int:
    """Return the length of the common start of different texts, up to a space between words."""
    first, last = min(texts, default=""), max(texts, default="")  # these two differ most
    if first == last:
        return 0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    shared = "".join(character for character, _ in same)
    return max(shared.rfind(" "), shared.rfind("\n")) + 1
