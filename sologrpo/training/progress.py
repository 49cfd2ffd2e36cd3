"""Progress of a run: seconds of a step by part, tokens per second, memory (`docs/metrics.md`)."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

PARTS = ("sampling", "sync_weights", "rewards", "data", "logprobs", "training")
GIB = 2**30

P = ParamSpec("P")
R = TypeVar("R")


class StepMeter(TrainerCallback):  # type: ignore[misc]
    """Measure every optimizer step, and put the figures among those that the trainer logs.

    A second belongs to one part: what runs inside another part is not counted there again. So the
    parts add up to the step, from before its first batch to after the optimizer's update. The rest
    is training.
    """

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        self._metrics = metrics
        self._start()

    def _start(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._tokens = {"sampling": 0, "training": 0}
        self._part = "training"
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of a block as this part of the step, one of `PARTS`."""
        outer = self._part
        self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(outer)

    def count(self, part: str, tokens: int) -> None:
        """Add tokens that were sampled, or trained on, in this step."""
        self._tokens[part] += tokens

    def _switch_to(self, name: str) -> None:
        if torch.cuda.is_available():
            # Kernels run after the call that started them: they would count as the next part's.
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._part, self._since = name, now

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop the time between the steps: logging, validation, checkpoints."""
        self._start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the figures of the step."""
        self._switch_to("training")
        for name, seconds in self._seconds.items():
            self._metrics[f"time/{name}"].append(seconds)
        for name, tokens in self._tokens.items():
            if tokens:
                self._metrics[f"tokens_per_second/{name}"].append(tokens / self._seconds[name])
        # Not means over the logged steps: the newest value holds for all of them.
        self._metrics["progress"] = [state.global_step / state.max_steps]
        for name, peak in peak_memory().items():
            self._metrics[name] = [peak]


def timed(
    part: str,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Count the seconds of a trainer's method as this part of the step; it has a `meter`."""

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @wraps(method)
        def timed_method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            meter: StepMeter = self.meter
            with meter.part(part):
                return method(self, *args, **kwargs)

        return timed_method

    return decorate


def peak_memory() -> dict[str, float]:
    """Return this process's peak memory in GiB: that of tensors on CUDA, otherwise main memory."""
    if torch.cuda.is_available():
        return {
            "memory/peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "memory/peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return {"memory/peak_rss_gib": kib * 1024 / GIB}
