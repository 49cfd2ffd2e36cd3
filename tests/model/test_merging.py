"""Merging: the merged model is the model that was trained, saved as others will load it."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_map
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from trl import ModelConfig

from sologrpo.base.errors import InputError
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import (
    check_adapter,
    dequantize,
    is_merge_exact,
    merge_adapter,
    merge_obstacle,
    merged,
    merged_bytes,
    save_4bit,
    save_merged,
)
from tiny import VOCABULARY, build_model, build_tokenizer, with_adapter

IDS = torch.arange(40, 104).reshape(4, 16)


def load(path: Path, load_in_4bit: bool = False) -> PreTrainedModel:
    return load_base_model(
        ModelConfig(
            model_name_or_path=str(path),
            dtype="float32",
            load_in_4bit=load_in_4bit,
            use_bnb_nested_quant=True,
        )
    )


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    get_peft_model(load(tiny_llama), config).save_pretrained(str(folder))
    return folder


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    return model(input_ids=IDS.to(model.device)).logits.float().cpu()


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) of two tensors of logits, mean of the positions."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_dequantised_weights_are_those_that_were_trained_on(
    tiny_llama: Path, adapter: Path
) -> None:
    trained = logits(PeftModel.from_pretrained(load(tiny_llama, load_in_4bit=True), str(adapter)))
    into_rounded = merge_adapter(dequantize(load(tiny_llama, load_in_4bit=True)), adapter)
    into_original = merge_adapter(load(tiny_llama), adapter)
    assert not any("4bit" in type(module).__name__ for module in into_rounded.modules())
    near, far = (
        divergence(trained, logits(into_rounded)),
        divergence(trained, logits(into_original)),
    )
    assert near < 1e-6
    assert far > 100 * near


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_saved_model_needs_no_peft(
    tmp_path: Path, tiny_llama: Path, adapter: Path, load_in_4bit: bool
) -> None:
    merged = merge_adapter(dequantize(load(tiny_llama, load_in_4bit)), adapter)
    tokenizer = load_tokenizer(str(tiny_llama))
    save_merged(merged, tokenizer, tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype="auto")
    assert reloaded.dtype == torch.float32
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(reloaded), logits(merged).to(torch.float32))
    again = AutoTokenizer.from_pretrained(str(tmp_path))
    assert again.chat_template == tokenizer.chat_template
    assert again("12 shells")["input_ids"] == tokenizer("12 shells")["input_ids"]
    assert again.pad_token_id == tokenizer.pad_token_id


def test_adapter_of_this_base(tiny_llama: Path, adapter: Path) -> None:
    assert check_adapter(adapter, str(tiny_llama)).r == 8
    # The same model under another parent folder, as after a move to another machine.
    assert check_adapter(adapter, f"elsewhere/{tiny_llama.name}").r == 8
    assert check_adapter(adapter, None).r == 8


def changed(**values: object) -> str:
    plain = {"peft_type": "LORA", "base_model_name_or_path": "a/qwen", "r": 8, "lora_alpha": 16}
    return json.dumps(plain | values)


BAD_CONFIGS = [  # content of adapter_config.json, and what the message says
    (None, r"holds no adapter: it has no adapter_config\.json"),
    ("", r"adapter_config\.json is empty"),
    ("{", r"adapter_config\.json is not valid JSON"),
    ("[]", r"expected key: value pairs"),
    (changed(base_model_name_or_path="a/llama"), r"made for base model 'a/llama', not 'a/qwen'"),
    # What PEFT would import, load or allocate.
    (changed(peft_type="PROMPT_TUNING"), r"peft_type: 'PROMPT_TUNING'; expected 'LORA'"),
    (changed(megatron_config={}, megatron_core="os"), r"megatron_config: {}; expected None"),
    (changed(arrow_config={"task_adapter_names": ["/x"]}), r"arrow_config: .*; expected None"),
    (changed(r=10**9), r"r: 1000000000; expected less than or equal to 65536"),
    (changed(r=True), r"r: True; expected a valid integer"),
    (changed(lora_alpha="high"), r"lora_alpha: 'high'; expected a valid number"),
]


@pytest.mark.parametrize(("content", "says"), BAD_CONFIGS)
def test_adapter_of_another_base_or_without_a_config(
    content: str | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        check_adapter(tmp_path, "a/qwen")


def widen(weights: dict[str, torch.Tensor]) -> None:
    weights.update({name: torch.cat([old, old], dim=-1) for name, old in weights.items()})


def make_infinite(weights: dict[str, torch.Tensor]) -> None:
    next(iter(weights.values()))[0, 0] = math.nan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "is damaged: No such file"),
        (widen, "does not fit the base model"),
        (make_infinite, "holds weights that are not finite"),
    ],
)
def test_adapter_with_bad_weights(
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    says: str,
    tmp_path: Path,
    tiny_llama: Path,
    adapter: Path,
) -> None:
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    if change is not None:
        weights = load_file(str(adapter / "adapter_model.safetensors"))
        change(weights)
        save_file(weights, str(tmp_path / "adapter_model.safetensors"))
    with pytest.raises(InputError, match=says) as caught:
        merge_adapter(load(tiny_llama), tmp_path)
    assert "\n" not in str(caught.value)


def test_half_precision_weights_are_summed_in_fp32_and_rounded_once(
    tiny_llama: Path, adapter: Path
) -> None:
    exact = merge_adapter(load(tiny_llama).bfloat16().float(), adapter).state_dict()
    merged = merge_adapter(load(tiny_llama).bfloat16(), adapter).state_dict()
    changed = [name for name in exact if name.endswith("_proj.weight")]
    assert len(changed) == 14
    for name in changed:
        assert torch.equal(merged[name], exact[name].bfloat16()), name


# -- merged inside a context ---------------------------------------------------------------------


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen"])
def test_merged_weights_are_the_adapted_model_and_are_restored_bit_by_bit(
    family: str, nf4: bool, request: pytest.FixtureRequest
) -> None:
    model = with_adapter(request.getfixturevalue(family), nf4=nf4)
    modules, state, before = dict(model.named_modules()), state_of(model), logits(model)
    with suppress(KeyboardInterrupt), merged(model):
        assert not any(isinstance(m, LoraLayer | bnb.nn.Linear4bit) for m in model.modules())
        torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
        raise KeyboardInterrupt
    assert dict(model.named_modules()) == modules  # the very same objects
    after = state_of(model)
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert torch.equal(logits(model), before)
    with model.disable_adapter():  # the adapter matters: it is not the base model that was compared
        unadapted = logits(model)
        assert (unadapted - before).abs().max() > 0.1
        with merged(model):  # nor is an adapter merged that is switched off
            torch.testing.assert_close(logits(model), unadapted, rtol=0, atol=1e-5)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights, packed 4-bit ones and their scales included."""
    return tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value,
        dict(model.state_dict()),
    )


