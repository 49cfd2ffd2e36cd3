"""Compute how completions, prompts and optimizer steps relate."""

from math import ceil

from sologrpo.base.errors import InputError
from sologrpo.config.arguments import SoloGRPOConfig


def batch_arithmetic(args: SoloGRPOConfig) -> str:
    """Describe how completions, prompts and optimizer steps relate, in one line."""
    updates = updates_of_a_batch(args)
    return (
        f"{prompts_of_a_batch(args)} prompts x {args.num_generations} completions = "
        f"{args.generation_batch_size} per generation batch, {updates} optimizer "
        f"step{'s' * (updates > 1)} of {completions_of_a_step(args)} on each; "
        f"up to {args.max_completion_length} tokens per completion"
    )


def check_fills_a_batch(args: SoloGRPOConfig, n_prompts: int) -> None:
    """Refuse data that TRL would drop as an incomplete batch, training on nothing."""
    needed = prompts_of_a_batch(args)
    if n_prompts < needed:
        raise InputError(
            f"{n_prompts} training rows do not fill a generation batch of {needed} prompts "
            f"({args.generation_batch_size} completions / num_generations {args.num_generations}): "
            f"give at least {needed} rows, or lower per_device_train_batch_size, "
            "gradient_accumulation_steps or generation_batch_size"
        )


def optimizer_steps(args: SoloGRPOConfig, n_prompts: int) -> int:
    """Count the optimizer steps of a run: `max_steps`, or those of its epochs.

    An epoch consists of complete generation batches; prompts left over are not used.
    """
    if args.max_steps > 0:
        return int(args.max_steps)
    steps_of_an_epoch = n_prompts // prompts_of_a_batch(args) * updates_of_a_batch(args)
    steps: int = ceil(args.num_train_epochs * steps_of_an_epoch)
    return steps


def prompts_of_a_batch(args: SoloGRPOConfig) -> int:
    """Count the prompts of a generation batch."""
    return int(args.generation_batch_size // args.num_generations)


def completions_of_a_step(args: SoloGRPOConfig) -> int:
    """Count the completions of an optimizer step, in all processes."""
    return int(
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )


def updates_of_a_batch(args: SoloGRPOConfig) -> int:
    """Count the optimizer steps on each generation batch."""
    return int(args.generation_batch_size // completions_of_a_step(args) * args.num_iterations)
