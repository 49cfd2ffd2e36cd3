"""No fast way is used for a model that it computes wrongly; `make soak` tries all architectures."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from architectures import BOUND, build, try_everything
from fixed_rollouts import config, problems
from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.training.drop_in import unpacked_reason
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import build_tokenizer

# What is ours for a model: (packed rows, shared prompts, the sampling loop).
EXPECTED = {
    "llama": (True, True, True),
    "qwen2": (True, True, True),
    "qwen3_moe": (True, True, True),
    "deepseek_v3": (True, True, True),
    "phi3": (True, False, False),  # a window
    "gemma3_text": (True, False, False),
    "jetmoe": (True, False, True),  # its layers cannot take a tree's gradient
    "diffllama": (True, False, False),  # attends twice in a layer
    "lfm2": (False, False, False),  # convolutions run across rows
    "lfm2_moe": (False, False, False),
    "afmoe": (False, False, False),  # drops the positions of packed rows
    "minimax": (False, False, False),
    "mamba": (False, False, False),
    "gpt2": (False, False, True),  # learned positions
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_ours_agrees_with_the_model(name: str, tmp_path: Path) -> None:
    found = try_everything(name, str(tmp_path))
    packs, shares, loops = EXPECTED[name]
    assert (found.packed_gap is not None) == packs
    assert found.shares_prompts == shares
    assert found.greedy is (True if loops else None)
    assert found.packed_gap is None or found.packed_gap < BOUND


def reason(model: PreTrainedModel, output_dir: Path) -> str | None:
    args = SoloGRPOConfig(str(output_dir), use_cpu=True, bf16=False, report_to="none")
    args.router_aux_loss_coef = 0.0
    return unpacked_reason(args, {"model": model})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_half_precision_is_not_taken_for_a_mixture(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    for name in ("llama", "qwen3_moe", "gemma3_text"):
        assert reason(build(name).to(dtype), tmp_path) is None
    for name in ("afmoe", "lfm2"):
        model = build(name)
        for parameter in model.parameters():  # a trained model is surer of its tokens
            parameter.data *= 3.0 if parameter.dim() >= 2 else 1.0
        assert "nats off the model's own" in str(reason(model.to(dtype), tmp_path))


def test_a_trial_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = build("llama").train()
    state = torch.get_rng_state()
    before = [parameter.clone() for parameter in model.parameters()]
    assert reason(model, tmp_path) is None
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "is_packed"), [("llama", True), ("lfm2", False)])
def test_a_model_that_trl_loads_is_tried_too(name: str, is_packed: bool, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    model = build(name, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    args = config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer = SoloGRPOTrainer(str(tmp_path), lambda **_: [0.0], args, train_dataset=problems())
    assert trainer.is_packed == ("the training pass" not in trainer.as_in_trl) == is_packed
    sizes = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    assert sizes == ((8, 1) if is_packed else (4, 2))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
