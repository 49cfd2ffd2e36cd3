"""`SoloGRPOTrainer`: TRL's `GRPOTrainer` that does less work for the same gradient.

The only file that overrides TRL. Every override names the lines of TRL 1.16.0 that it relies on.

Shapes: B rows of the batch at hand, G completions of one prompt, P prompts, T tokens, R rewards.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch
import trl.trainer.utils as trl_utils
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import GenerationConfig, TrainerControl
from trl import GRPOTrainer
from trl.trainer.utils import nanmax, nanmin, nanstd

from rewards import OUTCOME_REWARDS, hacking_signs
from rewards.completions import text_of
from sologrpo.config.arguments import TRL_EPSILON, SoloGRPOConfig
from sologrpo.data.dataset import stop_strings
from sologrpo.errors import InputError, RunError
from sologrpo.evaluation.evaluate import evaluate_greedily
from sologrpo.model.loading import keep_trainable_in_fp32
from sologrpo.model.memory import TokenBudget, release_unused
from sologrpo.sampling.decoding import Request, Sampled, can_generate_fast
from sologrpo.sampling.sampler import TEST_ROWS, Sampler, check_vllm
from sologrpo.sampling.stopping import StopStrings
from sologrpo.training.advantages import (
    RIGHT,
    advantage_shares,
    degenerate_groups,
    gate_side_rewards,
    rescaling,
)
from sologrpo.training.checkpoint import (
    EpochSampler,
    load_generation_state,
    save_generation_state,
)
from sologrpo.training.nonfinite import all_finite, save_batch
from sologrpo.training.packing import (
    SharedPrompts,
    pack_by_tokens,
    padded_tokens,
    replace_rows,
    row_lengths,
    select_and_trim,
)
from sologrpo.training.progress import StepMeter, timed
from sologrpo.training.prompt_tree import branches_that_pay, build_prompt_trees

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

NEVER = -1  # a token id that no model samples
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
    - Stop strings of the prompt format end a completion, row by row, as an end token does.
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
        self.stock_reason = why_not_packed(args, kwargs.get("train_dataset"))
        if self.stock_reason is None:
            args = _whole_optimizer_batch(args)
        else:
            logger.warning("the training pass runs as in TRL: %s", self.stock_reason)
        super().__init__(model, reward_funcs, args, **kwargs)
        self.meter = StepMeter(self._metrics["train"])
        self.add_callback(self.meter)
        self.num_completions_to_print = 0  # `ConsoleLog` shows them, and shorter than TRL
        keep_trainable_in_fp32(self.model)
        _score_completion_tokens_only()
        self._outcome = self._index_of_outcome()
        self.mask_truncated_completions: bool
        self._stops = StopStrings(self._tokenizer, stop_strings(self.train_dataset))
        self._sampler = self._make_sampler()
        self._vllm_is_checked = False
        self._nonfinite_steps = 0
        if self.use_vllm:  # vllm_generation.py:672 and 627 hand these to `SamplingParams`
            self.vllm_generation.generation_kwargs |= self._stops.vllm_settings()
        self._log_probs_BT: torch.Tensor  # of the last forward pass
        self._skips_old_log_probs = False
        self._scores_BR: torch.Tensor  # what the rewards said
        self._rewards_BR: torch.Tensor  # what the advantages are made of
        self._token_budget = TokenBudget(args.train_token_budget, "training")
        # Other attention implementations take no mask of our own.
        architecture = self.accelerator.unwrap_model(self.model).config.get_text_config()
        self._shares_prompts = args.share_prompts and architecture._attn_implementation == "sdpa"
        self._hidden_size = architecture.hidden_size

    # -- advantages -----------------------------------------------------------------------------

    @timed("rewards")
    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        # grpo_trainer.py:1579-1682 returns the rewards of all processes, (B, R). The advantages
        # are made of what is returned here.
        self._log_hacking_signs(inputs, prompts, completions)
        self._scores_BR = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        self._rewards_BR = self._scores_BR
        if self.args.outcome_reward is not None:
            assert self._outcome is not None
            self._rewards_BR = gate_side_rewards(
                self._scores_BR, self._outcome, self.num_generations, self.args.outcome_gate
            )
        return self._rewards_BR

    def _index_of_outcome(self) -> int | None:
        """The reward that tells right from wrong: the configured one, or the first that judges."""
        named = self.args.outcome_reward
        if named is not None and named not in self.reward_func_names:
            raise InputError(f"outcome_reward {named!r} is not among {self.reward_func_names}")
        judges = OUTCOME_REWARDS if named is None else (named,)
        found = (i for i, name in enumerate(self.reward_func_names) if name in judges)
        return next(found, None)

    def _log_hacking_signs(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any]
    ) -> None:
        """Log the rate of each sign, if the column `prompt_format` says which tags to look for."""
        if "prompt_format" not in inputs[0]:
            return
        signs = [
            hacking_signs(text_of(completion), row["prompt_format"], prompt)
            for row, prompt, completion in zip(inputs, prompts, completions, strict=True)
        ]
        for name in signs[0]:
            self._log_metric(f"hacking/{name}", mean(row[name] for row in signs))

    @timed("data")
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # grpo_trainer.py:2324-2930: one generation batch, sampled, scored and tokenised.
        batch, degenerate_P = self._sample_groups(inputs)
        rounds = self.args.max_resample_rounds if self.model.training else 0
        replaced = 0
        for attempt in range(rounds):
            missing = degenerate_P.nonzero(as_tuple=True)[0].tolist()
            if not missing:
                break
            kept = [list(column)[-len(inputs) :] for column in self._logged_columns()]
            others = self._other_prompts(len(missing), attempt)
            source, useless_P = self._sample_groups(others)
            found = (~useless_P).nonzero(as_tuple=True)[0].tolist()
            missing = missing[: len(found)]
            degenerate_P[missing] = False
            replaced += len(missing)
            rows, source_rows = self._rows_of(missing), self._rows_of(found)
            batch = replace_rows(batch, rows, source, source_rows, self._tokenizer.pad_token_id)
            for column, values in zip(self._logged_columns(), kept, strict=True):
                fresh = list(column)[-len(others) :]
                for row, source_row in zip(rows, source_rows, strict=True):
                    values[row] = fresh[source_row]
                column.extend(values)  # a queue as long as the batch
        if rounds:
            self._metrics["train"]["resampled_groups"].append(replaced)
        return batch

    def sample_and_score(
        self, rows: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, float], float | None]:
        """Sample and score completions that are not trained on.

        Args:
            rows: rows of the data set, each as often as a group has completions.

        Returns:
            TRL's batch, what would be logged of it, and the share of right completions, or None if
            no reward tells right from wrong.
        """
        self.model.train()
        with torch.no_grad():
            batch = self._generate_and_score_completions(rows)
        logged = {name: float(values[-1]) for name, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        if self._outcome is None:
            return batch, logged, None
        right_B = self._scores_BR[:, self._outcome] >= RIGHT
        return batch, logged, right_B.float().mean().item()

    def _other_prompts(self, count: int, attempt: int) -> list[dict[str, Any]]:
        """Rows for so many further groups, the same ones when a run is resumed here."""
        choice = random.Random(f"{self.args.seed} {self.state.global_step} {attempt}")
        indices = choice.sample(range(len(self.train_dataset)), count)
        return [self.train_dataset[i] for i in indices for _ in range(self.num_generations)]

    def _rows_of(self, groups: list[int]) -> list[int]:
        G = self.num_generations
        return [group * G + i for group in groups for i in range(G)]

    def _logged_columns(self) -> list[deque[Any]]:
        """The columns of the completions file, as TRL collects them (grpo_trainer.py:1088)."""
        logs = self._logs
        columns = [logs["prompt"], logs["completion"], logs["advantages"]]
        return [*columns, *logs["rewards"].values(), *logs["extra"].values()]

    def _sample_groups(self, inputs: list[dict[str, Any]]) -> tuple[dict[str, Any], torch.Tensor]:
        """TRL's batch with exact advantages, and which of its groups carry no signal, (P,)."""
        output: dict[str, Any] = self._score_with_truncated_masked(inputs)
        self._compare_with_sampler(output)
        G, weights_R = self.num_generations, self.reward_weights.to(self._rewards_BR.device)
        degenerate_P = degenerate_groups(self._rewards_BR, weights_R, G)
        if self.multi_objective_aggregation == "sum_then_normalize":
            start = self.accelerator.process_index * len(inputs)
            own = slice(start, start + len(inputs))
            if self.scale_rewards == "group" and self.args.advantage_eps != TRL_EPSILON:
                factor_B = rescaling(self._rewards_BR, weights_R, G, self.args.advantage_eps)
                output["advantages"] *= factor_B[own]
            # In a group of equal rewards the advantage should be zero, but the mean of equal floats
            # is off by rounding, and dividing by std + 1e-4 makes that up to 0.005.
            output["advantages"][degenerate_P.repeat_interleave(G)[own]] = 0.0
        self._log_groups(degenerate_P, weights_R)
        return output, degenerate_P

    def _log_groups(self, degenerate_P: torch.Tensor, weights_R: torch.Tensor) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        sums_B = (self._rewards_BR * weights_R).nansum(dim=1)
        sums_B[self._rewards_BR.isnan().all(dim=1)] = torch.nan  # as in TRL's mean of them
        metrics["reward_min"].append(nanmin(sums_B).item())
        metrics["reward_max"].append(nanmax(sums_B).item())
        G = self.num_generations
        if self.multi_objective_aggregation == "sum_then_normalize":
            # TRL's own figure misses what rounding tells apart (grpo_trainer.py:2780).
            metrics["frac_reward_zero_std"][-1] = degenerate_P.float().mean().item()
            shares = advantage_shares(self._rewards_BR, weights_R, G, self.scale_rewards == "group")
            for name, share in zip(self.reward_func_names, shares or [], strict=bool(shares)):
                metrics[f"advantage_share/{name}"].append(share)
        if self._outcome is not None:
            right_PG = (self._scores_BR[:, self._outcome] >= RIGHT).view(-1, G)
            all_right, all_wrong = right_PG.all(dim=1), ~right_PG.any(dim=1)
            metrics["degenerate/all_right"].append((degenerate_P & all_right).float().mean().item())
            metrics["degenerate/all_wrong"].append((degenerate_P & all_wrong).float().mean().item())
        if self._rewards_BR is not self._scores_BR:
            self._log_scores_before_the_gate(metrics)

    def _score_with_truncated_masked(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # grpo_trainer.py:2487-2498 masks as truncated what ends in no end token.
        mask_truncated = self.mask_truncated_completions and bool(self._stops.strings)
        if not mask_truncated:
            stock: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return stock
        self.mask_truncated_completions = False
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.mask_truncated_completions = True
        mask_BT = output["completion_mask"]
        rows = zip(output["completion_ids"], mask_BT.bool(), strict=True)
        kept = [not self._is_cut_off(ids[mask].tolist()) for ids, mask in rows]
        output["completion_mask"] = mask_BT * mask_BT.new_tensor(kept)[:, None]
        n_items = self.accelerator.gather(output["completion_mask"].sum()).sum()
        output["num_items_in_batch"] = n_items
        return output

    def _log_scores_before_the_gate(self, metrics: dict[str, list[float]]) -> None:
        """Show what the rewards said of the completions; `reward` is what is trained on."""
        for i, name in enumerate(self.reward_func_names):  # grpo_trainer.py:2821-2836
            scores_B = self._scores_BR[:, i]
            metrics[f"rewards/{name}/mean"][-1] = scores_B.nanmean().item()
            metrics[f"rewards/{name}/std"][-1] = nanstd(scores_B).item()
            column = self._logs["rewards"][name]
            for row, score in enumerate(scores_B.tolist(), start=-len(scores_B)):
                column[row] = score

    # -- loss -----------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Backward micro-batch by micro-batch; return the value of their sum, with nothing behind.

        `Trainer.training_step` calls backward once more, on what is returned: that is a number
        without a graph to the parameters.
        """
        lengths = row_lengths(inputs)
        if self.stock_reason is not None or not self.model.training:
            self.meter.count("training", sum(map(sum, lengths)))
            stock_loss: torch.Tensor = super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
            return stock_loss
        rows = self._rows_that_train(inputs)
        self.meter.count("training", sum(sum(lengths[row]) for row in rows))
        if not rows and self.accelerator.num_processes == 1:
            self._log_micro_batches([])
            return _zero_loss(model)
        # Other processes wait for this one in the wrapped model's forward and backward pass, to
        # average the gradients: a row without advantage goes there, and adds nothing.
        value, logs = self._within_memory(
            lambda batches: self._backward(model, inputs, batches), rows or [0], inputs
        )
        self._log_micro_batches(logs if rows else [])
        self._keep_from_weights_if_not_finite(model, inputs, value)
        return value + torch.zeros_like(value, requires_grad=True)

    def _keep_from_weights_if_not_finite(
        self, model: torch.nn.Module, inputs: dict[str, Any], value: torch.Tensor
    ) -> None:
        """Leave out a step whose loss or gradient is no number, or stop if there were too many.

        Raises:
            RunError: if `max_nonfinite_steps` were left out before.
        """
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # A scaled fp16 gradient may overflow: the scaler sees to that, and scales less.
        if all_finite([value] if self.args.fp16 else [value, *gradients]):
            return
        step, self._nonfinite_steps = self.state.global_step + 1, self._nonfinite_steps + 1
        text = f"the loss or a gradient of step {step} is not a finite number"
        if self.accelerator.is_main_process:
            text += f"; its batch is in {save_batch(inputs, Path(self.args.output_dir), step)}"
        if self._nonfinite_steps > self.args.max_nonfinite_steps:
            raise RunError(
                f"{text}: lower learning_rate or max_grad_norm, or allow some with "
                "max_nonfinite_steps"
            )
        logger.warning("%s; the step is left out", text)
        for parameter in model.parameters():
            parameter.grad = None  # the optimizer passes over it

    def _backward(
        self, model: torch.nn.Module, inputs: dict[str, Any], batches: list[list[int]]
    ) -> tuple[torch.Tensor, list[MicroBatchLog]]:
        """The sum of the losses, detached, and what each micro-batch logged."""
        model.zero_grad()  # what an attempt left that ran out of memory
        n_rows = inputs["completion_ids"].size(0)
        logs = []
        value = torch.zeros((), device=inputs["completion_ids"].device)
        for batch in batches:
            # Processes differ in the number of micro-batches: only in the last do they meet.
            last = batch is batches[-1]
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss, log = self._loss_and_log(model, select_and_trim(inputs, batch))
                if self.loss_type in ROW_NORMALISED:
                    loss = loss * len(batch) / n_rows
                self.accelerator.backward(loss)
            value += loss.detach()
            logs.append(log)
        return value, logs

    def _loss_and_log(
        self, model: torch.nn.Module, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, MicroBatchLog]:
        # grpo_trainer.py:3253-3290 reduces and gathers its metrics over the processes, which would
        # wait for each other for ever: they differ in the number and size of the micro-batches.
        accelerator, shared = self.accelerator, self._metrics["train"]
        own: dict[str, list[float]] = defaultdict(list)
        self._metrics["train"] = own
        accelerator.reduce = lambda tensor, reduction: tensor
        accelerator.gather = lambda tensor: tensor
        try:
            loss = self._compute_loss(model, inputs)
        finally:
            self._metrics["train"] = shared
            del accelerator.reduce, accelerator.gather
        metrics = {name: value for name, (value,) in own.items()}
        ratios_T = self._ratios_to_old_policy(inputs)
        metrics |= _describe_ratios(ratios_T)
        if not self._sampler.is_exact:
            metrics["sampling/kl"] = -ratios_T.log().mean().item()
        rows, tokens = len(inputs["completion_ids"]), int(inputs["completion_mask"].sum())
        return loss, MicroBatchLog(rows, tokens, metrics)

    def _log_micro_batches(self, logs: list[MicroBatchLog]) -> None:
        """Log what all processes trained on in this optimizer step."""
        logs = gather_object(logs)
        metrics = self._metrics["train"]
        metrics["trained_completions"].append(float(sum(log.rows for log in logs)))
        for name, value in metrics_of_one_batch(logs).items():
            metrics[name].append(value)

    def _ratios_to_old_policy(self, inputs: dict[str, Any]) -> torch.Tensor:
        """New over old probability of every completion token of this pass, in one row."""
        mask_BT = inputs["completion_mask"].bool()
        old_BT = inputs.get("old_per_token_logps")
        if old_BT is None:  # the policy that sampled is the one that is trained: 1 by definition
            return torch.ones_like(mask_BT, dtype=torch.float32)[mask_BT]
        ratios_BT: torch.Tensor = (self._log_probs_BT - old_BT).exp()
        return ratios_BT[mask_BT]

    def _within_memory(
        self, run: Callable[[list[list[int]]], Result], rows: list[int], inputs: dict[str, Any]
    ) -> Result:
        """Run over rows packed by tokens; where memory runs out, again in smaller passes."""
        lengths = row_lengths(inputs)
        shared = SharedPrompts.of(inputs, self._hidden_size) if self._shares_prompts else None
        while True:
            batches = list(pack_by_tokens(rows, lengths, self._token_budget.tokens, shared))
            try:
                return run(batches)
            except Exception as error:
                if torch.is_grad_enabled() and self.accelerator.num_processes > 1:
                    raise  # the others wait for the gradients of this very pass
                largest = max(padded_tokens(batch, lengths, shared) for batch in batches)
                self._token_budget.halve(error, largest, max(map(len, batches)))
            release_unused()  # here, where the error no longer holds what the pass had computed

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
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> Any:
        # grpo_trainer.py:1419-1508. TRL gives a `batch_size` to the passes without gradient, which
        # score all rows of a generation batch with the old or the reference policy.
        part = "training" if batch_size is None else "logprobs"
        with self.meter.part(part):
            if self.stock_reason is not None:
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, batch_size,
                    compute_entropy=compute_entropy, **kwargs,
                )  # fmt: skip
            inputs = _rows_of_passes(input_ids, attention_mask, logits_to_keep)
            if batch_size is not None and self._skips_old_log_probs:
                self._skips_old_log_probs = False
                return torch.zeros_like(inputs["completion_mask"], dtype=torch.float), None, None
            if batch_size is not None:
                return self._log_probs(model, inputs), None, None
            scored = self._score(model, inputs, compute_entropy)
        self._log_probs_BT = scored[0].detach()  # for `_ratios_to_old_policy`
        return scored

    def _log_probs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """(B, T) log-probs of the completion tokens, computed in packed passes."""
        completion_mask_BT = inputs["completion_mask"]

        def run(batches: list[list[int]]) -> torch.Tensor:
            log_probs_BT = torch.zeros_like(completion_mask_BT, dtype=torch.float32)
            for batch in batches:
                log_probs = self._score(model, select_and_trim(inputs, batch))[0]
                log_probs_BT[batch, : log_probs.size(1)] = log_probs.float()
            return log_probs_BT

        return self._within_memory(run, list(range(len(completion_mask_BT))), inputs)

    def _score(
        self, model: torch.nn.Module, inputs: dict[str, Any], compute_entropy: bool = False
    ) -> Any:
        """What TRL's `_get_per_token_logps_and_entropies` returns, in one pass."""
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        completion_T = inputs["completion_ids"].size(1)
        prompt_T = inputs["prompt_ids"].size(1)
        most = branches_that_pay(self._hidden_size, prompt_T, completion_T)
        if self._shares_prompts and most > 1:
            with self.accelerator.autocast():
                return _score_with_shared_prompts(
                    model, input_ids, attention_mask, completion_T, most, compute_entropy
                )
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, completion_T, compute_entropy=compute_entropy
        )

    # -- sampling -------------------------------------------------------------------------------

    @property
    def train_token_budget(self) -> int:
        """Tokens of a forward-backward pass; fewer than configured if memory ran out."""
        return self._token_budget.tokens

    def let_completions_grow(self) -> None:
        """Let nothing end a completion but its limit; what vLLM samples ends as it always does."""
        self._stops = StopStrings(self._tokenizer, [])
        self.eos_token_ids = [NEVER]
        if not self.use_vllm:
            self.generation_config.eos_token_id = [NEVER]

    def _make_sampler(self) -> Sampler:
        requested = self.args.sampling_engine
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # a process may hold a part only
            if requested not in ("auto", "adapter"):
                raise InputError(
                    f"sampling_engine {requested} needs all weights in each process, which FSDP "
                    "and DeepSpeed share out: set sampling_engine: adapter"
                )
            requested = "adapter"
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return Sampler(
            requested,
            self._score_rollouts,
            half.get(self.accelerator.mixed_precision),
            self.args.sampling_token_budget,
        )

    def _score_rollouts(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_T: int,
    ) -> torch.Tensor:
        inputs = _rows_of_passes(input_ids, attention_mask, completion_T)
        log_probs_BT: torch.Tensor = self._score(self.model, inputs)[0]
        return log_probs_BT

    def _compare_with_sampler(self, output: dict[str, Any]) -> None:
        """Measure the loss's probability ratio from the policy that sampled, if that is another."""
        sampled_BT = output.get("sampling_per_token_logps")
        if sampled_BT is None:
            return
        if not self._sampler.is_exact:
            output["old_per_token_logps"] = sampled_BT
        if self.use_vllm and not self._vllm_is_checked:
            rows = list(range(min(len(sampled_BT), TEST_ROWS)))
            few = select_and_trim(output, rows)
            mask = few["completion_mask"] * few.get("tool_mask", 1)
            with torch.no_grad():
                trained_BT = self._score(self.model, few)[0]
            check_vllm(few["sampling_per_token_logps"], trained_BT, mask)
            self._vllm_is_checked = True

    @timed("sampling")
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            # What TRL would do next (grpo_trainer.py:1768-1772), here to know how long it takes.
            with self.meter.part("sync_weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step: int = self.state.global_step
        # grpo_trainer.py:1859-1872 calls `model.generate(**inputs, generation_config=...)` on the
        # unwrapped model. For the length of that call, `generate` is our sampling loop.
        model = self.accelerator.unwrap_model(self.model)
        original = model.generate
        done: list[Sampled] = []

        def generate(generation_config: GenerationConfig, **inputs: Any) -> torch.Tensor:
            if not can_generate_fast(model, generation_config, inputs):
                if self.args.sampling_engine not in ("auto", "adapter"):
                    raise InputError(
                        f"sampling_engine {self.args.sampling_engine} covers plain sampling of "
                        "text with full attention only: set sampling_engine: adapter"
                    )
                criteria = self._stops.criteria(inputs["input_ids"].size(1))
                output: torch.Tensor = original(
                    **inputs, generation_config=generation_config, stopping_criteria=criteria
                )
                return output
            request = Request(**inputs, config=generation_config, stops=self._stops)
            self._sampler.prepare(model, request)
            part = self.meter.part
            with part("sync_weights"), self._sampler.weights(model), part("sampling"):
                done.append(self._sampler.sample(model, request))
            return torch.cat([request.input_ids, done[0].completion_ids], dim=1)

        model.generate = generate
        try:
            completion_ids, log_probs = super()._generate_single_turn(*args, **kwargs)
        finally:
            del model.generate
        if done and done[0].log_probs is not None:
            log_probs = done[0].log_probs.tolist()
            # Off-policy, grpo_trainer.py:2643 would now compute what `_compare_with_sampler` puts
            # there: the log-probs of the policy that sampled.
            steps = self.args.steps_per_generation * self.num_iterations
            self._skips_old_log_probs = self.args.gradient_accumulation_steps % steps != 0
        # TRL cuts rows at an end token alone: behind a stop string it has left the padding.
        completion_ids = [ids[: self._stops.length(ids)] for ids in completion_ids]
        if log_probs is not None:
            pairs = zip(log_probs, completion_ids, strict=True)
            log_probs = [row[: len(ids)] for row, ids in pairs]
        self.meter.count("sampling", sum(map(len, completion_ids)))
        return completion_ids, log_probs

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        # grpo_trainer.py:2166-2322 returns, among others, ids (1) and texts (3), and has logged as
        # cut off what ends in no end token (2300-2308).
        output: tuple[Any, ...] = super()._generate(prompts)
        if not self._stops.strings:
            return output
        completion_ids, texts = output[1], output[3]
        cut_off = [self._is_cut_off(ids) for ids in completion_ids]
        lengths = [len(ids) for ids, cut in zip(completion_ids, cut_off, strict=True) if not cut]
        lengths = gather_object(lengths) or [0]
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["completions/clipped_ratio"][-1] = mean(map(float, gather_object(cut_off)))
        for name, value in (("mean", mean(lengths)), ("min", min(lengths)), ("max", max(lengths))):
            metrics[f"completions/{name}_terminated_length"][-1] = float(value)
        return *output[:3], [self._stops.cut(text) for text in texts], *output[4:]

    def _is_cut_off(self, ids: list[int]) -> bool:
        ends = (*self.eos_token_ids, self._tokenizer.pad_token_id)
        return ids[-1] not in ends and self._stops.length(ids) is None

    # -- resuming -------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        # grpo_trainer.py:1280-1316.
        sampler = super()._get_train_sampler(dataset)
        return EpochSampler(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write none: `adapter/` has its own card, and TRL's does not know a base model on disk."""
        # grpo_trainer.py:3389 asks for one with every checkpoint.

    def _save_rng_state(self, output_dir: str) -> None:
        # transformers 5.23.0, trainer.py:3395: before `trainer_state.json`, which closes a
        # checkpoint.
        super()._save_rng_state(output_dir)
        save_generation_state(self, Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # transformers 5.23.0, trainer.py:1849 and 1881: once in a resumed run, before its first
        # step and behind the loop's own initialisation.
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_generation_state(self, Path(checkpoint))

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
        Each of several processes grades all prompts, and gets the same scores.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.accelerator.unwrap_model(self.model)
        with self._sampler.weights(model):
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


@dataclass(frozen=True)
class MicroBatchLog:
    """How many rows and completion tokens a micro-batch had, and its metrics."""

    rows: int
    tokens: int
    metrics: dict[str, float]


def metrics_of_one_batch(logs: Sequence[MicroBatchLog]) -> dict[str, float]:
    """Put together what would have been logged, had all these micro-batches been one.

    A mean is weighed by completion tokens; NaN says that a micro-batch has no value.

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


def _describe_ratios(ratios_T: torch.Tensor) -> dict[str, float]:
    if not len(ratios_T):  # all of them masked as truncated
        ratios_T = ratios_T.new_tensor([math.nan])
    extremes = {"ratio/min": ratios_T.amin().item(), "ratio/max": ratios_T.amax().item()}
    return {"ratio/mean": ratios_T.mean().item(), **extremes}


def why_not_packed(config: SoloGRPOConfig, dataset: Any = None) -> str | None:
    """Say why the loss must run as in TRL, or None if packing micro-batches is exact."""
    if not {"image", "images"}.isdisjoint(getattr(dataset, "column_names", None) or ()):
        return "pixels of a batch are not laid out row by row"
    if config.loss_type not in GLOBALLY_NORMALISED + ROW_NORMALISED:
        return f"loss_type {config.loss_type} is normalised over each micro-batch"
    if config.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "DeepSpeed's engine takes an optimizer step with every backward"
    if config.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return "FSDP collects the weights in every forward, and processes differ in their number"
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


def _score_with_shared_prompts(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    most: int,
    compute_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """Log-probs and entropies as in TRL, with a prompt computed once for up to `most` completions.

    These stand side by side behind it in a single sequence, and the attention mask keeps them
    apart. Each begins with its own copy of the last prompt token, from which its first token is
    predicted.

    Returns:
        (B, T) log-probs of the completion tokens, (B, T) entropies or None, and None for the
        auxiliary loss.
    """
    tree = build_prompt_trees(input_ids, attention_mask, logits_to_keep, most)
    output = model(
        input_ids=tree.input_ids,
        attention_mask=tree.mask[:, None],
        position_ids=tree.position_ids,
        shift_labels=tree.next_ids,
        fused_lm_head=True,
    )
    log_probs = tree.rows(output.log_probs)
    return log_probs, tree.rows(output.entropy) if compute_entropy else None, None


def _rows_of_passes(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_T: int
) -> dict[str, torch.Tensor]:
    """Take (B, T) rows apart again into prompts and completions."""
    prompt_T = input_ids.size(1) - completion_T  # completions that are all masked have no tokens
    return {
        "prompt_ids": input_ids[:, :prompt_T],
        "prompt_mask": attention_mask[:, :prompt_T],
        "completion_ids": input_ids[:, prompt_T:],
        "completion_mask": attention_mask[:, prompt_T:],
    }


def _score_completion_tokens_only() -> None:
    # trl/trainer/utils.py:1642: `compact = _use_triton(hidden_states.device)`. The flag is read
    # only to decide whether to drop the masked positions before the LM head; the kernels have
    # their own copy of the function. Scoring all positions was 35 % of a step on CPU.
    trl_utils._use_triton = lambda device: True
