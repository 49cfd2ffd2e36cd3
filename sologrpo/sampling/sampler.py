"""Sampling engines: two ways to sample from the policy, and the rule that chooses one.

| Engine | Samples from |
|---|---|
| `adapter` | the weights as they are trained, with the adapter unmerged |
| `merged` | the adapter merged into the weights while completions are sampled |

Both use the loop of `sampling.decoding`. Merging saves work at every token. It is exact in fp32,
and rounds the weights in half precision: then the log-probs of the first batch are compared with
the trainer's forward pass. Quantised weights are merged only where that is exact.

Shapes: B rows, T tokens.
"""

import logging
import math
import sys
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate.utils import gather_object

from sologrpo.base.errors import InputError, RunError, first_line
from sologrpo.config.arguments import SAMPLING_ENGINES
from sologrpo.model.memory import TokenBudget, free_bytes, release_unused
from sologrpo.model.merging import (
    is_merge_exact,
    is_quantised,
    merge_obstacle,
    merged,
    merged_bytes,
    working_dtype,
)
from sologrpo.model.trial import Model
from sologrpo.sampling.decoding import Request, Sampled, generate_fast
from sologrpo.sampling.shared_cache import cached_tokens

logger = logging.getLogger(__name__)

ADAPTER, MERGED = SAMPLING_ENGINES

# Mean absolute difference between the log-probs of the engine and of the trainer, nats per token.
# In bf16 with NF4 weights, SmolLM2-135M: 0.05 with the adapter unmerged, 0.07 with merged weights.
# Weights that an adapter was not trained on, garbage and wrong log-probs give far more.
MAX_GAP = 0.2
TEST_TOKENS = 32  # per row in the test
TEST_ROWS = 16  # rows of the test that the trainer scores
FREE_SHARE = 0.8  # of the free memory, for merged weights, and for a key-value cache
LOGIT_BYTES = 32  # per vocabulary entry and row: logits, probabilities, and their sum in float64


# (rows of prompts and completions, their mask, completion tokens T) -> (B, T) log-probs at the
# sampling temperature, by the trainer's forward pass.
Score = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class Sampler:
    """Samples completions with the requested engine, or with the one that the rule chooses.

    Args:
        half: dtype of mixed precision, if any.
        token_budget: tokens that the cache of a batch holds; None for what fits into memory.

    Attributes:
        engine: `adapter` or `merged`; None until `prepare` has chosen it.
        is_exact: the engine samples the trained policy. If not, completions have log-probs.

    Example:
        >>> sampler = Sampler("auto", score)
        >>> sampler.prepare(model, request)  # chooses the engine on the first call
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
        self.engine: str | None = None
        self._requested = requested
        self._score = score
        self._half = half
        self._fits_memory = token_budget is None
        self._budget = TokenBudget(token_budget or sys.maxsize, "sampling")
        self.is_exact = True

    # -- choosing -------------------------------------------------------------------------------

    def prepare(self, model: Model, request: Request) -> None:
        """Choose the engine, once.

        Raises:
            InputError: if the requested engine does not work, or disagrees with the trainer.
        """
        if self.engine is None:
            self.engine = self._choose(model, request)
            self.is_exact = self.engine == ADAPTER or is_merge_exact(model, self._half)

    def _choose(self, model: Model, request: Request) -> str:
        if not self._prefers_merged(model):
            return ADAPTER
        problem = _first_of_processes(self._merge_obstacle(model))
        if problem is None and not is_merge_exact(model, self._half):
            problem = _first_of_processes(self._disagreement(model, request))
        if problem is None:
            return MERGED
        if self._requested == MERGED:
            raise InputError(f"sampling_engine merged: {problem}; set sampling_engine: adapter")
        logger.warning("sampling engine adapter, not merged: %s", problem)
        return ADAPTER

    def _prefers_merged(self, model: Model) -> bool:
        return self._requested == MERGED or (
            self._requested != ADAPTER and prefers_merged(model, self._half)
        )

    def _merge_obstacle(self, model: Model) -> str | None:
        obstacle = merge_obstacle(model)
        if obstacle is not None:
            return obstacle
        needed, free = merged_bytes(model, self._half), free_bytes(model.device)
        if needed > FREE_SHARE * free:
            return f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        return None

    def _disagreement(self, model: Model, request: Request) -> str | None:
        """Sample the first tokens of a batch from merged weights, and compare with the trainer.

        The random state stays as it is, so that a resumed run draws the same numbers.
        """
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                gap = self._gap_to_trainer(model, request)
        except Exception as error:  # whatever is wrong with merged weights, there is the adapter
            problem = f"{type(error).__name__}: {first_line(error)}"
        else:
            return None if gap <= MAX_GAP else f"{gap:.3f} nats per token off the trainer"
        release_unused()  # after the except block: the error holds what the test had computed
        return problem

    def _gap_to_trainer(self, model: Model, request: Request) -> float:
        with merged(model, self._half):
            request = request.rows(slice(0, self._next_batch(model, request)[0]))
            request = request.limited(TEST_TOKENS)
            sampled = self._generate(model, request, with_log_probs=True)
        assert sampled.log_probs is not None
        n_rows = len(request.input_ids)
        few = slice(0, n_rows, max(1, n_rows // TEST_ROWS))  # from different groups
        request, ids = request.rows(few), sampled.completion_ids[few]
        mask = request.mask_of(ids)
        with torch.no_grad():
            trained = self._score(
                torch.cat([request.input_ids, ids], dim=1),
                torch.cat([request.attention_mask, mask], dim=1),
                ids.size(1),
            )
        return float((sampled.log_probs[few] - trained)[mask.bool()].abs().mean())

    # -- sampling -------------------------------------------------------------------------------

    def weights(self, model: Model) -> AbstractContextManager[None]:
        """Give the model the weights that the engine samples from, inside the context.

        Before an engine is chosen, for a validation ahead of training, they are not checked.
        """
        engine = self.engine
        if engine is None:
            merges = self._prefers_merged(model) and self._merge_obstacle(model) is None
            engine = MERGED if merges else ADAPTER
        return merged(model, self._half) if engine == MERGED else nullcontext()

    def sample(self, model: Model, request: Request) -> Sampled:
        """Sample all rows, in batches of complete groups where memory does not hold all at once.

        If memory runs out, the batches are halved, and completed ones are kept.
        """
        parts: list[Sampled] = []
        start, end = 0, len(request.input_ids)
        while start < end:
            rest = request.rows(slice(start, end))
            rows, tokens = self._next_batch(model, rest)
            batch = rest.rows(slice(0, rows))
            with self._budget.halved_if_out_of_memory(tokens, rows):
                parts.append(self._generate(model, batch, with_log_probs=not self.is_exact))
                start += rows
        return _joined(parts, int(request.config.pad_token_id))

    def _generate(self, model: Model, request: Request, with_log_probs: bool) -> Sampled:
        """Sample one batch, for which the adapter is cast to half precision once.

        The autocast in the model's forward pass would cast it again for every token.
        """
        half = self._half
        with nullcontext() if half is None else torch.autocast(model.device.type, half):
            return generate_fast(model, request, with_log_probs)

    def _next_batch(self, model: Model, request: Request) -> tuple[int, int]:
        """Choose the rows of the next batch, and count the tokens that its cache holds."""
        prompts, prompt_of_row = request.distinct_prompts()
        groups = prompt_of_row.tolist()
        tokens = cached_tokens([prompts[i] for i in groups], request.config.max_new_tokens)
        most = bisect_right(tokens, self._budget.tokens)
        if self._fits_memory:
            sizes = [bytes_of_batch(model, n, i + 1, self._half) for i, n in enumerate(tokens)]
            most = min(most, bisect_right(sizes, FREE_SHARE * free_bytes(model.device)))
        ends = [i + 1 for i, group in enumerate(groups) if groups[i + 1 : i + 2] != [group]]
        rows = rows_of_whole_groups(ends, max(1, most))
        return rows, tokens[rows - 1]


def bytes_of_batch(model: Model, tokens: int, rows: int, half: torch.dtype | None = None) -> int:
    """Compute the bytes of a batch while it is sampled: its logits, and its `cached_tokens`."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (half or working_dtype(model)).itemsize
    token = 2 * config.num_hidden_layers * heads * head_dim * size  # keys and values
    return int(tokens * token + rows * config.vocab_size * LOGIT_BYTES)


