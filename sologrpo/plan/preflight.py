"""Try the settings on objects without weights, with the code that will use them.

TRL, transformers and PEFT check many settings only after the model is loaded, or after the first
completions. Here whatever they refuse is refused in one line, before anything is written.
"""

import copy
import difflib
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    get_scheduler,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_optimizer import is_optimizer_factory
from trl import ModelConfig, get_peft_config

from rewards import name_of_spec
from sologrpo.base.device import one_device
from sologrpo.base.errors import LIBRARY_ERRORS, InputError, refusing
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.evaluation.answer import VALIDATION_SCORES
from sologrpo.model.fitting import build_without_weights
from sologrpo.model.loading import cannot_load, pick_dtype
from sologrpo.sampling.vllm_engine import check_swappable
from sologrpo.sampling.vllm_server import AdapterServer

TRIED_TOKENS = 2
SAMPLING_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation",
)  # fmt: skip
TRIED_STEPS = 1000  # of a schedule, if the number of steps is not known yet


def try_settings(
    run: RunArguments,
    args: SoloGRPOConfig,
    model_args: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> PeftModel:
    """Return the policy without weights; refuse what the libraries would refuse late."""
    policy = build_policy(model_args, args.trust_remote_code)
    _try_packages(args)
    swaps_adapters = args.use_vllm and run.trainer == "solo"
    if swaps_adapters:
        check_swappable(policy, bool(model_args.load_in_8bit))
    _try_optimizer(args, policy)
    _try_loading(args)
    _try_generation(args, tokenizer)
    _check_best_metric(run, args)
    coefficient, config = args.router_aux_loss_coef, policy.config.get_text_config()
    if coefficient and not hasattr(config, "output_router_logits"):
        raise InputError(
            f"router_aux_loss_coef {coefficient}: {model_args.model_name_or_path} has no experts "
            "to balance: leave it out"
        )
    if args.cast_lm_head_to_fp32 and config.tie_word_embeddings:  # TRL 1.16, grpo_trainer.py:1043
        raise InputError("cast_lm_head_to_fp32: TRL casts no LM head that is the embedding too "
                         "(tie_word_embeddings in config.json): leave it out")  # fmt: skip
    # What it was asked holds for all processes.
    is_first = args.process_index == 0 and not run.dry_run
    if swaps_adapters and args.vllm_mode == "server" and is_first:
        _try_vllm_server(args, model_args, policy)
    return policy


# -- the model -----------------------------------------------------------------------------------


def build_policy(model_args: ModelConfig, trust_remote_code: bool = False) -> PeftModel:
    """Build the model with its adapter, without weights.

    Raises:
        InputError: if there is no such model, it is not a causal language model, its attention is
            not available here, or an entry of the adapter's settings matches nothing.
    """
    name, dtype = str(model_args.model_name_or_path), pick_dtype(model_args.dtype)
    config = _load_config(model_args, trust_remote_code)
    attention = model_args.attn_implementation
    with refusing(f"{name} cannot be built with attn_implementation {attention}"):
        model = build_without_weights(model_args, config, trust_remote_code)
        model.set_attn_implementation("sdpa")  # which can be measured without weights
    adapter = _adapter_config(model_args, model)
    with refusing("the adapter does not fit the model"), init_empty_weights(include_buffers=True):
        policy = get_peft_model(model, adapter, autocast_adapter_dtype=False).to(dtype)
    # TRL 1.16.0, grpo_trainer.py:835-843.
    if isinstance(policy.get_output_embeddings(), BaseTunerLayer):
        raise InputError("lora_target_modules: an adapter of the LM head is never trained: leave "
                         "it out, or set all-linear")  # fmt: skip
    return policy


def _load_config(model_args: ModelConfig, trust_remote_code: bool) -> PretrainedConfig:
    """Load the config of a model that continues text, and of no other."""
    name = str(model_args.model_name_or_path)
    try:
        config = AutoConfig.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=trust_remote_code
        )
    except LIBRARY_ERRORS as error:
        raise cannot_load(name, error) from error
    own_code = trust_remote_code and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    classes = set(config.architectures or ())
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (
        not classes or not classes.isdisjoint(known)
    )
    if not own_code and (not is_causal or config.is_encoder_decoder):
        raise InputError(
            f"{name} is not a causal language model, but {', '.join(classes) or config.model_type}:"
            " give a model whose config.json names a class ...ForCausalLM"
        )
    if config.get_text_config() is not config:
        raise InputError(f"{name} ({config.model_type}) reads more than text: give a text model")
    return config


def _adapter_config(model_args: ModelConfig, model: PreTrainedModel) -> Any:
    """Build the adapter's config, once every entry of its lists matches something."""
    with refusing("LoRA"):
        adapter = get_peft_config(model_args)
    modules = [name for name, _ in model.named_modules() if name]
    targets = adapter.target_modules
    if targets != "all-linear":
        for target in [targets] if isinstance(targets, str) else targets or ():
            tried = copy.copy(adapter)
            tried.target_modules = target if isinstance(targets, str) else {target}
            with refusing(f"lora_target_modules: {target!r}"):
                found = any(check_target_module_exists(tried, name) for name in modules)
            if not found:
                _check_names("lora_target_modules", [target], modules)
    parameters = [name for name, _ in model.named_parameters()]
    _check_names("lora_modules_to_save", adapter.modules_to_save or (), modules)
    _check_names("lora_target_parameters", adapter.target_parameters or (), parameters)
    return adapter


