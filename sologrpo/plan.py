"""The plan of a run, printed before anything is loaded that costs time."""

from math import ceil, gcd, lcm

from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig

from sologrpo.config import RunArguments, SoloGRPOConfig
from sologrpo.data import describe_lengths, prompt_lengths, render_prompt
from sologrpo.device import describe_device
from sologrpo.diagnosis import print_warning, suspicious_settings
from sologrpo.errors import InputError
from sologrpo.model import pick_dtype


def print_plan(
    console: Console,
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    train_dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Print what will run, the batch arithmetic spelled out, and one rendered prompt.

    Raises:
        InputError: if the data does not fill one generation batch.
    """
    check_fills_a_batch(args, len(train_dataset))
    for name, text in plan_lines(run, args, model, train_dataset, tokenizer):
        console.print(f"{name:<8} {text}", highlight=False, markup=False, soft_wrap=True)
    steps = optimizer_steps(args, len(train_dataset))
    for text in suspicious_settings(run, args, steps, tokenizer):
        print_warning(console, text)
    if run.dry_run:
        console.print("\nfirst prompt, as the model sees it:", highlight=False)
        prompt = render_prompt(train_dataset[0]["prompt"], tokenizer)
        console.print(prompt, highlight=False, markup=False, soft_wrap=True)


def plan_lines(
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    train_dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> list[tuple[str, str]]:
    """The plan as (label, text) pairs."""
    quantised = "4-bit NF4" if model.load_in_4bit else "not quantised"
    dtype = str(pick_dtype(model.dtype)).removeprefix("torch.")
    lengths = prompt_lengths(train_dataset, tokenizer)
    return [
        ("device", f"{describe_device()}, {dtype}"),
        ("model", f"{model.model_name_or_path}, {quantised}, LoRA r {model.lora_r}"),
        ("data", f"{run.dataset_name}: {len(train_dataset)} prompts, {describe_lengths(lengths)}"),
        ("rewards", ", ".join(str(reward) for reward in run.rewards)),
        ("batch", batch_arithmetic(args)),
        ("run", f"{optimizer_steps(args, len(train_dataset))} optimizer steps, {args.output_dir}"),
    ]


def batch_arithmetic(args: SoloGRPOConfig) -> str:
    """Spell out how completions, prompts and optimizer steps hang together."""
    updates = _updates_of_a_batch(args)
    return (
        f"{_prompts_of_a_batch(args)} prompts x {args.num_generations} completions = "
        f"{args.generation_batch_size} a generation batch, {updates} optimizer "
        f"step{'s' * (updates > 1)} of {_completions_of_a_step(args)} on each; "
        f"up to {args.max_completion_length} tokens a completion"
    )


def check_fills_a_batch(args: SoloGRPOConfig, n_prompts: int) -> None:
    """Refuse data that TRL would drop as an incomplete batch, training on nothing.

    Raises:
        InputError: if the data does not fill one generation batch.
    """
    needed = _prompts_of_a_batch(args)
    if n_prompts < needed:
        raise InputError(
            f"{n_prompts} training rows do not fill a generation batch of {needed} prompts "
            f"({args.generation_batch_size} completions / num_generations {args.num_generations}): "
            f"give at least {needed} rows, or {_batch_that_fits(args, n_prompts)}"
        )


def _batch_that_fits(args: SoloGRPOConfig, n_prompts: int) -> str:
    """The largest settings under which so many prompts fill a generation batch."""
    completions, step = n_prompts * args.num_generations, _completions_of_a_step(args)
    whole = lcm(step, args.num_generations)
    if whole <= completions:
        return f"set generation_batch_size {completions // whole * whole}"
    per_size = step // args.per_device_train_batch_size
    unit = args.num_generations // gcd(args.num_generations, per_size)
    size = completions // per_size // unit * unit
    if not size:
        return f"lower gradient_accumulation_steps {args.gradient_accumulation_steps}"
    return f"set per_device_train_batch_size {size} and generation_batch_size {size * per_size}"


def optimizer_steps(args: SoloGRPOConfig, n_prompts: int) -> int:
    """Optimizer steps of the run: `max_steps`, or what the epochs give.

    An epoch is whole generation batches; the prompts that do not fill the last one are left out.
    """
    if args.max_steps > 0:
        return int(args.max_steps)
    steps_of_an_epoch = n_prompts // _prompts_of_a_batch(args) * _updates_of_a_batch(args)
    steps: int = ceil(args.num_train_epochs * steps_of_an_epoch)
    return steps


def _prompts_of_a_batch(args: SoloGRPOConfig) -> int:
    return int(args.generation_batch_size // args.num_generations)


def _completions_of_a_step(args: SoloGRPOConfig) -> int:
    return int(
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )


def _updates_of_a_batch(args: SoloGRPOConfig) -> int:
    return int(args.generation_batch_size // _completions_of_a_step(args) * args.num_iterations)
