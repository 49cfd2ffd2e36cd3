"""One sequence for a prompt and all its completions, for the training forward.

A row of the training batch is a prompt and one completion, so a prompt is computed G times. Here
the completions of a prompt follow it side by side, and a mask lets each see the prompt and itself.
The numbers are the same; the prompt's tokens are computed once.

    prompt without its last token | last token, completion 1 | last token, completion 2 | ...

Attention over a tree is dense: a completion pays for its neighbours too, and the mask hides them.
So a prompt with many completions is computed more than once, as `optimal_branch_count` says.

Shapes: B rows of the batch, N trees, G most completions of one of them, T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def optimal_branch_count(hidden_size: int, prompt_T: int, completion_T: int) -> int:
    """Compute the number of completions in a tree that takes the least work; 1 for no sharing.

    A layer of a transformer takes about 24 d^2 operations a token in its matrices and 4 d for every
    pair of tokens in attention (Kaplan et al. 2020, table 1). G completions in trees of k cost
    (G / k) * (24 d^2 (P + k T) + 4 d (P + k T)^2), which is least at k^2 = (6 d P + P^2) / T^2.

    Args:
        hidden_size: d, width of the model.
        prompt_T: P, tokens of the prompt.
        completion_T: T, tokens of a completion.
    """
    squared = (6 * hidden_size * prompt_T + prompt_T**2) / max(completion_T, 1) ** 2
    below = math.isqrt(int(squared))
    # Of two neighbours the larger is better from their geometric mean on.
    return below + 1 if squared > below * (below + 1) else below


def tree_shape(completions: Sequence[int], most: int) -> tuple[int, int]:
    """Count the trees for prompts with these numbers of completions, and the branches of a tree.

    Args:
        completions: of every prompt.
        most: completions in a tree; those of a prompt are spread evenly over its trees.
    """
    trees = [math.ceil(count / most) for count in completions]
    branches = [math.ceil(n / k) for n, k in zip(completions, trees, strict=True)]
    return sum(trees), max(branches)


@dataclass(frozen=True)
class PromptTrees:
    """The sequences, and the way back to the rows of the batch.

    Attributes:
        input_ids: (N, L) with L = prompt_T - 1 + G * (1 + completion_T).
        next_ids: (N, L) the token to predict at each position, -100 where there is none.
        position_ids: (N, L) as if each completion followed the prompt alone.
        mask: (N, L, L) bool; [n, q, k] lets position q see position k.
        tree_of_row: (B,) tree of each row.
        branch_of_row: (B,) which completion of its tree each row is.
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
        """Pick (B, completion_T) values of the completion tokens out of (N, L) predictions."""
        N, L = self.input_ids.shape
        branch_T = 1 + self.completion_T
        G = int(self.branch_of_row.max()) + 1
        branches = values[:, L - G * branch_T :].view(N, G, branch_T)
        return branches[self.tree_of_row, self.branch_of_row, : self.completion_T]


def build_prompt_trees(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_T: int, most: int
) -> PromptTrees:
    """Arrange (B, T) rows, prompts padded on the left and completions on the right.

    Args:
        input_ids: (B, T) prompts and completions.
        attention_mask: (B, T), 0 for padding.
        completion_T: how many of the T tokens belong to the completion.
        most: completions in a tree.
    """
    stem_T = input_ids.size(1) - completion_T - 1
    stem = torch.cat([input_ids[:, : stem_T + 1], attention_mask[:, : stem_T + 1]], dim=1)
    _, prompt_of_row, completions = torch.unique(
        stem, dim=0, return_inverse=True, return_counts=True
    )
    N, G = tree_shape(completions.tolist(), most)
    trees = (completions + most - 1) // most
    before = trees.cumsum(dim=0) - trees
    earlier = _count_earlier(prompt_of_row)
    tree_of_row = before[prompt_of_row] + earlier % trees[prompt_of_row]
    branch_of_row = earlier // trees[prompt_of_row]

    ids = _arrange(input_ids, tree_of_row, branch_of_row, N, G, stem_T)
    real = _arrange(attention_mask, tree_of_row, branch_of_row, N, G, stem_T).bool()
    row_positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    position_ids = _arrange(row_positions, tree_of_row, branch_of_row, N, G, stem_T)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    row_next_ids = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    row_next_ids[:, :stem_T] = -100
    next_ids = _arrange(row_next_ids, tree_of_row, branch_of_row, N, G, stem_T, fill=-100)
    mask = _tree_mask(stem_T, G, 1 + completion_T, ids.device) & real[:, None, :]
    # A position that sees nothing would be NaN; padding sees itself, and nobody reads it.
    mask |= torch.eye(mask.size(-1), dtype=torch.bool, device=mask.device)
    return PromptTrees(ids, next_ids, position_ids, mask, tree_of_row, branch_of_row, completion_T)


def _count_earlier(numbers: torch.Tensor) -> torch.Tensor:
    """Count the earlier entries that equal each entry: (B,) -> (B,)."""
    equal = numbers[:, None] == numbers[None, :]
    return equal.tril(diagonal=-1).sum(dim=1)


def _arrange(
    values: torch.Tensor,
    tree_of_row: torch.Tensor,
    branch_of_row: torch.Tensor,
    N: int,
    G: int,
    stem_T: int,
    fill: int = 0,
) -> torch.Tensor:
    """Move (B, T) values of the rows to their places in the (N, L) trees."""
    stems = values.new_full((N, stem_T), fill)
    stems[tree_of_row] = values[:, :stem_T]
    branches = values.new_full((N, G, values.size(1) - stem_T), fill)
    branches[tree_of_row, branch_of_row] = values[:, stem_T:]
    return torch.cat([stems, branches.flatten(1)], dim=1)


def _tree_mask(stem_T: int, G: int, branch_T: int, device: torch.device) -> torch.Tensor:
    """Build the (L, L) mask: a position sees the stem and the earlier tokens of its branch."""
    L = stem_T + G * branch_T
    position = torch.arange(L, device=device)
    branch = torch.where(position < stem_T, -1, (position - stem_T) // branch_T)
    causal = position[:, None] >= position[None, :]
    return causal & ((branch[None, :] == -1) | (branch[:, None] == branch[None, :]))
