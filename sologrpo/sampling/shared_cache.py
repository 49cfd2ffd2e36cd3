"""Keys and values of a sampled batch, each held once: of the root, of every prompt, of every row.

The rows of a batch are a tree: tokens that all prompts begin with (the root: a system prompt,
worked examples), the rest of each prompt (its stem), and the completions. Every token is computed
once. A decoding step multiplies the queries of all rows with the root in one product, those of the
rows of a prompt with its stem in another, and each row's with its own past. The scores stand side
by side before the softmax: so this is exact attention over each row.

Shapes: P distinct prompts, B rows, G rows of a prompt at most, T tokens of a completion, R of the
root, S of the longest stem, N of a forward pass, V vocabulary, H heads of keys and values, Q heads
of queries for each of them, D width of a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from operator import ne

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sologrpo.model.attention import along

# Tokens of stems in one forward pass: enough to keep any device busy, few enough that activations
# stay small compared with the cache.
PREFILL_TOKENS = 4096
ROOM = 128  # tokens by which the cache of the completions grows at most


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of one layer, (B or P, H, tokens, D)."""

    keys: torch.Tensor
    values: torch.Tensor

    def select(self, rows: torch.Tensor) -> "KeysValues":
        """Copy some rows."""
        return KeysValues(self.keys[rows], self.values[rows])

    def empty(self, rows: int) -> "KeysValues":
        """Return rows of the same heads, without tokens."""
        keys, values = (
            x.new_zeros(rows, x.size(1), 0, x.size(3)) for x in (self.keys, self.values)
        )
        return KeysValues(keys, values)

    def widened(self, tokens: int) -> "KeysValues":
        """Add empty places to every row."""
        keys, values = (pad(x, (0, 0, 0, tokens)) for x in (self.keys, self.values))
        return KeysValues(keys, values)

    def first(self, tokens: int) -> "KeysValues":
        """View the first tokens of every row."""
        return KeysValues(self.keys[:, :, :tokens], self.values[:, :, :tokens])

    def after(self, root: "KeysValues") -> "KeysValues":
        """Put the root before every row."""
        return KeysValues(_joined(root.keys, self.keys), _joined(root.values, self.values))


Layers = dict[int, KeysValues]


def keeps_shapes(device: torch.device) -> bool:
    """Check whether decoding keeps the shapes of its tensors from one token to the next.

    On a GPU, rows then attend to all of the cache's room, with what is still empty hidden: a CUDA
    graph can repeat that. On a CPU, smaller products are faster.
    """
    return device.type != "cpu"


