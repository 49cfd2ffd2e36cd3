"""A stand-in for the package `vllm` that records its calls. tests/engines has the real one."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class LLM:
    """Loads its weights as vLLM does; `calls` are all that it was asked for."""

    loaders: dict[str, type]

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(settings.get("seed", 0))
        self.settings, self.calls = settings, []
        self.config = json.loads((Path(settings["model"]) / "config.json").read_text())
        self.has_tokenizer = (Path(settings["model"]) / "tokenizer.json").is_file()
        self.weights: dict[str, torch.Tensor] = {}
        self.loaders[settings["load_format"]]().load_weights(self, None)
        self.llm_engine = SimpleNamespace(
            add_lora=self.add_lora, remove_lora=lambda number: self.calls.append(("remove", number))
        )

    def load_weights(self, weights: Any) -> set[str]:
        self.weights = {name: weight.clone() for name, weight in weights}
        return set(self.weights)

    def named_parameters(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.weights]

    def add_lora(self, request: LoRARequest) -> None:
        config = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        self.calls.append(("add", request.lora_int_id, config["r"]))
        self.folder = Path(request.lora_path)

    def generate(self, prompts: list[Any], **settings: Any) -> list[Any]:
        self.calls.append(("generate", settings["lora_request"].lora_int_id))
        sampled = SimpleNamespace(
            token_ids=[5], logprobs=[{5: SimpleNamespace(rank=1, logprob=-6)}]
        )
        return [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[sampled])
            for prompt in prompts
        ]

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))


def install(patch: pytest.MonkeyPatch) -> type[LLM]:
    """Make the stand-in importable; return its class."""
    loaders: dict[str, type] = {}

    def register_model_loader(name: str) -> Any:
        return lambda loader: loaders.setdefault(name, loader)

    kind = type("LLM", (LLM,), {"loaders": loaders})
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": kind, "SamplingParams": dict},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {
            "BaseModelLoader": object,
            "register_model_loader": register_model_loader,
        },
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    return kind
