"""Sizes are compared with the free memory before weights are loaded."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from trl import ModelConfig

from sologrpo.base.errors import InputError
from sologrpo.model import fitting
from sologrpo.model.fitting import (
    DoesNotFitError,
    explaining_out_of_memory,
    shortage,
    unquantised_bytes,
)
from sologrpo.model.loading import load_base_model
from sologrpo.model.merging import save_4bit

GIB = 2**30
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_is_that_of_the_loaded_weights(
    family: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    settings = ModelConfig(str(request.getfixturevalue(f"tiny_{family}")), dtype=dtype)
    loaded = sum(p.nbytes for p in load_base_model(settings).parameters())
    assert unquantised_bytes(settings) == loaded
    assert unquantised_bytes(replace(settings, load_in_4bit=True)) == loaded


def test_what_is_quantised_or_cannot_be_built_is_left_to_loading(
    tiny_llama: Path, tmp_path: Path
) -> None:
    save_4bit(tiny_llama, tmp_path / "4bit")
    (tmp_path / "empty").mkdir()
    for name in ("4bit", "empty", "missing"):
        assert unquantised_bytes(ModelConfig(str(tmp_path / name))) == 0


@pytest.mark.parametrize(("free", "fits"), [(14.6, False), (15.5, False), (23.0, True)])
def test_an_8b_model_in_16_bits(
    free: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free GiB about as on a T4, another card of 16 GB, and one of 24 GB."""
    AutoConfig.for_model("llama", **LLAMA_8B).save_pretrained(tmp_path)
    size = unquantised_bytes(ModelConfig(str(tmp_path), dtype="bfloat16"))
    assert size == 2 * 8_030_261_248
    monkeypatch.setattr(fitting, "free_bytes", lambda device: int(free * GIB))
    said = shortage(size)
    assert (said is None) == fits
    if said is not None:
        assert said == f"15.0 GiB of weights and a cache do not fit into {free} GiB"


@pytest.mark.parametrize("refused", [False, True])
def test_out_of_memory_is_one_line(refused: bool) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    def fail() -> None:
        with explaining_out_of_memory("buy more"):
            if refused:
                raise InputError("does not fit") from error
            raise error

    with pytest.raises(DoesNotFitError, match=r"^out of memory: buy more$"):
        fail()


@pytest.mark.parametrize("error", [InputError("bad"), ValueError("bad"), KeyboardInterrupt()])
def test_other_errors_stay(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explaining_out_of_memory("buy more"):
        raise error from OSError(os.strerror(2))
    assert caught.value is error
