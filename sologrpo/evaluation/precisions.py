"""Load the base model, alone or with an adapter, in one of `PRECISIONS`.

A baseline is the base model alone in the same precision, so that the difference to the trained
model comes from training alone.
"""

import logging
from dataclasses import replace

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from sologrpo.config.arguments import MERGED, UNMERGED
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


def fit_precision(settings: EvaluationSettings) -> EvaluationSettings:
    """Choose the model as trained where the merged weights of a 4-bit run do not fit.

    Raises:
        DoesNotFitError: if nothing else fits, or the precision was asked for.
    """
    if settings.trained_in_4bit and settings.precision == UNMERGED:
        return settings
    lack = shortage(unquantised_bytes(settings.model, settings.trust_remote_code))
    if lack is None:
        return settings
    if settings.is_precision_given or not settings.trained_in_4bit:
        raise DoesNotFitError(f"precision {settings.precision}: {lack}: {_smaller(settings)}")
    logger.warning(
        "precision %s, as trained, instead of %s: %s", UNMERGED, settings.precision, lack
    )
    label = settings.given_label and f"{settings.given_label}-{UNMERGED}"
    return replace(settings, precision=UNMERGED, given_label=label)


def _smaller(settings: EvaluationSettings) -> str:
    """Name what takes less memory than this evaluation."""
    if settings.trained_in_4bit and settings.precision == MERGED:
        return f"use --precision {UNMERGED}"
    return "use a smaller model, or a machine with more memory"


def load_untrained(settings: EvaluationSettings) -> PreTrainedModel:
    """Load the base model without the adapter, in `settings.precision`."""
    with explaining_out_of_memory(_smaller(settings)):
        model = load_base_model(settings.model, settings.trust_remote_code)
        merges_nf4 = settings.trained_in_4bit and settings.precision == MERGED
        return dequantize(model) if merges_nf4 else model


def add_adapter(
    model: PreTrainedModel, settings: EvaluationSettings
) -> PreTrainedModel | PeftModel:
    """Add the adapter to the base model, which must not be used afterwards."""
    assert settings.adapter is not None
    with explaining_out_of_memory(_smaller(settings)):
        if settings.precision == MERGED:
            return merge_adapter(model, settings.adapter)
        return load_adapter(model, settings.adapter)


def describe_precision(
    settings: EvaluationSettings, dtype: torch.dtype, has_adapter: bool = False
) -> str:
    """Describe the weights in words, such as `NF4 dequantised, bfloat16, adapter merged`."""
    merged = settings.precision == MERGED
    nf4 = "NF4 dequantised," if merged else "NF4, computed in"
    weights = f"{nf4 if settings.trained_in_4bit else 'unquantised,'} {dtype_name(dtype)}"
    if not has_adapter:
        return weights
    return f"{weights}, adapter {'merged' if merged else 'not merged'}"