def test_merged_in_half_precision_is_near(tiny_llama: Path) -> None:
    model = with_adapter(tiny_llama, nf4=True)
    expected = logits(model)
    model.to(torch.bfloat16)
    with merged(model):
        assert 0 < divergence(expected, logits(model)) < 0.01


def test_4bit_layers_without_an_adapter_are_merged_too(tiny_llama: Path) -> None:
    model = with_adapter(tiny_llama, nf4=True, target_modules=["q_proj"])
    expected = logits(model)
    with merged(model):
        assert not any(isinstance(m, bnb.nn.Linear4bit) for m in model.modules())
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "dtype", "exact"),
    [
        ({}, None, True),
        ({}, torch.bfloat16, False),
        ({"dtype": "bfloat16"}, None, False),
        ({"lora_dropout": 0.1}, None, False),
    ],
)
def test_when_merging_is_exact(
    settings: dict[str, Any], dtype: torch.dtype | None, exact: bool, tiny_llama: Path
) -> None:
    model = with_adapter(tiny_llama, **settings)
    assert merge_obstacle(model) is None
    assert is_merge_exact(model, dtype) is exact


@pytest.mark.parametrize("nf4", [False, True])
def test_bytes_of_merged_weights(tiny_llama: Path, nf4: bool) -> None:
    model = with_adapter(tiny_llama, nf4=nf4)
    expected = merged_bytes(model)
    names = [name for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    with merged(model):
        assert sum(model.get_submodule(name).weight.nbytes for name in names) == expected
    assert merged_bytes(model, torch.bfloat16) == expected // 2


# -- saved ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen2.5-1.5B-Instruct: tied embeddings, and a penalty in its generation config."""
    folder = tmp_path_factory.mktemp("models") / "tied-qwen"
    tokenizer = build_tokenizer()
    model = build_model("qwen2", tokenizer, tied=True)
    model.generation_config.repetition_penalty = 1.1
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def test_tied_embeddings_pad_token_and_vocabulary_are_untouched(
    tmp_path: Path, tied_qwen: Path, adapter: Path
) -> None:
    base = load(tied_qwen)
    save_merged(base, load_tokenizer(str(tied_qwen)), tmp_path)
    saved = load_file(str(tmp_path / "model.safetensors"))
    assert "lm_head.weight" not in saved
    assert saved["model.embed_tokens.weight"].shape[0] == VOCABULARY
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == VOCABULARY
    before, after = (AutoTokenizer.from_pretrained(str(path)) for path in (tied_qwen, tmp_path))
    assert after.pad_token == before.pad_token
    assert len(after) == len(before)


@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_tied_weight_that_was_trained_alone_is_merged_and_saved_alone(
    kind: str, name: str, tmp_path: Path, tied_qwen: Path
) -> None:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"target_modules": ["q_proj"]}
    chosen[kind] = [*chosen.get(kind, []), name]
    config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **chosen)
    trained = get_peft_model(load(tied_qwen), config)
    if kind == "modules_to_save":
        copy = dict(trained.named_modules())[f"base_model.model.{PLACES[name]}.modules_to_save"]
        torch.nn.init.normal_(copy["default"].weight, std=0.1)
    trained.save_pretrained(str(tmp_path / "adapter"))

    merged = merge_adapter(load(tied_qwen), tmp_path / "adapter")
    torch.testing.assert_close(logits(merged), logits(trained))
    save_merged(merged, load_tokenizer(str(tied_qwen)), tmp_path / "merged")
    assert load(tmp_path / "merged").config.tie_word_embeddings is False
    torch.testing.assert_close(logits(load(tmp_path / "merged")), logits(trained))


