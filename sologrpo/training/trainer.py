"""`SoloGRPOTrainer`: TRL's `GRPOTrainer` that does less work for the same gradient.

Every override names the lines of TRL 1.16.0 that it relies on, in `grpo_trainer.py`; what is
replaced within TRL is in `trl_patches`.

Shapes: B rows of a batch, G completions of one prompt, P prompts, T tokens, R rewards.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from transformers import TrainerControl
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path, nanstd

from rewards import hacking_signs
from rewards.completions import text_of
from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.data.dataset import can_be_graded, has_few_kinds, stop_strings
from sologrpo.evaluation.answer import evaluate_greedily
from sologrpo.model.loading import keep_trainable_in_fp32, skip_undone_casts
from sologrpo.sampling.stopping import StopStrings
from sologrpo.training.advantages import GroupRewards, find_outcome
from sologrpo.training.checkpoint import (
    EpochSampler,
    generation_state_file,
    load_generation_state,
    save_generation_state,
)
from sologrpo.training.drop_in import (
    as_solo_config,
    sampling_obstacle,
    shards_weights,
    take_whole_optimizer_batch,
    unpacked_reason,
)
from sologrpo.training.hot_swap import HotSwappedVllm, build_vllm
from sologrpo.training.nonfinite import check_finite
from sologrpo.training.packed_loss import (
    MicroBatchLog,
    PackedLoss,
    PackedScorer,
    metrics_of_one_batch,
    rows_with_gradient,
)
from sologrpo.training.packing import Batch, Tokens, rows_of_sequences
from sologrpo.training.progress import StepMeter, timed
from sologrpo.training.rollout import (
    GenerationBatch,
    Rollout,
    make_sampler,
    measure_vllm,
)
from sologrpo.training.trl_patches import Scores, replaced, truncated_kept

logger = logging.getLogger(__name__)


class SoloGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Takes the same arguments as `GRPOTrainer`, and gives the same gradient.

    - Trainable parameters stay in fp32.
    - Rows whose advantage is exactly zero are left out of the forward and backward pass where they
      cannot change the gradient. The rest is computed without padding, and each token that rows
      have in common once, in passes sized by the batch and the free memory.
    - Stop strings of the prompt format end a completion, row by row, as an end token does.
    - `evaluate()` grades one greedy completion of every prompt that `build_prompts` made.
      Other data sets are evaluated as in TRL.

    What it cannot reproduce exactly runs as in TRL; `as_in_trl` tells which parts do, and why. With
    TRL's own `GRPOConfig` it also prints completions and writes the model card as TRL does.

    >>> from sologrpo import SoloGRPOTrainer as GRPOTrainer
    >>> GRPOTrainer(model, reward_funcs, args, train_dataset=dataset).train()
    """

    # The batch that TRL is sampling and scoring. Only `_generate_and_score_completions` sets it:
    # the hooks that TRL calls back exchange here what they know of the batch.
    _generation: GenerationBatch | None = None

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        signature = inspect.signature(GRPOTrainer.__init__)
        given = signature.bind_partial(self, model, reward_funcs, args, *others, **named).arguments
        config = as_solo_config(args, model)
        self.as_in_trl: dict[str, str] = {}
        self.is_packed: bool | None = None  # not decided yet

        def decide(model: Any) -> Any:
            """Choose the training pass, before TRL reads the sizes of batches from the settings."""
            if self.is_packed is None:
                reason = unpacked_reason(config, given | {"model": model}, type(self))
                self.is_packed = reason is None
                if reason is None:
                    take_whole_optimizer_batch(config)
                else:
                    self._leave_to_trl("the training pass", reason)
            return model

        def load(*args: Any, **kwargs: Any) -> Any:
            return decide(create_model_from_path(*args, **kwargs))

        if not isinstance(model, str):
            decide(model)
        with (
            replaced(grpo_trainer, "create_model_from_path", load),  # 355: the policy comes first
            # 1107: with an adapter, vLLM swaps it and is never sent weights.
            replaced(grpo_trainer, "VLLMGeneration", build_vllm),
        ):
            super().__init__(model, reward_funcs, config, *others, **named)
        self._tokenizer.chat_template_kwargs = self.chat_template_kwargs  # for validation
        swaps = isinstance(getattr(self, "vllm_generation", None), HotSwappedVllm)
        if swaps and config.vllm_tensor_parallel_size == 1:
            # As at 1101: vLLM has set its own seed, which processes need that share an engine.
            set_seed(config.seed, device_specific=True)
        self._replaces_trl_output = isinstance(args, SoloGRPOConfig)
        if self._replaces_trl_output:
            self.num_completions_to_print = 0  # `ConsoleLog` shows them, and shorter than TRL
        self.meter = StepMeter(self._metrics["train"])
        self.add_callback(self.meter)
        keep_trainable_in_fp32(self.model)
        skip_undone_casts(self.model)
        self._outcome = find_outcome(self.reward_func_names, config.outcome_reward)
        self._has_few_kinds = has_few_kinds(self.train_dataset)
        self._scorer = PackedScorer(
            config, self.accelerator.unwrap_model(self.model), self.accelerator
        )
        if self.is_packed:
            self._scorer.prepare()
        self._loss = PackedLoss(self._scorer, self)
        self._rollout = self._make_rollout(sampling_obstacle(config, given))

    def _leave_to_trl(self, part: str, reason: str) -> None:
        if part not in self.as_in_trl:
            self.as_in_trl[part] = reason
            logger.warning("%s runs as in TRL: %s", part, reason)

    # -- rollout --------------------------------------------------------------------------------

    def _make_rollout(self, obstacle: str | None) -> Rollout:
        stops = StopStrings(self._tokenizer, stop_strings(self.train_dataset))
        if self.use_vllm:  # vllm_generation.py:672 and 627 hand these to `SamplingParams`
            ends = {"stop_token_ids": self.eos_token_ids}
            self.vllm_generation.generation_kwargs |= ends | stops.vllm_settings()
        return Rollout(
            make_sampler(
                self.args, self.accelerator, shards_weights(self.args), self._score_sampled
            ),
            self.args.sampling_engine,
            stops,
            self.meter,
            obstacle,
            lambda reason: self._leave_to_trl("sampling", reason),
        )

    def _score_sampled(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_T: int
    ) -> torch.Tensor:
        rows = len(input_ids)
        return self._get_per_token_logps_and_entropies(
            self.model, input_ids, attention_mask, completion_T, batch_size=rows
        )[0]

    @timed("sampling")
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # 1763-1891.
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            # What TRL would do next (1768-1772), here to know how long it takes.
            with self.meter.part("sync_weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step: int = self.state.global_step
        with self._rollout.sampling_loop(self.accelerator.unwrap_model(self.model)) as sampled:
            completion_ids, log_probs = super()._generate_single_turn(*args, **kwargs)
        if sampled and sampled[0].log_probs is not None:
            log_probs = sampled[0].log_probs.tolist()
            if self._generation is not None:
                self._generation.has_sampled_log_probs = True
        return self._rollout.cut(completion_ids, log_probs)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        # 2193-2322 returns, among others, ids (1) and texts (3), and has logged as cut off what
        # ends in no end token (2300-2308).
        output: tuple[Any, ...] = super()._generate(prompts)
        stops = self._rollout.stops
        if not stops.strings:
            return output
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in self._rollout.describe_lengths(output[1], self._end_ids).items():
            metrics[name][-1] = value
        return *output[:3], [stops.cut(text) for text in output[3]], *output[4:]

    @property
    def _end_ids(self) -> list[int]:
        return [*self.eos_token_ids, self._tokenizer.pad_token_id]

    # -- advantages -----------------------------------------------------------------------------

    @timed("data")
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        # 2324-2937: one generation batch, sampled, scored and tokenised.
        if not self.model.training:
            evaluated: Batch = super()._generate_and_score_completions(inputs)
            return evaluated
        generation = GenerationBatch()
        with replaced(self, "_generation", generation):
            batch = self._score_with_truncated_masked(inputs)
        self._rollout.correct_for_sampler(batch)
        if self.use_vllm:
            measured = measure_vllm(batch, self.top_p, self._score_sampled)
            for name, value in measured.items():
                self._metrics["train"][name].append(value)
        if self.multi_objective_aggregation == "sum_then_normalize":
            start = self.accelerator.process_index * len(inputs)
            batch["advantages"] = generation.rewards.exact_advantages(
                batch["advantages"],
                slice(start, start + len(inputs)),
                self.args.advantage_eps,
                self.scale_rewards == "group",
            )
        self._log_rewards(generation.rewards)
        return batch

    def _score_with_truncated_masked(self, inputs: list[dict[str, Any]]) -> Batch:
        masks = self.mask_truncated_completions and bool(self._rollout.stops.strings)
        with truncated_kept(self) if masks else nullcontext():
            batch: Batch = super()._generate_and_score_completions(inputs)
        if masks:
            batch["completion_mask"] = self._rollout.mask_cut_off(batch, self._end_ids)
            n_items = self.accelerator.gather(batch["completion_mask"].sum()).sum()
            batch["num_items_in_batch"] = n_items
        return batch

    @timed("rewards")
    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        # 1579-1682 returns the rewards of all processes, (B, R). TRL computes the advantages from
        # what is returned here.
        scores_BR: torch.Tensor = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        if self._generation is None:  # an evaluation
            return scores_BR
        rewards = GroupRewards.of_scores(
            scores_BR,
            self.reward_weights,
            self.num_generations,
            self._outcome,
            is_gated=self.args.outcome_reward is not None,
        )
        self._generation.rewards = rewards
        self._log_hacking_signs(inputs, prompts, completions)
        if self._has_few_kinds:
            kinds_B = gather_object([row.get("kind") for row in inputs])
            for name, share in rewards.accuracy_by_kind(kinds_B).items():
                self._metrics["train"][name].append(share)
        return rewards.rewards_BR

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

    def _log_rewards(self, rewards: GroupRewards) -> None:
        metrics = self._metrics["train"]
        if self.multi_objective_aggregation == "sum_then_normalize":
            # TRL's own figure misses what rounding tells apart (2780).
            metrics["frac_reward_zero_std"][-1] = rewards.degenerate_P.float().mean().item()
        for name, value in rewards.describe().items():
            metrics[name].append(value)
        if rewards.rewards_BR is rewards.scores_BR:
            return
        # Log the scores before the gate (2821-2844); `reward` is what the policy is trained on.
        for i, name in enumerate(self.reward_func_names):
            scores_B = rewards.scores_BR[:, i]
            metrics[f"rewards/{name}/mean"][-1] = scores_B.nanmean().item()
            metrics[f"rewards/{name}/std"][-1] = nanstd(scores_B).item()
            column = self._logs["rewards"][name]
            for row, score in enumerate(scores_B.tolist(), start=-len(scores_B)):
                column[row] = score

    # -- packed loss ----------------------------------------------------------------------------

    @property
    def train_token_budget(self) -> int:
        """Tokens of a forward-backward pass at most; fewer than at first if memory ran out."""
        return self._scorer.budget.tokens

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the gradients in packed micro-batches; return a loss that has them.

        So `Trainer.training_step` runs one backward pass, through DDP or DeepSpeed if one is used.
        """
        # 2939-2942.
        tokens = Tokens.of(inputs)
        n_tokens = tokens.count(range(len(tokens.prompts)))
        if not self.is_packed or not self.model.training:
            self.meter.count("training", n_tokens)
            stock_loss: torch.Tensor = super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
            return stock_loss
        rows = rows_with_gradient(inputs["advantages"], self.beta)
        self.meter.count("training", tokens.count(rows))
        off_sampler = not self._rollout.sampler.is_exact
        value, gradients, logs = self._loss.gradients(model, inputs, tokens, rows, off_sampler)
        self._log_micro_batches(logs, n_tokens)
        check_finite(value, gradients, self.state.global_step + 1, is_scaled=self.args.fp16)
        return self._loss.of_gradients(model, value, gradients)

    def _log_micro_batches(self, logs: list[MicroBatchLog], tokens: int) -> None:
        """Log what all processes trained on in this optimizer step, of this many tokens of rows."""
        logs = gather_object(logs)
        metrics = self._metrics["train"]
        computed = sum(log.computed for log in logs)
        metrics["tokens/computed"].append(float(computed))
        metrics["tokens/saved"].append(float(sum(gather_object([tokens])) - computed))
        metrics["trained_completions"].append(float(sum(log.rows for log in logs)))
        for name, value in metrics_of_one_batch(logs).items():
            metrics[name].append(value)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Scores:
        # 1419-1508. TRL gives a `batch_size` to the passes without gradient, which score all rows
        # of a generation batch with the old (2616) and then the reference policy (2676, 2690).
        with self.meter.part("training" if batch_size is None else "logprobs"):
            if batch_size is None or not self.is_packed:
                stock: Scores = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
                )
                return stock
            batch = rows_of_sequences(input_ids, attention_mask, logits_to_keep)
            if self._takes_sampled_log_probs():
                return torch.zeros_like(batch["completion_mask"], dtype=torch.float), None, None
            return self._scorer.log_probs(model, batch), None, None

    def _takes_sampled_log_probs(self) -> bool:
        """Check, once a generation batch, whether `correct_for_sampler` gives the old log-probs.

        Off-policy, TRL's first pass would compute them (2611-2625); on-policy it computes none.
        """
        steps = self.args.steps_per_generation * self.num_iterations
        if self._generation is None or self.args.gradient_accumulation_steps % steps == 0:
            return False
        taken = self._generation.has_sampled_log_probs
        self._generation.has_sampled_log_probs = False
        return taken

    # -- resuming -------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        # 1280-1316.
        return EpochSampler.like(super()._get_train_sampler(dataset))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's card (3389), but in our runs none: `adapter/` has one."""
        if not self._replaces_trl_output:
            super().create_model_card(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        # transformers 5.23.0, trainer.py:3395: before `trainer_state.json`, which closes a
        # checkpoint.
        super()._save_rng_state(output_dir)
        save_generation_state(self, Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # transformers 5.23.0, trainer.py:1849 and 1881: once in a resumed run, before its first
        # step and after the loop's own initialisation.
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        if generation_state_file(Path(checkpoint), self.args).is_file():
            load_generation_state(self, Path(checkpoint))
        else:
            self._leave_to_trl("resuming", "the checkpoint was not written by SoloGRPOTrainer")

    # -- evaluation -----------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Grade one greedy completion of every validation prompt that `build_prompts` made.

        TRL, which evaluates on all other rows, averages samples at the training temperature: not
        the accuracy that users will see. Each process grades all prompts, with the same scores.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):  # a key, transformers 5.23.0, trainer.py:2640
            dataset = self.eval_dataset[dataset]
        if not can_be_graded(dataset):
            if not isinstance(dataset, dict):
                self._leave_to_trl("evaluation", "its rows are not those of build_prompts")
            scores: dict[str, float] = super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
            return scores
        model = self.accelerator.unwrap_model(self.model)
        with self._rollout.sampler.weights(model):
            graded = evaluate_greedily(
                model, self.processing_class, dataset, self.max_completion_length
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in graded.items()}
        was_training = self.model.training
        self.model.eval()  # `log` (3302) would otherwise flush training metrics
        self.log(metrics)
        self.model.train(was_training)
        handler = self.callback_handler
        self.control: TrainerControl = handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics
