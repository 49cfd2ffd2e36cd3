"""vLLM that samples with hot-swapped adapters, in place of TRL's weight sync.

TRL merges the adapter before every sync and takes it out again. Half precision and NF4 round at
both, so the frozen weights drift, and vLLM samples from another model than is trained.
"""

from typing import Any

from accelerate import Accelerator
from peft import PeftModel
from trl.distributed import DistributedBackend
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from sologrpo.model.merging import working_dtype
from sologrpo.sampling.vllm_engine import HotSwappedLLM, check_swappable, lora_settings, start_vllm
from sologrpo.sampling.vllm_server import AdapterServer
from sologrpo.training.rollout import HALF
from sologrpo.training.trl_patches import replaced


class HotSwappedVllm(VLLMGeneration):  # type: ignore[misc]
    """TRL's colocated vLLM, on the base weights of the trainer, with its adapter.

    In trl/generation/vllm_generation.py of TRL 1.16.0 `_init_vllm` (341-372) makes an `LLM` as
    `self.llm`, and `generate` calls its `wake_up`, `generate` and `sleep`, and `sync_weights` where
    it asked for level 2 (583 and 761-763).
    """

    def _init_vllm(self) -> None:
        check_swappable(self.model)
        with replaced(vllm_generation, "LLM", self._start):
            super()._init_vllm()

    def _start(self, **settings: Any) -> HotSwappedLLM:
        settings |= lora_settings(self.model.active_peft_config)
        dtype = HALF.get(self.accelerator.mixed_precision) or working_dtype(self.model)
        return HotSwappedLLM(start_vllm(self.model, self.processing_class, dtype, **settings))

    def sync_weights(self) -> None:
        """Hand vLLM the adapter as it is now."""
        if self._llm_weights_sleeping:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping: bool = False
        self.llm.load_adapter(self.model)


class ServedVllm(VLLMGeneration):  # type: ignore[misc]
    """TRL's client of a vLLM server, which is given the adapter instead of merged weights.

    Relies on trl/generation/vllm_generation.py of TRL 1.16.0: `_init_vllm` (284-293) makes a
    `VLLMClient` in the main process, and `generate` samples with it (602-650).
    """

    def _init_vllm(self) -> None:
        with replaced(vllm_generation, "VLLMClient", AdapterServer):
            super()._init_vllm()
        if self.accelerator.is_main_process:
            self.vllm_client.check_log_probs()

    def sync_weights(self) -> None:
        """Hand the server the adapter as it is now."""
        if self.accelerator.is_main_process:
            self.vllm_client.load(self.model)


def build_vllm(model: Any, accelerator: Accelerator, mode: str, **settings: Any) -> VLLMGeneration:
    """Build what TRL's trainer samples with; only an adapter of unsharded weights is swapped."""
    backend = DistributedBackend(accelerator)
    is_sharded = backend.is_fsdp or backend.is_zero3
    swapping = {"colocate": HotSwappedVllm, "server": ServedVllm}
    swaps = isinstance(model, PeftModel) and not is_sharded
    kind = swapping.get(mode, VLLMGeneration) if swaps else VLLMGeneration
    return kind(model=model, accelerator=accelerator, mode=mode, **settings)
