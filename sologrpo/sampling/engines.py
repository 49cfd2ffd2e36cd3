"""Sampling engines: ways to sample the same policy, and the test that chooses between them.

| Engine | Weights | Loop |
|---|---|---|
| `adapter` | as they are trained | ours, `sampling.sample_fast` |
| `merged` | adapter merged for the time of sampling | ours |
| `static` | merged | `generate` with a static cache, compiled on CUDA |
| `continuous` | merged | `generate_batch`: paged cache, rows join and leave at every token |

An engine may be fast and wrong: kernels break with 4-bit weights, merging rounds. So before one of
several is taken, each samples from prompts of the batch at hand, and what it drew is judged by the
trainer's own forward pass. Weights in fp32 are merged without a test: there is nothing to gain
from another engine on a CPU, and nothing is rounded.

Shapes: B rows, T tokens.
"""

import copy
import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation import ContinuousBatchingConfig

from sologrpo.errors import InputError
from sologrpo.model.memory import TokenBudget, free_bytes, release_unused
from sologrpo.sampling.loop import (
    Sampled,
    is_merge_exact,
    merged,
    merged_bytes,
    sample_fast,
    why_not_merged,
    working_dtype,
)
from sologrpo.sampling.stopping import StopStrings

logger = logging.getLogger(__name__)

Model: TypeAlias = PreTrainedModel | PeftModel

# Nats a token, mean absolute difference between the log-probs of the engine and of the trainer.
# In bf16 with NF4 weights, SmolLM2-135M: 0.05 with the adapter beside the weights, 0.07 with merged
# ones. Weights that an adapter was not trained on, garbage and wrong log-probs give far more.
MAX_GAP = 0.2
# The surprise at the sampled tokens has to be their entropy; so far off, in nats a token, and so
# many standard errors are allowed.
MAX_SURPRISE, SURPRISE_ERRORS = 0.1, 5.0
TEST_TOKENS = 32  # of every row in the test
TEST_ROWS = 16  # of the test's rows that the trainer scores
FREE_SHARE = 0.8  # of the free memory that merged weights, or a key-value cache, may take
LOGIT_BYTES = 32  # a vocabulary entry and row: logits, probabilities, and their sum in float64
STATIC_LENGTHS = 128  # a static cache is a multiple of so many tokens: each length is compiled
PAGE = 256  # tokens of a page of the paged cache, transformers' own value


