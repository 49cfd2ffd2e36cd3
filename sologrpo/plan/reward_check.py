"""Check rewards before a run: right answers must earn most, and tricks must not pay.

GRPO finds every hole in a reward, and a run that found one looks like success. The check scores
with each reward:

- the gold answer of every training row, written as a well-formed completion,
- for a few rows, a very long right answer, one without reasoning, and tricks without one.

It needs no model. Without the run's tokenizer, rewards that take token ids are left out.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rewards import Reward, RewardError, load_rewards
from rewards.completions import Scores
from rewards.errors import escaped
from sologrpo.config.parsing import parse_config
from sologrpo.console import aligned, quiet_libraries
from sologrpo.data.dataset import build_prompts, load_rows
from sologrpo.errors import one_line_errors
from sologrpo.plan.trials import Answers, Bench, Trial
from sologrpo.prompts import PROMPT_FORMATS

ROUNDING = 1e-9  # sums of scores that differ by less are equal
SHOWN_CHARACTERS = 100  # of a completion that got more than it should


@dataclass
class RewardResult:
    """Result of one reward.

    Attributes:
        name: of the reward.
        weight: in the sum that is trained on.
        takes_token_ids: whether it declares the parameter `completion_ids`.
        scores: a score, or None, for every trial; empty if the reward could not be called.
        golds_judged: rows whose gold answer got a score other than None.
        golds_at_best: rows whose gold answer got the best score seen.
        problems: failed checks.
        remarks: notes that fail no check.
        fault: the traceback of the reward, and the completion on which it failed.
    """

    name: str
    weight: float
    takes_token_ids: bool = False
    scores: Scores = field(default_factory=list)
    golds_judged: int = 0
    golds_at_best: int = 0
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    fault: str = ""

    @property
    def judged(self) -> list[float]:
        """The scores other than None."""
        return [score for score in self.scores if score is not None]

    @property
    def best(self) -> float:
        """The score that earns most: with a negative weight, the lowest."""
        return min(self.judged) if self.weight < 0 else max(self.judged)


@dataclass
class HostileResult:
    """The reward of a trick, for the row where it pays best.

    Attributes:
        case: description of the trick.
        weighted_sum: sum of its weighted scores.
        right_sum: sum that the right answer to the same row earns.
        evidence: gold answer, scores and completion of that row.
    """

    case: str
    weighted_sum: float
    right_sum: float
    evidence: str

    @property
    def margin(self) -> float:
        """Weighted sum of the trick minus that of the right answer."""
        return self.weighted_sum - self.right_sum

    @property
    def problem(self) -> str:
        """Describe a trick that pays; empty if it does not."""
        if self.margin < -ROUNDING:
            return ""
        sums = f"pays {self.weighted_sum:g}, the right answer {self.right_sum:g}"
        return f"{sums}; {self.evidence}"


@dataclass
class Report:
    """Outcome of a check; `text` renders it."""

    title: str
    rewards: list[RewardResult]
    hostile: list[HostileResult]

    @property
    def failures(self) -> int:
        """Number of failed checks."""
        problems = sum(len(reward.problems) for reward in self.rewards)
        return problems + sum(bool(result.problem) for result in self.hostile)

    def text(self) -> str:
        """Render the rewards, the tricks, the failures and the verdict."""
        parts = [self.title, self._reward_table(), self._hostile_table(), *self._notes()]
        count = self.failures
        verdict = f"{_counted(count, 'check')} failed" if count else "all checks passed"
        return "\n\n".join([part for part in parts if part] + [verdict])

    def _reward_table(self) -> str:
        lines = [["reward", "weight", "min", "max", "golds at best", ""]]
        for reward in self.rewards:
            scores, verdict = reward.judged, "FAIL" if reward.problems else "ok"
            low_high = [_number(min(scores)), _number(max(scores))] if scores else ["-", "-"]
            golds = f"{reward.golds_at_best:,} of {reward.golds_judged:,}" if scores else "-"
            verdict = verdict if reward.scores or reward.problems else "not checked"
            lines.append([reward.name, f"{reward.weight:g}", *low_high, golds, verdict])
        return aligned(lines)

    def _hostile_table(self) -> str:
        if not self.hostile:
            return ""
        lines = [["hostile completion", "weighted sum", "right answer's", ""]]
        for result in self.hostile:
            sums = [f"{result.weighted_sum:.2f}", f"{result.right_sum:.2f}"]
            lines.append([result.case, *sums, "FAIL" if result.problem else "ok"])
        return aligned(lines)

    def _notes(self) -> list[str]:
        failed = [f"FAIL {r.name}: {problem}" for r in self.rewards for problem in r.problems]
        failed += [f"FAIL {r.case}: {r.problem}" for r in self.hostile if r.problem]
        remarks = [f"remark {r.name}: {remark}" for r in self.rewards for remark in r.remarks]
        if not self.hostile:
            remarks.append("not checked: the hostile completions, as a reward cannot be called")
        faults = [f"{r.name}:\n{r.fault}" for r in self.rewards if r.fault]
        return ["\n".join(failed), *faults, "\n".join(remarks)]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _number(score: float) -> str:
    return f"{score + 0.0:g}"  # the sum of -0.0 and 0.0 has no sign


# --- the check ----------------------------------------------------------------------------------


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Print the check of a run's rewards; exit with 1 if a check failed.

    Args:
        argv: as for `sologrpo train`.
    """
    quiet_libraries()
    report = check_run(argv)
    print(escaped(report.text()))
    sys.exit(1 if report.failures else 0)


