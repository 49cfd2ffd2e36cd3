"""Sizes that are computed before a run agree with what the run then has."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig
from trl import get_peft_config

from sologrpo.config.parsing import parse_config
from sologrpo.model.loading import keep_trainable_in_fp32, load_base_model
from sologrpo.plan.footprint import FP32, disk_bytes, footprint, free_disk_bytes
from sologrpo.plan.preflight import build_policy

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ["--config", str(ROOT / "configs/quickstart.yaml")]


@pytest.mark.parametrize("family", ["llama", "qwen", "tied"])
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_are_those_of_the_loaded_model(
    request: pytest.FixtureRequest, family: str, four_bit: bool, nested: bool
) -> None:
    folder = request.getfixturevalue(f"tiny_{family}")
    _, _, model_args = parse_config([
        *QUICKSTART, "--model_name_or_path", str(folder), "--dtype", "float32",
        "--load_in_4bit", str(four_bit), "--use_bnb_nested_quant", str(nested),
    ])  # fmt: skip
    size = footprint(build_policy(model_args), model_args)
    base = load_base_model(model_args)
    stored = sum(p.numel() * p.element_size() for p in base.parameters())
    scales = sum(
        _scale_bytes(p.quant_state) for p in base.parameters() if hasattr(p, "quant_state")
    )
    policy = get_peft_model(base, get_peft_config(model_args))
    keep_trainable_in_fp32(policy)
    trainable, total = policy.get_nb_trainable_parameters()
    assert (size.trainable, size.total) == (trainable, total - trainable)
    # Blocks that are not full have a scale all the same, and tiny matrices have many of them.
    assert size.weights_bytes == pytest.approx(stored + scales, rel=0.02)


def _scale_bytes(state) -> int:  # type: ignore[no-untyped-def]
    tensors = [state.absmax]
    if state.nested:
        tensors.append(state.state2.absmax)
    return sum(t.numel() * t.element_size() for t in tensors)


def test_the_8b_model_in_four_bits(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    _, args, model_args = parse_config([
        "--config", str(ROOT / "configs/llama3.1-8b.yaml"), "--model_name_or_path", str(tmp_path),
        "--dtype", "bfloat16",
    ])  # fmt: skip
    size = footprint(build_policy(model_args), model_args)
    assert size.total == 8_030_261_248  # as its model card has it
    # 32 layers of 218.1M weights in NF4, 1.05B in bf16.
    assert size.weights_bytes == pytest.approx(6.98e9 * 0.516 + 1.05e9 * 2, rel=0.01)
    assert size.trainable == 20_971_520  # rank 8 on all seven projections
    assert size.adapter_bytes == 16 * size.trainable
    per_checkpoint = disk_bytes(args, size, 1_000_000) / (args.save_total_limit + 1)
    assert per_checkpoint == pytest.approx(size.checkpoint_bytes, rel=0.15)


@pytest.mark.parametrize(("family", "target"), [("llama", "embed_tokens"), ("gpt2", "all-linear")])
def test_no_copy_is_merged_for_sampling_where_layers_are_not_linear(
    family: str, target: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoConfig.for_model(family, vocab_size=64, **sizes).save_pretrained(tmp_path)
    model = ["--model_name_or_path", str(tmp_path), "--lora_target_modules", target]
    _, _, model_args = parse_config([*QUICKSTART, *model, "--dtype", "float32"])
    assert footprint(build_policy(model_args), model_args).merged_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "checkpoints"),
    [
        (["--save_steps", "10"], 3),  # two are kept, and a third is written before one goes
        (["--save_steps", "60"], 2),
        (["--save_steps", "500"], 1),
        (["--save_strategy", "no"], 0),
    ],
)
def test_disk(tiny_llama: Path, arguments: list[str], checkpoints: int) -> None:
    model = ["--model_name_or_path", str(tiny_llama)]
    _, args, model_args = parse_config([*QUICKSTART, *model, *arguments])
    size = footprint(build_policy(model_args), model_args)
    expected = checkpoints * size.checkpoint_bytes + FP32 * size.trainable
    assert disk_bytes(args, size, steps=100) == expected


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "runs" / "new") > 0


def test_nothing_is_loaded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("safetensors.safe_open", load)
    monkeypatch.setattr(torch, "load", load)
    _, _, model_args = parse_config([*QUICKSTART, "--model_name_or_path", str(tiny_llama)])
    assert footprint(build_policy(model_args), model_args).total > 0
