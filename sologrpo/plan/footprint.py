"""Compute the size of a policy from the model's config, without loading weights."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from trl import ModelConfig

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.model.loading import pick_dtype
from sologrpo.model.memory import TokenBytes, activation_bytes
from sologrpo.model.merging import is_merge_exact, merge_obstacle, merged_bytes
from sologrpo.sampling.sampler import bytes_of_batch

# NF4 (bitsandbytes): half a byte per weight, and an fp32 scale for every 64 weights. With double
# quantisation the scale takes one byte, and an fp32 one is added for every 256 of those.
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
FP32 = 4
ADAM_MOMENTS = 2
TOKENIZER_BYTES = 12 * 2**20  # in a checkpoint; Llama 3's, others are smaller


@dataclass(frozen=True)
class Footprint:
    """Sizes of the policy.

    Attributes:
        adapter_bytes: adapter, its gradient and Adam's two moments, all in fp32.
        checkpoint_bytes: one `checkpoint-N/`.
        sampled_token_bytes: keys and values per token, during sampling.
        trained_token_bytes: activations per token that all layers keep for the backward pass.
        number_bytes: bytes per number in the compute dtype.
        context: tokens that the model was trained for; None if its config has no entry for it.
    """

    total: int
    trainable: int
    weights_bytes: int
    adapter_bytes: int
    checkpoint_bytes: int
    merged_bytes: int
    sampled_token_bytes: int
    trained_token_bytes: int
    layers: int
    hidden_size: int
    number_bytes: int
    vocabulary: int
    context: int | None

    def token_bytes(self, checkpointing: bool) -> TokenBytes:
        """Return what a token of a training pass takes, with gradient checkpointing or without."""
        return TokenBytes.of(
            self.trained_token_bytes,
            self.layers,
            self.hidden_size,
            self.number_bytes,
            checkpointing,
        )


def footprint(policy: PeftModel, model_args: ModelConfig) -> Footprint:
    """Compute the sizes of a model that is built without its weights."""
    dtype = pick_dtype(model_args.dtype)
    config = policy.config.get_text_config()
    trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    total = sum(p.numel() for p in policy.parameters()) - trainable
    quantised = _quantised(policy) if model_args.load_in_4bit else 0
    nested = bool(model_args.use_bnb_nested_quant)
    weights = quantised * _nf4_bytes(nested) + (total - quantised) * dtype.itemsize
    return Footprint(
        total=total,
        trainable=trainable,
        weights_bytes=math.ceil(weights),
        adapter_bytes=trainable * FP32 * (2 + ADAM_MOMENTS),
        checkpoint_bytes=trainable * FP32 * (1 + ADAM_MOMENTS) + TOKENIZER_BYTES,
        merged_bytes=_copied_bytes(policy, model_args),
        sampled_token_bytes=bytes_of_batch(policy, tokens=1, rows=0),
        trained_token_bytes=activation_bytes(policy),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        number_bytes=dtype.itemsize,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
    )


def _copied_bytes(policy: PeftModel, model_args: ModelConfig) -> int:
    """Count the bytes that `sampling_engine: auto` merges; the policy is not quantised yet."""
    rounds_nf4 = model_args.load_in_4bit and not is_merge_exact(policy)
    return 0 if rounds_nf4 or merge_obstacle(policy) else merged_bytes(policy)


def _quantised(policy: PeftModel) -> int:
    """Count the weights that bitsandbytes quantises: linear layers without the LM head."""
    named = ((name.removesuffix(".base_layer"), m) for name, m in policy.named_modules())
    return sum(
        module.weight.numel()
        for name, module in named
        if isinstance(module, torch.nn.Linear)
        and ".lora_" not in name
        and name.rpartition(".")[2] != "lm_head"
    )


def _nf4_bytes(nested: bool) -> float:
    scale = 1 + FP32 / NF4_NESTED_BLOCK if nested else FP32
    return 0.5 + scale / NF4_BLOCK


def disk_bytes(args: SoloGRPOConfig, size: Footprint, steps: int) -> int:
    """Return the most bytes that a run keeps on disk: its checkpoints, and the adapter."""
    if args.save_strategy == "no":
        saved = 0
    else:
        every = args.save_steps if args.save_strategy == "steps" else steps
        saved = max(1, math.ceil(steps / every))
    # The newest is written before the oldest is removed; the best one may be kept in addition.
    limit = args.save_total_limit
    kept = saved if limit is None else min(saved, limit + 1 + args.load_best_model_at_end)
    return kept * size.checkpoint_bytes + size.trainable * FP32


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is or will be on."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents)
                    if parent.exists())  # fmt: skip
    return shutil.disk_usage(existing).free
