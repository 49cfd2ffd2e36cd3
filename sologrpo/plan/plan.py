"""Print the plan of a run before anything is loaded that takes time."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig

from sologrpo.base.console import gibibytes, print_line, print_warning
from sologrpo.base.device import describe_device, one_device
from sologrpo.base.errors import InputError
from sologrpo.base.redact import redact
from sologrpo.base.text import shortened
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import COMMAND_LINE, PROJECT
from sologrpo.config.schedule import (
    batch_arithmetic,
    check_fills_a_batch,
    completions_of_a_step,
    optimizer_steps,
)
from sologrpo.data.dataset import describe_lengths, prompt_token_ids, render_prompt
from sologrpo.model.attention import SDPA
from sologrpo.model.loading import dtype_name, pick_dtype
from sologrpo.model.memory import bytes_for_tensors, cpu_process, free_bytes
from sologrpo.plan.footprint import Footprint, disk_bytes, footprint, free_disk_bytes
from sologrpo.plan.memory_plan import MemoryPlan, memory_fix, plan_memory
from sologrpo.plan.warnings import suspicious_settings
from sologrpo.sampling.shared_cache import shared_beginning
from sologrpo.training.drop_in import unpacked_reason
from sologrpo.training.packed_loss import sharing_obstacle
from sologrpo.training.run_directory import resolved_config


def print_plan(
    console: Console,
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    train_dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    policy: PeftModel,
    gflops: Mapping[str, int],
) -> None:
    """Print the plan of a run, with the batch arithmetic spelled out, and its likely problems.

    A dry run also prints the origin of each setting, and one rendered prompt.

    Raises:
        InputError: if the data does not fill one generation batch, or a prompt is longer than the
            model's context.
    """
    check_fills_a_batch(args, len(train_dataset))
    steps = optimizer_steps(args, len(train_dataset))
    prompts = prompt_token_ids(train_dataset["prompt"], tokenizer)
    lengths = list(map(len, prompts))
    in_trl = unpacked_reason(args, {"model": policy, "train_dataset": train_dataset})
    if run.trainer == "stock":
        in_trl = "trainer: stock"
    attention = model.attn_implementation or (SDPA if policy._supports_sdpa else "eager")
    planned = copy.copy(args)
    planned.share_prompts = in_trl is None and not sharing_obstacle(args, policy, attention)
    needs = _compute_needs(
        planned, footprint(policy, model), lengths, shared_beginning(prompts), steps, in_trl is None
    )
    device = f"{describe_device()}, {_describe_format(model, gflops)}"
    lines = _plan_lines(run, planned, model, lengths, needs)
    if in_trl is not None:
        lines.append(("passes", f"as in TRL ({in_trl})"))
    for name, text in (("device", device), *lines):
        print_line(console, f"{name:<8} {text}")
    for text in (
        *_shortages(needs, args, model),
        *suspicious_settings(run, args, steps, tokenizer),
    ):
        print_warning(console, text)
    if run.dry_run:
        print_line(console, "\nsettings, and where they come from:")
        print_line(console, _setting_lines(run, args, model))
        print_line(console, "\nfirst prompt, as the model sees it:")
        print_line(console, render_prompt(train_dataset[0]["prompt"], tokenizer))


@dataclass(frozen=True)
class _Needs:
    steps: int
    longest_prompt: int
    size: Footprint
    memory: MemoryPlan
    free_memory: int
    free_for_tensors: int
    process: float
    on_gpu: bool
    disk: int
    free_disk: int

    @property
    def overhead(self) -> str:
        """Note that a process on a CPU takes more memory than its tensors."""
        return "" if self.on_gpu else f" (the process up to {self.process} times that)"


def _compute_needs(
    args: SoloGRPOConfig,
    size: Footprint,
    lengths: Sequence[int],
    root_T: int,
    steps: int,
    packed: bool,
) -> _Needs:
    """Compute the needs of a run; refuse a prompt that is longer than the model's context."""
    longest = max(lengths)
    if size.context is not None and longest >= size.context:
        raise InputError(
            f"a prompt of {longest} tokens is longer than the model's context of {size.context}: "
            "leave such rows out with max_prompt_tokens"
        )
    device = torch.device(one_device())
    on_gpu = device.type == "cuda"
    free = free_bytes(device)
    process = cpu_process(size.number_bytes, bool(args.gradient_checkpointing))
    for_tensors = bytes_for_tensors(device, process, free)
    return _Needs(
        steps=steps,
        longest_prompt=longest,
        size=size,
        memory=plan_memory(
            size, args, lengths, for_tensors, root_T=root_T, packed=packed, on_gpu=on_gpu
        ),
        free_memory=free,
        free_for_tensors=for_tensors,
        process=process,
        on_gpu=on_gpu,
        disk=disk_bytes(args, size, steps),
        free_disk=free_disk_bytes(Path(args.output_dir)),
    )


