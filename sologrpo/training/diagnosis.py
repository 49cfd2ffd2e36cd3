"""Warnings during a run: problems that keep it from learning, and how to fix them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from sologrpo.base.console import print_warning
from sologrpo.base.logs import Warned, append_warning
from sologrpo.training.advantages import OF_A_KIND

LASTING = 5  # steps in a row that are not chance
TREND = 10  # steps at either end that are compared
START = 3  # steps in which the adapter has hardly moved
MUCH_TRUNCATED = 0.5
MUCH_SILENT = 0.5  # groups without signal: more than half of the sampling is wasted
NOTABLE = 0.25  # of the groups without signal: below it, a cause is not worth a change
# Of the first entropy. Quickstarts whose groups became silent fell to 0.02-0.06 of it.
COLLAPSED = 0.1
# Groups that give the same wrong answer each time. Below one in five, a certain model is mostly a
# model that has learned.
STUCK = 0.2
# Steps before a kind counts as not learned: a quickstart had no right division in its first 17.
LATE = 2 * TREND
HARDER = "take harder problems"
EASIER = (
    "take easier problems, worked examples, a larger num_generations or a longer "
    "max_completion_length"
)


class Diagnosis(TrainerCallback):  # type: ignore[misc]
    """Print a warning when the metrics show that a run is not learning."""

    def __init__(self, console: Console, max_completion_length: int) -> None:
        self._console = console
        self._limit = max_completion_length
        self._printed: set[str] = set()
        self._history: dict[str, list[float]] = defaultdict(list)
        self._before: dict[str, tuple[float, float]] | None = None
        self._adapter_is_checked = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the metrics of a step that sampled."""
        if logs is None or logs.get("reward") is None or not state.is_world_process_zero:
            return
        for key, value in logs.items():
            if isinstance(value, int | float):
                self._history[key].append(float(value))
        for topic, text in findings(self._history, self._limit):
            self._warn(args, state, state.global_step, topic, text)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **kwargs: Any,
    ) -> None:
        """Remember the adapter before the first update that should move it."""
        moves = any(group["lr"] > 0 for group in optimizer.param_groups)
        if self._adapter_is_checked or not moves:
            return
        if any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None):
            self._before = _checksums(model)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module,
        **kwargs: Any,
    ) -> None:
        """Warn if that update left the adapter as it was."""
        if self._before is None:
            return
        before, self._before, self._adapter_is_checked = self._before, None, True
        if before == _checksums(model):
            self._warn(
                args,
                state,
                state.global_step + 1,  # counted after this event
                "adapter",
                "the first update has not changed the adapter, though the gradient is not zero: "
                "the learning rate is too small for the number format of its weights; use "
                "--trainer solo, which keeps them in fp32, or a higher learning_rate",
            )

    def _warn(
        self, args: TrainingArguments, state: TrainerState, step: int, topic: str, text: str
    ) -> None:
        if topic in self._printed or not state.is_world_process_zero:
            return
        self._printed.add(topic)
        print_warning(self._console, f"step {step}: {text}")
        append_warning(Path(args.output_dir), Warned(step=step, topic=topic, text=text))


def _checksums(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Sum every trainable tensor in two ways, in fp64: an update of 1e-7 shows."""
    return {
        name: (float(p.detach().double().sum()), float(p.detach().double().square().sum()))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def findings(history: Mapping[str, list[float]], limit: int) -> Iterator[tuple[str, str]]:
    """Find problems in the metrics, oldest value first; yield (topic, warning)."""
    yield from _about_truncation(history.get("completions/clipped_ratio", []), limit)
    yield from _about_signal(history)
    yield from _about_entropy(history)
    yield from _about_kinds(history)


def _about_truncation(ratios: list[float], limit: int) -> Iterator[tuple[str, str]]:
    if ratios and ratios[0] == 1.0:
        yield (
            "truncation",
            f"every completion of the first batch was cut off at {limit} tokens: no answer can be "
            "right; raise max_completion_length",
        )
    elif len(ratios) >= TREND and min(ratios[-TREND:]) >= MUCH_TRUNCATED:
        yield (
            "truncation",
            f"for {TREND} steps at least {MUCH_TRUNCATED:.0%} of the completions were cut off at "
            f"{limit} tokens: raise max_completion_length, or set mask_truncated_completions true",
        )


def _about_signal(history: Mapping[str, list[float]]) -> Iterator[tuple[str, str]]:
    silent = history.get("frac_reward_zero_std", [])
    if len(silent) >= LASTING and min(silent[-LASTING:]) == 1.0:
        fixes = _fixes_of_silence(history, LASTING)
        yield ("signal", f"no group had a signal for {LASTING} steps; {fixes}")
    elif len(silent) >= TREND and (share := fmean(silent[-TREND:])) > MUCH_SILENT:
        fixes = _fixes_of_silence(history, TREND)
        yield (
            "little signal",
            f"{share:.0%} of the groups had no signal in the last {TREND} steps; {fixes}",
        )


def _fixes_of_silence(history: Mapping[str, list[float]], steps: int) -> str:
    """Name the share of each cause that is worth a change in the last steps, and the change."""
    notable = NOTABLE * fmean(history["frac_reward_zero_std"][-steps:])
    fixes = []
    for cause, fix in (("right", HARDER), ("wrong", EASIER)):
        shares = history.get(f"degenerate/all_{cause}", [])
        if shares and (share := fmean(shares[-steps:])) >= notable:
            fixes.append(f"{share:.0%} were all {cause}: {fix}")
    return "; ".join(fixes) or "take other problems, or a larger num_generations"


def _about_entropy(history: Mapping[str, list[float]]) -> Iterator[tuple[str, str]]:
    entropy = history.get("entropy", [])
    silent = history.get("frac_reward_zero_std", [])
    if len(entropy) < 2 * TREND or not silent:
        return
    before, now = fmean(entropy[:START]), fmean(entropy[-TREND:])
    stuck = fmean(silent[-TREND:]) - fmean(history.get("degenerate/all_right", [0.0])[-TREND:])
    reward = history["reward"]
    # A certain model may still learn: quickstarts gained most of their accuracy after the collapse.
    is_rising = fmean(reward[-TREND:]) > fmean(reward[-2 * TREND : -TREND])
    if now < COLLAPSED * before and stuck >= STUCK and not is_rising:
        yield (
            "entropy",
            f"entropy fell from {before:.2g} to {now:.2g} nats per token, {stuck:.0%} of the "
            "groups have no signal though they are not solved, and reward has not risen for "
            f"{TREND} steps: the model hardly explores any more; lower learning_rate, raise "
            "temperature, or set epsilon_high 0.28 where clip_ratio/high_mean is above 0",
        )


def _about_kinds(history: Mapping[str, list[float]]) -> Iterator[tuple[str, str]]:
    if len(history["reward"]) < LATE:
        return
    rates = {
        key.removeprefix(OF_A_KIND): values
        for key, values in history.items()
        if key.startswith(OF_A_KIND)
    }
    if not any(any(values[-LASTING:]) for values in rates.values()):
        return
    for kind, values in rates.items():
        if len(values) >= LASTING and not any(values):
            yield (
                f"kind {kind}",
                f"no problem of kind {kind!r} was ever solved, in {len(values)} steps that had "
                "one, while other kinds are: show one in worked_examples, add easier ones, raise "
                "num_generations, or leave the kind out",
            )
