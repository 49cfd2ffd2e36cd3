"""The loss and its gradient in micro-batches that are packed by tokens.

TRL's loss is a sum over the rows of a batch, up to a constant. So rows that cannot change the
gradient are left out, the others are sorted by length, trimmed, and passed through the model in
micro-batches of a bounded number of tokens; prompts are computed once for all their completions.

Shapes: B rows of a batch, N sequences, T tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.model.memory import TokenBudget
from sologrpo.sampling.decoding import has_plain_cache
from sologrpo.training.packing import (
    Batch,
    SharedPrompts,
    pack_by_tokens,
    padded_tokens,
    row_lengths,
    select_and_trim,
)
from sologrpo.training.prompt_tree import build_prompt_trees, optimal_branch_count
from sologrpo.training.trl_patches import Scores, compact_lm_head, replaced

# Loss types of `_compute_loss` (grpo_trainer.py:3175-3210) that are sums over rows, by how they
# are normalised: over the tokens of the whole generation batch, or over the rows of the call.
GLOBALLY_NORMALISED = ("dapo", "cispo", "vespo")
ROW_NORMALISED = ("grpo", "sapo", "dr_grpo", "luspo")

Result = TypeVar("Result")


class PackedScorer:
    """Score completion tokens in passes of a bounded number of tokens.

    Args:
        args: `train_token_budget`, which is halved where memory runs out, and `share_prompts`.
        config: of the language model.
        accelerator: the trainer's.
        score_rows: TRL's `_get_per_token_logps_and_entropies`, for rows that share no prompt.
    """

    def __init__(
        self,
        args: SoloGRPOConfig,
        config: PretrainedConfig,
        accelerator: Accelerator,
        score_rows: Callable[..., Scores],
    ) -> None:
        self._budget = TokenBudget(args.train_token_budget, "training")
        self._accelerator = accelerator
        self._score_rows = score_rows
        # Other attention takes no mask of ours, and a layer that sees a window needs its own.
        self._shares_prompts = (
            args.share_prompts and config._attn_implementation == "sdpa" and has_plain_cache(config)
        )
        self._hidden_size: int = getattr(config, "hidden_size", 0)

    @property
    def token_budget(self) -> int:
        """Tokens of a pass; fewer than configured if memory ran out."""
        return self._budget.tokens

    def score(self, model: torch.nn.Module, batch: Batch, compute_entropy: bool = False) -> Scores:
        """Score the completion tokens of all rows in one pass.

        Args:
            model: the policy or the reference, with TRL's fused LM head.
            batch: (B, T) ids and masks of prompts and completions.
            compute_entropy: return entropies too.
        """
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        prompt_T, completion_T = batch["prompt_ids"].size(1), batch["completion_ids"].size(1)
        branches = optimal_branch_count(self._hidden_size, prompt_T, completion_T)
        with compact_lm_head():
            if self._shares_prompts and branches > 1:
                with self._accelerator.autocast():
                    return _score_with_shared_prompts(
                        model, input_ids, attention_mask, completion_T, branches, compute_entropy
                    )
            return self._score_rows(
                model, input_ids, attention_mask, completion_T, compute_entropy=compute_entropy
            )

    def log_probs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return (B, T) log-probs of the completion tokens, computed in packed passes.

        Args:
            model: the policy or the reference, with TRL's fused LM head.
            batch: (B, T) ids and masks of prompts and completions.
        """
        completion_mask_BT = batch["completion_mask"]

        def run(micro_batches: list[list[int]]) -> torch.Tensor:
            log_probs_BT = torch.zeros_like(completion_mask_BT, dtype=torch.float32)
            for rows in micro_batches:
                log_probs = self.score(model, select_and_trim(batch, rows))[0]
                log_probs_BT[rows, : log_probs.size(1)] = log_probs.float()
            return log_probs_BT

        return self.within_memory(run, list(range(len(completion_mask_BT))), batch)

    def within_memory(
        self, run: Callable[[list[list[int]]], Result], rows: list[int], batch: Batch
    ) -> Result:
        """Run over rows packed by tokens; where memory runs out, again in smaller passes.

        Args:
            run: takes the rows of every micro-batch.
            rows: the rows of `batch` to pack.
            batch: (B, T) ids and masks.

        Raises:
            Exception: that of `run`, if it was not for memory or the pass cannot be made smaller.
        """
        lengths = row_lengths(batch)
        shared = SharedPrompts.of(batch, self._hidden_size) if self._shares_prompts else None
        while True:
            micro_batches = list(pack_by_tokens(rows, lengths, self._budget.tokens, shared))
            largest = max(padded_tokens(rows, lengths, shared) for rows in micro_batches)
            most_rows = max(map(len, micro_batches))
            with self._budget.halved_if_out_of_memory(largest, most_rows):
                return run(micro_batches)


@dataclass(frozen=True)
class MicroBatchLog:
    """Rows and completion tokens of a micro-batch, and its metrics."""

    rows: int
    tokens: int
    metrics: dict[str, float]


# (model, micro-batch, scores of its rows) -> the loss, and what TRL logs of it.
LossOfScores = Callable[[torch.nn.Module, Batch, Scores], tuple[torch.Tensor, dict[str, float]]]


