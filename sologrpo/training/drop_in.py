"""Decide which parts of a run are left to TRL, so that our trainer can replace `GRPOTrainer`."""

import copy
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.model.trial import Model, log_probs_alone, problem_of, trial_rows
from sologrpo.training.loss import GLOBALLY_NORMALISED, ROW_NORMALISED

MULTI_TURN = ("tools", "rollout_func", "environment_factory")


def as_solo_config(args: GRPOConfig | None, model: Any) -> SoloGRPOConfig:
    """Copy the settings; TRL's get the switches of our trainer, at their defaults."""
    if args is None:  # grpo_trainer.py:328-331
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return SoloGRPOConfig(f"{name.split('/')[-1]}-GRPO")
    config: Any = copy.copy(args)
    if not isinstance(args, SoloGRPOConfig):
        config.__class__ = SoloGRPOConfig  # the defaults of our fields are attributes of the class
    solo: SoloGRPOConfig = config
    return solo


def take_whole_optimizer_batch(config: SoloGRPOConfig) -> None:
    """Hand TRL the optimizer batch as one micro-batch, which the packed loss splits by tokens."""
    steps = config.gradient_accumulation_steps
    config.per_device_train_batch_size *= steps
    config.steps_per_generation //= steps
    config.gradient_accumulation_steps = 1


def sampling_obstacle(config: GRPOConfig, arguments: Mapping[str, Any]) -> str | None:
    """Return why a trainer of these arguments samples as in TRL, or None if our loop may sample."""
    for name in MULTI_TURN:
        if arguments.get(name):
            return f"{name} make a rollout of several turns"
    if isinstance(arguments.get("processing_class"), ProcessorMixin):
        return "prompts go through a processor"
    if shards_weights(config):
        return "FSDP and ZeRO-3 collect the weights in every forward pass of all processes"
    return None


def shards_weights(config: GRPOConfig) -> bool:
    """Check whether FSDP or ZeRO-3 leaves a process with a part of the weights."""
    plugin = config.deepspeed_plugin
    if plugin is not None:
        return bool(plugin.zero_stage == 3)
    return bool(config.fsdp) or os.environ.get("ACCELERATE_USE_FSDP") == "true"


def unpacked_reason(
    config: SoloGRPOConfig, arguments: Mapping[str, Any], trainer: type[GRPOTrainer] = GRPOTrainer
) -> str | None:
    """Return why the loss is computed as in TRL, or None if packing micro-batches is exact.

    `arguments` may lack `model`, which may be on the meta device, and `train_dataset`.
    """
    if trainer._compute_loss is not GRPOTrainer._compute_loss:
        return f"{trainer.__name__} computes another loss"
    return next(_reasons(config, arguments), None)


def _reasons(config: SoloGRPOConfig, arguments: Mapping[str, Any]) -> Iterator[str]:
    yield from filter(None, [sampling_obstacle(config, arguments)])
    if not {"image", "images"}.isdisjoint(_columns(arguments.get("train_dataset"))):
        yield "pixels of a batch are not laid out row by row"
    yield from _reasons_in_settings(config)
    if arguments.get("model") is not None:
        yield from _reasons_in_model(config, arguments)


def _reasons_in_settings(config: SoloGRPOConfig) -> Iterator[str]:
    if config.loss_type not in GLOBALLY_NORMALISED + ROW_NORMALISED:
        yield f"loss_type {config.loss_type} is normalised over each micro-batch"
    if config.steps_per_generation % config.gradient_accumulation_steps:
        yield "a generation batch is not a whole number of optimizer steps"
    if config.deepspeed_plugin is not None and config.fp16:
        yield "in fp16 DeepSpeed scales the loss by its own factor"
    if (config.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield "checkpointing with use_reentrant allows no gradient without a backward pass"
    if config.entropy_coef or config.use_adaptive_entropy:
        yield "the entropy bonus acts on rows without advantage too"
    if config.top_entropy_quantile < 1.0:
        yield "top_entropy_quantile compares the tokens of one micro-batch"
    if config.use_liger_kernel:
        yield "Liger replaces layers of the model"


def _reasons_in_model(config: SoloGRPOConfig, arguments: Mapping[str, Any]) -> Iterator[str]:
    model, adapter = arguments["model"], arguments.get("peft_config")
    text_config = model.config.get_text_config()
    coefficient = config.router_aux_loss_coef
    if coefficient is None:  # grpo_trainer.py:826-838
        coefficient = getattr(text_config, "router_aux_loss_coef", 0.0)
    if coefficient and hasattr(text_config, "output_router_logits"):
        yield "the router's auxiliary loss acts on rows without advantage too"
    if not hasattr(text_config, "rope_parameters"):
        yield "without rotary positions, leaving out the padding of a prompt would move its tokens"
    # In one sequence nothing but attention may look at other tokens, and attention must be
    # transformers' own, which reads from the positions where a row begins.
    if model._is_stateful or not model._supports_attention_backend:
        yield "the layers of this model may mix rows of one sequence"
    if isinstance(model, PeftModel):
        adapter = model.active_peft_config
    if adapter is not None and adapter.is_prompt_learning:
        yield "the adapter puts virtual tokens before the prompt"
    if model.device.type != "meta":
        problem = problem_of(model, lambda: _gaps_to_rows_alone(model))
        yield from [f"of rows packed into one sequence, {problem}"] if problem else []


def _gaps_to_rows_alone(model: Model) -> Iterator[torch.Tensor]:
    """Yield the (T, V) differences between rows in one packed sequence and each row alone."""
    rows = trial_rows(model)
    ids = torch.tensor([[*chain.from_iterable(rows)]], device=model.device)
    positions = torch.tensor([[t for row in rows for t in range(len(row))]], device=model.device)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    packed = torch.split(logits[0].float().log_softmax(dim=-1), [*map(len, rows)])
    for row, log_probs_TV in zip(rows, packed, strict=True):
        yield log_probs_TV - log_probs_alone(model, row)


def _columns(dataset: Any) -> set[str]:
    names = getattr(dataset, "column_names", None)
    if names is None and dataset is not None:  # a stream does not know them
        names = next(iter(dataset), {})
    return set(names or ())
