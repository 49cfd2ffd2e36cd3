"""Merge a LoRA adapter into the weights, and save the result as a model of its own."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sologrpo.device import one_device
from sologrpo.errors import BROKEN_FILE, InputError, first_line
from sologrpo.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from sologrpo.model.loading import end_token_ids, pick_dtype


def check_adapter(adapter: Path, base_name: str | None) -> dict[str, Any]:
    """Read the adapter's config and compare its base model's name with the one at hand.

    Raises:
        InputError: if there is no adapter, it is pickled, or it was made for another base model.
    """
    path = adapter / ADAPTER_CONFIG
    if not path.is_file():
        raise InputError(f"{adapter} holds no adapter: it has no adapter_config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        trained_on = str(config["base_model_name_or_path"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged: it names no base model") from error
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
    return config


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a 4-bit model into an ordinary one with the same, rounded, weights.

    An adapter trained on NF4 weights belongs onto those rounded weights: merged into them it
    is the model that was trained, merged into the original ones it is another (docs/export.md
    has the figures). A model that is not quantised is returned as it is.
    """
    if getattr(model, "is_loaded_in_4bit", False):
        return model.dequantize()
    return model


def load_adapter(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """Put a LoRA adapter beside the weights of `base`.

    Raises:
        InputError: if the adapter is damaged, or its shapes do not fit the base model.
    """
    try:
        return PeftModel.from_pretrained(base, str(adapter))
    except (RuntimeError, *BROKEN_FILE) as error:
        raise InputError(f"{adapter} does not fit the base model: {first_line(error)}") from error


def merge_adapter(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Merge a LoRA adapter into the weights of `base`, in place.

    Each layer is summed in fp32 and rounded once, to the dtype that it has.

    Raises:
        InputError: if the adapter's shapes do not fit the base model, or its weights are not
            finite.
    """
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
    base.to(torch.float32)
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        raise InputError(f"{adapter} holds weights that are not finite") from error
    base.to(dtype)


def save_merged(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Save weights (safetensors), tokenizer, chat template and generation config.

    The generation config keeps the base model's sampling defaults, but no penalty on repetition,
    which training and evaluation do not have, and every token that ended a completion there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = model.generation_config
    config.repetition_penalty = 1.0
    ends = sorted(end_token_ids(model, tokenizer))
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))


def save_4bit(merged: Path, directory: Path, trust_remote_code: bool = False) -> None:
    """Quantise a saved model to NF4 with double quantisation, and save it beside its tokenizer.

    Raises:
        InputError: if bitsandbytes does not work on this machine.
    """
    dtype = _dtype_on_disk(merged)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(merged),
            quantization_config=config,
            dtype=dtype,
            device_map={"": one_device()},
            trust_remote_code=trust_remote_code,
        )
    except ImportError as error:
        raise InputError(f"cannot quantise to 4 bits: {first_line(error)}") from error
    model.save_pretrained(str(directory))
    AutoTokenizer.from_pretrained(str(merged), trust_remote_code=trust_remote_code).save_pretrained(
        str(directory)
    )


def _dtype_on_disk(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return pick_dtype(config.get("dtype"))
