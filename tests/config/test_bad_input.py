"""Malformed rows, adapters and records end in one line, and change nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from scripts import refusal
from sologrpo.config.parsing import parse_config
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import check_adapter, load_adapter
from tiny import tiny_config, with_adapter

Weights = dict[str, torch.Tensor]


# -- adapters and models -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(str(folder))
    return folder


def loaded(folder: Path, tiny_llama: Path) -> None:
    check_adapter(folder, str(tiny_llama))
    base = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    load_adapter(base, folder)


def _config_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _config_is(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "adapter_config.json").write_text(text) and None


def _cut(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return change


def _wider(folder: Path) -> None:
    file = str(folder / "adapter_model.safetensors")
    save_file({name: torch.cat([w, w]) for name, w in load_file(file).items()}, file)


def _pickled(folder: Path) -> None:
    weights = load_file(str(folder / "adapter_model.safetensors"))
    (folder / "adapter_model.safetensors").unlink()
    torch.save(weights, folder / "adapter_model.bin")


def _tensors(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    """Change the tensors of the one file of weights in a folder."""

    def write(folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        save_file(change(load_file(str(file))), file, metadata={"format": "pt"})

    return write


def _with_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return _tensors(lambda weights: weights | {min(weights): change(weights[min(weights)])})


def _one_infinite(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = -torch.inf
    return tensor


def _zero(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))


# Files of weights, of an adapter or a model, that are not what their config describes.
BROKEN_WEIGHTS: dict[str, Callable[[Path], None]] = {
    "zeroed": _zero,
    "no-tensors": _tensors(lambda weights: {}),
    "half": _tensors(lambda weights: dict(list(weights.items())[::2])),
    "one-missing": _tensors(
        lambda weights: {k: w for k, w in weights.items() if k != min(weights)}
    ),
    "one-more": _tensors(lambda weights: weights | {"another": torch.ones(2)}),
    "renamed": _tensors(lambda weights: {f"x.{name}": w for name, w in weights.items()}),
    "other-layers": _tensors(
        lambda weights: {name.replace("layers.1", "layers.9"): w for name, w in weights.items()}
    ),
    "one-cut": _with_first(lambda tensor: tensor[:-1].contiguous()),
    "nan": _with_first(lambda tensor: tensor * torch.nan),
    "infinite": _with_first(_one_infinite),
}

BROKEN_ADAPTERS: dict[str, Callable[[Path], None]] = {
    **BROKEN_WEIGHTS,
    "no-config": lambda folder: (folder / "adapter_config.json").unlink(),
    "no-weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "pickled": _pickled,
    "wider": _wider,
    **{f"cut-{size}": _cut(size) for size in (4, 5000)},
    **{f"config-{i}": _config_is(text) for i, text in enumerate(["{", "[]", "{}"])},
    "rank": _config_with(r=8),
    "rank-of-text": _config_with(r="many"),
    "other-kind": _config_with(peft_type="NOTHING"),
    "no-kind": _config_with(peft_type=None),
    "no-layers": _config_with(target_modules=["nothing"]),
    "other-base": _config_with(base_model_name_or_path="another/model"),
}


@pytest.mark.parametrize("broken", BROKEN_ADAPTERS)
def test_adapters_that_cannot_be_used(
    adapter: Path, tiny_llama: Path, tmp_path: Path, broken: str
) -> None:
    loaded(adapter, tiny_llama)
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    BROKEN_ADAPTERS[broken](copy)
    line = refusal(lambda: loaded(copy, tiny_llama))
    assert line is not None
    assert "adapter" in line or "base model" in line


@pytest.mark.parametrize("in_4bit", [False, True])
@pytest.mark.parametrize("broken", BROKEN_WEIGHTS)
def test_weights_that_are_not_those_of_the_model(
    tiny_llama: Path, tmp_path: Path, broken: str, in_4bit: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    BROKEN_WEIGHTS[broken](folder)
    settings = ModelConfig(str(folder), dtype="float32", load_in_4bit=in_4bit)
    line = refusal(lambda: load_base_model(settings))
    assert line is not None
    assert str(folder) in line
    assert "REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "lora",
    [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}, {"use_dora": True},
     {"trainable_token_indices": [1, 2]}, {"bias": "lora_only"}],
    ids=lambda lora: next(iter(lora)),
)  # fmt: skip
def test_every_kind_of_adapter_is_loaded_whole(
    lora: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    trained = with_adapter(tiny_llama, **lora)
    trained.save_pretrained(str(tmp_path))
    check_adapter(tmp_path, str(tiny_llama))
    again = load_adapter(load_base_model(ModelConfig(str(tiny_llama), dtype="float32")), tmp_path)
    before, after = trained.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_an_adapter_is_no_base_model(adapter: Path) -> None:
    line = refusal(lambda: load_base_model(ModelConfig(str(adapter))))
    assert line is not None
    assert "holds an adapter: give its base model" in line


def test_a_pickled_model_is_not_read(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_llama, folder)
    (file,) = folder.glob("*.safetensors")
    torch.save(load_file(str(file)), folder / "pytorch_model.bin")
    file.unlink()
    config = tiny_config(folder, tmp_path, tmp_path / "run")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    _, _, model_args = parse_config(["--config", str(path)])
    line = refusal(lambda: load_base_model(model_args))
    assert line is not None
    assert "safetensors" in line
    assert load_base_model(model_args, trust_remote_code=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 5, "model": {}}'])
def test_models_that_cannot_be_loaded(
    tiny_llama: Path, tmp_path: Path, name: str, text: str
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / name).write_text(text, encoding="utf-8")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_config(folder, tmp_path, tmp_path / "run")))
    _, _, model_args = parse_config(["--config", str(path)])

    def load() -> None:
        load_tokenizer(str(folder))
        load_base_model(model_args)

    line = refusal(load)
    assert line is not None
    assert str(folder) in line


def test_a_tokenizer_with_an_entry_of_another_type(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "512"}))
    line = refusal(lambda: load_tokenizer(str(folder)))
    assert line is not None
    assert str(folder) in line


def test_a_tokenizer_without_an_end_of_text_token(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    line = refusal(lambda: load_tokenizer(str(folder)))
    assert line is not None
    assert "no end-of-text token" in line
