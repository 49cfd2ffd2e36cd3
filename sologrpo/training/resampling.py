"""Resampling: replace groups without a signal by groups of other prompts."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from sologrpo.training.packing import replace_rows
from sologrpo.training.rollout import GenerationBatch


def replace_degenerate_groups(
    batch: GenerationBatch,
    sample_groups: Callable[[int, int], GenerationBatch],
    rounds: int,
    logs: dict[str, Any],
    pad_id: int,
) -> int:
    """Replace groups without a signal, in the batch and in what TRL writes of it.

    Args:
        batch: it gets other rows in their place.
        sample_groups: takes a number of groups and of the round, counted from 0.
        rounds: of sampling, at most.
        logs: the columns of the completions file, as TRL collects them (grpo_trainer.py:1088).
        pad_id: token id that fills up prompts and completions.

    Returns:
        The number of groups that were replaced.
    """
    G = batch.rewards.num_generations
    columns: list[deque[Any]] = [logs["prompt"], logs["completion"], logs["advantages"]]
    columns += [*logs["rewards"].values(), *logs["extra"].values()]
    missing = batch.rewards.degenerate_P.nonzero().flatten().tolist()
    n_missing, n_rows = len(missing), len(batch.rewards.degenerate_P) * G
    for number in range(rounds):
        if not missing:
            break
        kept = [list(column)[-n_rows:] for column in columns]
        source = sample_groups(len(missing), number)
        found = (~source.rewards.degenerate_P).nonzero().flatten().tolist()
        rows, source_rows = _rows_of(missing[: len(found)], G), _rows_of(found, G)
        missing = missing[len(found) :]
        batch.inputs = replace_rows(batch.inputs, rows, source.inputs, source_rows, pad_id)
        for column, values in zip(columns, kept, strict=True):
            fresh = list(column)[-len(source.rewards.degenerate_P) * G :]
            for row, source_row in zip(rows, source_rows, strict=True):
                values[row] = fresh[source_row]
            column.extend(values)  # a queue as long as the batch
    return n_missing - len(missing)


def _rows_of(groups: list[int], num_generations: int) -> list[int]:
    return [group * num_generations + i for group in groups for i in range(num_generations)]


def pick_prompts(
    dataset: Dataset, count: int, num_generations: int, seed: str
) -> list[dict[str, Any]]:
    """Pick prompts at random, the same ones for the same seed.

    Args:
        dataset: to pick from.
        count: of the groups.
        num_generations: rows of a group, all with the same prompt.
        seed: any text.
    """
    indices = random.Random(seed).sample(range(len(dataset)), count)
    return [dataset[i] for i in indices for _ in range(num_generations)]
