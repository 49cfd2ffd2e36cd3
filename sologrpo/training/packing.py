"""Rows of a generation batch, as TRL's trainer lays it out: prompts left-padded, completions right.

Every tensor whose first dimension is the rows belongs to them; prompt tensors are named
``prompt_…``, and tensors with a value for every completion token are as wide as ``completion_ids``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch

from sologrpo.sampling.shared_cache import shared_beginning

Batch = dict[str, Any]

SMALLEST_BUDGET = 1024  # tokens of a pass
WORTHWHILE = 0.95  # of the work, for a pass of twice the size


def rows_of_sequences(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_T: int
) -> Batch:
    """Take (B, T) sequences apart: their last `completion_T` tokens are the completions."""
    prompt_T = input_ids.size(1) - completion_T  # completions that are all masked have no tokens
    return {
        "prompt_ids": input_ids[:, :prompt_T],
        "prompt_mask": attention_mask[:, :prompt_T],
        "completion_ids": input_ids[:, prompt_T:],
        "completion_mask": attention_mask[:, prompt_T:],
    }


@dataclass(frozen=True)
class Tokens:
    """Token ids of rows in main memory, without what is masked; `completion_T` counts padding."""

    prompts: list[tuple[int, ...]]
    completions: list[list[int]]
    completion_T: int
    device: torch.device

    @classmethod
    def of(cls, batch: Batch) -> "Tokens":
        """Copy the tokens of a batch; the host waits for the device once."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        widths = [batch[name].size(1) for name in names]
        copied = torch.cat([batch[name] for name in names], dim=1).cpu()
        prompt_ids, prompt_mask, completion_ids, completion_mask = (
            part.tolist() for part in torch.split(copied, widths, dim=1)
        )
        return cls(
            [tuple(compress(*row)) for row in zip(prompt_ids, prompt_mask, strict=True)],
            [list(compress(*row)) for row in zip(completion_ids, completion_mask, strict=True)],
            batch["completion_ids"].size(1),
            batch["completion_ids"].device,
        )

    def select(self, rows: Sequence[int]) -> "Tokens":
        """Select rows."""
        prompts = [self.prompts[row] for row in rows]
        completions = [self.completions[row] for row in rows]
        return replace(self, prompts=prompts, completions=completions)

    def count(self, rows: Iterable[int]) -> int:
        """Count the tokens of rows, prompts and completions."""
        return sum(len(self.prompts[row]) + len(self.completions[row]) for row in rows)


@dataclass(frozen=True)
class Rows:
    """The tokens of rows, without padding, as far as their number in one pass depends on them.

    Attributes:
        prompts: of each row, equal where rows share it.
        root_T: tokens that all prompts begin with, and that are computed once; without the last of
            any prompt, which each completion begins with.
    """

    prompts: list[Any]
    prompt_T: list[int]
    completion_T: list[int]
    root_T: int = 0

    @classmethod
    def of(cls, tokens: Tokens, share_prompts: bool) -> "Rows":
        """Count the tokens of rows."""
        prompts = tokens.prompts
        return cls(
            prompts if share_prompts else list(range(len(prompts))),
            list(map(len, prompts)),
            list(map(len, tokens.completions)),
            shared_beginning(prompts) if share_prompts else 0,
        )

    def tokens(self, rows: Sequence[int]) -> int:
        """Count the tokens that a pass over these rows computes."""
        stems = {self.prompts[row]: self.prompt_T[row] - 1 - self.root_T for row in rows}
        completions = sum(self.completion_T[row] for row in rows)
        return self.root_T + sum(stems.values()) + completions

    def packed(self, rows: Sequence[int], budget: int) -> Iterator[list[int]]:
        """Group rows so that a pass over a group computes at most `budget` tokens.

        Rows of a prompt stay together where they fit. A row over the budget forms its own group.
        """
        first_of: dict[Any, int] = {}
        for row in sorted(rows):
            first_of.setdefault(self.prompts[row], row)
        group: list[int] = []
        tokens = 0
        for row in sorted(rows, key=lambda row: (first_of[self.prompts[row]], row)):
            follows = group and self.prompts[group[-1]] == self.prompts[row]
            stem_T = 0 if follows else self.prompt_T[row] - 1 - self.root_T
            if group and tokens + stem_T + self.completion_T[row] > budget:
                yield group
                group = []
            tokens = self.tokens([row]) if not group else tokens + stem_T + self.completion_T[row]
            group.append(row)
        if group:
            yield group

    def best_budget(self, rows: Sequence[int], most: int, pass_tokens: int) -> int:
        """Choose how many tokens a pass has: as few as cost little time, to save memory.

        Larger passes compute shared prompts less often. The choice depends on the rows alone, not
        on a timing, so that a resumed run ends in the same bits. A pass takes as long as its tokens
        and `pass_tokens` more.
        """

        def passes(budget: int) -> list[list[int]]:
            return list(self.packed(rows, budget))

        def work(budget: int) -> int:
            return sum(self.tokens(group) + pass_tokens for group in passes(budget))

        best = budget = min(SMALLEST_BUDGET, most)
        share = 1.0
        while budget < most and len(passes(budget)) > 1:
            budget = min(2 * budget, most)
            share *= WORTHWHILE
            if work(budget) <= share * work(best):
                best, share = budget, 1.0
        return best


def on_device(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """Copy numbers to the device, without waiting for it."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def select_rows(batch: Batch, rows: list[int]) -> Batch:
    """Take these rows of the batch."""
    places = on_device(rows, batch["completion_ids"].device)
    of_rows = {name: value for name, value in batch.items() if _is_of_rows(value, batch)}
    return batch | {name: value[places] for name, value in of_rows.items()}


def _is_of_rows(value: Any, batch: Batch) -> bool:
    n_rows = batch["completion_ids"].size(0)
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == n_rows
