"""Decide whether the weights of a model fit into memory, before they are loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from trl import ModelConfig

from sologrpo.base.console import gibibytes
from sologrpo.base.device import one_device
from sologrpo.base.errors import LIBRARY_ERRORS, InputError
from sologrpo.model.loading import pick_dtype
from sologrpo.model.memory import free_bytes, is_out_of_memory

# Of the free memory, for weights. The rest is for the cache, and for merging a layer in fp32.
WEIGHTS_SHARE = 0.8


class DoesNotFitError(InputError):
    """Raised where memory is too small; the message is one line and tells how to fix it."""


def build_without_weights(
    model_args: ModelConfig, config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """Build a model on the meta device."""
    with init_empty_weights(include_buffers=True):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=pick_dtype(model_args.dtype),
            attn_implementation=model_args.attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return model


def unquantised_bytes(model_args: ModelConfig, trust_remote_code: bool = False) -> int:
    """Compute the size of a model's weights from its config, as if they were not quantised.

    It is 0 for a model that was saved quantised, and for one that cannot be built, because loading
    it explains why.
    """
    try:
        config = AutoConfig.from_pretrained(
            str(model_args.model_name_or_path),
            revision=model_args.model_revision,
            trust_remote_code=trust_remote_code,
        )
        if getattr(config, "quantization_config", None) is not None:
            return 0
        model = build_without_weights(model_args, config, trust_remote_code)
    except LIBRARY_ERRORS:
        return 0
    return sum(parameter.nbytes for parameter in model.parameters())


def shortage(needed: int) -> str | None:
    """Describe why weights of this many bytes do not fit on the device; None if they do."""
    free = free_bytes(torch.device(one_device()))
    if needed <= WEIGHTS_SHARE * free:
        return None
    return f"{gibibytes(needed)} of weights and a cache do not fit into {gibibytes(free)}"


@contextmanager
def explaining_out_of_memory(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error, or a refusal because of one, into a `DoesNotFitError`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error.__cause__ or error):
            raise
        raise DoesNotFitError(f"out of memory: {advice}") from error