def _joined(root: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return torch.cat([root.expand(rest.size(0), -1, -1, -1), rest], dim=2)


class SharedCache:
    """The cache of a batch while it is decoded, and attention over it.

    Args:
        root: (1, H, R, D) of each layer; empty if the prompts begin differently.
        stems: (P, H, S, D) of each layer, padded on the right.
        stem_T: tokens of each stem.
        prompt_of_row: (B,) index of each row's prompt, ascending, in main memory.
        most_T: tokens of a completion that it will hold at most.
    """

    def __init__(
        self,
        root: Layers,
        stems: Layers,
        stem_T: Sequence[int],
        prompt_of_row: torch.Tensor,
        most_T: int,
    ) -> None:
        self._root = root
        self._stems = stems
        self._device = next(iter(stems.values())).keys.device
        is_padding = torch.arange(max(stem_T)) >= torch.tensor(stem_T)[:, None]
        self._is_padding = is_padding[:, None, None].to(self._device)  # (P, 1, 1, S)
        self._keeps_shapes = keeps_shapes(self._device)
        self._completions = {i: layer.empty(len(prompt_of_row)) for i, layer in stems.items()}
        self._length, self.room, self._most_T = 0, 0, most_T
        self._place = torch.full([1], -1, device=self._device)
        self._group(prompt_of_row)

    def _group(self, prompt_of_row: torch.Tensor) -> None:
        self._prompt_of_row = prompt_of_row
        self._of_prompt = _Groups(prompt_of_row, self._device)
        self._all = _Groups(torch.zeros_like(prompt_of_row), self._device)

    def make_room(self) -> None:
        """Make room for a token of every row; call it before each forward pass."""
        if self._length == self.room:
            more = min(ROOM, self._most_T - self.room)
            for i, layer in self._completions.items():  # one of them in memory twice
                self._completions[i] = layer.widened(more)
            self.room += more
            self._places = torch.arange(self.room, device=self._device)
            self._is_empty = torch.empty_like(self._places, dtype=torch.bool)
        self._length += 1
        self._place += 1
        torch.gt(self._places, self._place, out=self._is_empty)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these (ascending, in main memory), and prompts that have none left."""
        prompts, prompt_of_row = torch.unique(self._prompt_of_row[rows], return_inverse=True)
        rows, prompts = rows.to(self._device), prompts.to(self._device)
        if len(prompts) < len(self._is_padding):
            for i, layer in self._stems.items():
                self._stems[i] = layer.select(prompts)
            self._is_padding = self._is_padding[prompts]
        for i, layer in self._completions.items():
            self._completions[i] = layer.select(rows)
        self._group(prompt_of_row)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Append a token to every row, and compute its attention; see `model.attention`."""
        i = int(module.layer_idx)  # type: ignore[arg-type]
        stem, root, own = self._stems[i], self._root.get(i), self._completions[i]
        own.keys.index_copy_(2, self._place, key)
        own.values.index_copy_(2, self._place, value)
        if not self._keeps_shapes:
            own = own.first(self._length)
        B, H, _, D = key.shape
        q = (query * scaling).reshape(B, H, -1, D)
        stem_scores = self._of_prompt.multiply(q, stem.keys.mT, hidden=self._is_padding)
        own_scores = q @ own.keys.mT
        if self._keeps_shapes:
            own_scores.masked_fill_(self._is_empty, -torch.inf)
        scores = [stem_scores, own_scores]
        if root is not None:
            scores.append(self._all.multiply(q, root.keys.mT))
        weights = torch.cat(scores, dim=-1).softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        shares = torch.split(weights, [part.size(-1) for part in scores], dim=-1)
        out = self._of_prompt.multiply(shares[0], stem.values) + shares[1] @ own.values
        if root is not None:
            out = out + self._all.multiply(shares[2], root.values)
        return out.reshape(B, 1, -1, out.size(-1))


class _Groups:
    """Rows that share keys and values: one product for each group instead of one for each row.

    `group_of_row` (B,) is in main memory, and ascends from 0 without gaps.
    """

    def __init__(self, group_of_row: torch.Tensor, device: torch.device) -> None:
        sizes = group_of_row.bincount()
        self._shape = len(sizes), int(sizes.max())
        B = len(group_of_row)
        self._is_even = self._shape[0] * self._shape[1] == B
        rows = torch.arange(B)
        within = rows - (sizes.cumsum(0) - sizes)[group_of_row]
        slot_of_row = group_of_row * self._shape[1] + within
        # Groups are filled up with row 0, whose results there are not used.
        row_of_slot = rows.new_zeros(self._shape[0] * self._shape[1])
        row_of_slot[slot_of_row] = rows
        self._slot_of_row, self._row_of_slot = slot_of_row.to(device), row_of_slot.to(device)

    def multiply(
        self, rows: torch.Tensor, shared: torch.Tensor, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply each row (B, H, Q, K) with its group's (P, H, K, N), giving (B, H, Q, N).

        Where `hidden` (P, 1, 1, N) is true, the product is minus infinity instead.
        """
        (P, G), (_, H, Q, K) = self._shape, rows.shape
        slots = rows if self._is_even else rows[self._row_of_slot]
        product = slots.view(P, G, H, Q, K).transpose(1, 2).reshape(P, H, G * Q, K) @ shared
        if hidden is not None:
            product.masked_fill_(hidden, -torch.inf)
        product = product.view(P, H, G, Q, -1).transpose(1, 2).reshape(P * G, H, Q, -1)
        return product if self._is_even else product[self._slot_of_row]


# -- filling it -----------------------------------------------------------------------------------


def prefill(
    model: torch.nn.Module,
    prompts: Sequence[list[int]],
    prompt_of_row: torch.Tensor,
    device: torch.device,
    most_T: int,
) -> tuple[SharedCache, torch.Tensor]:
    """Fill the cache, as `SharedCache` describes it, and return it with (P, V) first logits.

    The prompts are distinct; what all of them begin with is computed once.
    """
    R = shared_beginning(prompts)
    root: Layers = {}
    if R:
        beginning = _Beginnings([prompts[0][:R]], {}, 0, device)
        root = beginning.compute(model)[0]
    parts = [
        _Beginnings(stems, root, R, device).compute(model)
        for stems in _passes([prompt[R:] for prompt in prompts])
    ]
    S = max(map(len, prompts)) - R
    layers = [part[0] for part in parts]
    # Layer by layer, so that only one is in memory twice.
    stems = {i: _stacked([layer.pop(i) for layer in layers], S) for i in list(layers[0])}
    stem_T = [len(prompt) - R for prompt in prompts]
    logits = torch.cat([logits for _, logits in parts])
    return SharedCache(root, stems, stem_T, prompt_of_row, most_T), logits


def shared_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, leaving each at least one separate token.

    A single prompt shares nothing.
    """
    if len(prompts) < 2:
        return 0
    columns = enumerate(zip(*(prompt[:-1] for prompt in prompts), strict=False))
    shortest = min(map(len, prompts)) - 1
    return next((i for i, column in columns if len({*column}) > 1), shortest)


def cached_tokens(rows: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
    """Count the tokens, padding included, in the cache of the first row, of the first two, etc.

    The padding of stems is counted, and equal neighbours are one prompt.

    Example:
        >>> cached_tokens([[7, 8, 1], [7, 8, 1], [7, 8, 2, 3]], 10)  # a root of 2, stems of 2
        [14, 24, 36]
    """
    prompts = [prompt for prompt, _ in groupby(rows)]
    R = shared_beginning(prompts)
    S = max(map(len, prompts)) - R
    is_new = map(ne, rows, [None, *rows[:-1]])
    counts = enumerate(accumulate(is_new), start=1)
    return [R + prompts_so_far * S + n * new_tokens for n, prompts_so_far in counts]


def _passes(stems: list[list[int]]) -> Iterator[list[list[int]]]:
    """Divide stems into forward passes of about `PREFILL_TOKENS`."""
    batch: list[list[int]] = []
    for stem in stems:
        if batch and sum(map(len, batch)) + len(stem) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(stem)
    yield batch


class _Beginnings:
    """Token sequences that continue the same root, in one forward pass without padding."""

    def __init__(
        self, sequences: list[list[int]], root: Layers, root_T: int, device: torch.device
    ) -> None:
        self._root = root
        self._layers: Layers = {}
        lengths = torch.tensor([len(ids) for ids in sequences])
        S = int(lengths.max())
        steps = torch.arange(S)
        ends = lengths.cumsum(0)
        places = (ends - lengths)[:, None] + steps.minimum(lengths[:, None] - 1)  # (P, S)
        is_token = steps < lengths[:, None]
        self._places = places.to(device)
        self._token_places = is_token.flatten().nonzero().squeeze(1).to(device)  # of P * S
        self._mask = torch.ones(S, root_T + S, dtype=torch.bool, device=device).tril(root_T)
        self._last = (ends - 1).to(device)
        self._ids = torch.tensor([list(chain.from_iterable(sequences))], device=device)
        self._positions = (root_T + steps).expand_as(is_token)[is_token][None].to(device)

    def compute(self, model: torch.nn.Module) -> tuple[Layers, torch.Tensor]:
        """Return keys and values (P, H, S, D), padded on the right, and (P, V) logits."""
        output = model(
            input_ids=self._ids,
            position_ids=self._positions,
            logits_to_keep=self._last,
            use_cache=False,
            **along(self),
        )
        return self._layers, output.logits[0]

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Compute attention of one layer, and keep its keys and values; see `model.attention`."""
        i = int(module.layer_idx)  # type: ignore[arg-type]
        (P, S), H = self._places.shape, key.size(1)
        q, k, v = (x[0][:, self._places].transpose(0, 1).contiguous() for x in (query, key, value))
        self._layers[i] = seen = KeysValues(k, v)
        if self._root:
            seen = seen.after(self._root[i])
        q = q.view(P * H, -1, S, q.size(-1))
        k, v = (x.flatten(0, 1)[:, None].expand(-1, q.size(1), -1, -1)
                for x in (seen.keys, seen.values))  # fmt: skip
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=scaling)
        out = out.reshape(P, -1, S, out.size(-1)).transpose(1, 2)  # (P, S, H * Q, D)
        return out.flatten(0, 1)[self._token_places][None]


def _stacked(parts: list[KeysValues], S: int) -> KeysValues:
    if len(parts) == 1:
        return parts[0]
    padded = [part.widened(S - part.keys.size(2)) for part in parts]
    return KeysValues(torch.cat([x.keys for x in padded]), torch.cat([x.values for x in padded]))
