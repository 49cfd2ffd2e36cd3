"""A rehearsal: what a run will be like, in a process of its own, before the run.

    python -m sologrpo.training.rehearsal --config configs/llama3.1-8b.yaml

First it samples a few prompts as the run would: are there right answers, do groups have a signal,
do completions end? Then it takes the longest prompts, lets every completion become as long as it
may, trains on all of them, and saves a checkpoint, which is thrown away: the highest memory, the
seconds of a step, and whether it fits at all. `train.py --rehearse true` runs it; the run itself is
not touched, because nothing of the rehearsal is in its process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerBase, PrinterCallback
from trl import get_peft_config

from rewards import load_rewards
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import parse_config
from sologrpo.config.schedule import (
    completions_of_a_step,
    optimizer_steps,
    prompts_of_a_batch,
    updates_of_a_batch,
)
from sologrpo.console import duration, print_line, print_warning, quiet_libraries
from sologrpo.data.dataset import load_train_and_validation, prompt_lengths
from sologrpo.device import prepare_cpu
from sologrpo.errors import RunError, one_line_errors
from sologrpo.files import METRICS
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.memory import is_out_of_memory
from sologrpo.training.callbacks import MetricsFile, step_seconds
from sologrpo.training.progress import peak_memory
from sologrpo.training.trainer import SoloGRPOTrainer

BATCHES = 2  # the first warms up, and chooses the sampling engine
PROBED = 64  # prompts that are sampled as the run would
OUT_OF_MEMORY = 3  # exit code
# Shares from which on the probe proposes a change.
FEW_END, LITTLE_SIGNAL, EASY, HARD = 0.5, 0.8, 0.9, 0.05


@dataclass(frozen=True)
class Probe:
    """What the model makes of the problems before it is trained.

    Attributes:
        prompts: that were sampled.
        right: share of right completions; None if no reward tells right from wrong.
        no_signal: share of groups in which all completions earn the same.
        p95_tokens: 95th percentile of the completions' tokens.
        ended: share of completions that end by themselves.
    """

    prompts: int
    right: float | None
    no_signal: float
    p95_tokens: int
    ended: float


@dataclass(frozen=True)
class Rehearsal:
    """What was measured.

    Attributes:
        probe: of the model as it is.
        prompt_tokens: of the longest prompt.
        completion_tokens: of each completion.
        completions: of an optimizer step.
        step_s: seconds of a step, the mean of those on the last generation batch.
        peak_gib: most memory that was held, in GiB: on CUDA what torch allocated on the device,
            otherwise what the process kept in main memory.
        train_token_budget: what is left of it, where memory ran out and the passes were halved.
        steps: optimizer steps of the run that was rehearsed.
    """

    probe: Probe
    prompt_tokens: int
    completion_tokens: int
    completions: int
    step_s: float
    peak_gib: float
    train_token_budget: int
    steps: int


def should_rehearse(run: RunArguments, args: SoloGRPOConfig) -> bool:
    """Whether this run is rehearsed: a new one, by one process, of our trainer."""
    if run.resume or run.trainer != "solo" or args.world_size > 1:
        return False
    return torch.cuda.is_available() if run.rehearse is None else run.rehearse


def rehearse(arguments: Sequence[str], args: SoloGRPOConfig, console: Console) -> Rehearsal | None:
    """Rehearse a run in another process, and say what it found.

    Args:
        arguments: command line of `train.py`.
        args: the same, parsed.
        console: where to say it.

    Returns:
        What was measured; None if the rehearsal failed for a reason that may be its own.

    Raises:
        RunError: if the largest step does not fit into memory.
    """
    command = [sys.executable, "-m", "sologrpo.training.rehearsal", *arguments]
    # What this process can import, such as a reward of the user's, that one can.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == OUT_OF_MEMORY or done.returncode < 0:  # a CPU without memory kills
        raise RunError(
            "the longest prompt and completion do not fit into memory: lower "
            f"max_completion_length ({args.max_completion_length}) or max_prompt_tokens, or set "
            "gradient_checkpointing: true; --rehearse false starts all the same"
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print_warning(console, f"the rehearsal failed, the run starts all the same: {reason}")
        return None
    content = json.loads(done.stdout.strip().splitlines()[-1])
    found = Rehearsal(**content | {"probe": Probe(**content["probe"])})
    for line in describe(found, args):
        print_line(console, line)
    for text in advice(found, args):
        print_warning(console, text)
    return found


def describe(found: Rehearsal, args: SoloGRPOConfig) -> list[str]:
    """What was found, in two lines."""
    probe = found.probe
    right = "" if probe.right is None else f"{probe.right:.0%} right, "
    return [
        f"probe    {probe.prompts} prompts x {args.num_generations} completions: {right}"
        f"{probe.no_signal:.0%} of the groups without signal, {probe.ended:.0%} end by themselves, "
        f"95 % within {probe.p95_tokens} tokens",
        f"rehearsal {found.completions} completions of {found.completion_tokens} tokens behind "
        f"prompts of up to {found.prompt_tokens}: {found.step_s:.1f} s a step, at most "
        f"{found.peak_gib:.1f} GiB; {found.steps} steps like this take "
        f"{duration(found.steps * found.step_s)}",
    ]


def advice(found: Rehearsal, args: SoloGRPOConfig) -> Iterator[str]:
    """Which settings to change, with the reason."""
    probe = found.probe
    if found.train_token_budget < args.train_token_budget:
        yield (
            "memory ran out in a pass of training: set train_token_budget "
            f"{found.train_token_budget}, which fitted"
        )
    if probe.ended < FEW_END:
        yield (
            f"{1 - probe.ended:.0%} of the completions are cut off at {args.max_completion_length} "
            "tokens: raise max_completion_length, or show a short worked example"
        )
    elif probe.no_signal > LITTLE_SIGNAL and probe.right is not None:
        if probe.right > EASY:
            yield f"{probe.right:.0%} are right already: take harder problems"
        elif probe.right < HARD:
            yield (
                f"{probe.right:.0%} are right, and {probe.no_signal:.0%} of the groups teach "
                "nothing: take easier problems, worked examples, or a larger num_generations"
            )
        else:
            yield (
                f"{probe.no_signal:.0%} of the groups teach nothing: raise num_generations "
                f"({args.num_generations}) or temperature ({args.temperature:g})"
            )


@one_line_errors
def main() -> None:
    """Rehearse the run of this command line; the last line of stdout is a `Rehearsal` in JSON."""
    quiet_libraries()
    prepare_cpu()
    run, args, model_args = parse_config()
    tokenizer = load_tokenizer(model_args.model_name_or_path, args.trust_remote_code)
    train_dataset, _ = load_train_and_validation(run, tokenizer, args.seed)
    rewards = load_rewards(run.rewards, train_dataset.column_names, run.reward_timeout)
    steps = optimizer_steps(args, len(train_dataset))
    longest, prompt_tokens = longest_prompts(train_dataset, tokenizer, args)
    with tempfile.TemporaryDirectory() as folder:
        model = load_base_model(model_args, args.trust_remote_code)
        trainer = _ScoringByPlace(
            model=model,
            reward_funcs=rewards,
            args=rehearsed(args, folder),
            train_dataset=longest,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_args),
            callbacks=[MetricsFile()],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            seen = probe(trainer, train_dataset)
            trainer.by_place = True
            trainer.let_completions_grow()
            trainer.train()
        except Exception as error:
            if is_out_of_memory(error):
                sys.exit(OUT_OF_MEMORY)
            raise
        metrics = (Path(folder) / METRICS).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, metrics) if "loss" in row]
    last = rows[-updates_of_a_batch(args) :]
    found = Rehearsal(
        probe=seen,
        prompt_tokens=prompt_tokens,
        completion_tokens=int(last[0]["completions/max_length"]),
        completions=completions_of_a_step(args),
        step_s=fmean(step_seconds(row) or 0.0 for row in last),
        peak_gib=peak_memory()[1],
        train_token_budget=trainer.train_token_budget,
        steps=steps,
    )
    print(json.dumps(asdict(found)))


def longest_prompts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, args: SoloGRPOConfig
) -> tuple[Dataset, int]:
    """The rows with the longest prompts, enough for every step; tokens of the longest one."""
    lengths = prompt_lengths(dataset, tokenizer)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return dataset.select(order[: prompts_of_a_batch(args)] * BATCHES), lengths[order[0]]


def rehearsed(args: SoloGRPOConfig, folder: str) -> SoloGRPOConfig:
    """The settings of the run, for two generation batches whose results nobody wants."""
    args.output_dir = folder
    args.max_steps = BATCHES * updates_of_a_batch(args)
    args.logging_steps = 1
    args.save_strategy, args.save_steps = "steps", args.max_steps
    args.eval_strategy = "no"
    args.load_best_model_at_end = False
    args.report_to = []
    args.push_to_hub = False
    args.log_completions = False
    args.max_resample_rounds = 0
    args.disable_tqdm = True
    return args


class _ScoringByPlace(SoloGRPOTrainer):
    """Scores that give every group a signal, when asked for: no row is left out."""

    by_place = False

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        scores_BR = super()._calculate_rewards(*args)
        if self.by_place:
            scores_BR[:] = (torch.arange(len(scores_BR)) % 2)[:, None]
        return scores_BR


def probe(trainer: SoloGRPOTrainer, dataset: Dataset) -> Probe:
    """Sample a group for each of the first prompts, and look at what they earn."""
    count = min(PROBED, len(dataset))
    rows = [row for row in dataset.select(range(count)) for _ in range(trainer.num_generations)]
    batch, logged, right = trainer.sample_and_score(rows)
    tokens = batch["completion_mask"].sum(dim=1).float()
    return Probe(
        prompts=count,
        right=right,
        no_signal=logged["frac_reward_zero_std"],
        p95_tokens=int(tokens.quantile(0.95)),
        ended=1 - logged["completions/clipped_ratio"],
    )


if __name__ == "__main__":
    main()