class PackedLoss:
    """Compute the gradients of one optimizer step, micro-batch by micro-batch.

    DDP and DeepSpeed average the gradients, and DeepSpeed takes the optimizer step, in hooks of the
    backward pass. Here they see one backward pass per step, so processes may differ in their
    number of micro-batches, and the gradient is the same with any of them.

    Args:
        scorer: scores the completion tokens.
        accelerator: the trainer's.
        loss_type: one of `GLOBALLY_NORMALISED` or `ROW_NORMALISED`.
        compute_loss: TRL's loss of rows whose tokens are scored.
    """

    def __init__(
        self,
        scorer: PackedScorer,
        accelerator: Accelerator,
        loss_type: str,
        compute_loss: LossOfScores,
    ) -> None:
        self._scorer = scorer
        self._accelerator = accelerator
        self._is_mean_of_rows = loss_type in ROW_NORMALISED
        self._compute_loss = compute_loss

    def gradients(
        self, model: torch.nn.Module, batch: Batch, rows: list[int], log_sampler_kl: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[MicroBatchLog]]:
        """Compute the gradients of these rows, without the hooks of DDP and DeepSpeed.

        Args:
            model: the wrapped model.
            batch: TRL's batch of this optimizer step.
            rows: those that can change the gradient; if there are none, it is zero.
            log_sampler_kl: the old policy is the sampler's: log how far it is from the trainer's.

        Returns:
            The sum of the losses, detached, the gradient in fp32 of every trainable parameter, and
            what each micro-batch logged.
        """
        model = self._accelerator.unwrap_model(model)
        parameters = _trainable(model)
        # In fp16, gradients of activations would underflow. What `GradScaler` scales down again is
        # the one backward pass that it sees.
        scaler = self._accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()

        def run(
            micro_batches: list[list[int]],
        ) -> tuple[torch.Tensor, list[torch.Tensor], list[MicroBatchLog]]:
            value = torch.zeros((), device=batch["completion_ids"].device)
            sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
            logs = []
            for rows in micro_batches:
                loss, log = self._forward(model, select_and_trim(batch, rows), log_sampler_kl)
                if self._is_mean_of_rows:
                    loss = loss * len(rows) / batch["completion_ids"].size(0)
                # Runs no hooks, unlike `backward`.
                gradients = torch.autograd.grad(loss * scale, parameters, materialize_grads=True)
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add_(gradient, alpha=1 / scale)
                value += loss.detach()
                logs.append(log)
            return value, sums, logs

        return self._scorer.within_memory(run, rows, batch) if rows else run([])

    def of_gradients(
        self, model: torch.nn.Module, value: torch.Tensor, gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return a loss that has this value and these gradients.

        Args:
            model: the wrapped model, whose hooks take the gradients in the backward pass.
            value: of the loss.
            gradients: of every trainable parameter; they are used up.
        """
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
        self, model: torch.nn.Module, batch: Batch, log_sampler_kl: bool
    ) -> tuple[torch.Tensor, MicroBatchLog]:
        scores = self._scorer.score(model, batch, compute_entropy=True)
        loss, metrics = self._compute_loss(model, batch, scores)
        ratios_T = _ratios_to_old_policy(scores[0].detach(), batch)
        metrics |= _describe_ratios(ratios_T)
        if log_sampler_kl:
            metrics["sampling/kl"] = -ratios_T.log().mean().item()
        rows, tokens = len(batch["completion_ids"]), int(batch["completion_mask"].sum())
        return loss, MicroBatchLog(rows, tokens, metrics)


def rows_with_gradient(advantages_B: torch.Tensor, beta: float) -> list[int]:
    """List the rows that can change the gradient.

    Args:
        advantages_B: a row without one adds nothing to the policy's loss.
        beta: weight of the KL term, which acts on all rows.
    """
    if beta != 0.0:
        return list(range(advantages_B.size(0)))
    rows: list[int] = advantages_B.nonzero(as_tuple=True)[0].tolist()
    return rows


def metrics_of_one_batch(logs: Sequence[MicroBatchLog]) -> dict[str, float]:
    """Combine the metrics of micro-batches into those of one batch.

    Args:
        logs: a mean is weighted by completion tokens; NaN means that a micro-batch has no value.

    Example:
        >>> first = MicroBatchLog(1, 30, {"entropy": 1.0, "clip_ratio/high_max": 0.1})
        >>> second = MicroBatchLog(2, 10, {"entropy": 3.0, "clip_ratio/high_max": 0.4})
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


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _ratios_to_old_policy(log_probs_BT: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Compute the new over the old probability of every completion token, in one row."""
    mask_BT = batch["completion_mask"].bool()
    old_BT: torch.Tensor | None = batch.get("old_per_token_logps")
    if old_BT is None:  # the policy that sampled is the one that is trained: 1 by definition
        return torch.ones_like(mask_BT, dtype=torch.float32)[mask_BT]
    return (log_probs_BT - old_BT).exp()[mask_BT]


def _describe_ratios(ratios_T: torch.Tensor) -> dict[str, float]:
    if not len(ratios_T):  # all of them masked as truncated
        ratios_T = ratios_T.new_tensor([math.nan])
    extremes = {"ratio/min": ratios_T.amin().item(), "ratio/max": ratios_T.amax().item()}
    return {"ratio/mean": ratios_T.mean().item(), **extremes}


def _score_with_shared_prompts(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_T: int,
    branches: int,
    compute_entropy: bool,
) -> Scores:
    """Score as TRL does, with a prompt computed once for up to `branches` completions.

    They stand side by side after it in a single sequence, and the attention mask keeps them apart.
    Each begins with its own copy of the last prompt token, from which its first token is predicted.

    Returns:
        (B, T) log-probs of the completion tokens, (B, T) entropies or None, and None for the
        auxiliary loss.
    """
    tree = build_prompt_trees(input_ids, attention_mask, completion_T, branches)
    output = model(
        input_ids=tree.input_ids,
        attention_mask=tree.mask[:, None],
        position_ids=tree.position_ids,
        shift_labels=tree.next_ids,
        fused_lm_head=True,
    )
    log_probs = tree.rows(output.log_probs)
    return log_probs, tree.rows(output.entropy) if compute_entropy else None, None
