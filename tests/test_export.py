"""Export: the merged model is the model that was trained."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig

from sologrpo.errors import InputError
from sologrpo.export import check_adapter, dequantised, merge_adapter, save_merged
from sologrpo.model import load_base_model, load_tokenizer

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


def test_merged_equals_base_and_adapter(tiny_llama: Path, adapter: Path) -> None:
    base = logits(load(tiny_llama))
    unmerged = logits(PeftModel.from_pretrained(load(tiny_llama), str(adapter)))
    merged = logits(merge_adapter(load(tiny_llama), adapter))
    scale = unmerged.abs().max()
    assert (merged - unmerged).abs().max() / scale < 1e-5
    assert (base - unmerged).abs().max() / scale > 1e-2  # the adapter is no small change


def test_dequantised_weights_are_those_that_were_trained_on(
    tiny_llama: Path, adapter: Path
) -> None:
    trained = logits(PeftModel.from_pretrained(load(tiny_llama, load_in_4bit=True), str(adapter)))
    into_rounded = merge_adapter(dequantised(load(tiny_llama, load_in_4bit=True)), adapter)
    into_original = merge_adapter(load(tiny_llama), adapter)
    assert not any("4bit" in type(module).__name__ for module in into_rounded.modules())
    near, far = (
        divergence(trained, logits(into_rounded)),
        divergence(trained, logits(into_original)),
    )
    assert near < 1e-6
    assert far > 100 * near


def test_unquantised_model_passes_through(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    assert dequantised(model) is model


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_saved_model_needs_no_peft(
    tmp_path: Path, tiny_llama: Path, adapter: Path, load_in_4bit: bool
) -> None:
    merged = merge_adapter(dequantised(load(tiny_llama, load_in_4bit)), adapter)
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
    assert check_adapter(adapter, str(tiny_llama))["r"] == 8
    # The same model under another parent folder, as after a move to another machine.
    assert check_adapter(adapter, f"elsewhere/{tiny_llama.name}")["r"] == 8
    assert check_adapter(adapter, None)["r"] == 8


def test_adapter_of_another_base(tiny_qwen: Path, adapter: Path) -> None:
    with pytest.raises(InputError, match=r"made for base model .*tiny-llama.*not .*tiny-qwen"):
        check_adapter(adapter, str(tiny_qwen))


def test_folder_without_adapter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no adapter: it has no adapter_config\.json"):
        check_adapter(tmp_path, "any")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_damaged_adapter_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        check_adapter(tmp_path, "any")


def test_adapter_without_weights(tmp_path: Path, tiny_llama: Path, adapter: Path) -> None:
    text = (adapter / "adapter_config.json").read_text(encoding="utf-8")
    (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="does not fit the base model"):
        merge_adapter(load(tiny_llama), tmp_path)


def test_adapter_of_other_shapes(tmp_path: Path, tiny_llama: Path, adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(str(adapter / "adapter_model.safetensors"))
    wider = {name: torch.cat([tensor, tensor], dim=-1) for name, tensor in weights.items()}
    save_file(wider, str(tmp_path / "adapter_model.safetensors"))
    text = (adapter / "adapter_config.json").read_text(encoding="utf-8")
    (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="does not fit the base model") as caught:
        merge_adapter(load(tiny_llama), tmp_path)
    assert "\n" not in str(caught.value)
