"""TRL's colocated vLLM with hot-swapped adapters, on a stand-in for the package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

import vllm_stand_in
from digits import digit_share
from fixed_rollouts import config, make_trainer
from sologrpo.base.errors import InputError
from sologrpo.model.loading import load_tokenizer
from sologrpo.training.hot_swap import HotSwappedVllm, build_vllm
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import with_adapter

VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND",
)  # fmt: skip


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the stand-in, and restore the variables that TRL and the engine set."""
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, "0")
            patch.delenv(name)
        vllm_stand_in.install(patch)
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
        yield


def build(model: Any, path: Path, **settings: Any) -> Any:
    return build_vllm(
        model=model, accelerator=Accelerator(), mode="colocate",
        processing_class=load_tokenizer(str(path)), **settings,
    )  # fmt: skip


def test_the_weights_sleep_in_main_memory_and_wake_before_the_swap(tiny_llama: Path) -> None:
    generation = build(with_adapter(tiny_llama), tiny_llama, enable_sleep_mode=True)
    for _ in range(2):
        generation.sync_weights()  # as the trainer does after an update
        generation.generate([[1, 2]], None, 1)
    generation.generate([[1, 2]], None, 1)  # for other prompts, before the next update
    sampling = [("wake", "kv_cache"), ("generate", 1), ("sleep", 1)]
    expected: list[Any] = [("sleep", 1)]
    for update in (1, 2, 3):
        swap = [("remove", update - 1)] * (update > 1) + [("add", update, 4)]
        sampling[1] = ("generate", update)
        expected += [("wake", "weights"), *swap, *sampling]
    assert generation.llm.calls == expected


def test_models_without_an_adapter_are_synced_as_in_trl(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    base = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    assert type(build(base, tiny_llama)) is VLLMGeneration


def test_an_adapter_that_cannot_be_swapped_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match="vLLM does not support DoRA scales"):
        build(with_adapter(tiny_llama, use_dora=True), tiny_llama)


def test_the_trainer_hands_over_its_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    args = config(tmp_path, use_vllm=True, vllm_mode="colocate", seed=7)
    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, digit_share)
    generation = trainer.vllm_generation
    assert type(generation) is HotSwappedVllm
    assert generation.generation_kwargs["stop_token_ids"] == trainer.eos_token_ids
    assert generation.llm.settings["dtype"] == "float32"
    assert torch.initial_seed() == 7  # not the one that vLLM set
