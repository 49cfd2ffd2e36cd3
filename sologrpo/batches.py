"""Rows of a generation batch, as TRL's trainer lays it out: prompts left-padded, completions right.

Every tensor whose first dimension is the rows belongs to them; prompt tensors are named
``prompt_…``, and what has one entry a completion token is as wide as ``completion_ids``.
"""

from typing import Any

import torch
from torch.nn.functional import pad

Batch = dict[str, Any]


def replace_rows(
    batch: Batch, rows: list[int], source: Batch, source_rows: list[int], pad_id: int
) -> Batch:
    """Put rows of another batch in place of some rows; both are padded to the longer of the two.

    Args:
        batch: the batch that keeps its size and its other rows.
        rows: the rows of `batch` to replace, as many as `source_rows`.
        source: a batch with the same tensors, of any number and length of rows.
        source_rows: the rows of `source` to put there.
        pad_id: token id that fills up prompts and completions; masks and log-probs get 0.

    Returns:
        A new batch, with `num_items_in_batch` counted anew.
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


def _is_of_rows(value: Any, batch: Batch) -> bool:
    n_rows = batch["completion_ids"].size(0)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == n_rows


def _same_width(
    name: str, own: torch.Tensor, other: torch.Tensor, batch: Batch, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    per_token = own.dim() == 2 and (
        name.startswith("prompt_") or own.size(1) == batch["completion_ids"].size(1)
    )
    if not per_token:
        return own, other
    width = max(own.size(1), other.size(1))
    fill = pad_id if name.endswith("_ids") else 0
    left = name.startswith("prompt_")

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        missing = width - tensor.size(1)
        return pad(tensor, (missing, 0) if left else (0, missing), value=fill)

    return widened(own), widened(other)