def rows_of_whole_groups(ends: list[int], most: int) -> int:
    """Choose the size of the next batch: batches even in size, groups unbroken if possible.

    `ends` says where each group ends, in ascending order; the last is the number of rows.

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


def prefers_merged(model: Model, half: torch.dtype | None = None) -> bool:
    """Check whether sampling from merged weights is exact, or faster."""
    return is_merge_exact(model, half) or not is_quantised(model)


def _first_of_processes(problem: str | None) -> str | None:
    """Return the first problem of any process, since all must use the same engine."""
    return next((found for found in gather_object([problem]) if found is not None), None)


def _joined(parts: list[Sampled], pad_id: int) -> Sampled:
    """Concatenate the rows of all batches, padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.completion_ids.size(1) for part in parts)

    def widened(tensors: list[torch.Tensor], value: float) -> torch.Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(t, (0, width - t.size(1)), value=value) for t in tensors])

    completion_ids = widened([part.completion_ids for part in parts], pad_id)
    log_probs = [part.log_probs for part in parts if part.log_probs is not None]
    return Sampled(completion_ids, widened(log_probs, 0.0) if log_probs else None)


def check_vllm(
    sampled: torch.Tensor, trained: torch.Tensor, mask: torch.Tensor, top_p: float = 1.0
) -> dict[str, float]:
    """Compare vLLM's log-probs with the trainer's, over the rows of all processes.

    Args:
        sampled: (B, T) log-probs by vLLM; NaN where it gave none.
        trained: (B, T) log-probs by the trainer's forward pass.
        mask: (B, T), zero at padding.
        top_p: of sampling. Below 1, vLLM's probabilities are those within the share that it keeps,
            and so up to 1 / top_p times as high.

    Returns:
        `sampling/kl` and `sampling/max_gap`, in nats; nothing if the mask is zero everywhere.

    Raises:
        RunError: if they disagree: vLLM then samples a different policy from the trained one.
    """
    differences_T = (sampled - trained)[mask.bool()].double()
    known_T = differences_T[~differences_T.isnan()]  # vLLM gives no log-prob for some tokens
    sums = [known_T.sum().item(), known_T.abs().sum().item(), len(known_T), len(differences_T)]
    highest = known_T.abs().max().item() if len(known_T) else 0.0
    rows: list[tuple[float, ...]] = gather_object([(*sums, highest)])
    total, total_abs, n_known, n_tokens = (sum(row[i] for row in rows) for i in range(4))
    if not n_tokens:
        return {}
    gap, limit = total_abs / n_known if n_known else math.nan, MAX_GAP - math.log(top_p)
    if not gap <= limit:
        raise RunError(
            f"vLLM is {gap:.3f} nats per token off the trainer, at most {limit:.3g} is allowed: it "
            "does not sample the trained policy; set use_vllm: false"
        )
    return {"sampling/kl": total / n_known, "sampling/max_gap": max(row[4] for row in rows)}
