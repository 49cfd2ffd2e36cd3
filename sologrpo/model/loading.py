"""Loading: tokenizer, base model, 4-bit weights, dtype."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import logging as transformers_logging
from trl import ModelConfig, get_quantization_config

from sologrpo.base.device import default_dtype, describe_device, one_device
from sologrpo.base.errors import LIBRARY_ERRORS, InputError, refusing
from sologrpo.base.files import ADAPTER_CONFIG
from sologrpo.base.hub import check_hub, why_not_found
from sologrpo.base.schema import looked_in
from sologrpo.model.memory import is_out_of_memory

logger = logging.getLogger(__name__)

SHOWN_NAMES = 3  # of tensors, in an error
QUICKSTART_MODEL = "models/SmolLM2-135M-Instruct"  # of the recipes that need no hub


def pick_dtype(requested: str | None = "auto") -> torch.dtype:
    """Choose the dtype of the frozen weights and of the 4-bit computation."""
    if requested in (None, "auto"):
        return default_dtype()
    dtype: torch.dtype = getattr(torch, str(requested))
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Format a dtype as in configs: `float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def load_tokenizer(
    name_or_path: str,
    trust_remote_code: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, which pads on the left, with a token that ends no text if it has one.

    Raises:
        InputError: if it cannot be loaded, has no end-of-text token, or `chat_template_kwargs` are
            arguments of the rendering, or such that the template cannot use.
    """
    if name_or_path == QUICKSTART_MODEL and not Path(name_or_path).is_dir():
        raise InputError(
            f"no folder {name_or_path}{looked_in(name_or_path)}: download it with `sologrpo model`"
        )
    check_hub(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, padding_side="left"
        )
        tokenizer("a")  # a wrong entry of its config shows only now
    except Exception as error:  # tokenizers raises nothing narrower for a damaged file
        raise cannot_load(name_or_path, error) from error
    if tokenizer.eos_token is None:
        raise InputError(
            f"{name_or_path}: the tokenizer has no end-of-text token, so no completion would end: "
            "name one in its tokenizer_config.json, or copy that file again"
        )
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = _spare_token(tokenizer)
    _check_template_kwargs(tokenizer, chat_template_kwargs or {})
    tokenizer.chat_template_kwargs = chat_template_kwargs or {}
    return tokenizer


