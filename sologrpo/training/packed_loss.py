"""The loss and its gradient in micro-batches that are packed by tokens.

TRL's loss is a sum over the rows of a batch, up to a constant. So rows that cannot change the
gradient are left out, and the others are packed without padding, each token once (`token_tree`).

Shapes: B rows of a batch, N sequences, T tokens.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from trl import GRPOTrainer

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.model.attention import SDPA, follows_trees
from sologrpo.model.memory import (
    TokenBudget,
    TokenBytes,
    activation_bytes,
    bytes_for_tensors,
    cpu_process,
)
from sologrpo.model.merging import working_dtype
from sologrpo.model.trial import Model, problem_of, trial_rows
from sologrpo.sampling.decoding import has_plain_cache
from sologrpo.sampling.sampler import FREE_SHARE
from sologrpo.training.loss import ROW_NORMALISED, Metrics, grpo_loss
from sologrpo.training.packing import Batch, Rows, Tokens, on_device, select_rows
from sologrpo.training.token_tree import TokenTree
from sologrpo.training.trl_patches import lm_head_at, replaced

logger = logging.getLogger(__name__)

# What a pass takes besides its tokens, in tokens that take as long: on a CPU measured
# (docs/performance.md), on a GPU an estimate, since fewer tokens do not keep it busy.
PASS_TOKENS_ON_CPU, PASS_TOKENS_ON_GPU = 32, 512

Pass = tuple[list[int], int]  # its rows, and how many tokens it computes
Result = TypeVar("Result")


class PackedScorer:
    """Score completion tokens in passes of at most `budget` tokens, without padding."""

    def __init__(self, args: SoloGRPOConfig, model: Model, accelerator: Accelerator) -> None:
        self._args = args
        self._model = model
        self._accelerator = accelerator
        self.budget = TokenBudget(args.train_token_budget or sys.maxsize, "training")

    @cached_property
    def _shares_prompts(self) -> bool:
        """Try attention along a tree, which a GPU compiles, against that of each row."""
        attention = self._model.config.get_text_config()._attn_implementation
        if sharing_obstacle(self._args, self._model, attention) is not None:
            return False
        problem = problem_of(self._model, self._gaps_to_unshared)
        if problem is not None:
            logger.warning("prompts are not shared in training: %s", problem)
        return problem is None

    def _gaps_to_unshared(self) -> Iterator[torch.Tensor]:
        """Yield the (B, T) differences that sharing prompts makes, after its backward pass too."""
        on_cpu = self._model.device.type == "cpu"
        # FlexAttention compiles for one size first; for the second, and all that follow, once more.
        for prompt_T, completion_T in [(12, 4)] if on_cpu else [(100, 40), (100, 50)]:
            tokens = _trial_tokens(self._model, prompt_T, completion_T)
            with torch.enable_grad():
                shared, separate = (
                    self._try(TokenTree.of(tokens, share)) for share in (True, False)
                )
            yield shared - separate

    def _try(self, tree: TokenTree) -> torch.Tensor:
        """Return the log-probs of a pass, once its backward pass is computed too."""
        log_probs: torch.Tensor = self._score(self._model, tree).log_probs
        torch.autograd.grad(log_probs.sum(), _trainable(self._model), materialize_grads=True)
        return tree.rows(log_probs.detach())

    def prepare(self) -> None:
        """Try sharing prompts, and bound a pass by the free memory if the settings do not."""
        _ = self._shares_prompts  # now: while the reference is scored, nothing is trainable
        if self._args.train_token_budget is not None:
            return
        config = self._model.config.get_text_config()
        number_bytes = working_dtype(self._model).itemsize
        checkpointing = bool(self._args.gradient_checkpointing)
        with self._accelerator.autocast():
            activations = activation_bytes(self._model)
        token = TokenBytes.of(
            activations, config.num_hidden_layers, config.hidden_size, number_bytes, checkpointing
        )
        free = bytes_for_tensors(self._model.device, cpu_process(number_bytes, checkpointing))
        self.budget = TokenBudget(max(1, token.fitting(FREE_SHARE * free)), "training")

    def score(
        self, model: torch.nn.Module, tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Score (B, T) completions in one pass: log-probs, and entropies, None of a reference.

        At least one completion must have a token, and the model TRL's fused LM head.
        """
        tree = TokenTree.of(tokens, self._shares_prompts)
        output = self._score(model, tree)
        entropies = None if output.entropy is None else tree.rows(output.entropy)
        return tree.rows(output.log_probs), entropies

    def _score(self, model: torch.nn.Module, tree: TokenTree) -> Any:
        inner = self._accelerator.unwrap_model(model)
        with lm_head_at(inner, tree.places), self._accelerator.autocast():
            return model(
                input_ids=tree.input_ids,
                position_ids=tree.position_ids,
                shift_labels=tree.next_ids,
                fused_lm_head=True,
                **tree.attention,
            )

    def log_probs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return (B, T) log-probs of the completion tokens, computed in packed passes."""
        completion_mask_BT, tokens = batch["completion_mask"], Tokens.of(batch)

        def run(passes: list[Pass]) -> torch.Tensor:
            log_probs_BT = torch.zeros_like(completion_mask_BT, dtype=torch.float32)
            for rows, _ in passes:
                log_probs = self.score(model, tokens.select(rows))[0]
                log_probs_BT[on_device(rows, log_probs.device)] = log_probs.float()
            return log_probs_BT

        return self.within_memory(run, range(len(completion_mask_BT)), tokens)

    def within_memory(
        self, run: Callable[[list[Pass]], Result], which: Iterable[int], tokens: Tokens
    ) -> Result:
        """Run over the packed rows that have tokens; if memory runs out, in smaller passes."""
        rows = Rows.of(tokens, self._shares_prompts)
        with_tokens = [row for row in which if rows.completion_T[row]]
        while True:
            most = self.budget.tokens
            if self._args.train_token_budget is None:
                on_cpu = self._model.device.type == "cpu"
                pass_tokens = PASS_TOKENS_ON_CPU if on_cpu else PASS_TOKENS_ON_GPU
                most = rows.best_budget(with_tokens, most, pass_tokens)
            passes = [(group, rows.tokens(group)) for group in rows.packed(with_tokens, most)]
            largest = max((tokens for _, tokens in passes), default=0)
            most_rows = max((len(group) for group, _ in passes), default=0)
            with self.budget.halved_if_out_of_memory(largest, most_rows):
                return run(passes)


def sharing_obstacle(args: SoloGRPOConfig, model: Model, attention: str) -> str | None:
    """Return why training passes share no prompts, or None; a model on the meta device will do."""
    if not args.share_prompts:
        return "share_prompts is off"
    if attention != SDPA:
        return f"{attention} attention follows no tree"
    if not has_plain_cache(model.config.get_text_config()):
        return "layers that see a window would need their own tree"
    return None if follows_trees(model) else "the model hands no tree to its attention"


@dataclass(frozen=True)
class MicroBatchLog:
    """Count what a micro-batch trained on: completion tokens, and those that its pass computed."""

    rows: int
    tokens: int
    computed: int
    metrics: dict[str, float]


class PackedLoss:
    """Compute the gradients of one optimizer step, micro-batch by micro-batch.

    DDP and DeepSpeed work in hooks of the backward pass. Here they see one per step, so processes
    may differ in their number of micro-batches, and the gradient is the same with any of them.
    """

    def __init__(self, scorer: PackedScorer, trainer: GRPOTrainer) -> None:
        self._scorer = scorer
        self._trainer = trainer
        self._accelerator = trainer.accelerator

    def gradients(
        self,
        model: torch.nn.Module,
        batch: Batch,
        tokens: Tokens,
        rows: list[int],
        log_sampler_kl: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[MicroBatchLog]]:
        """Compute the loss, detached, and fp32 gradients of these rows, with a log per micro-batch.

        The hooks of DDP and DeepSpeed do not run. `log_sampler_kl` is for an old policy that is the
        sampler's, whose distance it logs.
        """
        model = self._accelerator.unwrap_model(model)
        parameters = _trainable(model)
        # In fp16, gradients of activations would underflow. What `GradScaler` scales down again is
        # the one backward pass that it sees.
        scaler = self._accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()

        def run(
            passes: list[Pass],
        ) -> tuple[torch.Tensor, list[torch.Tensor], list[MicroBatchLog]]:
            value = torch.zeros((), device=batch["completion_ids"].device)
            sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
            metrics = []
            for rows, _ in passes:
                part, its_tokens = select_rows(batch, rows), tokens.select(rows)
                loss, described = self._forward(model, part, its_tokens, log_sampler_kl)
                if self._trainer.loss_type in ROW_NORMALISED:
                    loss = loss * len(rows) / batch["completion_ids"].size(0)
                # Runs no hooks, unlike `backward`.
                gradients = torch.autograd.grad(loss * scale, parameters, materialize_grads=True)
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add_(gradient, alpha=1 / scale)
                value += loss.detach()
                metrics.append(described)
            logs = []
            for (rows, computed), values in zip(passes, read_metrics(metrics), strict=True):
                n_tokens = sum(map(len, tokens.select(rows).completions))
                logs.append(MicroBatchLog(len(rows), n_tokens, computed, values))
            return value, sums, logs

        return self._scorer.within_memory(run, rows, tokens)

    def of_gradients(
        self, model: torch.nn.Module, value: torch.Tensor, gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return a loss of this value whose backward pass gives the gradients, and uses them up."""
        inner = self._accelerator.unwrap_model(model)
        loss: torch.Tensor = _GivenGradients.apply(  # type: ignore[no-untyped-call]
            value, gradients, *_trainable(inner)
        )
        if inner is model:
            return loss
        # DDP and DeepSpeed prepare for a backward pass in their `forward`.
        with replaced(inner, "forward", lambda: loss):
            prepared: torch.Tensor = model()
        return prepared

    def _forward(
        self, model: torch.nn.Module, batch: Batch, tokens: Tokens, log_sampler_kl: bool
    ) -> tuple[torch.Tensor, Metrics]:
        log_probs_BT, entropies_BT = self._scorer.score(model, tokens)
        assert entropies_BT is not None  # TRL asks for those of the policy
        loss, metrics = grpo_loss(self._trainer, log_probs_BT, entropies_BT, batch)
        described = _compare_to_old_policy(log_probs_BT.detach(), batch)
        if not log_sampler_kl:
            del described["sampling/kl"]
        return loss, metrics | described


