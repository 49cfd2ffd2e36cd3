"""Rows of a batch in one sequence that has each of their tokens once, and attention over it.

Tokens that all prompts begin with (the root), the rest of each prompt (its stem) and the
completions are a tree, laid out so that everything but attention needs no change at all:

    root | stem 1, completion, completion, ... | stem 2, completion, ... | ...

A completion begins with its own copy of the last prompt token, from which its first token is
predicted, and leaves out its last, which predicts nothing: so it has as many places as tokens.

Shapes: B rows, T tokens, N places of the sequence, K of them with a token to predict, H heads of
keys and values, Q heads of queries for each of them, D width of a head.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward

from sologrpo.model.attention import along
from sologrpo.sampling.shared_cache import shared_beginning
from sologrpo.training.packing import Tokens, on_device

# Of fewer keys, the kernel's backward pass takes longer in bf16 than in fp32.
MANY_KEYS = 256

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Branch:
    """Places of a prompt, [start, stem_end), and of its completions, up to each of `ends`."""

    start: int
    stem_end: int
    ends: list[int]

    @property
    def completions(self) -> list[slice]:
        """The places of each completion."""
        return list(map(slice, [self.stem_end, *self.ends[:-1]], self.ends))


@dataclass(frozen=True)
class TokenTree:
    """Some rows of a batch in one sequence.

    Attributes:
        position_ids: (1, N) as if each completion followed its prompt alone.
        places: (K,) the places with a token to predict.
        next_ids: (1, K) that token.
        targets: (K,) its index in (B, T), flattened.
        branches: in the order of their places; they begin after the root.
        shape: (B, T) of the completions.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    places: torch.Tensor
    next_ids: torch.Tensor
    targets: torch.Tensor
    root: int
    branches: list[Branch]
    shape: torch.Size
    is_shared: bool

    @property
    def attention(self) -> dict[str, Any]:
        """The arguments of the forward pass that decide who sees whom; none for packed rows."""
        return along(self) if self.is_shared else {}

    @classmethod
    def of(cls, tokens: Tokens, share_prompts: bool) -> "TokenTree":
        """Lay out rows; those whose completion is masked get no place.

        Without `share_prompts` the sequence is what transformers takes for packed rows.
        """
        prompts, completions = tokens.prompts, tokens.completions
        shape = torch.Size([len(completions), tokens.completion_T])
        rows_of: dict[Any, list[int]] = {}
        for row, completion in enumerate(completions):
            if completion:
                rows_of.setdefault(prompts[row] if share_prompts else row, []).append(row)
        groups = list(rows_of.values())
        root = shared_beginning([prompts[rows[0]] for rows in groups]) if share_prompts else 0
        ids, positions = list(prompts[groups[0][0]][:root]), list(range(root))
        places: list[int] = []
        next_ids: list[int] = []
        targets: list[int] = []
        branches = []
        for rows in groups:
            prompt, start = prompts[rows[0]], len(ids)
            last = len(prompt) - 1
            ids += prompt[root:last]
            positions += range(root, last)
            stem_end, ends = len(ids), []
            for row in rows:
                completion, first = completions[row], row * shape[1]
                places += range(len(ids), len(ids) + len(completion))
                ids += [prompt[last], *completion[:-1]]
                positions += range(last, last + len(completion))
                next_ids += completion
                targets += range(first, first + len(completion))
                ends.append(len(ids))
            branches.append(Branch(start, stem_end, ends))
        input_ids, position_ids = on_device([ids, positions], tokens.device)
        where, what, whose = on_device([places, next_ids, targets], tokens.device)
        return cls(
            input_ids[None], position_ids[None], where, what[None], whose, root, branches, shape,
            share_prompts,
        )  # fmt: skip

    def rows(self, values_1K: torch.Tensor) -> torch.Tensor:
        """Bring values of the tokens to predict into (B, T); 0 where there is none."""
        values_K = values_1K[0]
        values_BT = values_K.new_zeros(self.shape.numel()).index_copy(0, self.targets, values_K)
        return values_BT.view(self.shape)

    @cached_property
    def parts(self) -> list[tuple[slice, slice, bool]]:
        """List which places attend to which: (queries, keys, causal), every pair of them once."""
        size, root = self.input_ids.size(1), slice(0, self.root)
        parts = [(root, root, True), (slice(self.root, size), root, False)]
        for branch in self.branches:
            stem = slice(branch.start, branch.stem_end)
            parts += [(stem, stem, True), (slice(branch.stem_end, branch.ends[-1]), stem, False)]
            parts += [(places, places, True) for places in branch.completions]
        return [part for part in parts if part[1].start < part[1].stop]

    @cached_property
    def block_mask(self) -> BlockMask:
        """Build FlexAttention's mask: it skips the blocks in which no place sees another."""
        device, size = self.input_ids.device, self.input_ids.size(1)
        prompts, completions = [-1] * size, [-1] * size
        for i, branch in enumerate(self.branches):
            prompts[branch.start : branch.ends[-1]] = [i] * (branch.ends[-1] - branch.start)
            for k, places in enumerate(branch.completions):
                completions[places] = [k] * (places.stop - places.start)
        of_places = on_device([prompts, completions], device)
        prompt_N, completion_N = of_places[0], of_places[1]

        def sees(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            is_above = (completion_N[k] == -1) | (completion_N[k] == completion_N[q])
            return (q >= k) & ((k < self.root) | (prompt_N[k] == prompt_N[q]) & is_above)

        return create_block_mask(sees, None, None, size, size, device=device)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Compute attention of one layer, see `model.attention`."""
        if query.device.type == "cpu":
            return _in_parts(query, key, value, self, scaling).transpose(1, 2)
        attended: torch.Tensor = flex_attention_forward(
            module, query, key, value, self.block_mask, scaling
        )[0]
        return attended


class _TreeAttention(torch.autograd.Function):
    """Attention in parts without a mask, merged by their log-sum-exps.

    The kernel's backward pass for one part, given the merged output and log-sum-exps, returns that
    part's share of the gradients, as in ring attention (Liu et al. 2023).
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: TokenTree, scale: float
    ) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:-1], -torch.inf)
        precise = [x.float() for x in (q, k, v)]
        for queries, keys, causal in tree.parts:
            q_, k_, v_ = (q, k, v) if _is_large(keys, causal) else precise
            one, its_lse = _FORWARD(
                q_[:, :, queries], k_[:, :, keys], v_[:, :, keys], 0.0, causal, scale=scale
            )
            before, merged = lse[:, :, queries], torch.logaddexp(lse[:, :, queries], its_lse)
            out[:, :, queries] *= (before - merged).exp()[..., None]
            out[:, :, queries] += one * (its_lse - merged).exp()[..., None]
            lse[:, :, queries] = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
        precise = [x.float() for x in (grad, q, k, v, out)]
        for queries, keys, causal in ctx.tree.parts:
            large = _is_large(keys, causal)
            grad_, q_, k_, v_, out_ = (grad, q, k, v, out) if large else precise
            parts = _BACKWARD(
                grad_[:, :, queries], q_[:, :, queries], k_[:, :, keys], v_[:, :, keys],
                out_[:, :, queries], lse[:, :, queries], 0.0, causal, scale=ctx.scale,
            )  # fmt: skip
            for gradient, part, places in zip(gradients, parts, (queries, keys, keys), strict=True):
                gradient[:, :, places] += part
        return *(gradient.to(q.dtype) for gradient in gradients), None, None


def _is_large(keys: slice, causal: bool) -> bool:
    return not causal and keys.stop - keys.start >= MANY_KEYS


def _in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TokenTree, scale: float
) -> torch.Tensor:
    H, N, D = key.shape[1:]
    q = query.view(H, -1, N, D)
    k, v = (x.view(H, 1, N, D).expand_as(q) for x in (key, value))
    merged: torch.Tensor = _TreeAttention.apply(q, k, v, tree, scale)  # type: ignore[no-untyped-call]
    return merged.view(query.shape)
