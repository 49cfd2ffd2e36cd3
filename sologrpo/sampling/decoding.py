"""The decoding loop, sampled or greedy: prompts are held once, and finished rows leave.

`transformers.generate` computes and caches each prompt once for each of its G completions, copies
the whole key-value cache at every token, and computes all rows until the last one ends. This loop
gives the same distribution without the three. What it does not support is left to `generate`.

Shapes: P distinct prompts, B = P x G rows, T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
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

from sologrpo.model.attention import along, follows_trees, tree_attention_enabled
from sologrpo.sampling.shared_cache import SharedCache, keeps_shapes, prefill
from sologrpo.sampling.stopping import StopStrings

Model: TypeAlias = PreTrainedModel | PeftModel

# Finished rows leave when less than this share of the batch is unfinished: removing rows copies the
# cache of those that stay.
LEAVE_BELOW = 0.75
# Tokens after which the loop looks at what ended, where shapes are kept: the host waits for the GPU
# each time. Rows that ended in between are sampled to no use.
LOOK_EVERY = 16

# Settings of `GenerationConfig` that `generate_fast` follows. Any other asks for more.
SUPPORTED_SETTINGS = {
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_beams",
    "repetition_penalty", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache",
    "disable_compile", "transformers_version",
}  # fmt: skip


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
    is_plain = plain_config and set(kwargs) <= {"input_ids", "attention_mask"}
    return is_plain and has_plain_cache(model.config.get_text_config()) and follows_trees(model)


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

    def limited(self, tokens: int) -> "Request":
        """Limit completions to this number of tokens."""
        config = copy.copy(self.config)
        config.max_new_tokens = min(config.max_new_tokens, tokens)
        return replace(self, config=config)

    def rows(self, rows: slice) -> "Request":
        """Select rows."""
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        return replace(self, input_ids=ids, attention_mask=mask)

    def distinct_prompts(self) -> tuple[list[list[int]], torch.Tensor]:
        """Return the ids of each prompt, equal neighbours once, and (B,) the prompt of each row.

        Both are in main memory.
        """
        rows = zip(self.input_ids.cpu(), self.attention_mask.bool().cpu(), strict=True)
        groups = groupby(ids[mask].tolist() for ids, mask in rows)
        prompts, sizes = zip(*((ids, len(list(rows))) for ids, rows in groups), strict=True)
        return list(prompts), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

    def mask_of(self, completion_ids: torch.Tensor) -> torch.Tensor:
        """Mask (B, T) completions: ones up to the end token, or the one that ends a stop string."""
        end_ids = torch.as_tensor(self.config.eos_token_id, device=completion_ids.device)
        is_end = torch.isin(completion_ids, end_ids)
        is_after = is_end.cumsum(dim=1) - is_end.int() > 0
        mask = (~is_after).long()
        if not self.stops.strings:
            return mask
        rows = zip(completion_ids.tolist(), mask.sum(dim=1).tolist(), strict=True)
        lengths = [self.stops.length(ids[:length]) or length for ids, length in rows]
        positions = torch.arange(completion_ids.size(1))
        return (positions < torch.tensor(lengths)[:, None]).long().to(mask.device)


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
    with tree_attention_enabled(model.config.get_text_config()):
        return _decode(model, request, with_log_probs)


def _decode(model: Model, request: Request, with_log_probs: bool) -> Sampled:
    config, stops, device = request.config, request.stops, request.input_ids.device
    room = int(config.max_new_tokens)
    end_ids = torch.as_tensor(config.eos_token_id, device=device).reshape(-1)
    choose = _sampler(config) if config.do_sample else _most_likely

    prompts, prompt_of_row = request.distinct_prompts()
    # The last token of a completion is not put into the cache.
    cache, logits_PV = prefill(model, prompts, prompt_of_row, device, room - 1)
    logits_BV = logits_PV[prompt_of_row.to(device)]
    position = torch.tensor([len(prompts[i]) for i in prompt_of_row.tolist()], device=device)
    step = _Step(model, cache)
    B, pad_id = len(position), int(config.pad_token_id)
    completion_ids = position.new_full((B, room), pad_id)
    log_probs = torch.zeros(B, room, device=device) if with_log_probs else None
    rows = torch.arange(B, device=device)  # indices of the rows still in the batch
    writing = torch.ones(B, dtype=torch.bool, device=device)  # which are unfinished
    look_every = LOOK_EVERY if keeps_shapes(device) else 1
    for t in range(room):
        logits_BV = logits_BV.float()
        tokens = choose(logits_BV)
        completion_ids[rows, t] = tokens.where(writing, pad_id)
        if log_probs is not None:
            log_probs[rows, t] = _log_probs_of(tokens, logits_BV, config)
        writing &= ~torch.isin(tokens, end_ids)
        if t == room - 1:
            break
        if (t + 1) % look_every == 0:
            still_B = _still_writing(writing, completion_ids[rows, : t + 1], stops, look_every)
            n_writing = int(still_B.sum())
            if n_writing == 0:
                break
            writing = still_B.to(device, non_blocking=True)
            if n_writing < LEAVE_BELOW * len(rows):
                stay = still_B.nonzero(as_tuple=True)[0]
                cache.keep(stay)
                stay = stay.to(device)
                rows, tokens = rows[stay], tokens[stay]
                writing, position = writing[stay], position[stay]
        logits_BV = step(tokens, position)
        position = position + 1
    T = t + 1
    return Sampled(completion_ids[:, :T], None if log_probs is None else log_probs[:, :T])


def _still_writing(
    writing: torch.Tensor, completion_ids: torch.Tensor, stops: StopStrings, newest: int
) -> torch.Tensor:
    """Look which rows continue. The host waits for the device once, for one copy.

    Args:
        writing: (B,) which have no end token.
        completion_ids: (B, T) tokens so far.
        stops: what ends a completion besides.
        newest: how many tokens were not looked at yet.

    Returns:
        (B,) booleans in main memory.
    """
    if not stops.strings:
        return writing.cpu()
    seen = torch.cat([writing[:, None], completion_ids], dim=1).cpu()
    return seen[:, 0].bool() & ~stops.ended(seen[:, 1:], newest)


class _Step:
    """One token of every row: on a GPU a CUDA graph, captured again only when the shapes change.

    Without it, the host would launch every kernel of every layer for every token.

    Args:
        model: whose attention follows trees.
        cache: of the rows.
    """

    def __init__(self, model: Model, cache: SharedCache) -> None:
        self._model = model
        self._cache = cache
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: tuple[int, int] | None = None  # rows, room of the cache

    def __call__(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return (B, V) logits of the next tokens; the next call may overwrite them.

        Args:
            tokens: (B,) newest token of each row.
            position: (B,) its position.
        """
        self._cache.make_room()
        if tokens.device.type != "cuda":
            return self._forward(tokens, position)
        if self._captured != (len(tokens), self._cache.room):
            self._capture(tokens, position)
        self._tokens.copy_(tokens)
        self._position.copy_(position)
        assert self._graph is not None
        self._graph.replay()
        return self._logits_BV

    def _forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=tokens[:, None],
            position_ids=position[:, None],
            use_cache=False,
            **along(self._cache),
        ).logits[:, -1]
        return logits

    def _capture(self, tokens: torch.Tensor, position: torch.Tensor) -> None:
        self._tokens, self._position = tokens.clone(), position.clone()
        # Kernels choose and allocate in their first call, which a capture does not allow.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(self._tokens, self._position)
        torch.cuda.current_stream().wait_stream(stream)
        pool = None if self._graph is None else self._graph.pool()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits_BV = self._forward(self._tokens, self._position)
        self._captured = len(tokens), self._cache.room


def _log_probs_of(
    tokens: torch.Tensor, logits_BV: torch.Tensor, config: GenerationConfig
) -> torch.Tensor:
    scaled_BV = logits_BV / (config.temperature or 1.0)
    chosen_B: torch.Tensor = scaled_BV.gather(1, tokens[:, None]).squeeze(1)
    return chosen_B - scaled_BV.logsumexp(dim=1)


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
