"""Load the base model, alone or with an adapter, in one of `PRECISIONS`.

A baseline is the base model alone in the same precision, so that the difference to the trained
model comes from training alone.
"""

import logging
from dataclasses import replace

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from sologrpo.config.arguments import (
    MERGED,
    MERGED_DEQUANTISED,
    UNMERGED,
    UNMERGED_NF4,
)
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.model.fitting import (
    DoesNotFitError,
    explaining_out_of_memory,
    shortage,
    unquantised_bytes,
)
from sologrpo.model.loading import dtype_name, load_base_model
from sologrpo.model.merging import dequantize, load_adapter, merge_adapter

logger = logging.getLogger(__name__)

STARTS_AS_NF4 = (MERGED_DEQUANTISED, UNMERGED_NF4)


def fit_precision(settings: EvaluationSettings) -> EvaluationSettings:
    """Choose `nf4_adapter` where the weights of the default precision of a 4-bit run do not fit.

    That is the model that was trained. A line tells of it, and so do the labels of the results.

    Args:
        settings: of the baseline and of the trained model, which get the same precision.

    Raises:
        DoesNotFitError: if another precision does not fit: `nf4_adapter` would be another model
            than the one that was asked for.
    """
    if settings.precision == UNMERGED_NF4:
        return settings
    lack = shortage(unquantised_bytes(settings.model, settings.trust_remote_code))
    if lack is None:
        return settings
    if settings.is_precision_given or not settings.trained_in_4bit:
        raise DoesNotFitError(f"precision {settings.precision}: {lack}: {_smaller(settings)}")
    logger.warning(
        "precision %s, as trained, instead of %s: %s", UNMERGED_NF4, settings.precision, lack
    )
    return settings.in_precision(UNMERGED_NF4)


def _smaller(settings: EvaluationSettings) -> str:
    """Name what takes less memory than this evaluation."""
    if settings.precision == UNMERGED_NF4:
        return "use a smaller model, or a machine with more memory"
    return f"use --precision {UNMERGED_NF4}"


def load_untrained(settings: EvaluationSettings) -> PreTrainedModel:
    """Load the base model without the adapter, in `settings.precision`.

    Raises:
        InputError: if the model does not exist, or does not fit into memory.
    """
    with explaining_out_of_memory(_smaller(settings)):
        in_4bit = settings.precision in STARTS_AS_NF4
        arguments = replace(settings.model, load_in_4bit=in_4bit, load_in_8bit=False)
        if in_4bit and not settings.trained_in_4bit:
            arguments.use_bnb_nested_quant = True  # the default of training
        model = load_base_model(arguments, settings.trust_remote_code)
        return dequantize(model) if settings.precision == MERGED_DEQUANTISED else model


def add_adapter(
    model: PreTrainedModel, settings: EvaluationSettings
) -> PreTrainedModel | PeftModel:
    """Add the adapter to the base model.

    Args:
        model: from `load_untrained`; do not use it afterwards.
        settings: name the adapter and the precision.

    Raises:
        InputError: if the adapter does not fit the model, or memory runs out.
    """
    assert settings.adapter is not None
    with explaining_out_of_memory(_smaller(settings)):
        if settings.precision in (MERGED, MERGED_DEQUANTISED):
            return merge_adapter(model, settings.adapter)
        return load_adapter(model, settings.adapter)


def describe_precision(settings: EvaluationSettings, dtype: torch.dtype) -> str:
    """Describe the evaluated weights in words, for `precision` in `results.json`.

    Args:
        settings: name the precision, and the adapter, if there is one.
        dtype: of the weights, or of the computation where they are quantised.

    Returns:
        For example `NF4 dequantised, bfloat16, adapter merged`.
    """
    in_dtype = dtype_name(dtype)
    weights, added = {
        MERGED: (f"unquantised, {in_dtype}", ", adapter merged"),
        MERGED_DEQUANTISED: (f"NF4 dequantised, {in_dtype}", ", adapter merged"),
        UNMERGED: (f"unquantised, {in_dtype}", ", adapter not merged"),
        UNMERGED_NF4: (f"NF4, computed in {in_dtype}", ", adapter not merged"),
    }[settings.precision]
    return weights + (added if settings.adapter is not None else "")
