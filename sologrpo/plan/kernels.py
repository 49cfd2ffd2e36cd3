"""Name what computes the training passes of a run, and what samples its completions."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
from datasets import Dataset
from peft import PeftModel
from trl import ModelConfig
from trl.kernels.chunked_logprob import _use_triton

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.device import one_device
from sologrpo.model.attention import SDPA
from sologrpo.plan.preflight import sampling_config
from sologrpo.sampling.decoding import can_generate_fast
from sologrpo.training.drop_in import sampling_obstacle, unpacked_reason
from sologrpo.training.packed_loss import sharing_obstacle
from sologrpo.training.rollout import MORE_THAN_PLAIN, obstacle_of_model
from sologrpo.training.trl_patches import vocabulary_tile


@dataclass(frozen=True)
class Kernels:
    """Describe what computes a run.

    Attributes:
        training: kernels of training passes, with the reasons for them.
        sampling: kernels of sampling.
        packs: training passes are packed; otherwise they are TRL's.
        shares_prompts: training passes share prompts.
    """

    training: str
    sampling: str
    packs: bool
    shares_prompts: bool


def describe_kernels(
    run: RunArguments,
    args: SoloGRPOConfig,
    model: ModelConfig,
    train_dataset: Dataset,
    policy: PeftModel,
) -> Kernels:
    """Describe the kernels of training and of sampling.

    Args:
        run: the trainer.
        args: its settings.
        model: attention and quantisation.
        train_dataset: to train on.
        policy: without weights, of `try_settings`.
    """
    device = torch.device(one_device())
    attention = model.attn_implementation or (SDPA if policy._supports_sdpa else "eager")
    in_trl = unpacked_reason(args, {"model": policy, "train_dataset": train_dataset})
    if run.trainer == "stock":
        in_trl = "trainer: stock"
    obstacle = sharing_obstacle(args, policy, attention)
    if in_trl is not None:
        passes = f"as in TRL ({in_trl}): {attention} attention"
    elif obstacle is not None:
        passes = f"{attention} attention, prompts not shared ({obstacle})"
    elif device.type == "cpu":
        passes = "PyTorch's attention along the tree of prompts, if its trial agrees"
    else:
        passes = "FlexAttention along the tree of prompts, if its trial agrees"
    return Kernels(
        "; ".join([passes, *_other_kernels(run, args, model, device)]),
        _sampling(run, args, policy, attention, device),
        packs=in_trl is None,
        shares_prompts=in_trl is None and obstacle is None,
    )


def _other_kernels(
    run: RunArguments, args: SoloGRPOConfig, model: ModelConfig, device: torch.device
) -> Iterator[str]:
    tile = vocabulary_tile(on_gpu=device.type != "cpu" or run.trainer == "stock")
    language = "Triton" if _use_triton(device) else "PyTorch"
    yield f"TRL's log-probs in {language}, in tiles of {tile:,} tokens of the vocabulary"
    if model.load_in_4bit:
        yield f"NF4 products of bitsandbytes {metadata.version('bitsandbytes')}"
    if args.use_liger_kernel:
        yield f"layers of Liger {metadata.version('liger_kernel')}"
    elif find_spec("liger_kernel") is not None:
        yield "Liger is installed, and not used"


def _sampling(
    run: RunArguments,
    args: SoloGRPOConfig,
    policy: PeftModel,
    attention: str,
    device: torch.device,
) -> str:
    """Name what samples, as `Rollout` chooses it."""
    if args.use_vllm:
        return "vLLM's"
    obstacle = sampling_obstacle(args, {}) or obstacle_of_model(policy)
    if obstacle is None and not can_generate_fast(policy, sampling_config(args), {}):
        obstacle = MORE_THAN_PLAIN
    if run.trainer == "stock":
        obstacle = "trainer: stock"
    if obstacle is not None:
        return f"as in TRL ({obstacle}): {attention} attention"
    graphs = ", in CUDA graphs" if device.type == "cuda" else ""
    return f"sdpa for prompts, then products with their shared cache{graphs}"