def _check_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> None:
    taken = signature(tokenizer.apply_chat_template).parameters.keys() & template_kwargs.keys()
    if taken:
        raise InputError(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set")
    if template_kwargs and tokenizer.chat_template:
        greeting = [{"role": "user", "content": "Hello"}]
        with refusing("chat_template_kwargs"):
            tokenizer.apply_chat_template(greeting, tokenize=False, **template_kwargs)


# Reserved tokens that model families ship and never use in text. With one of them as padding, the
# end-of-text token keeps its meaning, and the embedding needs no new row.
_RESERVED_PAD_TOKENS = (
    "<|finetune_right_pad_id|>",  # Llama 3.1 and later
    "<|endoftext|>",  # Qwen, SmolLM2, where it is not the end of a chat turn
    "<|reserved_special_token_0|>",  # Llama 3
    "<pad>",
)


def _spare_token(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = tokenizer.get_vocab()
    for token in (*_RESERVED_PAD_TOKENS, tokenizer.unk_token):
        if token in vocabulary and token != tokenizer.eos_token:
            return str(token)
    return str(tokenizer.eos_token)


def load_base_model(
    model_args: ModelConfig, trust_remote_code: bool = False, device: str | None = None
) -> PreTrainedModel:
    """Load the frozen weights, in 4-bit NF4 if `load_in_4bit`.

    Raises:
        InputError: if the model cannot be loaded, does not fit into memory, lacks weights or has
            others, or has only pickled ones and is not trusted.
    """
    name, dtype = str(model_args.model_name_or_path), pick_dtype(model_args.dtype)
    if (Path(name) / ADAPTER_CONFIG).is_file():
        # transformers would load the model that the adapter names.
        raise InputError(f"{name} holds an adapter: give its base model as the model")
    # TRL passes `dtype` on as the 4-bit compute dtype, which must be a real dtype, not "auto". A
    # copy: `config.yaml` records what the user asked for, and `--resume` compares it.
    resolved = copy.copy(model_args)
    resolved.dtype = dtype_name(dtype)
    try:
        with _without_load_report():
            model, loaded = AutoModelForCausalLM.from_pretrained(
                name,
                revision=model_args.model_revision,
                dtype=dtype,
                attn_implementation=model_args.attn_implementation,
                quantization_config=get_quantization_config(resolved),
                device_map={"": one_device() if device is None else device},
                trust_remote_code=trust_remote_code,
                use_safetensors=None if trust_remote_code else True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
    except (MemoryError, *LIBRARY_ERRORS) as error:
        if is_out_of_memory(error):
            raise InputError(
                f"{name} does not fit into memory ({describe_device()}): use load_in_4bit: true or "
                "a smaller model"
            ) from error
        raise cannot_load(name, error) from error
    _check_weights(model, loaded, name)
    keep_nf4_trainable(model)
    keep_one_input_hook(model)
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence transformers' table of weights that do not fit, which is an error here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _check_weights(
    model: PreTrainedModel, loaded: Mapping[str, Iterable[Any]], name_or_path: str
) -> None:
    """Refuse a base model of which transformers would make up or leave out weights.

    transformers takes tied weights, and those that a model class may lack or need not load, off
    these lists (5.23.0, modeling_utils.py:4916).
    """
    floats = ((name, p) for name, p in model.named_parameters() if p.is_floating_point())
    for problem, names in (
        ("its files lack", loaded["missing_keys"]),
        ("their size is another in its files:", {name for name, *_ in loaded["mismatched_keys"]}),
        ("its files hold weights without a place:", loaded["unexpected_keys"]),
        # A sum takes no memory, unlike `isfinite` of a large embedding.
        (
            "its files hold numbers that are not finite:",
            {name for name, p in floats if not p.sum(dtype=torch.float).isfinite()},
        ),
    ):
        if names:
            raise InputError(
                f"cannot load model {name_or_path!r}: {problem} {few(sorted(names))}: download it "
                "again, or give the model that its config.json describes"
            )


def few(names: Sequence[str]) -> str:
    """List the first of many names.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def cannot_load(name_or_path: str, error: BaseException) -> InputError:
    """Build the error for a model that cannot be loaded."""
    reason = why_not_found(name_or_path, error).rstrip(".")
    return InputError(
        f"cannot load model {name_or_path!r}: {reason}; a local folder works without a hub, e.g. "
        f"{QUICKSTART_MODEL}, which `sologrpo model` downloads"
    )


def keep_nf4_trainable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking NF4 weights for CPU inference.

    On CPUs with AVX512-BF16, the first forward in eval mode (bitsandbytes 0.50,
    `Linear4bit.forward`) repacks the weights in place for a kernel that has no backward, and
    nothing unpacks them: gradients and a later merge are wrong. A rollout or a validation before
    the first training step is enough. This turns that kernel off; other devices are not affected.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def keep_one_input_hook(model: PreTrainedModel) -> None:
    """Keep the hooks on the embedding from accumulating during a run.

    TRL 1.16 turns gradient checkpointing off and on again around each sampling and each scoring
    (models/utils.py:154 and 397-414), and `enable_input_require_grads` (transformers 5.23,
    modeling_utils.py:2137) registers a new hook each time without removing the one before. After a
    thousand steps, the tiny model takes twice as long per token.
    """
    enable = model.enable_input_require_grads

    def enable_once() -> None:
        model.disable_input_require_grads()
        enable()

    model.enable_input_require_grads = enable_once


def keep_trainable_in_fp32(model: torch.nn.Module) -> None:
    """Cast the trainable parameters to fp32.

    TRL 1.16 (grpo_trainer.py:537-541) casts the adapter of a quantised model to bf16, and the
    optimizer then steps on bf16 weights: an update below 1/256 of a weight is rounded away, so at
    a learning rate of 1e-6 about 1 % of the elements move. fp32 costs 4 bytes per parameter, about
    80 MB for rank 8 on an 8B model.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def skip_undone_casts(model: torch.nn.Module) -> None:
    """Hand a LoRA layer its input as it is, where autocast undoes PEFT's cast of it.

    PEFT (0.21.2, tuners/lora/layer.py:1100) casts the input to the adapter's fp32, and autocast
    casts it back for the product. Both are exact, but each layer then keeps its own copy for the
    backward pass. Without the cast, layers with the same input share it.

    Dropout draws other numbers in half precision, and variants such as DoRA compute more in the
    dtype of the input, so adapters with either are left alone.
    """
    for module in model.modules():
        if not isinstance(module, LoraLayer) or module.lora_variant:
            continue
        if all(isinstance(dropout, torch.nn.Identity) for dropout in module.lora_dropout.values()):
            module._cast_input_dtype = _cast_unless_undone


def _cast_unless_undone(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device):
        return x
    return x.to(dtype)


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Collect the token ids that end a completion, from the tokenizer and the model's config."""
    ids = {*listed_end_ids(model.generation_config), tokenizer.eos_token_id}
    return {int(token) for token in ids if token is not None}


def listed_end_ids(config: GenerationConfig) -> list[int]:
    """Return the end tokens of a generation config, which may have none, one or a list."""
    listed: int | list[int] | None = config.eos_token_id
    return listed if isinstance(listed, list) else [] if listed is None else [listed]
