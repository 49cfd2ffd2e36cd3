"""The plan of a run, printed before anything is loaded that costs time."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig

from rewards import Reward, parse_gold
from rewards.checking import reward_name
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import COMMAND_LINE, PROJECT, origins
from sologrpo.config.schedule import (
    batch_arithmetic,
    check_fills_a_batch,
    completions_of_a_step,
    optimizer_steps,
)
from sologrpo.console import print_line, print_warning
from sologrpo.data.dataset import describe_lengths, prompt_lengths, render_prompt
from sologrpo.device import describe_device, one_device
from sologrpo.errors import InputError
from sologrpo.model.loading import pick_dtype
from sologrpo.model.memory import free_bytes
from sologrpo.plan.footprint import Footprint, disk_bytes, footprint, free_disk_bytes
from sologrpo.plan.memory_plan import CPU_PROCESS, memory_mend, plan_memory
from sologrpo.plan.reward_check import aligned
from sologrpo.plan.trials import Bench, Trial, render, solution_of
from sologrpo.plan.warnings import suspicious_settings
from sologrpo.prompts import PROMPT_FORMATS
from sologrpo.training.run_directory import resolved_config


def print_plan(
    console: Console,
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    train_dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[Reward] = (),
) -> None:
    """Print what will run, the batch arithmetic spelled out, and what looks wrong.

    A dry run prints also where the settings come from, one rendered prompt, and what the rewards
    say of a made-up right and wrong answer to it.

    Raises:
        InputError: if the data does not fill one generation batch, or a prompt is longer than the
            model's context.
    """
    check_fills_a_batch(args, len(train_dataset))
    steps = optimizer_steps(args, len(train_dataset))
    size = footprint(model, args.trust_remote_code)
    needed, free = disk_bytes(args, size, steps), free_disk_bytes(Path(args.output_dir))
    lengths = prompt_lengths(train_dataset, tokenizer)
    device = torch.device(one_device())
    free_memory = free_bytes(device)
    on_gpu = device.type == "cuda"
    memory = plan_memory(size, args, lengths, on_gpu=on_gpu)
    as_process = "" if on_gpu else f" (the process up to {CPU_PROCESS} times that)"
    free_for_tensors = free_memory if on_gpu else int(free_memory / CPU_PROCESS)
    lines = [
        *plan_lines(run, args, model, lengths, size),
        ("memory", f"about {_gib(memory.peak(free_memory))}{as_process}, "
                   f"{_gib(free_memory)} free: "
                   f"weights and adapter {_gib(memory.held)}, "
                   f"sampling {_gib(memory.merged + memory.cache)}, "
                   f"training {_gib(memory.training)}"),
        ("run", f"{steps} optimizer steps, {describe_tokens(args, steps)}, {args.output_dir}"),
        ("disk", f"{_gib(needed)} of {_gib(free)} free"),
    ]  # fmt: skip
    if size.context is not None and max(lengths) >= size.context:
        raise InputError(
            f"a prompt of {max(lengths)} tokens is longer than the model's context of "
            f"{size.context}: leave such rows out with max_prompt_tokens"
        )
    for name, text in lines:
        print_line(console, f"{name:<8} {text}")
    if needed > free:
        print_warning(
            console,
            f"the run writes {_gib(needed)}, and the disk has {_gib(free)} free: lower "
            "save_total_limit, or take another output_dir",
        )
    mend = memory_mend(memory, free_for_tensors, args, bool(model.load_in_4bit))
    if mend is not None:
        print_warning(
            console,
            f"the run needs about {_gib(memory.needed)} of memory{as_process}, and "
            f"{_gib(free_memory)} are free: {mend}",
        )
    if size.context is not None and max(lengths) + args.max_completion_length > size.context:
        print_warning(
            console,
            f"the longest prompt has {max(lengths)} tokens, and with max_completion_length "
            f"{args.max_completion_length} a row goes beyond the model's context of "
            f"{size.context}, for which it was not trained",
        )
    for text in suspicious_settings(run, args, steps, tokenizer):
        print_warning(console, text)
    if run.dry_run:
        print_line(console, "\nsettings, and where they come from:")
        for line in setting_lines(run, args, model):
            print_line(console, line)
        print_line(console, "\nfirst prompt, as the model sees it:")
        print_line(console, render_prompt(train_dataset[0]["prompt"], tokenizer))
        print_line(console, "\nwhat the rewards say of made-up answers to it:")
        for line in score_lines(run, args, train_dataset.select([0]), tokenizer, rewards):
            print_line(console, line)


def describe_tokens(args: SoloGRPOConfig, steps: int) -> str:
    """Completions of the whole run, and their tokens if each is as long as it may be."""
    completions = math.ceil(steps / args.num_iterations) * completions_of_a_step(args)
    tokens = completions * args.max_completion_length
    return f"{completions:,} completions, at most {tokens:,} tokens"


def setting_lines(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> list[str]:
    """A line for each setting that is not TRL's default: key, value, origin."""
    values = resolved_config(run, args, model)  # with tokens masked
    found = [item for item in origins().items() if item[0] in values]
    width = max(len(key) for key, _ in found)
    lines = [
        f"{key:<{width}}  {_short(str(values[key]), 40):<40}  {origin}"
        for key, origin in sorted(found, key=_by_precedence)
    ]
    return [*lines, "everything else is TRL's default; config.yaml of a run names it all"]


