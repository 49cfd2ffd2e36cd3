"""Generate the completions of an evaluation, with one of two engines.

An engine takes prompts as token ids, and yields batches of (index of the prompt, completion).
Prompts, stop strings and end tokens are the same for both. So are the completions, except where
two tokens are almost equally likely and the engines round differently.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

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

Prompts = Sequence[Sequence[int]]
Batches = Iterator[list[tuple[int, Completion]]]

# Prompts per call of vLLM: enough to keep a GPU busy, few enough that an interrupted evaluation
# loses little.
PROMPTS_PER_CALL = 512


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

    def complete(self, prompts: Prompts, greedy: bool = True) -> Batches:
        """Complete prompts greedily, or by sampling.

        Args:
            prompts: token ids of each prompt.
            greedy: take the likeliest token at every step.

        Yields:
            (index of the prompt, completion) pairs, one batch at a time, in any order.
        """
        model, tokenizer, limit = self.model, self.tokenizer, self.max_new_tokens
        if greedy:
            config = greedy_config(model, tokenizer, limit)
        else:
            config = sampling_config(model, tokenizer, limit, self.temperature, self.top_p)
        return ENGINES[self.engine](self, prompts, config)


def _generate_with_our_loop(
    generator: Generator, prompts: Prompts, config: GenerationConfig
) -> Batches:
    return generate_in_batches(
        generator.model, generator.tokenizer, prompts, config,
        stop_strings=generator.stop_strings, seed=generator.seed,
    )  # fmt: skip


def _generate_with_vllm(
    generator: Generator, prompts: Prompts, config: GenerationConfig
) -> Batches:
    """Generate with vLLM from a saved copy of the merged weights.

    The model itself waits in main memory until vLLM is done.
    """
    # Not a plain import: vLLM is optional, and the type checker would ask for it.
    vllm = import_module("vllm")
    model, tokenizer, device = generator.model, generator.tokenizer, generator.model.device
    stops, end_ids = StopStrings(tokenizer, generator.stop_strings), set(config.eos_token_id)
    settings = stops.vllm_settings() | {
        "max_tokens": config.max_new_tokens,
        "stop_token_ids": sorted(end_ids),
        "temperature": config.temperature if config.do_sample else 0.0,
        "top_p": config.top_p if config.do_sample else 1.0,
    }
    with tempfile.TemporaryDirectory(prefix="sologrpo-vllm-") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model.to("cpu")
        release_unused()
        try:
            llm = vllm.LLM(
                model=folder,
                dtype=dtype_name(model.dtype),
                max_model_len=max(map(len, prompts)) + config.max_new_tokens,
                seed=generator.seed,
            )
            for start in range(0, len(prompts), PROMPTS_PER_CALL):
                part = prompts[start : start + PROMPTS_PER_CALL]
                # One seed per request, because samples of a problem share its prompt. It depends
                # on what is left, so that a resumed evaluation does not sample the same again.
                seeds = [generator.seed + len(prompts) - start - i for i in range(len(part))]
                outputs = llm.generate(
                    [{"prompt_token_ids": list(prompt)} for prompt in part],
                    [vllm.SamplingParams(seed=seed, **settings) for seed in seeds],
                    use_tqdm=False,
                )
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
                completions = [completion_of(ids, tokenizer, end_ids, stops) for ids in tokens]
                yield list(enumerate(completions, start))
        finally:
            llm = None  # frees its memory for the model
            release_unused()
            model.to(device)


ENGINES: dict[str, Callable[[Generator, Prompts, GenerationConfig], Batches]] = {
    "transformers": _generate_with_our_loop,
    "vllm": _generate_with_vllm,
}
