"""Rows of a generation batch, as TRL's trainer lays it out: prompts left-padded, completions right.

Every tensor whose first dimension is the rows belongs to them; prompt tensors are named
``prompt_…``, and tensors with a value for every completion token are as wide as ``completion_ids``.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from sologrpo.training.prompt_tree import optimal_branch_count, tree_shape

Batch = dict[str, Any]


def replace_rows(
    batch: Batch, rows: list[int], source: Batch, source_rows: list[int], pad_id: int
) -> Batch:
    """Replace some rows by rows of another batch; both are padded to the longer of the two.

    Args:
        batch: the batch that keeps its size and its other rows.
        rows: the rows of `batch` to replace, as many as `source_rows`.
        source: a batch with the same tensors, of any number and length of rows.
        source_rows: the rows of `source` to put there.
        pad_id: token id that fills up prompts and completions; masks and log-probs get 0.

    Returns:
        A new batch, with `num_items_in_batch` counted again.
    """
    replaced = dict(batch)
    for name, own in batch.items():
        if not _is_of_rows(own, batch):
            continue
        own, other = _same_width(name, own, source[name], batch, pad_id)
        own = own.clone()
        own[rows] = other[source_rows]
        replaced[name] = own
    replaced["num_items_in_batch"] = replaced["completion_mask"].sum()
    return replaced


def _same_width(
    name: str, own: torch.Tensor, other: torch.Tensor, batch: Batch, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    left = _is_of_prompts(name)
    if not left and not _is_per_completion_token(own, batch):
        return own, other
    width = max(own.size(1), other.size(1))
    fill = pad_id if name.endswith("_ids") else 0

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        missing = width - tensor.size(1)
        return pad(tensor, (missing, 0) if left else (0, missing), value=fill)

    return widened(own), widened(other)


def rows_of_sequences(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_T: int
) -> Batch:
    """Take (B, T) sequences apart into prompts and completions.

    Args:
        input_ids: (B, T) prompts and completions.
        attention_mask: (B, T), 0 for padding.
        completion_T: how many of the T tokens belong to the completion.
    """
    prompt_T = input_ids.size(1) - completion_T  # completions that are all masked have no tokens
    return {
        "prompt_ids": input_ids[:, :prompt_T],
        "prompt_mask": attention_mask[:, :prompt_T],
        "completion_ids": input_ids[:, prompt_T:],
        "completion_mask": attention_mask[:, prompt_T:],
    }


def row_lengths(inputs: Batch) -> list[tuple[int, int]]:
    """Count the (prompt, completion) tokens of every row, without padding."""
    prompt_T = inputs["prompt_mask"].sum(dim=1).tolist()
    completion_T = inputs["completion_mask"].sum(dim=1).tolist()
    return list(zip(prompt_T, completion_T, strict=True))


@dataclass(frozen=True)
class SharedPrompts:
    """The rows that have a prompt in common, and how many of them may share a sequence.

    Attributes:
        prompt_of_row: a number for every row; rows of one group have the same.
        hidden_size: width of the model.
    """

    prompt_of_row: list[int]
    hidden_size: int

    @classmethod
    def of(cls, inputs: Batch, hidden_size: int) -> "SharedPrompts":
        """Index the distinct prompts of a batch."""
        _, prompt_of_row = torch.unique(inputs["prompt_ids"], dim=0, return_inverse=True)
        return cls(prompt_of_row.tolist(), hidden_size)

    def shape(self, batch: list[int], prompt_T: int, completion_T: int) -> tuple[int, int]:
        """Count the sequences for these rows, and the completions in one of them."""
        completions = Counter(self.prompt_of_row[row] for row in batch)
        most = optimal_branch_count(self.hidden_size, prompt_T, completion_T)
        return tree_shape(list(completions.values()), most)


def pack_by_tokens(
    rows: list[int],
    lengths: list[tuple[int, int]],
    budget: int,
    shared: SharedPrompts | None = None,
) -> Iterator[list[int]]:
    """Group rows so that a group, padded, holds at most `budget` tokens.

    Args:
        rows: the rows to pack; a single row over the budget forms a group by itself.
        lengths: (prompt, completion) tokens of every row.
        budget: tokens of a group, padding counted.
        shared: the prompts, if rows share them; rows of one prompt then stay together where they
            fit. Otherwise rows of similar length do.
    """

    def tokens(batch: list[int]) -> int:
        return padded_tokens(batch, lengths, shared)

    def units() -> Iterator[list[int]]:
        """Yield the rows to keep together: those of one prompt, or single rows."""
        ordered = sorted(rows, key=lambda row: (-sum(lengths[row]), row))
        together: dict[int, list[int]] = {}
        for row in ordered:
            owner = row if shared is None else shared.prompt_of_row[row]
            together.setdefault(owner, []).append(row)
        for unit in together.values():
            yield from [unit] if tokens(unit) <= budget else ([row] for row in unit)

    batch: list[int] = []
    for unit in units():
        if batch and tokens(batch + unit) > budget:
            yield batch
            batch = []
        batch = batch + unit
    if batch:
        yield batch


def padded_tokens(
    batch: list[int], lengths: list[tuple[int, int]], shared: SharedPrompts | None = None
) -> int:
    """Count the tokens that a pass over these rows computes.

    Args:
        batch: the rows.
        lengths: (prompt, completion) tokens of every row.
        shared: the prompts, if rows share them.
    """
    prompt_T = max(lengths[row][0] for row in batch)
    completion_T = max(lengths[row][1] for row in batch)
    N, G = (len(batch), 1) if shared is None else shared.shape(batch, prompt_T, completion_T)
    return N * (prompt_T + G * completion_T)


def select_and_trim(inputs: Batch, rows: list[int]) -> Batch:
    """Take these rows of the batch and cut the padding that none of them needs.

    Exact for rotary positions, which depend on distances only; learned absolute positions are not
    supported by the trainer.
    """
    prompt_T = int(inputs["prompt_mask"][rows].sum(dim=1).max())
    completion_T = int(inputs["completion_mask"][rows].sum(dim=1).max())
    selected = dict(inputs)
    for name, value in inputs.items():
        if not _is_of_rows(value, inputs):
            continue
        value = value[rows]
        if _is_of_prompts(name):
            value = value[:, value.size(1) - prompt_T :]
        elif _is_per_completion_token(value, inputs):
            value = value[:, :completion_T]
        selected[name] = value
    return selected


def _is_of_rows(value: Any, batch: Batch) -> bool:
    n_rows = batch["completion_ids"].size(0)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == n_rows


def _is_of_prompts(name: str) -> bool:
    return name.startswith("prompt_")


def _is_per_completion_token(value: torch.Tensor, batch: Batch) -> bool:
    return value.dim() == 2 and value.size(1) == int(batch["completion_ids"].size(1))