def _describe_format(model: ModelConfig, gflops: Mapping[str, int]) -> str:
    rates = ", ".join(f"{name} {rate}" for name, rate in gflops.items())
    return dtype_name(pick_dtype(model.dtype)) + (f" (GFLOP/s: {rates})" if rates else "")


def _plan_lines(
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    lengths: Sequence[int],
    needs: _Needs,
) -> list[tuple[str, str]]:
    size, memory = needs.size, needs.memory
    quantised = "4-bit NF4" if model.load_in_4bit else "not quantised"
    peak = memory.peak(needs.free_memory)
    completions = math.ceil(needs.steps / args.num_iterations) * completions_of_a_step(args)
    tokens = completions * args.max_completion_length
    rows = completions_of_a_step(args) // args.world_size
    row_tokens = rows * (needs.longest_prompt + args.max_completion_length)
    computed = f"of {row_tokens:,} in the rows of a step, {memory.step_tokens:,} are computed"
    if args.share_prompts:
        computed += ": what prompts share once in a pass"
    return [
        ("model", f"{model.model_name_or_path}, {size.total / 1e6:,.0f}M parameters, {quantised}, "
                  f"{gibibytes(size.weights_bytes)}"),
        ("adapter", f"LoRA r {model.lora_r}, {size.trainable / 1e6:,.1f}M parameters "
                    f"({size.trainable / size.total:.1%}), {gibibytes(size.adapter_bytes)} with "
                    "gradient and optimizer"),
        ("data", f"{run.dataset_name}: {len(lengths)} prompts, {describe_lengths(lengths)}"),
        ("rewards", ", ".join(str(reward) for reward in redact(run.rewards))),
        ("batch", batch_arithmetic(args)),
        *([("tokens", computed)] if memory.packed else []),
        ("memory", f"about {gibibytes(peak)}{needs.overhead}, {gibibytes(needs.free_memory)} free: "
                   f"weights and adapter {gibibytes(memory.held)}, "
                   f"sampling {gibibytes(memory.merged + memory.cache)}, "
                   f"training {gibibytes(memory.training)} in passes of up to "
                   f"{memory.trained_tokens:,} tokens, estimated for full-length completions"),
        ("run", f"{needs.steps} optimizer steps, {completions:,} completions, "
                f"at most {tokens:,} tokens, {args.output_dir}"),
        ("disk", f"{gibibytes(needs.disk)} of {gibibytes(needs.free_disk)} free"),
    ]  # fmt: skip


def _shortages(needs: _Needs, args: SoloGRPOConfig, model: ModelConfig) -> Iterator[str]:
    if needs.disk > needs.free_disk:
        yield (
            f"the run writes {gibibytes(needs.disk)}; the disk has {gibibytes(needs.free_disk)} "
            "free: lower save_total_limit, or choose another output_dir"
        )
    fix = memory_fix(needs.memory, needs.free_for_tensors, args, bool(model.load_in_4bit))
    if fix is not None:
        yield (
            f"the run needs about {gibibytes(needs.memory.needed)} of memory{needs.overhead}, and "
            f"{gibibytes(needs.free_memory)} are free: {fix}"
        )
    context = needs.size.context
    if context is not None and needs.longest_prompt + args.max_completion_length > context:
        yield (
            f"the longest prompt has {needs.longest_prompt} tokens, and with max_completion_length "
            f"{args.max_completion_length} a row exceeds the {context} tokens of context that the "
            "model was trained for: lower max_completion_length or max_prompt_tokens"
        )


def _setting_lines(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> str:
    values = resolved_config(run, args, model)  # with secrets hidden
    found = [item for item in run.origins.items() if item[0] in values]
    width = max(len(key) for key, _ in found)
    lines = [
        f"{key:<{width}}  {shortened(str(values[key]), 40):<40}  {origin}"
        for key, origin in sorted(found, key=_by_precedence)
    ]
    lines.append("all else is TRL's default; config.yaml in the run directory lists it")
    return "\n".join(lines)


def _by_precedence(setting: tuple[str, str]) -> tuple[bool, bool, str]:
    key, origin = setting
    return origin == PROJECT, origin != COMMAND_LINE, key