@dataclass(frozen=True)
class Request:
    """What is to be sampled.

    Attributes:
        input_ids: (B, T) left-padded prompts; those of a group are neighbours.
        attention_mask: (B, T).
        config: sampling parameters, length limit, end and pad token ids.
        stops: what ends a completion beside the end tokens.
        limit: tokens of the completions at most, if fewer than `config` allows. A cache of fixed
            size holds as many as `config` allows.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    config: GenerationConfig
    stops: StopStrings
    limit: int | None = None

    @property
    def width(self) -> int:
        """Tokens of a row at most, prompt and completion."""
        return int(self.input_ids.size(1) + self.config.max_new_tokens)

    def settings(self) -> GenerationConfig:
        """A copy of the sampling parameters, with the limit put in."""
        config = copy.copy(self.config)
        if self.limit is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.limit)
        return config

    def rows(self, rows: slice) -> "Request":
        """The same of some rows only."""
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        return replace(self, input_ids=ids, attention_mask=mask)

    def mask_of(self, completion_ids: torch.Tensor) -> torch.Tensor:
        """(B, T) ones up to the end token, or the token that completes a stop string."""
        end_ids = torch.as_tensor(self.config.eos_token_id, device=completion_ids.device)
        is_end = torch.isin(completion_ids, end_ids)
        lengths = completion_ids.size(1) - (is_end.cumsum(dim=1) - is_end.int() > 0).sum(dim=1)
        for row, ids in enumerate(completion_ids.tolist()):
            stop = self.stops.length(ids[: int(lengths[row])])
            if stop is not None:
                lengths[row] = stop
        positions = torch.arange(completion_ids.size(1), device=completion_ids.device)
        return (positions < lengths[:, None]).long()


# (rows of prompts and completions, their mask, completion tokens T, whether entropies are wanted)
# -> (B, T) log-probs, and entropies, of the trainer's forward pass at the sampling temperature.
Score = Callable[[torch.Tensor, torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Engine:
    """A way to sample: of which weights, and `run(model, request, with_log_probs)`.

    An engine that leaves out log-probs that were asked for has them computed afterwards.
    """

    name: str
    run: Callable[[Model, Request, bool], Sampled]
    merges: bool = True


def _run_loop(model: Model, request: Request, with_log_probs: bool) -> Sampled:
    return sample_fast(
        model,
        request.input_ids,
        request.attention_mask,
        request.settings(),
        request.stops,
        with_log_probs,
    )


def _run_static(model: Model, request: Request, with_log_probs: bool) -> Sampled:
    inner = _without_adapter(model)
    config = request.settings()
    config.disable_compile = False  # grpo_trainer.py:1173 sets it
    length = math.ceil(request.width / STATIC_LENGTHS) * STATIC_LENGTHS
    cache = StaticCache(config=inner.config.get_text_config(), max_cache_len=length)
    prompt_T = request.input_ids.size(1)
    output_ids = type(inner).generate(
        inner,
        input_ids=request.input_ids,
        attention_mask=request.attention_mask,
        generation_config=config,
        stopping_criteria=request.stops.criteria(prompt_T),
        past_key_values=cache,
    )
    return Sampled(output_ids[:, prompt_T:])


def _run_continuous(model: Model, request: Request, with_log_probs: bool) -> Sampled:
    # Nothing in it stops at a stop string: what comes behind is cut off by whoever asked.
    pages = math.ceil(request.width / PAGE)
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        # Without a limit it takes most of the memory; nor is more than this ever used.
        num_blocks=max(len(request.input_ids) * pages, 2),
        max_batch_tokens=max(len(request.input_ids), request.input_ids.size(1)),
        drop_unsupported_processors=False,
        seed=int(torch.randint(2**31, ())),  # it has a generator of its own
    )
    rows = zip(request.input_ids, request.attention_mask.bool(), strict=True)
    inner = _without_adapter(model)
    done = type(inner).generate_batch(
        inner,
        [ids[mask].tolist() for ids, mask in rows],
        generation_config=request.settings(),
        continuous_batching_config=settings,
        progress_bar=False,
    )
    failed = [output.error for output in done.values() if output.error is not None]
    if failed or len(done) != len(request.input_ids):
        raise RuntimeError(f"generate_batch finished {len(done)} rows: {failed or 'it stopped'}")
    completions = [torch.tensor(output.generated_tokens) for output in done.values()]
    completion_ids = torch.nn.utils.rnn.pad_sequence(
        completions, batch_first=True, padding_value=int(request.config.pad_token_id)
    )
    return Sampled(completion_ids.to(request.input_ids.device))


def _without_adapter(model: Model) -> PreTrainedModel:
    """The model below PEFT, whose `generate` the trainer has not replaced."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


SAMPLING_ENGINES = {
    engine.name: engine
    for engine in (
        Engine("adapter", _run_loop, merges=False),
        Engine("merged", _run_loop),
        Engine("static", _run_static),
        Engine("continuous", _run_continuous),
    )
}
# Without compiled kernels the latter two are slower than our loop.
ON_CPU, ON_CUDA = ("adapter", "merged"), tuple(SAMPLING_ENGINES)


@dataclass(frozen=True)
class Verdict:
    """What the test found about an engine.

    Attributes:
        tokens_per_second: at the width of the batch; 0 if it was rejected.
        gap: see `MAX_GAP`; NaN if it got nowhere.
        reason: why it was rejected; None if it was not.
    """

    tokens_per_second: float = 0.0
    gap: float = math.nan
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"rejected: {self.reason}"
        return f"{self.tokens_per_second:.0f} tokens/s, {self.gap:.4f} nats off"


