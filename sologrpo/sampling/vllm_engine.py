"""vLLM: an engine in this process, on the weights of a model that is loaded already.

The weights are handed over once, one tensor at a time, so that vLLM computes on exactly what is
trained: 4-bit weights are unpacked to the rounded values that the trainer computes with. They are
never sent again. What training changes is the adapter, which is swapped (`HotSwappedLLM`).

Tested with vLLM 0.32.0. It is optional, and imported where it is used.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, PeftModel
from peft.utils.integrations import dequantize_bnb_weight
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.base.errors import InputError, RunError, first_line
from sologrpo.model.loading import dtype_name
from sologrpo.model.memory import is_out_of_memory
from sologrpo.model.merging import merge_obstacle

# MaxLoRARanks of vLLM 0.32.0, vllm/config/lora.py.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Initialisations that leave the base weights as they are: vllm/lora/peft_helper.py, 0.32.0.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
MEMORY_BACKED = Path("/dev/shm")  # of Linux
_engines = count(1)


def start_vllm(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    /,
    **settings: Any,
) -> Any:
    """Start a `vllm.LLM` in this process, with the weights of a model, without its adapter.

    The model is unquantised or in 4 bits, and is not changed; settings are those of `vllm.LLM`.

    Raises:
        InputError: if the engine cannot start.
    """
    quiet_vllm()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights are in this process
    # On a CPU, vLLM would pin each thread to a core, also those that train.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with temporary_folder() as folder, _refusing_to_start():
        vllm = import_module("vllm")
        _save_config(model, tokenizer, folder)
        settings |= {
            "model": str(folder),
            "dtype": dtype_name(dtype),
            "load_format": _register_loader(base_weights(model)),
            "quantization": None,  # the weights are unpacked
        }
        return vllm.LLM(**settings)


@contextmanager
def temporary_folder(size: int = 0) -> Iterator[Path]:
    """Make a folder in memory, or on disk where `size` bytes have no room; remove it afterwards."""
    roomy = MEMORY_BACKED.is_dir() and shutil.disk_usage(MEMORY_BACKED).free > 2 * size
    where = MEMORY_BACKED if roomy else None
    with tempfile.TemporaryDirectory(prefix="sologrpo-vllm-", dir=where) as folder:
        yield Path(folder)


@contextmanager
def _refusing_to_start() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # vLLM raises whatever its parts raise
        raise InputError(
            f"vLLM cannot start: {first_line(error)}: set use_vllm: false, or change "
            "vllm_gpu_memory_utilization or vllm_max_model_length"
        ) from error


def quiet_vllm() -> None:
    """Silence vLLM's own log, in its processes too, unless its variable asks for it."""
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.getLogger("vllm").setLevel(logging.ERROR)


# -- the base weights ----------------------------------------------------------------------------


