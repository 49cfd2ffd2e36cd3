"""Training steps of stock TRL and of ours on a CPU: time, memory, and their growth."""

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _llama import build_config, build_prompts, build_tokenizer
from _measure import Row, alternate, compare, free_memory
from _sizes import Bench, Sizes
from _trainers import (
    Contender,
    Settings,
    Workload,
    build,
    gradient_gap,
    quickstart_workload,
    settings_for,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

# Shares of groups in which all completions have the same reward.
DEGENERATE = (0.0, 0.5, 0.75)


def step_workload(bench: Bench, prompts: int | None = None, **changes: Any) -> Workload:
    """Build a step of the quickstart's problems, on completions that the model sampled once.

    Args:
        bench: names the policy, and the sizes of the step.
        prompts: of the step, if not those of the sizes; their completions are kept apart.
        changes: of the config.
    """
    sizes, prompts = bench.sizes, prompts or bench.sizes.prompts
    shape = {
        "num_generations": sizes.generations,
        "per_device_train_batch_size": sizes.micro_batch,
        "gradient_accumulation_steps": prompts * sizes.generations // sizes.micro_batch,
        "max_completion_length": sizes.completion_tokens,
    }
    workload = quickstart_workload(settings_for(bench.model, bench.scratch, **shape | changes))
    workload.kept_in = bench.samples.with_suffix(f".{prompts}.json")
    workload.load()
    return workload


def warm_up(contenders: dict[str, Contender]) -> None:
    """Let each contender take a step; the first one's samples are everybody's completions."""
    for contender in contenders.values():
        contender.workload.degenerate = DEGENERATE[-1]  # quick for ours
        contender.train()
        contender.workload.degenerate = 0.0
        contender.workload.save()


def compare_steps(contenders: dict[str, Contender], repeats: int, seconds: float, row: Row) -> None:
    """Time the training part of equal steps, and measure how far the gradients are apart.

    The first contender is compared with itself too, from one round to the next: what any two
    computations of the same gradient differ by.
    """
    first = next(iter(contenders.values()))
    # Gradients of the first round only: copies of all of them would fill the memory.
    gradients = {}

    def run(name: str, i: int) -> Row:
        contender = contenders[name]
        again = i == 1 and contender is first
        times = contender.train(seed=i, capture=i == 0 or again)
        if i == 0:
            gradients[name] = contender.gradients
        elif again:
            row["repeat_gap"] = gradient_gap(gradients[name], contender.gradients)
        contender.gradients = []
        return times

    measured = alternate({name: partial(run, name) for name in contenders}, repeats, seconds)
    row |= compare(measured, "training_s") | first.workload.describe()
    row["gradient_gap"] = {
        name: gradient_gap(gradients[first.name], gradients[name])
        for name in contenders
        if name != first.name
    }


def compare_sampling(
    contenders: dict[str, Contender],
    prompts: list[list[int]],
    repeats: int,
    seconds: float,
    row: Row,
) -> None:
    """Time each contender's own sampling of one completion for each row of prompts."""
    runs = {name: partial(contender.sample, prompts) for name, contender in contenders.items()}
    measured = alternate(runs, repeats, seconds)
    row |= compare(measured, "tokens_per_s", rate=True)
    row["rows"] = len(prompts)
    row["seconds"] = {name: [round(run["seconds"], 4) for run in measured[name]] for name in runs}
    row["tokens"] = {name: [run["tokens"] for run in measured[name]] for name in runs}


# --- the parts ------------------------------------------------------------------------------------


def part_step(bench: Bench) -> None:
    """Measure a training step on the same completions, and its sampling."""
    workload = step_workload(bench)
    contenders = build(["stock", "solo"], workload)
    warm_up(contenders)
    repeats = bench.sizes.repeats
    for i, share in enumerate(DEGENERATE):
        workload.degenerate = share
        seconds = bench.report.time_left() / (len(DEGENERATE) + 1 - i)
        measure = partial(compare_steps, contenders, repeats, seconds)
        bench.variant("step", measure, case="training", degenerate=share)
    assert workload.prompts is not None
    seconds = bench.report.time_left()
    measure = partial(compare_sampling, contenders, workload.prompts, repeats, seconds)
    bench.variant("step", measure, case="sampling")


def part_sharing(bench: Bench) -> None:
    """Measure the same step with and without `share_prompts`, to choose its default."""
    workload = step_workload(bench)
    contenders = build(["stock", "solo", "solo_unshared"], workload)
    warm_up(contenders)
    repeats, seconds = bench.sizes.repeats, bench.report.time_left()
    bench.variant("sharing", partial(compare_steps, contenders, repeats, seconds))


VARIANTS: dict[str, dict[str, Any]] = {
    "beta 0.02": {"beta": 0.02},
    "num_iterations 2": {"num_iterations": 2, "max_steps": 2},
}


def part_variants(bench: Bench) -> None:
    """Measure a step on half the prompts with a reference model, and two steps on one batch."""
    for i, (variant, changes) in enumerate(VARIANTS.items()):
        workload = step_workload(bench, bench.sizes.prompts // 2, **changes)
        contenders = build(["stock", "solo"], workload)
        warm_up(contenders)
        seconds = bench.report.time_left() / (len(VARIANTS) - i)
        measure = partial(compare_steps, contenders, bench.sizes.repeats, seconds)
        bench.variant("variants", measure, variant=variant)
        del contenders, measure
        free_memory()


def part_memory(bench: Bench) -> None:
    """Peak memory of a process that does nothing but one whole step of one contender."""
    bench.variant("memory", partial(measure_memory, bench, bench.labels["contender"]))


def measure_memory(bench: Bench, contender: str, row: Row) -> None:
    """Take one step, sampling included, and read the peak memory of this process."""
    only = build([contender], step_workload(bench))[contender]
    only.samples = True
    row["before_gib"] = round(resident_gib("VmRSS"), 3)
    row["step_s"] = round(only.train()["step_s"], 3)
    row["peak_gib"] = round(resident_gib("VmHWM"), 3)


def resident_gib(field: str) -> float:
    """Read the memory of this process in GiB: current (`VmRSS`) or peak (`VmHWM`).

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, f"no {field}"
    return int(found[1]) / 2**20


def part_growth(bench: Bench) -> None:
    """Measure a training step as the group, the completions and the model grow."""
    cases = growth_cases(bench.sizes)
    for i, (series, case) in enumerate(cases):
        seconds = bench.report.time_left() / (len(cases) - i)
        measure = partial(measure_growth, bench, case, i == 0, seconds)
        bench.variant("growth", measure, series=series, **case)


def growth_cases(sizes: Sizes) -> list[tuple[str, dict[str, Any]]]:
    """List the series of growing sizes, each with the sizes of the step."""
    shapes = sizes.growth_shapes
    base = {
        "generations": sizes.growth_generations[0],
        "tokens": sizes.growth_tokens[0],
        "shape": shapes[len(shapes) // 2],
    }
    series: dict[str, Sequence[Any]] = {
        "generations": sizes.growth_generations,
        "tokens": sizes.growth_tokens,
        "shape": shapes,
    }
    return [(name, {**base, name: value}) for name, values in series.items() for value in values]


def measure_growth(
    bench: Bench, case: dict[str, Any], warm: bool, seconds: float, row: Row
) -> None:
    """Compare a step of one size; few repeats."""
    contenders = build(["stock", "solo"], growth_workload(bench, **case))
    if warm:  # for what is set up once per process
        for contender in contenders.values():
            contender.train()
    compare_steps(contenders, min(bench.sizes.repeats, 3), seconds, row)


def growth_workload(
    bench: Bench, generations: int, tokens: int, shape: str, **changes: Any
) -> Workload:
    """Build random prompts and completions for a model with random weights."""
    sizes, config = bench.sizes, build_config(shape)
    rows = sizes.growth_prompts * generations
    micro_batch = min(sizes.micro_batch, rows)
    settings: Settings = settings_for(
        shape,
        bench.scratch,
        num_generations=generations,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        max_completion_length=tokens,
        **changes,
    )
    tokenizer = build_tokenizer(config.vocab_size)
    # One prompt more than is trained on: TRL's sampler drops an incomplete batch.
    dataset = build_prompts(sizes.growth_prompts + 1, sizes.growth_prompt_tokens, len(tokenizer))
    make = _ragged_completions(tokens, len(tokenizer) - 16, int(tokenizer.eos_token_id))
    return Workload(settings, tokenizer, dataset, partial(_random_model, shape), invent=make)


def _random_model(shape: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        build_config(shape), dtype=torch.float32, attn_implementation="sdpa"
    )


def _ragged_completions(
    longest: int, vocabulary: int, end_id: int
) -> Callable[[list[list[int]]], list[list[int]]]:
    """Build completions of a quarter of the limit up to all of it; the first one has all of it."""

    def make(prompts: list[list[int]]) -> list[list[int]]:
        rng = random.Random(0)
        lengths = [longest, *(rng.randint(longest // 4, longest) for _ in prompts[1:])]
        made = [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]
        return [ids if len(ids) == longest else [*ids[:-1], end_id] for ids in made]

    return make
