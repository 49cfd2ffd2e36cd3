"""Rehearse the largest step before a run: sample the longest prompts to full length, then train.

It happens in the trainer that is about to train. There is no update, and all that a run depends on
is restored: the run ends bit for bit as without a rehearsal.
"""

import copy
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from transformers import Trainer
from trl.trainer.utils import pad

from sologrpo.config import RunArguments
from sologrpo.config.schedule import (
    completions_of_a_step,
    optimizer_steps,
    prompts_of_a_batch,
    updates_of_a_batch,
)
from sologrpo.console import duration, print_line, print_warning
from sologrpo.data.dataset import prompt_token_ids
from sologrpo.errors import RunError
from sologrpo.model.memory import is_out_of_memory, release_unused
from sologrpo.training.progress import peak_memory
from sologrpo.training.trainer import SoloGRPOTrainer

SAMPLING_SECONDS = 40.0  # completions that would take longer are sampled in part
FIRST_TOKENS, GROWTH = 8, 4  # tokens of the first completions; those that follow are longer
CHANGED = ("state", "generation_config")  # attributes of TRL's trainer whose content changes
ADAM_STATES = 2  # tensors per trainable parameter, which the first update adds


def rehearse(trainer: SoloGRPOTrainer, run: RunArguments, console: Console) -> None:
    """Try the largest step; print its time and memory, and warn about what did not fit.

    By default only on a GPU. A resumed run, several processes, DeepSpeed, whose engine is made when
    training starts, and TRL's trainer are left out.

    Args:
        trainer: constructed, but not trained yet.
        run: `rehearse` asks for it, or against it.
        console: where to print; a terminal shows the progress.

    Raises:
        RunError: if a single row does not fit into memory.
    """
    asked = torch.cuda.is_available() if run.rehearse is None else run.rehearse
    if not asked or run.resume or run.trainer != "solo" or trainer.args.world_size > 1:
        return
    if trainer.is_deepspeed_enabled:
        return
    args, limit = trainer.args, trainer.args.max_completion_length
    prompts = _longest_prompts(trainer)
    budget = trainer.train_token_budget
    try:
        with _restored(trainer):
            tokens, sampling_s = _sample(trainer, prompts, console)
            training_s = _train(trainer, prompts, console)
            peak_gib, left = max(peak_memory().values()), trainer.train_token_budget
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"the longest prompt ({len(prompts[0])} tokens) and completion do not fit into "
            f"memory: lower max_completion_length ({limit}) or max_prompt_tokens, or set "
            "gradient_checkpointing: true; --rehearse false starts without this check"
        ) from error
    seconds = sampling_s / updates_of_a_batch(args) * limit / tokens + training_s
    steps = optimizer_steps(args, len(trainer.train_dataset))
    print_line(
        console,
        f"rehearsal prompts of up to {len(prompts[0])} tokens, completions of {limit}"
        f"{'' if tokens == limit else f' ({tokens} sampled)'}: about {seconds:.1f} s per step, "
        f"at most {peak_gib:.1f} GiB; {steps} steps like this take {duration(steps * seconds)}",
    )
    if left < budget:
        print_warning(
            console, f"out of memory in training: set train_token_budget {left}, which fits"
        )


@contextmanager
def _restored(trainer: SoloGRPOTrainer) -> Iterator[None]:
    """Put back random states, gradients, metrics and every attribute of the trainer."""
    before, modes = dict(vars(trainer)), dict(trainer._metrics)
    with tempfile.TemporaryDirectory() as folder:
        Trainer._save_rng_state(trainer, folder)
        for name, value in before.items():
            if name in CHANGED or type(value).__module__.startswith("sologrpo.training."):
                setattr(trainer, name, copy.copy(value))
        trainer._metrics = {mode: defaultdict(list) for mode in modes}
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        try:
            yield
        finally:
            trainer.__dict__.clear()
            trainer.__dict__.update(before)
            for metrics in modes.values():
                metrics.clear()
            trainer.model.zero_grad()
            release_unused()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            Trainer._load_rng_state(trainer, folder)


def _longest_prompts(trainer: SoloGRPOTrainer) -> list[list[int]]:
    """Tokenize the longest prompts, the longest first, each once per completion of its group."""
    ids = prompt_token_ids(trainer.train_dataset["prompt"], trainer.processing_class)
    longest = sorted(ids, key=len, reverse=True)[: prompts_of_a_batch(trainer.args)]
    return [prompt for prompt in longest for _ in range(trainer.num_generations)]


def _sample(
    trainer: SoloGRPOTrainer, prompts: list[list[int]], console: Console
) -> tuple[int, float]:
    """Sample longer and longer completions, as far as time allows; return (tokens, seconds)."""
    trainer.let_completions_grow()
    trainer.model.train()
    limit, start = trainer.args.max_completion_length, time.perf_counter()
    tokens = limit if trainer.use_vllm else min(FIRST_TOKENS, limit)  # vLLM has its own
    while True:
        if not trainer.use_vllm:
            trainer.generation_config.max_new_tokens = tokens
        began = time.perf_counter()
        with torch.no_grad(), console.status(f"rehearsal: {tokens} tokens per completion"):
            trainer._generate_single_turn(prompts, None, {}, trainer.num_generations)
        seconds = time.perf_counter() - began
        if tokens == limit or began - start + GROWTH * seconds > SAMPLING_SECONDS:
            return tokens, seconds
        tokens = min(GROWTH * tokens, limit)


def _train(trainer: SoloGRPOTrainer, prompts: list[list[int]], console: Console) -> float:
    """Run the largest forward and backward pass; return the seconds of a step of such rows."""
    args, model = trainer.args, trainer.model
    rows = args.per_device_train_batch_size
    if trainer.is_packed:  # packed: more rows than this make more passes, not larger
        rows = min(rows, trainer.train_token_budget // args.max_completion_length + 1)
    if args.gradient_checkpointing:  # as `train` does first, trainer.py:1503 of transformers 5.23
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    trainable = [p for p in model.parameters() if p.requires_grad]
    moments = [torch.zeros_like(p) for p in trainable for _ in range(ADAM_STATES)]
    start = time.perf_counter()
    with console.status("rehearsal: forward and backward pass"):
        with trainer.accelerator.autocast():  # `train` wraps the model's forward in it
            loss = trainer.compute_loss(model, _batch(trainer, prompts[:rows]))
        trainer.accelerator.backward(loss)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    del moments
    passes: float = completions_of_a_step(args) / rows
    return (time.perf_counter() - start) * passes


def _batch(trainer: SoloGRPOTrainer, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Make a batch of full-length completions, with the keys that TRL's loss reads.

    Neighbours have opposite advantages, so that every row is trained on.
    """
    device, T = trainer.accelerator.device, trainer.args.max_completion_length
    ids = [torch.tensor(prompt, device=device) for prompt in prompts]
    # The prompts' own text, repeated: tokens as varied as those of completions.
    completion_ids_BT = torch.stack([row.repeat(T // len(row) + 1)[:T] for row in ids])
    return {
        "prompt_ids": pad(ids, trainer._tokenizer.pad_token_id, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(row) for row in ids], 0, padding_side="left"),
        "completion_ids": completion_ids_BT,
        "completion_mask": torch.ones_like(completion_ids_BT),
        "advantages": torch.arange(len(ids), device=device) % 2 * 2.0 - 1.0,
        "num_items_in_batch": torch.tensor(completion_ids_BT.numel(), device=device),
        "ref_per_token_logps": torch.zeros(completion_ids_BT.shape, device=device),
        "importance_sampling_ratio": torch.ones(completion_ids_BT.shape, device=device),  # vLLM's
    }
