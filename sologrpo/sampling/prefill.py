"""Prefill: compute the beginning that all prompts share once, then the rest of each.

With worked examples most of a prompt is the same in every row. The shared beginning is computed
as one row, its key-value cache is copied to all prompts, and each continues with its own question.
Gradients, if enabled, flow back through the cache.

Shapes: P distinct prompts, B rows, T tokens.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache


@dataclass
class Prefill:
    """Left-padded prompts in a key-value cache.

    The padding of a row is between the shared beginning and the rest of the row, so `mask` differs
    from the tokenizer's, and positions must be given explicitly for rotary embeddings.

    Attributes:
        cache: keys and values, one row per prompt.
        mask: (P, T), zero at padding.
        next_position: (P,) position of the next token.
        logits: (P, V) next-token logits.
    """

    cache: DynamicCache
    mask: torch.Tensor
    next_position: torch.Tensor
    logits: torch.Tensor

    def expand(self, prompt_of_row: torch.Tensor) -> "Prefill":
        """Copy prompts to rows: the completions of a group start from the same prompt.

        Args:
            prompt_of_row: (B,) index of each row's prompt.
        """
        self.cache.batch_select_indices(prompt_of_row)
        return Prefill(
            self.cache,
            self.mask[prompt_of_row],
            self.next_position[prompt_of_row],
            self.logits[prompt_of_row],
        )


def prefill(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: DynamicCache,
) -> Prefill:
    """Compute distinct left-padded prompts.

    Args:
        model: any causal language model of transformers.
        input_ids: (P, T).
        attention_mask: (P, T).
        cache: an empty one, which is filled.
    """
    shared_T = shared_beginning(input_ids, attention_mask)
    lengths_P = attention_mask.sum(dim=1)
    if shared_T:
        beginning = input_ids[:1, input_ids.size(1) - int(lengths_P[0]) :][:, :shared_T]
        model(input_ids=beginning, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_select_indices(torch.zeros_like(lengths_P))
    rest_ids, rest_mask = input_ids[:, shared_T:], _mask_of_rest(attention_mask, shared_T)
    mask = torch.cat([torch.ones_like(input_ids[:, :shared_T]), rest_mask], dim=1)
    output = model(
        input_ids=rest_ids,
        attention_mask=mask,
        position_ids=positions(mask)[:, shared_T:],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return Prefill(cache, mask, lengths_P, output.logits[:, -1])


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Compute the position of every token, counting real tokens only; padding gets 0."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def _mask_of_rest(attention_mask: torch.Tensor, shared_T: int) -> torch.Tensor:
    # A row of n real tokens has n - shared_T of them left, at the right edge.
    rest_T = attention_mask.size(1) - shared_T
    rest_lengths_P = attention_mask.sum(dim=1, keepdim=True) - shared_T
    columns = torch.arange(rest_T, device=attention_mask.device)
    return (columns >= rest_T - rest_lengths_P).to(attention_mask.dtype)


def shared_beginning(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> int:
    """Count the tokens that all prompts begin with, leaving each at least one separate token."""
    if input_ids.size(0) == 1:
        return 0
    lengths = attention_mask.sum(dim=1).tolist()
    limit = min(lengths) - 1
    T = input_ids.size(1)
    starts = torch.stack(
        [row[T - n : T - n + limit] for row, n in zip(input_ids, lengths, strict=True)]
    )
    differs = (starts != starts[:1]).any(dim=0)
    return int(differs.int().argmax()) if bool(differs.any()) else limit