def check_run(argv: Sequence[str]) -> Report:
    """Check the rewards of a run.

    Args:
        argv: ``--config NAME`` and ``--key value`` pairs, for example
            ``["--config", "quickstart", "--rewards", "my_rewards:short"]``.

    Raises:
        InputError: for bad input, as in training.
        RewardSpecError: for bad input in `rewards`.
    """
    run, args, model_args = parse_config(argv)
    model, limit = model_args.model_name_or_path, args.max_completion_length
    tokenizer = load_local_tokenizer(model, args.trust_remote_code)
    rows = load_rows(run.dataset_name, run.dataset_train_split, run.dataset_config)
    rows = build_prompts(rows, run, tokenizer)
    rewards = load_rewards(run.rewards, rows.column_names, run.reward_timeout, run.reward_workers)
    weights = args.reward_weights or [1.0] * len(rewards)
    results = [_result_of(*pair) for pair in zip(rewards, weights, strict=True)]
    bench = Bench(rows, args.generation_batch_size, tokenizer, limit)
    answers = Answers(rows.to_dict()["answer"], PROMPT_FORMATS[run.prompt_format], limit)

    trials = answers.trials(run.system_prompt)
    for reward, result in zip(rewards, results, strict=True):
        if result.takes_token_ids and tokenizer is None:
            result.remarks.append(f"not checked: needs the tokenizer of {model}")
        else:
            check_reward(result, reward, trials, bench, answers)
    hostile = check_hostile(results, trials, answers.golds)
    title = (
        f"{_counted(len(rewards), 'reward')}, prompt format {run.prompt_format}, "
        f"{len(rows):,} rows of {run.dataset_name} ({run.dataset_train_split})"
    )
    return Report(title, results, hostile)


def _result_of(reward: Any, weight: float) -> RewardResult:
    return RewardResult(reward.__name__, weight, reward.takes_token_ids)


def load_local_tokenizer(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Load the run's tokenizer, or return None if it would have to be downloaded."""
    try:
        return AutoTokenizer.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError):
        return None


# --- right answers ------------------------------------------------------------------------------


def check_reward(
    result: RewardResult, reward: Reward, trials: list[Trial], bench: Bench, answers: Answers
) -> None:
    """Score all trials with one reward, and enter what fails into its result.

    Args:
        result: of this reward; changed in place.
        reward: to call.
        trials: the golds of all rows first, in order.
        bench: calls the reward.
        answers: of the rows.
    """
    try:
        result.scores = bench.scores(reward, trials)
        _check_golds(result, reward, bench, answers)
    except RewardError as error:
        result.problems.append(str(error).removeprefix(f"reward {result.name!r} "))
        result.fault = error.details.strip()