def read_metrics(metrics: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, float]]:
    """Copy the metrics of all micro-batches, of the same names, from the device in one wait."""
    if not metrics:
        return []
    values = torch.stack([torch.stack(list(one.values())) for one in metrics]).tolist()
    return [dict(zip(one, row, strict=True)) for one, row in zip(metrics, values, strict=True)]


def rows_with_gradient(advantages_B: torch.Tensor, beta: float) -> list[int]:
    """List the rows that can change the gradient; with a KL term all of them can."""
    if beta != 0.0:
        return list(range(advantages_B.size(0)))
    return [row for row, advantage in enumerate(advantages_B.tolist()) if advantage != 0.0]


def metrics_of_one_batch(logs: Sequence[MicroBatchLog]) -> dict[str, float]:
    """Combine the metrics of micro-batches, with means by completion tokens; NaN is no value.

    >>> first = MicroBatchLog(1, 30, 50, {"entropy": 1.0, "clip_ratio/high_max": 0.1})
    >>> second = MicroBatchLog(2, 10, 30, {"entropy": 3.0, "clip_ratio/high_max": 0.4})
    >>> metrics_of_one_batch([first, second])
    {'entropy': 1.5, 'clip_ratio/high_max': 0.4}
    """
    together = {}
    for name in logs[0].metrics if logs else ():
        known = [(log.metrics[name], log.tokens) for log in logs]
        known = [(value, tokens) for value, tokens in known if not math.isnan(value)]
        if name.endswith("min"):
            together[name] = min((value for value, _ in known), default=math.nan)
        elif name.endswith("max"):
            together[name] = max((value for value, _ in known), default=math.nan)
        else:
            n_tokens = max(sum(tokens for _, tokens in known), 1)
            together[name] = sum(value * tokens for value, tokens in known) / n_tokens
    return together


