"""Export: merge a LoRA adapter into the weights and save a model that needs no PEFT."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.errors import InputError


def check_adapter(adapter: Path, base_name: str | None) -> dict[str, Any]:
    """Read the adapter's config and compare its base model's name with the one at hand.

    Raises:
        InputError: if there is no adapter, or it was made for another base model.
    """
    path = adapter / "adapter_config.json"
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
    return config


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a 4-bit model into an ordinary one with the same, rounded, weights.

    An adapter trained on NF4 weights belongs onto those rounded weights: merged into them it
    is the model that was trained (KL 0.002), merged into the original ones it is another
    (KL 0.25, see docs/LOG.md). A model that is not quantised is returned as it is.
    """
    if getattr(model, "is_loaded_in_4bit", False):
        return model.dequantize()
    return model


def merge_adapter(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Merge a LoRA adapter into the weights of `base`, in place.

    Raises:
        InputError: if the adapter's shapes do not fit the base model.
    """
    try:
        model = PeftModel.from_pretrained(base, str(adapter))
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"{adapter} does not fit the base model: {str(error).strip().splitlines()[0]}"
        ) from error
    with torch.no_grad():
        merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    return merged


def save_merged(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Save weights (safetensors), tokenizer, chat template and generation config."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
