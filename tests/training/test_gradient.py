"""The gradient, and what is logged of it, are stock TRL's."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel
from trl import GRPOTrainer

from fixed_rollouts import (
    CONSTANT,
    MIXED,
    CapturedGradients,
    captured_gradients,
    completion_ids,
    config,
    fixed_reward,
    make_trainer,
    problems,
    relative_gap,
    stock_and_solo,
    trained_on,
)
from sologrpo.training.drop_in import unpacked_reason
from sologrpo.training.trainer import SoloGRPOTrainer

ALL_DIFFER = [0.0, 1.0, 0.5, 0.75] * 4
# One forward-backward pass holds everything, or a few rows.
WHOLE, SMALL = 8192, 120
TWO_MICRO_BATCHES = {
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": len(MIXED) // 2,
}
# Small steps: rounding differences in the weights add up from step to step.
OFF_POLICY = {
    "num_iterations": 2,
    "steps_per_generation": 2,
    "per_device_train_batch_size": len(MIXED) // 2,
    "max_steps": 4,
    "learning_rate": 0.001,
}
SEQUENCE_LEVEL = {"importance_sampling_level": "sequence"}
FAMILIES = ("tiny_llama", "tiny_qwen")
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {},
    "dr_grpo": {"scale_rewards": "none"},
    "cispo": {"epsilon_high": 2.0},
    "vespo": {},
    "sapo": {},
    "luspo": SEQUENCE_LEVEL,
}


def cases() -> Iterator[Any]:
    """Every loss, on- and off-policy, with and without KL; then one setting at a time."""
    policies: dict[str, dict[str, Any]]
    policies = {"on": {}, "on-accum": TWO_MICRO_BATCHES, "off": OFF_POLICY}
    for i, (loss, settings) in enumerate(LOSSES.items()):
        for j, (policy, steps) in enumerate(policies.items()):
            beta = 0.05 * ((i + j) % 2)
            case = {"loss_type": loss, "beta": beta, **settings, **steps}
            name = f"{loss}-{policy}{'-kl' if beta else ''}"
            yield pytest.param(FAMILIES[j % 2], case, id=name)
    clips = {
        "tight": {"epsilon": 1e-3, "epsilon_high": 2e-3},
        "two-sided": {"delta": 1.001},
    }
    for loss in ("dapo", "grpo"):
        for scale in ("batch", "none"):
            case = {"loss_type": loss, "scale_rewards": scale, "beta": 0.05, **TWO_MICRO_BATCHES}
            yield pytest.param("tiny_qwen", case, id=f"{loss}-{scale}")
        for name, clip in clips.items():
            case = {"loss_type": loss, **OFF_POLICY, **clip}
            yield pytest.param("tiny_llama", case, id=f"{loss}-clip-{name}")
    others: dict[str, dict[str, Any]] = {
        "gspo": {"loss_type": "grpo", **SEQUENCE_LEVEL, **OFF_POLICY},
        "dr_grpo-scaled": {"loss_type": "dr_grpo"},
        "bnpo-stock-path": {"loss_type": "bnpo", **TWO_MICRO_BATCHES},
        "truncated-masked": {"mask_truncated_completions": True},
        "checkpointing": {"gradient_checkpointing": True},
        "own-prompts": {"share_prompts": False},
        "temperature": {"temperature": 0.7, **OFF_POLICY},
    }
    for name, case in others.items():
        yield pytest.param("tiny_llama", case, id=name)


@pytest.mark.parametrize(("family", "settings"), cases())
def test_gradient_equals_stock(
    family: str, settings: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    stock, solo = stock_and_solo(path, tmp_path, MIXED, train_token_budget=SMALL, **settings)
    assert len(stock) == len(solo) == settings.get("max_steps", 1)
    for step, (expected, got) in enumerate(zip(stock, solo, strict=True)):
        assert min(float(gradient.norm()) for gradient in expected.values()) > 1e-6, step
        # vespo takes powers of the ratio of whole sequences, which magnifies rounding.
        assert relative_gap(expected, got) < (2e-5 if "vespo" in settings.values() else 1e-5), step


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_in_bf16_the_gap_is_rounding(loss_type: str, tiny_llama: Path, tmp_path: Path) -> None:
    # Rounding is what stock TRL's own gradient in bf16 is off from that in fp32.
    settings = {"loss_type": loss_type, "beta": 0.05}
    (exact,), _ = stock_and_solo(tiny_llama, tmp_path, MIXED, **settings)
    (stock,), (solo,) = stock_and_solo(tiny_llama, tmp_path, MIXED, bf16=True, **settings)
    rounding = relative_gap(exact, stock)
    assert rounding > 1e-4  # it was bf16
    assert relative_gap(exact, solo) < 2 * rounding


@pytest.mark.parametrize("policy", ["on", "off"])
def test_metrics_of_the_same_name_agree(policy: str, tiny_llama: Path, tmp_path: Path) -> None:
    # Off-policy the second optimizer step is the first whose ratio is not 1.
    settings = {"beta": 0.05, "epsilon": 0.01, "logging_steps": 1}
    settings |= {"num_iterations": 2, "max_steps": 2} if policy == "off" else {}
    stock = trained_on(GRPOTrainer, tiny_llama, config(tmp_path, **settings), ALL_DIFFER)[1]
    args = config(tmp_path, train_token_budget=SMALL, **settings)
    solo = trained_on(SoloGRPOTrainer, tiny_llama, args, ALL_DIFFER)[1]
    same = {name for name in stock.keys() & solo.keys() if name != "step_time"}
    assert {"loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean"} <= same
    for name in same:
        assert solo[name] == pytest.approx(stock[name], rel=1e-4, abs=1e-6), name
    assert (solo["clip_ratio/region_mean"] > 0) == (policy == "off")


def test_inexact_constant_rewards_carry_no_signal(tiny_llama: Path, tmp_path: Path) -> None:
    # The float mean of eight times 0.7 is not 0.7: TRL makes an advantage of the difference.
    inexact = [0.7] * 16
    args = {"num_generations": 8}
    stock, solo = stock_and_solo(tiny_llama, tmp_path, inexact, **args)
    assert any(torch.count_nonzero(gradient) for gradient in stock[0].values())
    assert not any(torch.count_nonzero(gradient) for gradient in solo[0].values())


def test_kl_acts_on_a_batch_without_signal(tiny_llama: Path, tmp_path: Path) -> None:
    stock, solo = stock_and_solo(tiny_llama, tmp_path, CONSTANT, beta=0.05)
    assert relative_gap(stock[0], solo[0]) < 1e-5


# -- memory --------------------------------------------------------------------------------------


class SmallDevice:
    """A model whose forward pass runs out of memory above `room` tokens, padding counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.passes: list[int] = []
        forward = LlamaModel.forward

        def limited(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.passes.append(input_ids.numel())
            if input_ids.numel() > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return forward(model, input_ids, *args, **kwargs)

        monkeypatch.setattr(LlamaModel, "forward", limited)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_out_of_memory_halves_the_passes_and_changes_nothing_else(
    beta: float,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = config(tmp_path, beta=beta, max_steps=2)
    whole = captured_gradients(SoloGRPOTrainer, tiny_llama, args, MIXED)
    device = SmallDevice(monkeypatch, room=100)
    halved = captured_gradients(SoloGRPOTrainer, tiny_llama, args, MIXED)
    for expected, got in zip(whole, halved, strict=True):
        assert relative_gap(expected, got) < 1e-5
    refused = [tokens for tokens in device.passes if tokens > 100]
    assert 1 <= len(refused) <= 3  # what fits is remembered for the next pass and the next step
    assert caplog.text.count("out of memory in training") == len(refused)


# What TRL's loss is then needed for; `test_drop_in.py` trains with most of them.
UNPACKED = {
    "is normalised over each micro-batch": {"loss_type": "bnpo"},
    "entropy bonus": {"entropy_coef": 0.1},
    "Liger": {"use_liger_kernel": True},
    "pixels": {"train_dataset": Dataset.from_dict({"prompt": ["What is this?"], "image": [None]})},
    "tools make a rollout of several turns": {"tools": [len]},
    "FSDP": {"ACCELERATE_USE_FSDP": "true"},
    "ZeRO-3": {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
    "fp16": {"deepspeed_plugin": SimpleNamespace(zero_stage=2), "fp16": True},
    "use_reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize("reason", UNPACKED)
def test_what_packing_does_not_cover(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, arguments = config(tmp_path), {"train_dataset": problems()}
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    assert unpacked_reason(args, arguments) is None
    args.deepspeed_plugin = None
    for name, value in UNPACKED[reason].items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        elif name in ("train_dataset", "tools"):
            arguments[name] = value
        else:
            setattr(args, name, value)
    assert reason in str(unpacked_reason(args, arguments))


class LayersWithAState(LlamaForCausalLM):
    _is_stateful = True


class AttentionOfItsOwn(LlamaForCausalLM):
    _supports_attention_backend = False


class AnotherLoss(SoloGRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return 2 * super()._compute_loss(model, inputs)


def test_a_class_with_a_loss_of_its_own_is_asked_for_it(tiny_llama: Path, tmp_path: Path) -> None:
    usual, doubled = (
        captured_gradients(trainer, tiny_llama, config(tmp_path), MIXED)[0]
        for trainer in (SoloGRPOTrainer, AnotherLoss)
    )
    assert relative_gap({name: 2 * value for name, value in usual.items()}, doubled) < 1e-5


@pytest.mark.parametrize("model_class", [LayersWithAState, AttentionOfItsOwn])
def test_rows_that_could_mix_are_not_packed(
    model_class: type[LlamaForCausalLM], tiny_llama: Path, tmp_path: Path
) -> None:
    args = config(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    assert unpacked_reason(args, {"model": model}) is None
    model = model_class.from_pretrained(tiny_llama)
    for given in (model, get_peft_model(model, LoraConfig())):
        assert "may mix rows" in str(unpacked_reason(args, {"model": given}))


def test_gradients_are_scaled_once_for_fp16(tiny_llama: Path, tmp_path: Path) -> None:
    # fp16 itself needs a GPU; its scaler does not.
    gradients = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        captured = CapturedGradients()
        trainer = make_trainer(
            SoloGRPOTrainer,
            tiny_llama,
            config(tmp_path, train_token_budget=SMALL),
            fixed_reward("reward", MIXED),
            callbacks=[captured],
        )
        ids = completion_ids(len(MIXED), trainer.processing_class.eos_token_id)
        trainer._generate_single_turn = lambda *args, ids=ids, **kwargs: (ids, None)
        trainer.accelerator.scaler = scaler
        trainer.train()
        gradients += captured.steps
    plain, scaled = gradients
    assert relative_gap({name: g * 1024.0 for name, g in plain.items()}, scaled) < 1e-6
