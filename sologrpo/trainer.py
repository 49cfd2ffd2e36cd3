"""`SoloGRPOTrainer`: TRL's `GRPOTrainer` that does less work for the same gradient.

The only file that overrides TRL. Every override names the lines of TRL 1.16.0 that it relies on.

Shapes: B rows of the batch at hand, G completions of one prompt, P prompts, T tokens.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from datasets import Dataset
from transformers import GenerationConfig, TrainerControl
from trl import GRPOTrainer

from sologrpo.config import SoloGRPOConfig
from sologrpo.evaluation import evaluate_greedily
from sologrpo.model import keep_trainable_in_fp32
from sologrpo.prompt_tree import build_prompt_trees
from sologrpo.sampling import can_generate_fast, generate_fast, merged_where_exact

logger = logging.getLogger(__name__)

# Loss types of `_compute_loss` (grpo_trainer.py:3175-3210) that are sums over rows, by how they
# are normalised: over the tokens of the whole generation batch, or over the rows of the call.
GLOBALLY_NORMALISED = ("dapo", "cispo", "vespo")
ROW_NORMALISED = ("grpo", "sapo", "dr_grpo", "luspo")


class SoloGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Takes the same arguments as `GRPOTrainer`, and gives the same gradient.

    - Trainable parameters stay in fp32.
    - Rows whose advantage is exactly zero are left out of the forward and backward pass where they
      cannot change the gradient; the rest is sorted by length, trimmed, and packed into
      micro-batches of at most `train_token_budget` tokens.
    - The LM head scores completion tokens only, on CPU too.
    - `evaluate()` is greedy, one completion a prompt, at the training prompt, length and judge.

    What it cannot reproduce exactly runs as in TRL; `stock_reason` says why (None: it packs).
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SoloGRPOConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = SoloGRPOConfig()
        self.stock_reason = why_not_packed(args)
        self._micro_batch_size: int = args.per_device_train_batch_size
        if self.stock_reason is None:
            args = _whole_optimizer_batch(args)
        else:
            logger.warning("the training pass runs as in TRL: %s", self.stock_reason)
        super().__init__(model, reward_funcs, args, **kwargs)
        keep_trainable_in_fp32(self.model)
        _score_completion_tokens_only()
        self._rewards_G: torch.Tensor | None = None
        # Other attention implementations take no mask of our own.
        attention = self.accelerator.unwrap_model(self.model).config._attn_implementation
        self._shares_prompts = args.share_prompts and attention == "sdpa"

    # -- advantages -----------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # grpo_trainer.py:1579-1682 returns the rewards of all processes, (P*G, rewards).
        rewards_per_func: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        weights = self.reward_weights.to(rewards_per_func.device)
        self._rewards_G = (rewards_per_func * weights).nansum(dim=1).view(-1, self.num_generations)
        return rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # grpo_trainer.py:2324-2930. In a group of equal rewards the advantage should be zero, but
        # the mean of equal floats is off by rounding, and dividing by std + 1e-4 makes that up to
        # 0.005. Such a group carries no signal: set it to exactly zero.
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.multi_objective_aggregation == "sum_then_normalize" and self._rewards_G is not None:
            rewards_G = self._rewards_G
            degenerate = rewards_G.amax(dim=1) == rewards_G.amin(dim=1)
            rows = degenerate.repeat_interleave(rewards_G.size(1))
            start = self.accelerator.process_index * len(inputs)
            output["advantages"][rows[start : start + len(inputs)]] = 0.0
            # TRL's own figure misses them for the same reason (grpo_trainer.py:2780).
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["frac_reward_zero_std"][-1] = degenerate.float().mean().item()
        return output

    # -- loss -----------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Backward micro-batch by micro-batch; return the loss of the last, with the sum's value.

        `Trainer.training_step` calls backward once more, on what is returned: the last micro-batch
        still has its graph, the others are done and enter as a detached number.
        """
        if self.stock_reason is not None or not self.model.training:
            stock_loss: torch.Tensor = super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
            return stock_loss
        rows = self._rows_that_train(inputs)
        self._metrics["train"]["trained_completions"].append(float(len(rows)))
        if not rows:
            return _zero_loss(model)
        n_rows = inputs["completion_ids"].size(0)
        pending: torch.Tensor | None = None
        done = torch.zeros((), device=inputs["completion_ids"].device)
        for batch in self._micro_batches(rows, inputs):
            if pending is not None:
                self.accelerator.backward(pending)
                done += pending.detach()
            loss = self._compute_loss(model, select_and_trim(inputs, batch))
            pending = loss if self.loss_type in GLOBALLY_NORMALISED else loss * len(batch) / n_rows
        assert pending is not None
        return pending + done

    def _micro_batches(self, rows: list[int], inputs: dict[str, Any]) -> Iterator[list[int]]:
        prompts = _prompt_of_row(inputs) if self._shares_prompts else None
        budget = self.args.train_token_budget
        return pack_by_tokens(rows, _row_lengths(inputs), budget, prompts)

    def _rows_that_train(self, inputs: dict[str, Any]) -> list[int]:
        """Rows that can change the gradient: with a KL term all do, otherwise advantage != 0."""
        advantages_B: torch.Tensor = inputs["advantages"]
        if self.beta != 0.0:
            return list(range(advantages_B.size(0)))
        rows: list[int] = advantages_B.nonzero(as_tuple=True)[0].tolist()
        return rows

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        # grpo_trainer.py:1419-1508. TRL passes `per_device_train_batch_size` as the chunk of the
        # no-grad passes (old and reference log-probs); that is now the whole optimizer batch.
        if batch_size is not None:
            batch_size = min(batch_size, self._micro_batch_size)
        elif self._shares_prompts and torch.is_grad_enabled():
            compute_entropy = kwargs.get("compute_entropy", False)
            return _score_with_shared_prompts(
                model, input_ids, attention_mask, logits_to_keep, compute_entropy
            )
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
        )

    # -- sampling -------------------------------------------------------------------------------

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # grpo_trainer.py:1859-1872 calls `model.generate(**inputs, generation_config=...)` on the
        # unwrapped model. For the length of that call, `generate` is our sampling loop.
        model = self.accelerator.unwrap_model(self.model)
        original = model.generate

        def generate(generation_config: GenerationConfig, **inputs: Any) -> torch.Tensor:
            if not can_generate_fast(model, generation_config, inputs):
                output: torch.Tensor = original(generation_config=generation_config, **inputs)
                return output
            with merged_where_exact(model):
                return generate_fast(model, **inputs, config=generation_config)

        model.generate = generate
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            del model.generate

    # -- validation -----------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Grade one greedy completion of every validation prompt.

        TRL samples `num_generations` completions at the training temperature and averages batch
        means; that is neither the accuracy that users will see nor comparable between runs.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.accelerator.unwrap_model(self.model)
        with merged_where_exact(model):
            scores = evaluate_greedily(
                model, self.processing_class, dataset, self.max_completion_length
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        was_training = self.model.training
        self.model.eval()  # `log` (grpo_trainer.py:3302) would otherwise flush training metrics
        self.log(metrics)
        self.model.train(was_training)
        handler = self.callback_handler
        self.control: TrainerControl = handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def why_not_packed(config: SoloGRPOConfig) -> str | None:
    """Say why the loss must run as in TRL, or None if packing micro-batches is exact."""
    if config.loss_type not in GLOBALLY_NORMALISED + ROW_NORMALISED:
        return f"loss_type {config.loss_type} is normalised over each micro-batch"
    if config.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "DeepSpeed's engine takes an optimizer step with every backward"
    if config.entropy_coef or config.use_adaptive_entropy:
        return "the entropy bonus acts on rows without advantage too"
    if config.top_entropy_quantile < 1.0:
        return "top_entropy_quantile compares the tokens of one micro-batch"
    if config.router_aux_loss_coef:
        return "the router's auxiliary loss acts on rows without advantage too"
    return None


def _whole_optimizer_batch(config: SoloGRPOConfig) -> SoloGRPOConfig:
    """Hand TRL the optimizer batch as one micro-batch; `compute_loss` splits it by tokens."""
    steps = config.gradient_accumulation_steps
    config = copy.copy(config)
    config.per_device_train_batch_size *= steps
    config.steps_per_generation //= steps
    config.gradient_accumulation_steps = 1
    return config


def _zero_loss(model: torch.nn.Module) -> torch.Tensor:
    # Zero gradients, not None: Adam's moments decay as they do in TRL for a step without signal.
    parameters = (p for p in model.parameters() if p.requires_grad)
    return torch.stack([p.sum() * 0.0 for p in parameters]).sum()


def _row_lengths(inputs: dict[str, Any]) -> list[tuple[int, int]]:
    prompt_T = inputs["prompt_mask"].sum(dim=1).tolist()
    completion_T = inputs["completion_mask"].sum(dim=1).tolist()
    return list(zip(prompt_T, completion_T, strict=True))


def _prompt_of_row(inputs: dict[str, Any]) -> list[int]:
    """Number the distinct prompts; rows of one group get the same number."""
    _, prompt_of_row = torch.unique(inputs["prompt_ids"], dim=0, return_inverse=True)
    numbers: list[int] = prompt_of_row.tolist()
    return numbers


def pack_by_tokens(
    rows: list[int],
    lengths: list[tuple[int, int]],
    budget: int,
    prompts: list[int] | None = None,
) -> Iterator[list[int]]:
    """Group rows so that a group, padded, holds at most `budget` tokens.

    Args:
        rows: the rows to pack; a single row over the budget is a group of its own.
        lengths: (prompt, completion) tokens of every row.
        budget: tokens of a group, padding counted.
        prompts: number of the prompt of every row, if a prompt counts once for all its rows in a
            group; those rows then stay together where they fit. Otherwise rows of similar length
            do.
    """

    def tokens(batch: list[int]) -> int:
        prompt_T = max(lengths[row][0] for row in batch)
        completion_T = max(lengths[row][1] for row in batch)
        n_prompts = len(batch) if prompts is None else len({prompts[row] for row in batch})
        return n_prompts * prompt_T + len(batch) * completion_T

    def units() -> Iterator[list[int]]:
        """What is better not torn apart: the rows of one prompt, or single rows."""
        ordered = sorted(rows, key=lambda row: (-sum(lengths[row]), row))
        together: dict[int, list[int]] = {}
        for row in ordered:
            together.setdefault(row if prompts is None else prompts[row], []).append(row)
        for unit in together.values():
            yield from [unit] if tokens(unit) <= budget else ([row] for row in unit)

    batch: list[int] = []
    for unit in units():
        if batch and tokens(batch + unit) > budget:
            yield batch
            batch = []
        batch = batch + unit
    if batch:
        yield batch


def _score_with_shared_prompts(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """Log-probs and entropies as in TRL, with every distinct prompt computed once.

    The completions of one prompt stand side by side behind it in a single sequence, and the
    attention mask keeps them apart. Each begins with its own copy of the last prompt token, from
    which its first token is predicted.

    Returns:
        (B, T) log-probs of the completion tokens, (B, T) entropies or None, and None for the
        auxiliary loss.
    """
    tree = build_prompt_trees(input_ids, attention_mask, logits_to_keep)
    output = model(
        input_ids=tree.input_ids,
        attention_mask=tree.mask[:, None],
        position_ids=tree.position_ids,
        shift_labels=tree.next_ids,
        fused_lm_head=True,
    )
    log_probs = tree.rows(output.log_probs)
    return log_probs, tree.rows(output.entropy) if compute_entropy else None, None


def select_and_trim(inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Take these rows of the batch and cut the padding that none of them needs.

    Prompts are padded on the left, completions on the right. Exact for rotary positions, which
    depend on distances only; learned absolute positions are not supported by the trainer.
    """
    n_rows = inputs["completion_ids"].size(0)
    prompt_T = int(inputs["prompt_mask"][rows].sum(dim=1).max())
    completion_T = int(inputs["completion_mask"][rows].sum(dim=1).max())
    full_prompt_T, full_completion_T = (
        inputs["prompt_ids"].size(1),
        inputs["completion_ids"].size(1),
    )
    selected: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.size(0) != n_rows:
            selected[name] = value
            continue
        value = value[rows]
        if name.startswith("prompt_"):
            value = value[:, full_prompt_T - prompt_T :]
        elif value.dim() == 2 and value.size(1) == full_completion_T:
            value = value[:, :completion_T]
        selected[name] = value
    return selected


def _score_completion_tokens_only() -> None:
    # trl/trainer/utils.py:1642: `compact = _use_triton(hidden_states.device)`. The flag is read
    # only to decide whether to drop the masked positions before the LM head; the kernels have
    # their own copy of the function. Scoring all positions was 35 % of a step on CPU.
    trl_utils._use_triton = lambda device: True
