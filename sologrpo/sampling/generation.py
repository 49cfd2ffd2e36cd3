"""Batched generation for validation and evaluation: greedy unless told otherwise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.model.loading import end_token_ids
from sologrpo.model.memory import TokenBudget
from sologrpo.sampling.loop import can_generate_fast, generate_fast
from sologrpo.sampling.stopping import StopStrings
from sologrpo.scoring.records import END_TOKEN, LENGTH, STOP_STRING


@dataclass(frozen=True)
class Completion:
    """One generated completion.

    Attributes:
        text: decoded, without special tokens; nothing follows a stop string.
        token_count: tokens generated, the end-of-text token included. The token that completes
            a stop string counts whole, even if `text` ends within it.
        stop_reason: `stop_string`, `end_token`, or `length` if it met the length limit before both.
    """

    text: str
    token_count: int
    stop_reason: str


def generate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    token_budget: int = 16384,
    stop_strings: Sequence[str] = (),
) -> list[Completion]:
    """Complete every prompt, in the given order.

    Args:
        prompts: token ids of the prompts, special tokens included (`data.prompt_token_ids`).
        max_new_tokens: limit of a completion, in tokens.
        token_budget: tokens (prompt and completion, padding counted) of one batch.
        stop_strings: text that ends a completion and stays in it, see `sampling.stopping`.

    Raises:
        InputError: if a stop string is empty.

    Example:
        >>> ids = tokenizer(["1, 2, 3, 4,"])["input_ids"]
        >>> generate_greedily(model, tokenizer, ids, 32, stop_strings=["9"])
        [Completion(text=' 5, 6, 7, 8, 9', token_count=14, stop_reason='stop_string')]
    """
    config = greedy_config(model, tokenizer, max_new_tokens)
    batches = generate_in_batches(model, tokenizer, prompts, config, token_budget, stop_strings)
    completions = dict(chain.from_iterable(batches))
    return [completions[i] for i in range(len(prompts))]


def generate_in_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    token_budget: int = 16384,
    stop_strings: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[list[tuple[int, Completion]]]:
    """Complete every prompt, and hand out each batch as soon as it is done.

    The longest prompts come first, so that the largest batch, and an out-of-memory error, do. A
    batch that does not fit into memory is tried again in halves; one prompt that does not is an
    error.

    Args:
        prompts: token ids; equal neighbours are computed once, which is how to sample several
            completions of a prompt.
        config: `greedy_config`, or `sampling_config`.
        token_budget: tokens (prompt and completion, padding counted) of one batch.
        stop_strings: text that ends a completion and stays in it.
        seed: of sampling. Each batch draws its own numbers from it and from how many prompts are
            left, so that whoever goes on with the rest of the prompts gets the same completions.

    Yields:
        (index into `prompts`, completion) pairs, one batch at a time.
    """
    stops = StopStrings(tokenizer, stop_strings)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    budget = TokenBudget(token_budget, "generation")
    was_training = model.training
    model.eval()
    try:
        while order:
            width = len(prompts[order[0]]) + int(config.max_new_tokens)
            batch = order[: max(1, budget.tokens // width)]
            if config.do_sample:
                torch.manual_seed(seed + len(order))
            done: list[Completion] = []
            with budget.halved_if_out_of_memory(width * len(batch), rows=len(batch)):
                ids = [list(prompts[i]) for i in batch]
                done = _generate_batch(model, tokenizer, ids, config, stops)
                order = order[len(batch) :]
            if done:
                yield list(zip(batch, done, strict=True))
    finally:
        model.train(was_training)


def sampling_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """Settings for drawing completions, from the whole vocabulary or its likeliest `top_p`."""
    config = greedy_config(model, tokenizer, max_new_tokens)
    config.do_sample = True
    config.temperature, config.top_p, config.top_k = temperature, top_p, 0
    return config


def greedy_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> GenerationConfig:
    """Settings for the likeliest token at every step, whatever the model's own file asks for."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        # What is not set here comes from the model's own file; Qwen2.5-Instruct asks for 1.1.
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(end_token_ids(model, tokenizer)),
        bos_token_id=tokenizer.bos_token_id,
    )


def _generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[list[int]],
    config: GenerationConfig,
    stops: StopStrings,
) -> list[Completion]:
    padded = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    inputs = {name: tensor.to(model.device) for name, tensor in padded.items()}
    prompt_T = inputs["input_ids"].size(1)
    if can_generate_fast(model, config, inputs):
        output_ids = generate_fast(model, **inputs, config=config, stops=stops)
    else:
        criteria = stops.criteria(prompt_T)
        output_ids = model.generate(**inputs, generation_config=config, stopping_criteria=criteria)
    end_ids = set(config.eos_token_id)
    return [
        completion_of(row, tokenizer, end_ids, stops) for row in output_ids[:, prompt_T:].tolist()
    ]


def completion_of(
    token_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: set[int],
    stops: StopStrings,
) -> Completion:
    """Cut generated tokens where the completion ends, and decode it."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in end_ids), None)
    # The stop string comes first if there are both: behind it there is only padding.
    stop = stops.length(token_ids[:end])
    kept = token_ids[: end if stop is None else stop]
    text = stops.cut(tokenizer.decode(kept, skip_special_tokens=True))
    ended = LENGTH if end is None else END_TOKEN
    return Completion(text, len(kept), ended if stop is None else STOP_STRING)