def base_weights(model: PreTrainedModel | PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights by name, one at a time, 4-bit ones unpacked, an adapter left out."""
    prefix = "base_model.model." if isinstance(model, PeftModel) else ""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        is_4bit = isinstance(parameter, bnb.nn.Params4bit)
        with torch.no_grad():
            weight = dequantize_bnb_weight(parameter) if is_4bit else parameter.data
        yield name.removeprefix(prefix).replace(".base_layer.", "."), weight


def save_base(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save the base model, 4-bit weights unpacked, for a vLLM that runs in another process.

    An adapter is left out, and the folder must exist.
    """
    _save_config(model, tokenizer, folder)
    weights = {name: weight.cpu().contiguous() for name, weight in base_weights(model)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _save_config(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save what vLLM reads besides the weights: an unquantised model of the same shape."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config = type(base.config).from_dict(base.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _register_loader(weights: Iterator[tuple[str, torch.Tensor]]) -> str:
    """Register a load format that takes these weights; return its name."""
    loaders = import_module("vllm.model_executor.model_loader")

    class FromMemory(loaders.BaseModelLoader):  # type: ignore[misc, name-defined]
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            loaded = model.load_weights(weights)
            missing = {name for name, _ in model.named_parameters()} - (loaded or set())
            if missing:
                raise ValueError(f"no weights for {min(missing)}")

    name = f"sologrpo-{next(_engines)}"
    loaders.register_model_loader(name)(FromMemory)
    return name


# -- the adapter ---------------------------------------------------------------------------------


def swap_obstacle(model: PeftModel) -> str | None:
    """Name what vLLM does not support in this adapter; None if it supports all of it.

    vllm/lora/peft_helper.py of 0.32.0 would refuse most of it, but after the model is loaded.
    """
    config = model.active_peft_config
    if not isinstance(config, LoraConfig):
        return f"an adapter of type {config.peft_type}"
    if obstacle := merge_obstacle(model):
        return obstacle
    if config.modules_to_save:
        return "lora_modules_to_save"
    if config.bias != "none":
        return "trained biases"
    if getattr(config, "trainable_token_indices", None):
        return "trained tokens"
    if config.layer_replication:
        return "replicated layers"
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        return f"init_lora_weights {init}, which changes the base weights"
    if lora_rank(config) > LORA_RANKS[-1]:
        return f"LoRA of rank {lora_rank(config)}, above {LORA_RANKS[-1]}"
    return None


def check_swappable(model: PeftModel, in_8bit: bool = False) -> None:
    """Refuse an adapter that vLLM cannot sample with; the model may be without weights."""
    if obstacle := "8-bit weights" if in_8bit else swap_obstacle(model):
        raise InputError(f"use_vllm: vLLM does not support {obstacle}: leave one of them out")


def lora_rank(config: LoraConfig) -> int:
    """Return the highest rank of an adapter's layers."""
    ranks: list[int] = [config.r, *(config.rank_pattern or {}).values()]
    return max(ranks)


def lora_settings(config: LoraConfig) -> dict[str, Any]:
    """Build the settings of `vllm.LLM` for one adapter, whose `swap_obstacle` is None."""
    rank = next(rank for rank in LORA_RANKS if rank >= lora_rank(config))
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


class HotSwappedLLM:
    """A `vllm.LLM` that samples with the latest adapter; everything else is passed on.

    Args:
        llm: started with `lora_settings`.

    Example:
        >>> llm = HotSwappedLLM(start_vllm(model, tokenizer, dtype, **lora_settings(config)))
        >>> llm.load_adapter(model)  # after every update
        >>> llm.generate(prompts, sampling_params=settings)
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._request: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def load_adapter(self, model: PeftModel) -> None:
        """Load the adapter as it is now, under a new id, and remove the one before.

        vLLM keeps its own copy, so the files are removed at once. Its prefix cache distinguishes
        adapters by their name (vllm/v1/core/kv_cache_utils.py:578, 0.32.0): nothing that was
        computed with another one is used again.

        Raises:
            RunError: if vLLM does not take the adapter.
        """
        requests = import_module("vllm.lora.request")
        number = 1 if self._request is None else self._request.lora_int_id + 1
        with save_adapter_files(model) as folder, _stopping("load the adapter"):
            request = requests.LoRARequest(f"update-{number}", number, str(folder))
            if self._request is not None:
                self._llm.llm_engine.remove_lora(self._request.lora_int_id)
            self._llm.llm_engine.add_lora(request)
        self._request = request

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `vllm.LLM` does, with the adapter."""
        with _stopping("sample"):
            return self._llm.generate(*args, **kwargs, lora_request=self._request)

    def sleep(self, level: int = 1) -> Any:
        """Free the GPU's memory, but keep the weights in main memory: nothing sends them again.

        The level is not taken: TRL asks for 2, which discards the weights.
        """
        return self._llm.sleep(level=1)


@contextmanager
def save_adapter_files(
    model: PeftModel, weights: dict[str, torch.Tensor] | None = None
) -> Iterator[Path]:
    """Save the active adapter to a folder in memory, which is removed after the block.

    The model is not sharded over processes, and gives the weights if there are no others.
    """
    adapter = model.active_adapter
    size = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    with temporary_folder(size) as folder:
        model.save_pretrained(
            str(folder), selected_adapters=[adapter], save_embedding_layers=False,
            state_dict=weights,
        )  # fmt: skip
        yield folder if adapter == "default" else folder / adapter


@contextmanager
def _stopping(action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise RunError(
            f"vLLM could not {action}: {first_line(error)}: --resume continues from the last "
            "checkpoint; use_vllm: false samples without vLLM"
        ) from error
