"""One sequence for a prompt and all its completions, for the training forward.

A row of the training batch is a prompt and one completion, so a prompt is computed G times. Here
the completions of a prompt stand side by side behind it, and a mask lets each see the prompt and
itself. The numbers are the same; the prompt's tokens are computed once.

    prompt without its last token | last token, completion 1 | last token, completion 2 | ...

Shapes: B rows of the batch, P distinct prompts, G most completions of one of them, T tokens.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PromptTrees:
    """The sequences, and the way back to the rows of the batch.

    Attributes:
        input_ids: (P, L) with L = prompt_T - 1 + G * (1 + completion_T).
        next_ids: (P, L) the token to predict at each position, -100 where there is none.
        position_ids: (P, L) as if each completion followed the prompt alone.
        mask: (P, L, L) bool; [p, q, k] lets position q see position k.
        tree_of_row: (B,) sequence of each row.
        branch_of_row: (B,) which completion of its sequence each row is.
        completion_T: tokens of a completion, padding counted.
    """

    input_ids: torch.Tensor
    next_ids: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    tree_of_row: torch.Tensor
    branch_of_row: torch.Tensor
    completion_T: int

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Pick (B, completion_T) values of the completion tokens out of (P, L) predictions."""
        P, L = self.input_ids.shape
        branch_T = 1 + self.completion_T
        G = int(self.branch_of_row.max()) + 1
        branches = values[:, L - G * branch_T :].view(P, G, branch_T)
        return branches[self.tree_of_row, self.branch_of_row, : self.completion_T]


def build_prompt_trees(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_T: int
) -> PromptTrees:
    """Arrange (B, T) rows, prompts padded on the left and completions on the right."""
    stem_T = input_ids.size(1) - completion_T - 1
    stem = torch.cat([input_ids[:, : stem_T + 1], attention_mask[:, : stem_T + 1]], dim=1)
    _, tree_of_row = torch.unique(stem, dim=0, return_inverse=True)
    branch_of_row = _count_earlier(tree_of_row)
    P, G = int(tree_of_row.max()) + 1, int(branch_of_row.max()) + 1

    ids = _arrange(input_ids, tree_of_row, branch_of_row, P, G, stem_T)
    real = _arrange(attention_mask, tree_of_row, branch_of_row, P, G, stem_T).bool()
    row_positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    position_ids = _arrange(row_positions, tree_of_row, branch_of_row, P, G, stem_T)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    row_next_ids = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    row_next_ids[:, :stem_T] = -100
    next_ids = _arrange(row_next_ids, tree_of_row, branch_of_row, P, G, stem_T, fill=-100)
    mask = _tree_mask(stem_T, G, 1 + completion_T, ids.device) & real[:, None, :]
    # A position that sees nothing would be NaN; padding sees itself, and nobody reads it.
    mask |= torch.eye(mask.size(-1), dtype=torch.bool, device=mask.device)
    return PromptTrees(ids, next_ids, position_ids, mask, tree_of_row, branch_of_row, completion_T)


def _count_earlier(numbers: torch.Tensor) -> torch.Tensor:
    """For each entry, how many earlier ones are equal: (B,) -> (B,)."""
    equal = numbers[:, None] == numbers[None, :]
    return equal.tril(diagonal=-1).sum(dim=1)


def _arrange(
    values: torch.Tensor,
    tree_of_row: torch.Tensor,
    branch_of_row: torch.Tensor,
    P: int,
    G: int,
    stem_T: int,
    fill: int = 0,
) -> torch.Tensor:
    """Move (B, T) values of the rows to their places in the (P, L) sequences."""
    stems = values.new_full((P, stem_T), fill)
    stems[tree_of_row] = values[:, :stem_T]
    branches = values.new_full((P, G, values.size(1) - stem_T), fill)
    branches[tree_of_row, branch_of_row] = values[:, stem_T:]
    return torch.cat([stems, branches.flatten(1)], dim=1)


def _tree_mask(stem_T: int, G: int, branch_T: int, device: torch.device) -> torch.Tensor:
    """(L, L): every position sees the stem before it, and what is before it in its own branch."""
    L = stem_T + G * branch_T
    position = torch.arange(L, device=device)
    branch = torch.where(position < stem_T, -1, (position - stem_T) // branch_T)
    causal = position[:, None] >= position[None, :]
    return causal & ((branch[None, :] == -1) | (branch[:, None] == branch[None, :]))
