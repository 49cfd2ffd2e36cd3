"""Sizes of the work that `cpu.py` measures, and the object that its parts share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import Report, Row


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; the defaults are those of `make bench`.

    Attributes:
        prompts: prompts of a step; with `generations` each.
        micro_batch: completions that stock TRL holds in one forward pass.
        completion_tokens: limit of a completion in a step.
        repeats: rounds of every comparison, if there is enough time.
        sampling_prompts: prompts of the sampling part, `generations` completions each.
        sampling_tokens: limits of a completion in the sampling part.
        problems: test problems of the evaluation part.
        evaluation_tokens: limit of an answer there.
        growth_prompts: prompts of a step in the growth part.
        growth_prompt_tokens: their length.
        growth_generations: completions of a prompt; the first is the base of the other two series.
        growth_tokens: limits of a completion; likewise.
        growth_shapes: sizes of the model, from `_llama.SHAPES`; the middle one is the base.
        run_reward: mean reward of three steps at which a complete run stops.
    """

    prompts: int = 4
    generations: int = 8
    micro_batch: int = 8
    completion_tokens: int = 96
    repeats: int = 5
    sampling_prompts: int = 8
    sampling_tokens: tuple[int, ...] = (48, 128)
    problems: int = 256
    evaluation_tokens: int = 48
    growth_prompts: int = 2
    growth_prompt_tokens: int = 100
    growth_generations: tuple[int, ...] = (4, 8, 16, 32)
    growth_tokens: tuple[int, ...] = (128, 256, 512, 1024)
    growth_shapes: tuple[str, ...] = ("tiny", "25m", "135m")
    run_reward: float = 0.4


# Enough to check that every part works; the figures are meaningless.
SMOKE = Sizes(
    prompts=2,
    generations=2,
    micro_batch=2,
    completion_tokens=12,
    repeats=2,
    sampling_prompts=2,
    sampling_tokens=(8,),
    problems=6,
    evaluation_tokens=8,
    growth_prompt_tokens=20,
    growth_generations=(2, 4),
    growth_tokens=(8, 16),
    growth_shapes=("tiny",),
    run_reward=-1.0,
)


@dataclass(frozen=True)
class Bench:
    """The context of every part: what to measure, how much of it, and where to write it.

    Attributes:
        report: takes the rows.
        model: folder of the policy.
        sizes: of the work.
        samples: name of the files with the completions of a step, which the first process writes.
        labels: of all rows: `allocator`, and `contender` if a process has only one.
    """

    report: Report
    model: Path
    sizes: Sizes
    samples: Path
    labels: dict[str, Any]

    @property
    def scratch(self) -> Path:
        """Output directory of the trainers, which save nothing there."""
        return self.samples.parent / "output"

    def variant(self, part: str, measure: Callable[[Row], None], **labels: Any) -> None:
        """Measure one variant into a row."""
        self.report.variant(part, measure, **labels, **self.labels)