class _GivenGradients(torch.autograd.Function):
    """A loss of a given value whose gradients are given."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, gradients: list[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # autograd takes them without a copy
        return None, None, *(gradient.mul_(scale) for gradient in gradients)


def _trial_tokens(model: Model, prompt_T: int, completion_T: int) -> Tokens:
    prompts = [tuple(row) for row in trial_rows(model, (prompt_T, prompt_T)) for _ in range(2)]
    completions = trial_rows(model, (completion_T,) * 4, same=0)
    return Tokens(prompts, completions, completion_T, model.device)


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _compare_to_old_policy(log_probs_BT: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    hidden_BT = ~batch["completion_mask"].bool()
    old_BT: torch.Tensor | None = batch.get("old_per_token_logps")
    if old_BT is None:  # the policy that sampled is the one that is trained: 1 by definition
        old_BT = log_probs_BT
    logs_BT = (log_probs_BT - old_BT).float().masked_fill(hidden_BT, 0.0)
    ratios_BT, n_tokens = logs_BT.exp(), batch["completion_mask"].sum()
    return {
        "ratio/mean": ratios_BT.masked_fill(hidden_BT, 0.0).sum() / n_tokens,
        "ratio/min": ratios_BT.masked_fill(hidden_BT, torch.inf).amin(),
        "ratio/max": ratios_BT.masked_fill(hidden_BT, -torch.inf).amax(),
        "sampling/kl": -logs_BT.sum() / n_tokens,
    }
