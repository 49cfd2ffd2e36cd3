"""Batched generation for validation and evaluation, greedy or sampled."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.model.loading import end_token_ids
from sologrpo.model.memory import TokenBudget, free_bytes
from sologrpo.model.trial import eval_mode
from sologrpo.sampling.decoding import Request, can_generate_fast, generate_fast
from sologrpo.sampling.sampler import FREE_SHARE, bytes_of_batch
from sologrpo.sampling.shared_cache import cached_tokens
from sologrpo.sampling.stopping import StopStrings
from sologrpo.scoring.records import END_TOKEN, LENGTH, STOP_STRING

# Tokens of a batch on a CPU: enough for products of full speed.
CPU_TOKENS = 16384
SHORTEST_ROW = 64  # tokens of a prompt and its completion, to estimate the memory of a batch


@dataclass(frozen=True)
class Completion:
    """One generated completion.

    Attributes:
        text: without special tokens; nothing follows a stop string.
        token_count: tokens generated, including the end-of-text token, and the token that completes
            a stop string, even if `text` ends inside it.
        stop_reason: `stop_string`, `end_token`, or `length` if it reached the limit before both.
    """

    text: str
    token_count: int
    stop_reason: str


def generate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    token_budget: int | None = None,
    stop_strings: Sequence[str] = (),
) -> list[Completion]:
    """Complete every prompt greedily, in the given order.

    Args:
        prompts: token ids, special tokens included (`data.prompt_token_ids`).
        token_budget: see `generate_in_batches`.
        stop_strings: text that ends a completion and stays in it, see `sampling.stopping`.

    Example:
        >>> ids = tokenizer(["1, 2, 3, 4,"])["input_ids"]
        >>> generate_greedily(model, tokenizer, ids, 32, stop_strings=["9"])
        [Completion(text=' 5, 6, 7, 8, 9', token_count=14, stop_reason='stop_string')]
    """
    config = greedy_config(model, tokenizer, max_new_tokens)
    stops = StopStrings(tokenizer, stop_strings)
    batches = generate_in_batches(model, tokenizer, prompts, config, stops, token_budget)
    completions = dict(chain.from_iterable(batches))
    return [completions[i] for i in range(len(prompts))]


def generate_in_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stops: StopStrings,
    token_budget: int | None = None,
    seed: int = 0,
) -> Iterator[list[tuple[int, Completion]]]:
    """Complete every prompt, and yield each batch as soon as it is complete.

    The longest prompts come first, so that the largest batch does, and an out-of-memory error. A
    batch that does not fit into memory is repeated in halves; a single prompt that does not fit
    raises the error.

    Args:
        prompts: token ids. Equal neighbours are computed once: repeat a prompt to sample several
            completions of it.
        token_budget: tokens of one batch: those in the cache, where what prompts share is counted
            once, and completions of full length. None for `default_token_budget`.
        seed: of sampling. Each batch is seeded with it plus the number of prompts that are left,
            so that resuming with the rest of the prompts gives the same completions.

    Yields:
        (index into `prompts`, completion) pairs, one batch at a time.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    budget = TokenBudget(token_budget or default_token_budget(model), "generation")
    end_ids = set(config.eos_token_id)
    with eval_mode(model):
        while order:
            tokens = _tokens_of_batches([prompts[i] for i in order], model, config)
            rows = max(1, bisect_right(tokens, budget.tokens))
            batch = order[:rows]
            if config.do_sample:
                torch.manual_seed(seed + len(order))
            done: list[Completion] = []
            with budget.halved_if_out_of_memory(tokens[rows - 1], rows):
                ids = [list(prompts[i]) for i in batch]
                generated = generate_batch(model, tokenizer, ids, config, stops)
                done = [completion_of(row, tokenizer, end_ids, stops) for row in generated]
                order = order[rows:]
            if done:
                yield list(zip(batch, done, strict=True))


def default_token_budget(model: PreTrainedModel) -> int:
    """Choose the tokens of a batch: on a GPU what fits into its memory, rounded to a power of two.

    Rounded, so that a resumed evaluation has the batches of the first try, and so the same samples,
    although not quite as much memory is free.
    """
    if model.device.type == "cpu":
        return CPU_TOKENS
    # Every row has logits, and at least as many tokens as its prompt and completion.
    row = bytes_of_batch(model, SHORTEST_ROW, rows=1)
    fitting = SHORTEST_ROW * FREE_SHARE * free_bytes(model.device) / row
    return int(2 ** math.floor(math.log2(max(fitting, SHORTEST_ROW))))


def _tokens_of_batches(
    prompts: Sequence[Sequence[int]], model: PreTrainedModel, config: GenerationConfig
) -> list[int]:
    """Count the tokens of a batch of the first prompt, of the first two, and so on."""
    new = int(config.max_new_tokens)
    if can_generate_fast(model, config, {}):
        return cached_tokens(prompts, new)
    width = max(map(len, prompts)) + new
    return [width * rows for rows in range(1, len(prompts) + 1)]


def sampling_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """Build the settings for sampling from the whole vocabulary, or its likeliest `top_p`."""
    config = greedy_config(model, tokenizer, max_new_tokens)
    config.do_sample = True
    config.temperature, config.top_p, config.top_k = temperature, top_p, 0
    return config


def greedy_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> GenerationConfig:
    """Build the settings for greedy decoding, ignoring the model's own generation config."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        # What is not set here is taken from the model's own file; Qwen2.5-Instruct has 1.1.
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(end_token_ids(model, tokenizer)),
        bos_token_id=tokenizer.bos_token_id,
    )


def generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    config: GenerationConfig,
    stops: StopStrings,
) -> list[list[int]]:
    """Generate tokens for each prompt of one batch; what follows an end is padding."""
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    inputs = {name: tensor.to(model.device) for name, tensor in padded.items()}
    if can_generate_fast(model, config, inputs):
        request = Request(**inputs, config=config, stops=stops)
        completion_ids = generate_fast(model, request).completion_ids
    else:
        prompt_T = inputs["input_ids"].size(1)
        criteria = stops.criteria(prompt_T)
        output_ids = model.generate(**inputs, generation_config=config, stopping_criteria=criteria)
        completion_ids = output_ids[:, prompt_T:]
    rows: list[list[int]] = completion_ids.tolist()
    return rows


def completion_of(
    token_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: set[int],
    stops: StopStrings,
) -> Completion:
    """Cut generated tokens where the completion ends, and decode it."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in end_ids), None)
    # The stop string comes first if there are both: after it there is only padding.
    stop = stops.length(token_ids[:end])
    kept = token_ids[: end if stop is None else stop]
    text = stops.cut(tokenizer.decode(kept, skip_special_tokens=True))
    ended = LENGTH if end is None else END_TOKEN
    return Completion(text, len(kept), ended if stop is None else STOP_STRING)
