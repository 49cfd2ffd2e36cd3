"""What completes the prompts of an evaluation: one function per engine, behind one signature.

An engine takes prompts as token ids, and hands out batches of (index of the prompt, completion)
as they are done. Prompts, stop rule and end tokens are the same whichever runs, and so are the
records, but for what rounding does to a close choice between two tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.model.memory import release_unused
from sologrpo.sampling.generation import (
    Completion,
    completion_of,
    generate_in_batches,
    greedy_config,
    sampling_config,
)
from sologrpo.sampling.stopping import StopStrings

Prompts = Sequence[Sequence[int]]
Batches = Iterator[list[tuple[int, Completion]]]

# Prompts handed over at once: enough to keep a GPU busy, few enough that an interrupted evaluation
# loses little.
PROMPTS_AT_ONCE = 512


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Generator:
    """A model with everything that decides its completions of given prompts.

    Attributes:
        max_new_tokens: limit of a completion.
        stop_strings: text that ends a completion, beside the end tokens.
        engine: a key of `ENGINES`.
        seed: of sampling.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    engine: str = "transformers"
    seed: int = 0

    def complete(self, prompts: Prompts, sampling: Sampling | None = None) -> Batches:
        """Complete prompts greedily, or by sampling; batches come in any order."""
        if sampling is None:
            config = greedy_config(self.model, self.tokenizer, self.max_new_tokens)
        else:
            config = sampling_config(
                self.model, self.tokenizer, self.max_new_tokens, sampling.temperature,
                sampling.top_p,
            )  # fmt: skip
        return ENGINES[self.engine](self, prompts, config)


def _with_our_loop(generator: Generator, prompts: Prompts, config: GenerationConfig) -> Batches:
    return generate_in_batches(
        generator.model, generator.tokenizer, prompts, config,
        stop_strings=generator.stop_strings, seed=generator.seed,
    )  # fmt: skip


def _with_vllm(generator: Generator, prompts: Prompts, config: GenerationConfig) -> Batches:
    """vLLM on a copy of the merged weights; the model waits in main memory meanwhile."""
    # Not imported by name: vLLM is optional, and the type checker would ask for it.
    vllm = import_module("vllm")
    model, tokenizer = generator.model, generator.tokenizer
    stops, end_ids = StopStrings(tokenizer, generator.stop_strings), set(config.eos_token_id)
    settings = {"max_tokens": config.max_new_tokens, "stop_token_ids": sorted(end_ids)}
    settings |= stops.vllm_settings()
    settings |= (
        {"temperature": config.temperature, "top_p": config.top_p}
        if config.do_sample
        else {"temperature": 0.0}
    )
    device = model.device
    with tempfile.TemporaryDirectory(prefix="sologrpo-vllm-") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model.to("cpu")
        release_unused()
        try:
            llm = vllm.LLM(
                model=folder,
                dtype=str(model.dtype).removeprefix("torch."),
                max_model_len=max(map(len, prompts)) + config.max_new_tokens,
                seed=generator.seed,
            )
            for start in range(0, len(prompts), PROMPTS_AT_ONCE):
                part = prompts[start : start + PROMPTS_AT_ONCE]
                # A seed for every request: samples of one problem have the same prompt. It depends
                # on what is left, so that a resumed evaluation does not draw the same again.
                seeds = [generator.seed + len(prompts) - start - i for i in range(len(part))]
                requests = [{"prompt_token_ids": list(prompt)} for prompt in part]
                params = [vllm.SamplingParams(seed=seed, **settings) for seed in seeds]
                done = llm.generate(requests, params, use_tqdm=False)
                yield [
                    (
                        row,
                        completion_of(list(output.outputs[0].token_ids), tokenizer, end_ids, stops),
                    )
                    for row, output in enumerate(done, start)
                ]
        finally:
            llm = None  # its memory is wanted for the model
            release_unused()
            model.to(device)


ENGINES: dict[str, Callable[[Generator, Prompts, GenerationConfig], Batches]] = {
    "transformers": _with_our_loop,
    "vllm": _with_vllm,
}