def _check_golds(result: RewardResult, reward: Reward, bench: Bench, answers: Answers) -> None:
    # A reward with weight 0 is only logged, so it can do no harm.
    problems = result.problems if result.weight else result.remarks
    if not result.judged:
        problems.append("returned None for every completion: it teaches nothing")
        return
    if min(result.judged) == max(result.judged):
        score = _number(result.judged[0])
        problems.append(f"gives {score} to every completion: a constant teaches nothing")
    golds, best = result.scores[: len(answers.golds)], result.best
    short = [row for row, score in enumerate(golds) if score not in (None, best)]
    result.golds_judged = len(golds) - golds.count(None)
    result.golds_at_best = result.golds_judged - len(short)
    if unjudged := golds.count(None):
        result.remarks.append(f"cannot judge {unjudged:,} of {len(golds):,} golds (None)")
    # The model will not write at the length of the reference solutions: not a problem.
    by_length = short
    if not result.takes_token_ids:
        by_length = _short_by_length(result, short, reward, bench, answers)
    if others := sorted({*short} - {*by_length}):
        problems.append(_shortfall(result, others, answers))
    if by_length:
        result.remarks.append(_shortfall(result, by_length, answers) + ", for its length")


def _short_by_length(
    result: RewardResult, rows: list[int], reward: Reward, bench: Bench, answers: Answers
) -> list[int]:
    """Find the rows that miss the best score only because of their length.

    There, meaningless reasoning of the same length gets the same score, and a shorter or a longer
    one a better score. A reward that misreads the answer fails one of the two.
    """

    def scores(reasoning: Callable[[int], str]) -> Scores:
        trials = [answers.right(row, reasoning(row), "right answer, filler") for row in rows]
        return bench.scores(reward, trials)

    same = scores(lambda row: re.sub(r"\S", "x", answers.solutions[row]))
    short, long = scores(lambda row: ""), scores(lambda row: answers.long_reasoning)
    return [
        row
        for row, *others in zip(rows, same, short, long, strict=True)
        if others[0] == result.scores[row]
        and any(_is_better(score, result.scores[row], result.weight) for score in others[1:])
    ]


def _is_better(score: float | None, than: float | None, weight: float) -> bool:
    if score is None or than is None:
        return False
    return score < than if weight < 0 else score > than


def _shortfall(result: RewardResult, rows: list[int], answers: Answers) -> str:
    first = rows[0]
    return (
        f"{len(rows):,} of {result.golds_judged:,} golds miss the best score "
        f"{_number(result.best)}; the first is row {first + 1}, gold {answers.golds[first]}: "
        f"{_number(result.scores[first] or 0.0)}"
    )


# --- tricks -------------------------------------------------------------------------------------


def check_hostile(
    results: Sequence[RewardResult],
    trials: list[Trial],
    golds: list[str],
) -> list[HostileResult]:
    """Compare the weighted sum of every trick with that of the right answer.

    The right answer's sum is the best that a right completion to the row earned.

    Args:
        results: of all rewards.
        trials: that were scored.
        golds: of all rows.

    Returns:
        One result per trick; none if a reward that counts could not be called, as the sums would
        mean nothing without it.
    """
    if any(r.weight and r.problems and not r.scores for r in results):
        return []
    sums = _weighted_sums(results, len(trials))
    right_sums: dict[int, float] = {}
    for trial, value in zip(trials, sums, strict=True):
        if trial.right:
            right_sums[trial.row] = max(value, right_sums.get(trial.row, -math.inf))

    worst: dict[str, HostileResult] = {}
    for index, trial in enumerate(trials):
        if trial.right:
            continue
        evidence = _evidence(index, trial, results, golds)
        result = HostileResult(trial.case, sums[index], right_sums[trial.row], evidence)
        if trial.case not in worst or result.margin > worst[trial.case].margin:
            worst[trial.case] = result
    return list(worst.values())


def _weighted_sums(results: Sequence[RewardResult], count: int) -> list[float]:
    """Add the weighted scores as the trainer does: None counts as 0."""
    sums = [0.0] * count
    for result in results:
        for index, score in enumerate(result.scores):
            sums[index] += result.weight * (score or 0.0)
    return sums


def _evidence(index: int, trial: Trial, results: Sequence[RewardResult], golds: list[str]) -> str:
    scores = ", ".join(f"{r.name} {r.scores[index]}" for r in results if r.scores)
    cut = "..." * (len(trial.text) > SHOWN_CHARACTERS)
    return f"gold {golds[trial.row]}, {scores}, completion {cut}{trial.text[-SHOWN_CHARACTERS:]!r}"