def _by_precedence(setting: tuple[str, str]) -> tuple[bool, bool, str]:
    key, origin = setting
    return origin == PROJECT, origin != COMMAND_LINE, key


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def score_lines(
    run: RunArguments,
    args: SoloGRPOConfig,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[Reward],
) -> list[str]:
    """What each reward gives a right and a wrong completion of the first row, and their sum.

    Raises:
        RewardError: if a reward raises, or returns what cannot be trained on.
    """
    answer, prompt_format = rows[0]["answer"], PROMPT_FORMATS[run.prompt_format]
    gold = parse_gold(answer)
    texts = {
        "right": render(prompt_format, solution_of(answer), gold),
        "wrong": render(prompt_format, solution_of(answer), str(int(gold) + 1)),
        "no answer": solution_of(answer),
    }
    trials = [Trial(0, case, text) for case, text in texts.items()]
    bench = Bench(rows, len(trials), tokenizer, args.max_completion_length)
    weights = args.reward_weights or [1.0] * len(rewards)
    scores = [bench.scores(reward, trials) for reward in rewards]
    sums = [
        sum(weight * (column[i] or 0.0) for weight, column in zip(weights, scores, strict=True))
        for i in range(len(trials))
    ]
    names = ["", *map(reward_name, rewards), "weighted sum"]
    columns: list[Sequence[str | float | None]] = [list(texts), *scores, sums]
    lines = [[name, *map(_cell, values), ""] for name, values in zip(names, columns, strict=True)]
    return aligned(lines).splitlines()


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.2f}"


def plan_lines(
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    lengths: Sequence[int],
    size: Footprint,
) -> list[tuple[str, str]]:
    """What the run is made of, as (label, text) pairs; `lengths` are the prompts' tokens."""
    quantised = "4-bit NF4" if model.load_in_4bit else "not quantised"
    dtype = str(pick_dtype(model.dtype)).removeprefix("torch.")
    share = size.trainable / size.total
    return [
        ("device", f"{describe_device()}, {dtype}"),
        (
            "model",
            f"{model.model_name_or_path}, {size.total / 1e6:,.0f}M parameters, {quantised}, "
            f"{_gib(size.weights_bytes)}",
        ),
        (
            "adapter",
            f"LoRA r {model.lora_r}, {size.trainable / 1e6:,.1f}M parameters ({share:.1%}), "
            f"{_gib(size.adapter_bytes)} with gradient and optimizer",
        ),
        ("data", f"{run.dataset_name}: {len(lengths)} prompts, {describe_lengths(lengths)}"),
        ("rewards", ", ".join(str(reward) for reward in run.rewards)),
        ("batch", batch_arithmetic(args)),
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"
