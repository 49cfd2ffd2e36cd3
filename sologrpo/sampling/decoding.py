"""The decoding loop, sampled or greedy: each prompt is computed once, and finished rows leave.

`transformers.generate` computes each prompt once for each of its G completions, copies the whole
key-value cache at every token, and computes all rows until the last one ends. This loop gives the
same distribution without the three. What it does not support is left to `generate`.

Shapes: P distinct prompts, B = P x G rows, T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sologrpo.sampling.prefill import Prefill, prefill
from sologrpo.sampling.stopping import StopStrings

Model: TypeAlias = PreTrainedModel | PeftModel

# Finished rows leave when less than this share of the batch is unfinished: removing rows copies the
# cache of those that stay.
LEAVE_BELOW = 0.75

# Settings of `GenerationConfig` that `generate_fast` follows. Any other asks for more.
SUPPORTED_SETTINGS = {
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_beams",
    "repetition_penalty", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache",
    "disable_compile", "transformers_version",
}  # fmt: skip


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer with room for all tokens from the start: appending one copies only that one."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        B, heads, length, width = keys.shape
        self._key_store = keys.new_empty(B, heads, length + room, width)
        self._value_store = values.new_empty(B, heads, length + room, values.shape[-1])
        self._key_store[:, :, :length] = keys
        self._value_store[:, :, :length] = values
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys = self._key_store[:, :, :length]
        self.values = self._value_store[:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens."""
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        self._key_store[:, :, start:end] = key_states
        self._value_store[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        length = self.keys.shape[-2]
        self._key_store, self._value_store = self._key_store[indices], self._value_store[indices]
        self._show(length)


def can_generate_fast(model: Model, config: GenerationConfig, kwargs: dict[str, Any]) -> bool:
    """Check whether `generate_fast` supports this call of `model.generate`.

    Args:
        kwargs: what `generate` was called with, besides the config.
    """
    plain_config = (
        config.num_beams in (None, 1)
        and config.repetition_penalty in (None, 1.0)
        and config.to_diff_dict().keys() <= SUPPORTED_SETTINGS
    )
    plain_cache = has_plain_cache(model.config.get_text_config())
    return plain_cache and plain_config and set(kwargs) <= {"input_ids", "attention_mask"}


def has_plain_cache(config: PretrainedConfig) -> bool:
    """Check whether every layer of a language model caches the keys and values of all tokens."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


@dataclass(frozen=True)
class Request:
    """A batch of prompts, and how to sample from them.

    Attributes:
        input_ids: (B, T) left-padded prompts; those of a group are neighbours.
        attention_mask: (B, T).
        config: sampling parameters, length limit, end and pad token ids.
        stops: what ends a completion besides the end tokens.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    config: GenerationConfig
    stops: StopStrings

    @property
    def width(self) -> int:
        """Tokens of a row at most: prompt and completion."""
        return int(self.input_ids.size(1) + self.config.max_new_tokens)

    def limited(self, tokens: int) -> "Request":
        """Limit completions to this number of tokens."""
        config = copy.copy(self.config)
        config.max_new_tokens = min(config.max_new_tokens, tokens)
        return replace(self, config=config)

    def rows(self, rows: slice) -> "Request":
        """Select rows."""
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        return replace(self, input_ids=ids, attention_mask=mask)

    def mask_of(self, completion_ids: torch.Tensor) -> torch.Tensor:
        """Mask (B, T) completions: ones up to the end token, or the one that ends a stop string."""
        end_ids = torch.as_tensor(self.config.eos_token_id, device=completion_ids.device)
        is_end = torch.isin(completion_ids, end_ids)
        lengths = completion_ids.size(1) - (is_end.cumsum(dim=1) - is_end.int() > 0).sum(dim=1)
        for row, ids in enumerate(completion_ids.tolist()):
            stop = self.stops.length(ids[: int(lengths[row])])
            if stop is not None:
                lengths[row] = stop
        positions = torch.arange(completion_ids.size(1), device=completion_ids.device)
        return (positions < lengths[:, None]).long()


@dataclass(frozen=True)
class Sampled:
    """Sampled completions.

    Attributes:
        completion_ids: (B, T), padded on the right. A row that ended at a stop string has no end
            token: `stops.length` gives its length.
        log_probs: (B, T) of the tokens at the sampling temperature, before tokens were excluded
            by top-k, top-p or min-p; arbitrary at padding. None if they were not requested.
    """

    completion_ids: torch.Tensor
    log_probs: torch.Tensor | None = None


@torch.no_grad()
def generate_fast(model: Model, request: Request, with_log_probs: bool = False) -> Sampled:
    """Complete each row of left-padded prompts, by sampling or greedily.

    Args:
        model: in the mode and with the weights that are to be sampled from.
        request: the prompts; equal neighbouring rows are computed once.
        with_log_probs: also return the log-probs of the sampled tokens.
    """
    input_ids, config, stops = request.input_ids, request.config, request.stops
    B = input_ids.size(0)
    room = int(config.max_new_tokens)
    end_ids = torch.as_tensor(config.eos_token_id, device=input_ids.device).reshape(-1)
    choose = _sampler(config) if config.do_sample else _most_likely
    completion_ids = input_ids.new_full((B, room), int(config.pad_token_id))
    log_probs = torch.zeros(B, room, device=input_ids.device) if with_log_probs else None

    prompts = _prefill(model, request, room)
    cache, mask, position = prompts.cache, prompts.mask, prompts.next_position
    logits_BV = prompts.logits
    rows = torch.arange(B, device=input_ids.device)  # indices of the rows still in the batch
    writing = torch.ones(B, dtype=torch.bool, device=input_ids.device)  # which are unfinished
    for t in range(room):
        logits_BV = logits_BV.float()
        tokens = choose(logits_BV)
        completion_ids[rows[writing], t] = tokens[writing]
        if log_probs is not None:
            log_probs[rows, t] = _log_probs_of(tokens, logits_BV, config)
        writing &= ~torch.isin(tokens, end_ids)
        if stops.strings:
            writing &= ~stops.ended(completion_ids[rows, : t + 1])
        n_writing = int(writing.sum())
        if n_writing == 0 or t == room - 1:
            break
        if n_writing < LEAVE_BELOW * len(rows):
            stay = writing.nonzero(as_tuple=True)[0]
            cache.batch_select_indices(stay)
            rows, tokens, writing = rows[stay], tokens[stay], writing[stay]
            mask, position = mask[stay], position[stay]
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits_BV = model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=position[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        position = position + 1
    T = t + 1
    return Sampled(completion_ids[:, :T], None if log_probs is None else log_probs[:, :T])


def _log_probs_of(
    tokens: torch.Tensor, logits_BV: torch.Tensor, config: GenerationConfig
) -> torch.Tensor:
    scaled_BV = logits_BV / (config.temperature or 1.0)
    chosen_B: torch.Tensor = scaled_BV.gather(1, tokens[:, None]).squeeze(1)
    return chosen_B - scaled_BV.logsumexp(dim=1)


def _prefill(model: Model, request: Request, room: int) -> Prefill:
    """Compute each distinct prompt once, then give every row a copy of its cache, with room."""
    input_ids, attention_mask = request.input_ids, request.attention_mask
    is_new = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    is_new[1:] = (input_ids[1:] != input_ids[:-1]).any(dim=1)
    cache = DynamicCache(config=model.config.get_text_config())
    prompts = prefill(model, input_ids[is_new], attention_mask[is_new], cache)
    prompts = prompts.expand(is_new.cumsum(0) - 1)
    cache.layers = [RoomyLayer(layer.keys, layer.values, room) for layer in cache.layers]
    return prompts


def _most_likely(logits_BV: torch.Tensor) -> torch.Tensor:
    return logits_BV.argmax(dim=-1)


def _sampler(config: GenerationConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build a function that draws tokens, with the warpers of `generate` in its order."""
    warpers = LogitsProcessorList()
    if config.temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        warpers.append(TopKLogitsWarper(top_k=config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(min_p=config.min_p))
    # None of these warpers looks at the tokens so far.
    return lambda logits_BV: _draw(warpers(None, logits_BV))


def _draw(logits_BV: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution function.

    `torch.multinomial` draws a random number for each token of the vocabulary, which took a
    seventh of the decoding time on CPU. The sum is in float64: over 100,000 tokens, float32 would
    round small probabilities away.
    """
    cumulative = logits_BV.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    threshold = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    return drawn.squeeze(1).clamp(max=logits_BV.size(1) - 1)
