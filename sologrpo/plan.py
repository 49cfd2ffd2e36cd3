"""The plan of a run, printed before anything is loaded that costs time."""

from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig

from sologrpo.config import RunArguments, SoloGRPOConfig
from sologrpo.data import describe_lengths, prompt_lengths, render_prompt
from sologrpo.device import describe_device
from sologrpo.model import pick_dtype


def print_plan(
    console: Console,
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    train_dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Print what will run, the batch arithmetic spelled out, and one rendered prompt."""
    for name, text in plan_lines(run, args, model, train_dataset, tokenizer):
        console.print(f"{name:<8} {text}", highlight=False, markup=False)
    if run.dry_run:
        console.print("\nfirst prompt, as the model sees it:", highlight=False)
        console.print(
            render_prompt(train_dataset[0]["prompt"], tokenizer), highlight=False, markup=False
        )


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
    prompts = args.generation_batch_size // args.num_generations
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    updates = args.generation_batch_size // step * args.num_iterations
    return (
        f"{prompts} prompts x {args.num_generations} completions = {args.generation_batch_size} "
        f"a generation batch, {updates} optimizer step{'s' * (updates > 1)} of {step} on each; "
        f"up to {args.max_completion_length} tokens a completion"
    )


def optimizer_steps(args: SoloGRPOConfig, n_prompts: int) -> int:
    """Optimizer steps of the run: `max_steps`, or what the epochs give."""
    if args.max_steps > 0:
        return int(args.max_steps)
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    completions = n_prompts * args.num_generations * args.num_iterations
    return int(args.num_train_epochs * completions // step)