def _check_names(key: str, entries: Iterable[str], names: Sequence[str]) -> None:
    for entry in entries:
        if not any(f".{name}".endswith(f".{entry}") for name in names):
            last = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()})
            near = difflib.get_close_matches(entry, last, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(last)}"
            raise InputError(f"{key}: unknown {entry!r}; {hint}")


# -- the trainer ---------------------------------------------------------------------------------


def _try_packages(args: SoloGRPOConfig) -> None:
    for setting, package, install in (
        ("use_vllm", "vllm", "pip install 'sologrpo[vllm]'"),
        ("use_liger_kernel", "liger_kernel", "pip install liger-kernel"),
    ):
        if getattr(args, setting) and find_spec(package) is None:
            raise InputError(f"{setting}: {package} is not installed: {install}, or leave it out")


def _try_vllm_server(args: SoloGRPOConfig, model_args: ModelConfig, policy: PeftModel) -> None:
    # TRL 1.16.0, vllm_generation.py:286-289.
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    server = AdapterServer(url, connection_timeout=args.vllm_server_timeout)
    server.check(policy, str(model_args.model_name_or_path), bool(model_args.load_in_4bit))


def _try_optimizer(args: SoloGRPOConfig, policy: PeftModel) -> None:
    """Build the optimizer and its schedule as transformers 5.23 does (trainer.py:1259-1376)."""
    with refusing(f"optim {args.optim.value}"):
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, policy)
        if is_optimizer_factory(optimizer_class):
            return
        for replaced in ("params", "model", "optimizer_dict"):
            options.pop(replaced, None)
        parameter = torch.nn.Parameter(torch.zeros(1, device=one_device()))
        optimizer = optimizer_class([parameter], **options)
    steps = max(args.max_steps, 0) or TRIED_STEPS
    with refusing(f"lr_scheduler_type {args.lr_scheduler_type.value}, lr_scheduler_kwargs"):
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        for rate in getattr(schedule, "lr_lambdas", ()):
            if not all(0 <= rate(step) <= 1e6 for step in (0, steps // 2, steps - 1, steps)):
                raise ValueError("the learning rate is not a positive number at each step")


def _try_loading(args: SoloGRPOConfig) -> None:
    """Build the loader of the rows, and recompute a number as checkpointing recomputes layers."""
    with refusing("dataloader"):
        DataLoader(
            TensorDataset(torch.zeros(1)),
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )
    with refusing("gradient_checkpointing_kwargs"):
        options = {"use_reentrant": True, **(args.gradient_checkpointing_kwargs or {})}
        checkpoint(torch.neg, torch.ones(1, requires_grad=True), **options)
    if args.torch_compile:
        with refusing("torch_compile"):
            torch.compile(
                torch.nn.Identity(),
                backend=args.torch_compile_backend or "inductor",
                mode=args.torch_compile_mode,
            )


def sampling_config(args: SoloGRPOConfig) -> GenerationConfig:
    """Build sampling settings as TRL 1.16.0 does (grpo_trainer.py:1153); they end no completion."""
    settings = {name: getattr(args, name) for name in SAMPLING_SETTINGS}
    limits = {"max_new_tokens": TRIED_TOKENS, "do_sample": True, "pad_token_id": 0}
    given = args.generation_kwargs or {}
    return GenerationConfig(**limits | settings | given, disable_compile=True)


def _try_generation(args: SoloGRPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    given = args.generation_kwargs or {}
    if args.use_vllm:  # vllm_generation.py:672
        parameters = import_module("vllm").SamplingParams
        _check_names("generation_kwargs", given, [*signature(parameters).parameters])
        with refusing("generation_kwargs"):
            parameters(**given)
        return
    _check_names("generation_kwargs", given, [*GenerationConfig().to_dict()])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=max(8, len(tokenizer)), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=64,
    ))  # fmt: skip
    with refusing("sampling settings"), torch.random.fork_rng(devices=[]):
        config = sampling_config(args)
        config.max_new_tokens = min(TRIED_TOKENS, config.max_new_tokens)
        ids = torch.zeros(2, 1, dtype=torch.long)
        sampled = model.generate(ids, attention_mask=ids + 1, generation_config=config)
        if not isinstance(sampled, torch.Tensor) or len(sampled) != len(ids):
            raise ValueError("generation_kwargs change the number or the form of the completions")


def _check_best_metric(run: RunArguments, args: SoloGRPOConfig) -> None:
    """Refuse a metric that no validation reports; transformers looks for it after the first one."""
    metric = args.metric_for_best_model
    if args.eval_strategy == "no" or metric is None:
        return
    name = str(metric).removeprefix("eval_")
    names = [*VALIDATION_SCORES, "runtime"]
    if run.trainer == "stock":
        names = ["loss", "reward", "reward_std", "kl", "completions/mean_length"]
        names += [f"rewards/{name_of_spec(spec)}/mean" for spec in run.rewards]
    if name not in names and not name.startswith("accuracy/"):
        known = ", ".join(f"eval_{name}" for name in names)
        raise InputError(f"metric_for_best_model {metric!r} is not reported: use one of {known}")