class Sampler:
    """Samples by the engine that was asked for, or by the fastest one that is right.

    Args:
        requested: one of `SAMPLING_ENGINES`, or `auto`.
        score: the trainer's forward pass; within `merged` it scores with the merged weights.
        half: number format of mixed precision; None if there is none.
        token_budget: tokens (padding counted) of a batch; None for what fits into memory.

    Example:
        >>> sampler = Sampler("auto", score)
        >>> sampler.prepare(model, request)  # chooses, at the first time
        >>> with sampler.weights(model):
        ...     sampled = sampler.sample(model, request)
    """

    def __init__(
        self,
        requested: str,
        score: Score,
        half: torch.dtype | None = None,
        token_budget: int | None = None,
    ) -> None:
        self.engine: Engine | None = None
        self._requested = requested
        self._score = score
        self._half = half
        self._fits_memory = token_budget is None
        self._budget = TokenBudget(token_budget or sys.maxsize, "sampling")
        self._is_exact = True

    @property
    def is_exact(self) -> bool:
        """Whether the engine's policy is the trained one; if not, completions have log-probs."""
        return self._is_exact

    # -- choosing -------------------------------------------------------------------------------

    def prepare(self, model: Model, request: Request) -> None:
        """Choose the engine, unless that has been done.

        Raises:
            InputError: if the engine that was asked for does not work, or is not right.
        """
        if self.engine is not None:
            return
        name = self._choose(model, request)
        self.engine = SAMPLING_ENGINES[name]
        in_fp32 = is_merge_exact(model, self._half)
        self._is_exact = name == "adapter" or (name == "merged" and in_fp32)

    def _choose(self, model: Model, request: Request) -> str:
        if self._requested == "adapter":
            return "adapter"
        obstacles = gather_object([self._why_not_merged(model)])
        obstacle = next((obstacle for obstacle in obstacles if obstacle is not None), None)
        if obstacle is not None:
            if self._requested != "auto":
                raise _cannot(self._requested, obstacle)
            logger.warning("sampling engine adapter: it cannot be merged: %s", obstacle)
            return "adapter"
        candidates = self._candidates(model)
        if candidates == ["merged"] and is_merge_exact(model, self._half):
            return "merged"
        verdicts = {name: self._test(SAMPLING_ENGINES[name], model, request) for name in candidates}
        verdicts = _agreed(verdicts)
        if self._requested != "auto" and verdicts[self._requested].reason is not None:
            raise _cannot(self._requested, str(verdicts[self._requested].reason))
        # The adapter is the policy itself; whatever is wrong with it shows in the training pass.
        right = [name for name in candidates if verdicts[name].reason is None] or ["adapter"]
        fastest = max(right, key=lambda name: verdicts[name].tokens_per_second)
        found = "; ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
        logger.warning("sampling engine %s (%s)", fastest, found)
        return fastest

    def _candidates(self, model: Model) -> list[str]:
        if self._requested != "auto":
            return [self._requested]
        if model.device.type == "cuda":
            return list(ON_CUDA)
        return ["merged"] if is_merge_exact(model, self._half) else list(ON_CPU)

    def _why_not_merged(self, model: Model) -> str | None:
        obstacle = why_not_merged(model)
        if obstacle is not None:
            return obstacle
        if self._half is not None and self._requested in ("static", "continuous"):
            dtype = working_dtype(model)
            if dtype != self._half:
                return f"it needs dtype: {self._half}, not {dtype} in mixed precision"
        needed, free = merged_bytes(model, self._half), free_bytes(model.device)
        if needed > FREE_SHARE * free:
            return f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        return None

    def _test(self, engine: Engine, model: Model, request: Request) -> Verdict:
        """Sample the first tokens of the first batch; the random state is put back."""
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                return self._judge(engine, model, replace(request, limit=TEST_TOKENS))
        except Exception as error:  # whatever ails a candidate, there is another
            reason = (str(error).strip().splitlines() or [""])[0]
            verdict = Verdict(reason=f"{type(error).__name__}: {reason}")
        release_unused()  # here, where the error no longer holds what the test had computed
        return verdict

    def _judge(self, engine: Engine, model: Model, request: Request) -> Verdict:
        with self._weights_of(engine, model):
            request = request.rows(slice(0, self._rows_of_next_batch(model, request)))
            sampled = engine.run(model, request, True)
            few = _spread(len(request.input_ids), TEST_ROWS)
            request_few, ids = request.rows(few), sampled.completion_ids[few]
            own = None if sampled.log_probs is None else sampled.log_probs[few]
            if own is None:
                own, _ = self._scored(request_few, ids)
        trainer, entropies = self._scored(request_few, ids, with_entropy=True)
        assert entropies is not None
        mask = request_few.mask_of(ids).bool()
        gap = float((own - trainer)[mask].abs().mean())
        if not gap <= MAX_GAP:
            return Verdict(gap=gap, reason=f"{gap:.3f} nats a token off the trainer")
        surprise = _surprise(-(trainer + entropies)[mask], request.config)
        if surprise is not None:
            return Verdict(gap=gap, reason=surprise)
        # Timed with weights merged anew, as at every later batch: that must not compile again.
        with self._weights_of(engine, model):
            start = time.perf_counter()
            sampled = engine.run(model, request, True)
            tokens = int(request.mask_of(sampled.completion_ids).sum())
            return Verdict(tokens / (time.perf_counter() - start), gap)

    def _scored(
        self, request: Request, completion_ids: torch.Tensor, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_ids = torch.cat([request.input_ids, completion_ids], dim=1)
        mask = torch.cat([request.attention_mask, request.mask_of(completion_ids)], dim=1)
        with torch.no_grad():
            return self._score(input_ids, mask, completion_ids.size(1), with_entropy)

    # -- sampling -------------------------------------------------------------------------------

    def weights(self, model: Model) -> AbstractContextManager[None]:
        """Within, the model has the weights that the engine samples from.

        Before an engine is chosen, for a validation ahead of training: merged if that is possible.
        """
        if self.engine is not None:
            return self._weights_of(self.engine, model)
        if self._requested == "adapter" or self._why_not_merged(model) is not None:
            return nullcontext()
        return merged(model, self._half)

    def _weights_of(self, engine: Engine, model: Model) -> AbstractContextManager[None]:
        return merged(model, self._half) if engine.merges else nullcontext()

    def sample(self, model: Model, request: Request) -> Sampled:
        """Sample all rows, in batches of whole groups where memory does not hold all at once.

        If memory runs out, the batches get half as large, and those that are done are kept.
        """
        parts: list[Sampled] = []
        start, end = 0, len(request.input_ids)
        while start < end:
            rest = request.rows(slice(start, end))
            batch = rest.rows(slice(0, self._rows_of_next_batch(model, rest)))
            rows = len(batch.input_ids)
            try:
                parts.append(self._sample_batch(model, batch))
            except Exception as error:
                self._budget.halve(error, rows * batch.width, rows)
            else:
                start += rows
                continue
            release_unused()  # here, where the error no longer holds what the batch had computed
        return _joined(parts, int(request.config.pad_token_id))

    def _sample_batch(self, model: Model, request: Request) -> Sampled:
        assert self.engine is not None
        sampled = self.engine.run(model, request, not self._is_exact)
        if self._is_exact or sampled.log_probs is not None:
            return sampled
        return replace(sampled, log_probs=self._scored(request, sampled.completion_ids)[0])

    def _rows_of_next_batch(self, model: Model, request: Request) -> int:
        tokens = self._budget.tokens
        if self._fits_memory:
            row = bytes_of_row(model, request.width, self._half)
            tokens = min(tokens, int(FREE_SHARE * free_bytes(model.device) / row) * request.width)
        most = max(1, tokens // request.width)
        is_new = (request.input_ids[1:] != request.input_ids[:-1]).any(dim=1)
        ends = [*(is_new.nonzero().flatten() + 1).tolist(), len(request.input_ids)]
        return rows_of_whole_groups(ends, most)


def bytes_of_row(model: Model, width: int, half: torch.dtype | None = None) -> int:
    """Bytes that a row of so many tokens takes while it is sampled: its cache and its logits."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (half or working_dtype(model)).itemsize
    token = 2 * config.num_hidden_layers * heads * head_dim * size  # keys and values
    return int(width * token + config.vocab_size * LOGIT_BYTES)


def rows_of_whole_groups(ends: list[int], most: int) -> int:
    """Rows of the first of several batches, even in size, that break no group if that is possible.

    Args:
        ends: where each group ends, ascending; the last is the number of rows.
        most: rows that a batch can hold.

    Example:
        >>> rows_of_whole_groups([8, 16, 24], 20)  # two batches of 16 and 8, not of 20 and 4
        16
        >>> rows_of_whole_groups([8, 16, 24, 32], 31)
        16
        >>> rows_of_whole_groups([8, 16], 6)
        6
    """
    total = ends[-1]
    if total <= most:
        return total
    even = math.ceil(total / math.ceil(total / most))
    fitting = [end for end in ends if end <= most]
    return next((end for end in fitting if end >= even), max(fitting, default=most))


def _spread(total: int, count: int) -> slice:
    """About so many of all rows, from different groups."""
    return slice(0, total, max(1, total // count))


def _surprise(differences_T: torch.Tensor, config: GenerationConfig) -> str | None:
    """Say so if tokens are not as likely as tokens sampled from the trainer's policy would be.

    Args:
        differences_T: what a token's improbability, in nats, exceeds the entropy by. Over tokens
            that were sampled from the same distribution its mean is 0.
    """
    off = float(differences_T.double().mean())
    error = float(differences_T.double().std()) / math.sqrt(max(len(differences_T), 1))
    allowed = MAX_SURPRISE + SURPRISE_ERRORS * error if len(differences_T) > 1 else math.inf
    truncated = bool(config.top_k) or (config.top_p or 1.0) < 1.0 or bool(config.min_p)
    greedy = not config.do_sample
    if off > allowed or (off < -allowed and not truncated and not greedy):
        return f"its tokens are not those of the policy: {off:+.2f} nats from the entropy"
    return None


def _agreed(verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
    """The worst that any process found: all have to take the same engine."""
    every = gather_object([verdicts])
    return {
        name: min((found[name] for found in every), key=lambda verdict: verdict.tokens_per_second)
        for name in verdicts
    }


def _cannot(name: str, reason: str) -> InputError:
    return InputError(f"sampling_engine {name}: {reason}; set sampling_engine: adapter")


def _joined(parts: list[Sampled], pad_id: int) -> Sampled:
    """The rows of all batches, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.completion_ids.size(1) for part in parts)

    def widened(tensors: list[torch.Tensor], value: float) -> torch.Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(t, (0, width - t.size(1)), value=value) for t in tensors])

    completion_ids = widened([part.completion_ids for part in parts], pad_id)
    log_probs = [part.log_probs for part in parts if part.log_probs is not None]
    return Sampled(completion_ids, widened(log_probs, 0.0) if log_probs else None)


def check_vllm(sampled: torch.Tensor, trained: torch.Tensor, mask: torch.Tensor) -> None:
    """Compare vLLM's log-probs with the trainer's, (B, T) each.

    Raises:
        InputError: if they disagree; vLLM then samples another policy than the one that is trained.
    """
    differences_T = (sampled - trained)[mask.bool()].abs()
    gap = float(differences_T.nanmean())  # vLLM knows no log-prob of some tokens
    if not gap <= MAX_GAP:
        raise InputError(
            f"vLLM is {gap:.3f} nats a token off the trainer, at most {MAX_GAP} is allowed: it "
            "does not sample the trained policy; set use_vllm: false, or load_in_4bit: false"
        )
