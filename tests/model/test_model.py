"""Model: NF4 on CPU that trains, adapters that move, a pad token that costs nothing."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from trl import ModelConfig

from digits import digit_share
from sologrpo.base.device import default_dtype
from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.model.loading import (
    keep_trainable_in_fp32,
    load_base_model,
    load_tokenizer,
    pick_dtype,
    skip_undone_casts,
)
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import SIZES, VOCABULARY, rows, with_adapter

LORA = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def load_nf4(path: Path) -> PreTrainedModel:
    return load_base_model(
        ModelConfig(
            model_name_or_path=str(path),
            load_in_4bit=True,
            use_bnb_nested_quant=True,
            dtype="float32",
        )
    )


def nf4_layers(model: torch.nn.Module) -> list[bnb.nn.Linear4bit]:
    return [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.arange(100, 124, device=model.device).reshape(2, 12)
    model.train()
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def nf4_with_adapter(path: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    return get_peft_model(load_nf4(path), LoraConfig(**LORA, init_lora_weights=False))


def test_nf4_model_is_double_quantised_in_all_linear_layers(tiny_llama: Path) -> None:
    layers = nf4_layers(load_nf4(tiny_llama))
    assert len(layers) == 7 * SIZES["num_hidden_layers"]
    for layer in layers:
        assert layer.weight.quant_state.quant_type == "nf4"
        assert layer.weight.quant_state.nested
        assert layer.compute_dtype == torch.float32


def test_nf4_model_with_adapter_learns(tiny_llama: Path) -> None:
    model = nf4_with_adapter(tiny_llama)
    ids = torch.arange(100, 124, device=model.device).reshape(2, 12)
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = [layer.weight.data.clone() for layer in nf4_layers(model)]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    now = [layer.weight.data for layer in nf4_layers(model)]
    assert all(torch.equal(before, after) for before, after in zip(frozen, now, strict=True))


def test_forward_in_eval_mode_leaves_nf4_gradients_alone(tiny_llama: Path) -> None:
    model = nf4_with_adapter(tiny_llama)
    before = gradients(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(100, 116, device=model.device).reshape(1, 16))
    after = gradients(model)
    assert any(gradient.norm() > 0 for gradient in before.values())
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient, msg=name)


def test_kernel_without_backward_is_off(tiny_llama: Path) -> None:
    # The kernel needs AVX512-BF16, which few test machines have; the switch is checked on all.
    layers = nf4_layers(load_nf4(tiny_llama))
    assert all(layer.support_avx512bf16_for_cpu is False for layer in layers)
    # What the switch switches must still be there.
    fresh = bnb.nn.Linear4bit(64, 64)
    assert hasattr(fresh, "support_avx512bf16_for_cpu")


def nf4_trainer(path: Path, output: Path, learning_rate: float) -> SoloGRPOTrainer:
    args = SoloGRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        max_steps=3,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in rows(6)]
    return SoloGRPOTrainer(
        model=load_nf4(path),
        reward_funcs=digit_share,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=load_tokenizer(str(path)),
        peft_config=LoraConfig(**LORA),
    )


def input_hooks(model: PreTrainedModel) -> int:
    return len(model.get_input_embeddings()._forward_hooks)


def test_hooks_on_the_embedding_do_not_pile_up(tiny_llama: Path, tmp_path: Path) -> None:
    trainer = nf4_trainer(tiny_llama, tmp_path, learning_rate=1e-6)
    assert trainer.args.gradient_checkpointing
    trainer.train()
    assert trainer.state.global_step > 2
    assert input_hooks(trainer.model) == 1


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def share_that_differs(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], kind: str
) -> float:
    names = [name for name in before if kind in name]
    assert names
    moved = sum(int((before[name] != after[name]).sum()) for name in names)
    return moved / sum(before[name].numel() for name in names)


def test_small_learning_rate_moves_the_adapter_of_a_4bit_model(
    tiny_llama: Path, tmp_path: Path
) -> None:
    trainer = nf4_trainer(tiny_llama, tmp_path, learning_rate=1e-6)
    before = trainable(trainer.model)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    trainer.train()
    after = trainable(trainer.model)
    assert share_that_differs(before, after, "lora_B") > 0.95
    # The gradient of A is zero until B has moved, so A moves from the second step on.
    assert share_that_differs(before, after, "lora_A") > 0.95


def test_only_trainable_parameters_become_fp32() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    keep_trainable_in_fp32(model)
    assert model[0].weight.dtype == torch.bfloat16
    assert model[1].weight.dtype == torch.float32


def pass_with(
    path: Path, skips: bool, dtype: str = "bfloat16", autocast: bool = True, nf4: bool = False,
    checkpointing: bool = False, **lora: Any,
) -> tuple[int, list[torch.Tensor]]:  # fmt: skip
    """Take a forward and a backward pass; return the bytes kept in between, and the gradients."""
    policy = with_adapter(path, dtype, nf4, **lora).train()
    keep_trainable_in_fp32(policy)
    if skips:
        skip_undone_casts(policy)
    if checkpointing:
        policy.gradient_checkpointing_enable()
        policy.enable_input_require_grads()
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(4 * 96).reshape(4, 96)
    torch.manual_seed(0)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        hidden = policy.get_base_model().base_model(input_ids=ids).last_hidden_state
    hidden.float().square().sum().backward()
    n_bytes = sum(storage.nbytes() for storage in kept.values())
    return n_bytes, [p.grad for p in policy.parameters() if p.requires_grad]


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.any() for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("changes", "share"),
    # In an fp32 model, autocast makes few inputs of layers half-precision.
    [({}, 0.9), ({"nf4": True}, 0.9), ({"dtype": "float32"}, 0.97)],
)
def test_without_the_casts_that_autocast_undoes_less_is_kept(
    tiny_llama: Path, changes: dict[str, Any], share: float
) -> None:
    cast_bytes, cast = pass_with(tiny_llama, skips=False, **changes)
    kept_bytes, kept = pass_with(tiny_llama, skips=True, **changes)
    assert all_equal(kept, cast)
    assert kept_bytes < share * cast_bytes
    # Checkpointing computes the layers again in the backward pass.
    assert all_equal(pass_with(tiny_llama, skips=True, checkpointing=True, **changes)[1], cast)


@pytest.mark.parametrize(
    "changes",
    [
        {"autocast": False},
        {"autocast": False, "dtype": "float32"},
        {"lora_dropout": 0.1},
        {"use_dora": True},
    ],
)
def test_other_casts_stay(tiny_llama: Path, changes: dict[str, Any]) -> None:
    cast_bytes, cast = pass_with(tiny_llama, skips=False, **changes)
    kept_bytes, kept = pass_with(tiny_llama, skips=True, **changes)
    assert all_equal(kept, cast)
    assert kept_bytes == cast_bytes


def test_the_trainer_skips_casts_that_autocast_undoes(tiny_llama: Path, tmp_path: Path) -> None:
    model = nf4_trainer(tiny_llama, tmp_path, learning_rate=0.0).model
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layers
        assert all(layer._cast_input_dtype(x, torch.float32) is x for layer in layers)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen"])
def test_pad_token_differs_from_the_end_and_needs_no_new_row(
    family: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    tokenizer = load_tokenizer(str(path))
    model = load_nf4(path)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.pad_token_id < model.get_input_embeddings().num_embeddings
    assert model.get_input_embeddings().num_embeddings == VOCABULARY


def save_tokenizer(path: Path, source: Path, **changes: Any) -> str:
    tokenizer = load_tokenizer(str(source))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "pad_token"),
    [
        ({"pad_token": None}, "<|endoftext|>"),
        ({"pad_token": "<|im_end|>"}, "<|endoftext|>"),
        ({"pad_token": None, "eos_token": "<|endoftext|>"}, "<|endoftext|>"),  # none is spare
    ],
)
def test_missing_pad_token_becomes_a_spare_one(
    changes: dict[str, str | None], pad_token: str, tmp_path: Path, tiny_llama: Path
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, tiny_llama, **changes))
    assert tokenizer.pad_token == pad_token
    assert tokenizer.eos_token == changes.get("eos_token", "<|im_end|>")
    assert len(tokenizer) == VOCABULARY


@pytest.mark.parametrize(
    ("cuda", "native_bf16", "expected"),
    [
        (True, True, torch.bfloat16),
        (True, False, torch.float16),
        (False, True, torch.float32),
        (False, False, torch.float32),
    ],
)
def test_pick_dtype_by_device(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, native_bf16: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: native_bf16)
    assert default_dtype() is expected
    assert pick_dtype("auto") is expected
    assert pick_dtype(None) is expected
