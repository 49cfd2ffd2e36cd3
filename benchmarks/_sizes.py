"""Sizes of the work that `cpu.py` measures, and the object that its parts share."""

from dataclasses import dataclass
from pathlib import Path

from _measure import Report


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; the defaults are those of `make bench`.

    Attributes:
        shrink: what the tokens of a cell are divided by.
        rounds: rounds of every comparison, if there is enough time; two are always taken.
        seconds: after which a comparison begins no third round.
        sampling_prompts: prompts of the sampling part, with 8 completions each.
        problems: test problems of the evaluation part.
        user_steps: steps of each process of the user part, after one that does not count.
        run_reward: mean reward of three steps that the run part waits for.
        run_steps: optimizer steps of the complete run.
        run_seconds: after which the run with stock TRL is given up.
    """

    shrink: int = 1
    rounds: int = 4
    seconds: float = 60.0
    sampling_prompts: int = 8
    problems: int = 256
    user_steps: int = 2
    run_reward: float = 0.4
    run_steps: int = 32
    run_seconds: float = 900.0


# Enough to check that every part works; the figures are meaningless.
REHEARSAL = Sizes(
    shrink=10,
    rounds=2,
    seconds=0.0,
    sampling_prompts=2,
    problems=6,
    user_steps=1,
    run_reward=-1.0,
    run_steps=2,
    run_seconds=60.0,
)


@dataclass(frozen=True)
class Bench:
    """The context of every measurement: what to measure, and how much of it.

    Attributes:
        report: takes the rows.
        model: folder of the policy.
        sizes: of the work.
        scratch: output directory of the trainers, which save nothing there.
        seed: of the made-up prompts and completions.
    """

    report: Report
    model: Path
    sizes: Sizes
    scratch: Path
    seed: int = 0
