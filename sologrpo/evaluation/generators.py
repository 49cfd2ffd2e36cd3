"""Generate the completions of an evaluation, with one of two engines.

An engine takes prompts as token ids, and yields batches of (index of the prompt, completion).
Prompts, stop strings and end tokens are the same for both. So are the completions, except where
two tokens are almost equally likely and the engines round differently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from zlib import crc32

from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.errors import InputError, RunError, refusing
from sologrpo.model.loading import dtype_name
from sologrpo.model.memory import release_unused
from sologrpo.sampling.generation import (
    Completion,
    completion_of,
    generate_in_batches,
    greedy_config,
    sampling_config,
)
from sologrpo.sampling.stopping import StopStrings
from sologrpo.sampling.vllm_engine import (
    lora_settings,
    quiet_vllm,
    save_adapter_files,
    save_base,
    swap_obstacle,
)

Prompts = Sequence[Sequence[int]]
Batches = Iterator[list[tuple[int, Completion]]]


# vLLM would reserve nine tenths of the main memory, and compile for minutes.
VLLM_ON_CPU = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}


@dataclass(frozen=True)
class Generator:
    """A model with everything that decides its completions of given prompts.

    Attributes:
        max_new_tokens: limit of a completion, in tokens.
        stop_strings: text that ends a completion, besides the end tokens.
        engine: a key of `ENGINES`.
        seed: of sampling.
        temperature: of sampling.
        top_p: of sampling, from 0 to 1.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    engine: str = "transformers"
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0

    def complete(
        self, prompts: Prompts, greedy: bool = True, names: Sequence[object] = ()
    ) -> Batches:
        """Complete prompts greedily, or by sampling.

        Args:
            prompts: token ids of each prompt.
            greedy: take the likeliest token at every step.
            names: of the completions, by which vLLM seeds each; none if nothing is sampled.

        Yields:
            (index of the prompt, completion) pairs, one batch at a time, in any order.
        """
        model, tokenizer, limit = self.model, self.tokenizer, self.max_new_tokens
        if greedy:
            config = greedy_config(model, tokenizer, limit)
        else:
            config = sampling_config(model, tokenizer, limit, self.temperature, self.top_p)
        return ENGINES[self.engine](self, prompts, config, names)


def _generate_with_our_loop(
    generator: Generator, prompts: Prompts, config: GenerationConfig, names: Sequence[object]
) -> Batches:
    return generate_in_batches(
        generator.model, generator.tokenizer, prompts, config,
        stop_strings=generator.stop_strings, seed=generator.seed,
    )  # fmt: skip


def _generate_with_vllm(
    generator: Generator, prompts: Prompts, config: GenerationConfig, names: Sequence[object]
) -> Batches:
    """Generate with vLLM from the same weights, and yield each completion when it has ended.

    Raises:
        InputError: if vLLM cannot start, or not with this adapter.
        RunError: if its process ends.
    """
    tokenizer = generator.tokenizer
    stops, end_ids = StopStrings(tokenizer, generator.stop_strings), set(config.eos_token_id)
    settings = stops.vllm_settings() | {
        "max_tokens": config.max_new_tokens,
        "stop_token_ids": sorted(end_ids),
        "temperature": config.temperature if config.do_sample else 0.0,
        "top_p": config.top_p if config.do_sample else 1.0,
    }
    # One seed per completion, because samples of a problem share its prompt. It does not depend on
    # the order, so that a resumed evaluation samples the rest as it would have been.
    seeds = [crc32(f"{generator.seed} {name}".encode()) for name in names or range(len(prompts))]
    width = max(map(len, prompts)) + int(config.max_new_tokens)
    with _vllm_engine(generator, width) as (llm, adapter):
        sampling = import_module("vllm").SamplingParams
        llm.enqueue(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [sampling(seed=seed, **settings) for seed in seeds],
            lora_request=adapter,
            use_tqdm=False,
        )
        while llm.llm_engine.has_unfinished_requests():
            ended = llm.llm_engine.step()  # its `request_id` counts from 0
            ids = [(int(output.request_id), list(output.outputs[0].token_ids)) for output in ended]
            if ids:
                yield [(i, completion_of(row, tokenizer, end_ids, stops)) for i, row in ids]


@contextmanager
def _vllm_engine(generator: Generator, width: int) -> Iterator[tuple[Any, Any]]:
    """Start vLLM in a separate process, whose end frees all of its memory.

    Args:
        generator: its model may be in 4 bits, and may have an adapter.
        width: tokens of the longest prompt and completion.

    Yields:
        A `vllm.LLM` with the base weights, and the request that names the adapter, or None.
    """
    model, device, request = generator.model, generator.model.device, None
    settings: dict[str, Any] = {"max_model_len": width, "seed": generator.seed}
    settings |= VLLM_ON_CPU if device.type == "cpu" else {}
    quiet_vllm()
    # Not plain imports: vLLM is optional, and the type checker would ask for it.
    vllm, exceptions = import_module("vllm"), import_module("vllm.v1.engine.exceptions")
    with ExitStack() as stack, refusing("engine vllm"):
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="sologrpo-vllm-")))
        save_base(model, generator.tokenizer, folder)
        if isinstance(model, PeftModel):
            if obstacle := swap_obstacle(model):
                raise InputError(f"engine vllm does not support {obstacle}: use a merged precision")
            settings |= lora_settings(model.active_peft_config)
            adapter = stack.enter_context(save_adapter_files(model))
            request = import_module("vllm.lora.request").LoRARequest("adapter", 1, str(adapter))
        stack.callback(model.to, device)
        model.to("cpu")
        release_unused()
        llm = vllm.LLM(str(folder), dtype=dtype_name(model.dtype), **settings)
        stack.callback(llm.llm_engine.engine_core.shutdown)
        _report_death(llm.llm_engine.engine_core, exceptions.EngineDeadError())
        kept = stack.pop_all()
    with kept:
        try:
            yield llm, request
        except exceptions.EngineDeadError as error:
            raise RunError(
                "vLLM's process has ended: what it answered is kept: continue with --resume"
            ) from error


def _report_death(core: Any, error: Exception) -> None:
    """Raise an error in `step` when vLLM's process is killed.

    vLLM 0.32.0 (v1/engine/core_client.py:981 and 811-823) notices it, and then waits forever for
    the next completion.
    """
    if not hasattr(core, "outputs_queue"):  # VLLM_ENABLE_V1_MULTIPROCESSING=0: it is this process
        return
    sentinels = [process.sentinel for process in core.resources.engine_manager.processes]

    def watch() -> None:
        wait(sentinels)
        core.outputs_queue.put(error)

    Thread(target=watch, daemon=True).start()


Engine = Callable[[Generator, Prompts, GenerationConfig, Sequence[object]], Batches]
ENGINES: dict[str, Engine] = {
    "transformers": _generate_with_our_loop,
    "vllm": _generate_with_vllm,
}
