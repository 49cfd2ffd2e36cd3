"""Start vLLM on the base weights of a model, and hand it every adapter under a new id."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import vllm_stand_in
from sologrpo.model.loading import load_tokenizer
from sologrpo.sampling import vllm_engine
from sologrpo.sampling.vllm_engine import (
    HotSwappedLLM,
    base_weights,
    lora_settings,
    start_vllm,
    swap_obstacle,
    temporary_folder,
)
from tiny import with_adapter


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[vllm_stand_in.LLM]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
            patch.setenv(name, os.environ.get(name, ""))
        yield vllm_stand_in.install(monkeypatch)


def started(model: PeftModel, path: Path) -> Any:
    settings = lora_settings(model.active_peft_config)
    return start_vllm(model, load_tokenizer(str(path)), torch.float32, model="of TRL", **settings)


def test_vllm_gets_the_weights_that_are_trained(tiny_llama: Path) -> None:
    model = with_adapter(tiny_llama, nf4=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    llm = started(model, tiny_llama)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    plain = with_adapter(tiny_llama, nf4=True).get_base_model().dequantize()
    expected = {
        name.replace(".base_layer.", "."): p
        for name, p in plain.named_parameters()
        if "lora_" not in name
    }
    assert expected.keys() == llm.weights.keys()
    assert all(torch.equal(expected[name], weight) for name, weight in llm.weights.items())
    # They are rounded to four bits: not those of the file.
    on_disk = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(on_disk.get_parameter(name), llm.weights[name])


def test_a_model_without_an_adapter_is_handed_over_as_it_is(tiny_qwen: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_qwen), dtype=torch.bfloat16)
    given = dict(base_weights(model))
    assert given.keys() == dict(model.named_parameters()).keys()
    assert all(weight.dtype == torch.bfloat16 for weight in given.values())


def test_the_settings_of_the_engine(tiny_llama: Path) -> None:
    llm = started(with_adapter(tiny_llama, nf4=True), tiny_llama)
    assert "quantization_config" not in llm.config
    assert llm.has_tokenizer
    assert llm.settings.items() >= {
        "dtype": "float32", "quantization": None, "enable_lora": True, "max_loras": 1,
        "max_lora_rank": 8,
    }.items()  # fmt: skip
    assert not Path(llm.settings["model"]).exists()


def test_an_adapter_of_another_name(tiny_llama: Path) -> None:
    model = with_adapter(tiny_llama)
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    model.set_adapter("second")
    llm = HotSwappedLLM(started(model, tiny_llama))
    llm.load_adapter(model)
    assert llm.calls == [("add", 1, 2)]


@pytest.mark.parametrize(
    ("lora", "obstacle"),
    [
        ({}, None),
        ({"use_rslora": True}, None),
        ({"rank_pattern": {"q_proj": 8}}, None),
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "a layer of type Embedding"),
        ({"modules_to_save": ["lm_head"]}, "lora_modules_to_save"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "a separate bias"),
        ({"trainable_token_indices": [1]}, "trained tokens"),
        ({"rank_pattern": {"q_proj": 513}}, "LoRA of rank 513, above 512"),
    ],
)
def test_adapters_that_vllm_cannot_swap(
    lora: dict[str, Any], obstacle: str | None, tiny_llama: Path
) -> None:
    found = swap_obstacle(with_adapter(tiny_llama, **lora))
    assert (found is None) == (obstacle is None)
    assert obstacle is None or obstacle in str(found)


def test_other_adapters_and_other_bases(tiny_llama: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    settings = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    changed = get_peft_model(base, LoraConfig(**settings, init_lora_weights="pissa"))
    assert "init_lora_weights pissa" in str(swap_obstacle(changed))
    base = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    prompt = get_peft_model(base, PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    assert "type" in str(swap_obstacle(prompt))


@pytest.mark.parametrize(("rank", "engine"), [(1, 1), (2, 8), (16, 16), (17, 32), (500, 512)])
def test_the_rank_of_the_engine(rank: int, engine: int) -> None:
    assert lora_settings(LoraConfig(r=rank))["max_lora_rank"] == engine


def test_a_folder_on_disk_where_memory_has_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with temporary_folder(2**60) as folder:
        assert folder.is_dir()
        assert vllm_engine.MEMORY_BACKED not in folder.parents
    monkeypatch.setattr(vllm_engine, "MEMORY_BACKED", tmp_path)
    with temporary_folder(1) as folder:
        assert folder.parent == tmp_path
    assert not list(tmp_path.iterdir())