PLACES = {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}


def test_generation_config_is_that_of_the_evaluation(tmp_path: Path, tied_qwen: Path) -> None:
    model = load(tied_qwen)
    model.generation_config.eos_token_id = 7  # the tokenizer's ends a completion too
    tokenizer = load_tokenizer(str(tied_qwen))
    save_merged(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert saved.get("repetition_penalty", 1.0) == 1.0
    assert saved["eos_token_id"] == sorted([7, tokenizer.eos_token_id])


def test_4bit_folder_reloads_as_nf4_with_double_quantisation(
    tmp_path: Path, tiny_llama: Path, adapter: Path
) -> None:
    merged = merge_adapter(load(tiny_llama), adapter)
    save_merged(merged, load_tokenizer(str(tiny_llama)), tmp_path / "merged")
    save_4bit(tmp_path / "merged", tmp_path / "4bit")
    reloaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "4bit"), dtype="auto")
    layers = [m for m in reloaded.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(layers) == 14
    assert {layer.weight.quant_state.quant_type for layer in layers} == {"nf4"}
    assert all(layer.weight.quant_state.nested for layer in layers)
    far, near = (divergence(logits(load(tiny_llama)), logits(merged)),
                 divergence(logits(merged), logits(reloaded)))  # fmt: skip
    assert near < far / 10
    assert AutoTokenizer.from_pretrained(str(tmp_path / "4bit")).pad_token is not None
