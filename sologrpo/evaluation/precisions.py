"""The forms in which a base model and an adapter are put together: each is another model.

`merged`              unquantised base, adapter merged into it
`merged_dequantised`  NF4 base dequantised, adapter merged into it
`adapter`             unquantised base, adapter computed beside it
`nf4_adapter`         NF4 base, adapter computed beside it: what a 4-bit run trains
`merged_requantised`  what a run is merged to by default, then quantised to NF4 again

A baseline is the base model alone in the same form, so that the difference is the training's.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.config.arguments import (
    BESIDE,
    BESIDE_NF4,
    MERGED,
    MERGED_DEQUANTISED,
    MERGED_REQUANTISED,
)
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.model.loading import load_base_model
from sologrpo.model.memory import release_unused
from sologrpo.model.merging import dequantised, load_adapter, merge_adapter, save_merged

QUANTISED = (MERGED_DEQUANTISED, BESIDE_NF4, MERGED_REQUANTISED)  # begin with the NF4 base


def load_untrained(settings: EvaluationSettings) -> PreTrainedModel:
    """Load the base model alone, in the form of `settings.precision`.

    Raises:
        InputError: if there is no such model, or it does not fit into memory.
    """
    model = _load(settings, in_4bit=settings.precision in QUANTISED)
    return dequantised(model) if settings.precision == MERGED_DEQUANTISED else model


def add_adapter(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings
) -> PreTrainedModel | PeftModel:
    """Put the adapter onto what `load_untrained` gave, which is used up.

    Raises:
        InputError: if the adapter does not fit the model.
    """
    assert settings.adapter is not None
    if settings.precision in (MERGED, MERGED_DEQUANTISED):
        return merge_adapter(model, settings.adapter)
    if settings.precision in (BESIDE, BESIDE_NF4):
        return load_adapter(model, settings.adapter)
    return _merged_requantised(model, tokenizer, settings)


def _merged_requantised(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings
) -> PreTrainedModel:
    """Merge, write to disk, and load in 4 bits, as one does who deploys the model."""
    assert settings.adapter is not None
    if settings.trained_in_4bit:
        model = dequantised(model)
    else:
        del model
        release_unused()
        model = _load(settings, in_4bit=False)
    model = merge_adapter(model, settings.adapter)
    with tempfile.TemporaryDirectory(prefix="sologrpo-merged-") as folder:
        save_merged(model, tokenizer, Path(folder))
        del model
        release_unused()
        return _load(settings, in_4bit=True, folder=folder)


def _load(
    settings: EvaluationSettings, in_4bit: bool, folder: str | None = None
) -> PreTrainedModel:
    changes: dict[str, Any] = {"load_in_4bit": in_4bit, "load_in_8bit": False}
    if folder is not None:
        changes |= {"model_name_or_path": folder, "model_revision": "main"}
    if in_4bit and not settings.trained_in_4bit:
        changes["use_bnb_nested_quant"] = True  # the default of training
    return load_base_model(replace(settings.model, **changes), settings.trust_remote_code)


def describe_precision(settings: EvaluationSettings, dtype: torch.dtype, adapter: bool) -> str:
    """Name the weights that were measured, in words."""
    number_format = str(dtype).removeprefix("torch.")
    merged = ", adapter merged" if adapter else ""
    beside = ", adapter beside it" if adapter else ""
    base = "NF4 dequantised" if settings.trained_in_4bit else "unquantised"
    again = f" ({base}{merged}, then NF4 again)" if adapter else ""
    return {
        MERGED: f"unquantised, {number_format}{merged}",
        MERGED_DEQUANTISED: f"NF4 dequantised, {number_format}{merged}",
        BESIDE: f"unquantised, {number_format}{beside}",
        BESIDE_NF4: f"NF4, computed in {number_format}{beside}",
        MERGED_REQUANTISED: f"NF4, computed in {number_format}{again}",
    }[settings.precision]
