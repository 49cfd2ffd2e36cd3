"""Generation, sampled or greedy: every prompt computed once, and rows that are done leave.

`transformers.generate` computes every prompt once for each of its G completions, copies the whole
key-value cache at every token, and goes on with all rows until the last one ends. This loop gives
the same distribution without the three. What it does not cover is left to `generate`.

`merged` puts the adapter into the weights for as long as completions are sampled.

Shapes: P distinct prompts, B = P x G rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_bnb_weight
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sologrpo.sampling.prefill import Prefill, prefill
from sologrpo.sampling.stopping import StopStrings

# Rows leave the batch when so small a share of it is still being written: each departure copies
# the cache of those that stay.
LEAVE_BELOW = 0.75


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer with room for the tokens to come: growing by one copies one token, not all."""

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
        """Write the new tokens behind the old ones."""
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        self._key_store[:, :, start:end] = key_states
        self._value_store[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        length = self.keys.shape[-2]
        self._key_store, self._value_store = self._key_store[indices], self._value_store[indices]
        self._show(length)


def can_generate_fast(
    model: PreTrainedModel | PeftModel, config: GenerationConfig, kwargs: dict[str, Any]
) -> bool:
    """Whether `generate_fast` covers this call of `generate`; if not, `generate` must do it."""
    text_config = model.config.get_text_config()
    plain_cache = all(
        type(layer) is DynamicLayer for layer in DynamicCache(config=text_config).layers
    )
    plain_config = (
        config.num_beams in (None, 1)
        and config.repetition_penalty in (None, 1.0)
        and config.cache_implementation is None
        and config.stop_strings is None
    )
    return plain_cache and plain_config and set(kwargs) <= {"input_ids", "attention_mask"}


@dataclass(frozen=True)
class Sampled:
    """Completions as they came from an engine.

    Attributes:
        completion_ids: (B, T), padded on the right. A row that ended at a stop string has no end
            token: `stops.length` tells where its padding begins.
        log_probs: (B, T) of the tokens at the sampling temperature, before tokens were excluded
            by top-k, top-p or min-p; arbitrary at padding. None if they were not asked for.
    """

    completion_ids: torch.Tensor
    log_probs: torch.Tensor | None = None


def generate_fast(
    model: PreTrainedModel | PeftModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    config: GenerationConfig,
    stops: StopStrings | None = None,
) -> torch.Tensor:
    """Complete each row of left-padded prompts, by sampling or greedily.

    Args:
        input_ids: (B, T) prompts; equal neighbouring rows are computed once.
        attention_mask: (B, T).
        config: sampling parameters, length limit, end and pad token ids.
        stops: what ends a row beside the end tokens; the token that completes it is kept.

    Returns:
        (B, T + T_new) prompts and completions, padded on the right, as `generate` does. A row
        that ended at a stop string has no end token: `stops.length` tells where its padding begins.
    """
    sampled = sample_fast(model, input_ids, attention_mask, config, stops)
    return torch.cat([input_ids, sampled.completion_ids], dim=1)


@torch.no_grad()
def sample_fast(
    model: PreTrainedModel | PeftModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    config: GenerationConfig,
    stops: StopStrings | None = None,
    with_log_probs: bool = False,
) -> Sampled:
    """Do as `generate_fast`, and keep the log-probs of the sampled tokens if they are wanted."""
    B = input_ids.size(0)
    room = int(config.max_new_tokens)
    end_ids = torch.as_tensor(config.eos_token_id, device=input_ids.device).reshape(-1)
    choose = _sampler(config) if config.do_sample else _most_likely
    completion_ids = input_ids.new_full((B, room), int(config.pad_token_id))
    log_probs = torch.zeros(B, room, device=input_ids.device) if with_log_probs else None

    prompts = _prefill(model, input_ids, attention_mask, room)
    cache, mask, position = prompts.cache, prompts.mask, prompts.next_position
    logits_BV = prompts.logits
    rows = torch.arange(B, device=input_ids.device)  # the rows still in the batch
    writing = torch.ones(B, dtype=torch.bool, device=input_ids.device)  # those of them not done
    for t in range(room):
        logits_BV = logits_BV.float()
        tokens = choose(logits_BV)
        completion_ids[rows[writing], t] = tokens[writing]
        if log_probs is not None:
            log_probs[rows, t] = _log_probs_of(tokens, logits_BV, config)
        writing &= ~torch.isin(tokens, end_ids)
        if stops is not None:
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


def _prefill(
    model: PreTrainedModel | PeftModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    room: int,
) -> Prefill:
    """Compute each distinct prompt once, then give every row its copy and room to write."""
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
    """Draw after the warpers that `generate` would use, in its order."""
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
    """Draw one token a row by inverting the distribution function.

    `torch.multinomial` draws a random number for each token of the vocabulary, which took a
    seventh of the decoding time on CPU. The sum runs in float64: over 100,000 tokens, float32
    would round small probabilities away.
    """
    cumulative = logits_BV.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    threshold = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    return drawn.squeeze(1).clamp(max=logits_BV.size(1) - 1)


# -- merged weights -------------------------------------------------------------------------------


@contextmanager
def merged(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Within, plain linear layers hold the weights with the adapter added; after, all is as before.

    Saves unpacking 4-bit weights, and the two small products of every LoRA layer, at every token.
    The sum is made in fp32 and rounded once, to `dtype`. The original layers are not touched, so
    that the merged ones need memory of their own: `merged_bytes`.

    Args:
        model: one for which `why_not_merged` knows no reason.
        dtype: of the merged weights; None for that of the model's embedding, which is what its
            layers work in.
    """
    dtype = dtype or working_dtype(model)
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    try:
        for parent, name, layer in _layers_to_merge(model):
            linear = _merged_linear(layer, dtype)
            replaced.append((parent, name, layer))
            setattr(parent, name, linear)
        yield
    finally:
        for parent, name, layer in replaced:
            setattr(parent, name, layer)


def why_not_merged(model: PreTrainedModel | PeftModel) -> str | None:
    """Say what `merged` does not cover in this model; None if it covers it."""
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if type(base) not in (torch.nn.Linear, bnb.nn.Linear4bit):
            return f"LoRA on a layer of type {type(base).__name__}"
        if any(module.use_dora.values()):
            return "DoRA scales the weights as well"
        if module.lora_variant:
            return "a variant of LoRA"
        if any(module.lora_bias.values()):
            return "LoRA with a bias of its own"
    return None


def is_merge_exact(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> bool:
    """Whether `merged` is the policy that is trained, up to the order of fp32 sums.

    Half precision rounds the sum, which the unmerged adapter's forward pass does not. Dropout acts
    on the adapter in training mode, and cannot in merged weights.
    """
    dropout = any(
        getattr(dropout, "p", 0.0)
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for dropout in module.lora_dropout.values()
    )
    return (dtype or working_dtype(model)) == torch.float32 and not dropout


def merged_bytes(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> int:
    """Bytes that `merged` needs on top of the model."""
    size = (dtype or working_dtype(model)).itemsize
    layers = (_base_of(layer) for _, _, layer in _layers_to_merge(model))
    return sum(size * layer.in_features * layer.out_features for layer in layers)


def working_dtype(model: PreTrainedModel | PeftModel) -> torch.dtype:
    """The number format in which hidden states run through the model."""
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def _layers_to_merge(
    module: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(parent, name, layer) of the layers with an adapter or 4-bit weights."""
    for name, child in list(module.named_children()):
        if isinstance(child, LoraLayer | bnb.nn.Linear4bit):
            yield module, name, child
        else:
            yield from _layers_to_merge(child)


def _base_of(layer: torch.nn.Module) -> Any:
    return layer.get_base_layer() if isinstance(layer, LoraLayer) else layer


@torch.no_grad()
def _merged_linear(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Linear:
    base = _base_of(layer)
    is_4bit = isinstance(base, bnb.nn.Linear4bit)
    weight = dequantize_bnb_weight(base.weight) if is_4bit else base.weight
    if isinstance(layer, LoraLayer) and not layer.disable_adapters:
        active = (name for name in layer.active_adapters if name in layer.lora_A)
        weight = weight.float() + sum(layer.get_delta_weight(name).float() for name in active)
    linear = torch.nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    if base.bias is not None:
        linear.bias = torch.nn.Parameter(base.bias.to(dtype), requires_grad=False)
    return linear
