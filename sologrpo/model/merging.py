"""LoRA adapters: checking and loading one, merging it into the weights, saving the result.

There are two merges; both sum in fp32 and round once. `merge_adapter` is permanent: PEFT merges in
place, whatever kind of LoRA it is. `merged` is temporary: it leaves the original weights untouched,
packed 4-bit ones included, which PEFT would quantise again.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import bitsandbytes as bnb
import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from pydantic import Field
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sologrpo.base.device import one_device
from sologrpo.base.errors import InputError, refusing
from sologrpo.base.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, REWARD_CURVE
from sologrpo.base.manifest import MANIFEST, damage
from sologrpo.base.schema import Number, Schema, looked_in, read_json
from sologrpo.model.loading import end_token_ids, few, pick_dtype


class AdapterConfig(Schema):
    """The config of an adapter, as PEFT writes it; its `base_model_name_or_path` is not loaded.

    Only LoRA, and nothing that makes PEFT 0.21 import a module (tuners/lora/tp_layer.py:333) or
    load further adapters (tuners/lora/arrow.py).
    """

    peft_type: Literal["LORA"]
    base_model_name_or_path: str
    r: Annotated[int, Field(ge=1, le=2**16)]
    lora_alpha: Number
    megatron_config: None = None
    arrow_config: None = None


def check_adapter(adapter: Path, base_name: str | None) -> AdapterConfig:
    """Read an adapter's config; refuse one that is damaged, pickled or of another base model."""
    if not (adapter / ADAPTER_CONFIG).exists():
        where = f"{adapter}{looked_in(adapter)}"
        raise InputError(f"{where} holds no adapter: it has no {ADAPTER_CONFIG}")
    config = read_json(adapter / ADAPTER_CONFIG, AdapterConfig)
    trained_on = config.base_model_name_or_path
    if base_name is not None and Path(trained_on).name != Path(base_name).name:
        raise InputError(
            f"{adapter} was made for base model {trained_on!r}, not {base_name!r}: "
            "leave --model out, or give the adapter of this model"
        )
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise InputError(
            f"{adapter} has no adapter_model.safetensors; pickled weights (adapter_model.bin) are "
            "not read, because they can run code: save the adapter again with PEFT"
        )
    # Adapters from elsewhere have no manifest. A card may be edited, or written again.
    card = ["README.md", REWARD_CURVE]
    changed = damage(adapter, ignored=card) if (adapter / MANIFEST).exists() else None
    if changed is not None:
        raise InputError(f"{adapter} is damaged, {changed}: copy it again from where it was saved")
    _read_weights(adapter)
    return config


def _read_weights(adapter: Path) -> dict[str, torch.Tensor]:
    with refusing(f"{adapter / ADAPTER_WEIGHTS} is damaged"):
        weights: dict[str, torch.Tensor] = load_file(adapter / ADAPTER_WEIGHTS)
    bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if bad:
        raise InputError(
            f"{adapter} holds weights that are not finite: {few(bad)}: train it again with a lower "
            "learning_rate"
        )
    return weights


def dequantize(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a 4-bit model to an unquantised one with the same, rounded, weights.

    An adapter trained on NF4 weights fits those rounded weights: merged into them it gives the
    model that was trained, merged into the original ones a different one (docs/export.md has the
    figures).
    """
    if getattr(model, "is_loaded_in_4bit", False):
        return model.dequantize()
    return model


def load_adapter(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """Load a LoRA adapter, all of whose tensors must fit, onto `base`, which is changed."""
    weights = _read_weights(adapter)
    with refusing(f"{adapter} does not fit the base model"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
        model = PeftModel.from_pretrained(base, str(adapter))
        # Again, for what it returns: `from_pretrained` ignores tensors without a place.
        result = set_peft_model_state_dict(model, weights)
    # The base model's own tensors count as missing, too.
    missing = [key for key in result.missing_keys if "default" in key.split(".")]
    if bad := [*missing, *result.unexpected_keys]:
        raise InputError(
            f"{adapter} does not fit the base model: {'missing' if missing else 'unexpected'} "
            f"{few(bad)}: give the model that it was trained on, or copy the adapter again"
        )
    return model


def merge_adapter(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Merge a LoRA adapter into an unquantised model, in place; each layer keeps its dtype."""
    model = load_adapter(base, adapter)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                _merge_layer(layer, adapter)
    merged: PreTrainedModel = model.unload()
    return merged


def _merge_layer(layer: BaseTunerLayer, adapter: Path) -> None:
    base = layer.get_base_layer()
    dtype = base.weight.dtype
    base.weight = torch.nn.Parameter(base.weight, False)  # not what is tied to it
    base.to(torch.float32)
    with refusing(str(adapter)):
        layer.merge(safe_merge=True)
    base.to(dtype)


@contextmanager
def merged(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Replace adapted and 4-bit layers by plain linear ones, adapter merged, inside the context.

    This saves unpacking 4-bit weights, and the two small products of every LoRA layer, at every
    token. The merged layers take `merged_bytes` of extra memory. Without a dtype they get that of
    the embedding, which layers compute in. The model must have no `merge_obstacle`.
    """
    dtype = dtype or working_dtype(model)
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    try:
        for parent, name, layer in _layers_to_merge(model):
            linear = _merged_linear(layer, dtype)
            replaced.append((parent, name, layer))
            setattr(parent, name, linear)
        yield
    finally:
        for parent, name, layer in replaced:
            setattr(parent, name, layer)


def merge_obstacle(model: PreTrainedModel | PeftModel) -> str | None:
    """Name what `merged` does not support in this model; None if it supports all of it."""
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if type(base) not in (torch.nn.Linear, bnb.nn.Linear4bit):
            return f"LoRA on a layer of type {type(base).__name__}"
        if any(module.use_dora.values()):
            return "DoRA scales the weights as well"
        if module.lora_variant:
            return "a variant of LoRA"
        if any(module.lora_bias.values()):
            return "LoRA with a separate bias"
    return None


def is_quantised(model: PreTrainedModel | PeftModel) -> bool:
    """Check whether layers hold 4-bit weights."""
    return any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())


def is_merge_exact(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> bool:
    """Check that `merged` gives the policy that is trained, up to the order of fp32 sums.

    Half precision rounds the sum, which the unmerged adapter's forward pass does not. Dropout acts
    on the adapter in training mode, and cannot in merged weights.
    """
    dropout = any(
        getattr(dropout, "p", 0.0)
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for dropout in module.lora_dropout.values()
    )
    return (dtype or working_dtype(model)) == torch.float32 and not dropout


def merged_bytes(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> int:
    """Count the bytes that `merged` needs in addition to the model."""
    size = (dtype or working_dtype(model)).itemsize
    layers = (_base_of(layer) for _, _, layer in _layers_to_merge(model))
    return sum(size * layer.in_features * layer.out_features for layer in layers)


def working_dtype(model: PreTrainedModel | PeftModel) -> torch.dtype:
    """Return the dtype of the model's hidden states."""
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def _layers_to_merge(
    module: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Yield (parent, name, layer) for each layer with an adapter or 4-bit weights."""
    for name, child in list(module.named_children()):
        if isinstance(child, LoraLayer | bnb.nn.Linear4bit):
            yield module, name, child
        else:
            yield from _layers_to_merge(child)


def _base_of(layer: torch.nn.Module) -> Any:
    return layer.get_base_layer() if isinstance(layer, LoraLayer) else layer


@torch.no_grad()
def _merged_linear(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Linear:
    base = _base_of(layer)
    is_4bit = isinstance(base, bnb.nn.Linear4bit)
    weight = dequantize_bnb_weight(base.weight) if is_4bit else base.weight
    if isinstance(layer, LoraLayer) and not layer.disable_adapters:
        active = (name for name in layer.active_adapters if name in layer.lora_A)
        weight = weight.float() + sum(layer.get_delta_weight(name).float() for name in active)
    linear = torch.nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    if base.bias is not None:
        linear.bias = torch.nn.Parameter(base.bias.to(dtype), requires_grad=False)
    return linear


def save_merged(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Save weights (safetensors), tokenizer, chat template and generation config.

    The generation config keeps the base model's sampling defaults, except for a repetition penalty,
    which training and evaluation do not use. It lists every token that ended a completion there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = model.generation_config
    config.repetition_penalty = 1.0
    ends = sorted(end_token_ids(model, tokenizer))
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    # Trained on its own, one of two tied weights has become another.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embedding.weight
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))


def save_4bit(merged: Path, directory: Path, trust_remote_code: bool = False) -> None:
    """Quantise a saved model to NF4 with double quantisation, and save it with its tokenizer."""
    dtype = _dtype_on_disk(merged)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    with refusing("cannot quantise to 4 bits", (ImportError,)):
        model = AutoModelForCausalLM.from_pretrained(
            str(merged),
            quantization_config=config,
            dtype=dtype,
            device_map={"": one_device()},
            trust_remote_code=trust_remote_code,
        )
    model.save_pretrained(str(directory))
    AutoTokenizer.from_pretrained(str(merged), trust_remote_code=trust_remote_code).save_pretrained(
        str(directory)
    )


def _dtype_on_disk(folder: Path) -> torch.dtype:
    config = read_json(folder / "config.json", dict[str, Any])
    return pick_dtype(config.get("dtype"))
