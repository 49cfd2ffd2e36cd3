"""Batched generation for validation and evaluation: greedy unless told otherwise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.sampling import can_generate_fast, generate_fast
from sologrpo.stopping import StopStrings


@dataclass(frozen=True)
class Completion:
    """One generated completion.

    Attributes:
        text: decoded, without special tokens; nothing follows a stop string.
        token_count: tokens generated, the end-of-text token included. The token that completes
            a stop string counts whole, even if `text` ends within it.
        truncated: it met the length limit before an end-of-text token or a stop string.
    """

    text: str
    token_count: int
    truncated: bool


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
        stop_strings: text that ends a completion and stays in it, as in `sologrpo.stopping`.

    Raises:
        InputError: if a stop string is empty.

    Example:
        >>> ids = tokenizer(["1, 2, 3, 4,"])["input_ids"]
        >>> generate_greedily(model, tokenizer, ids, 32, stop_strings=["9"])
        [Completion(text=' 5, 6, 7, 8, 9', token_count=14, truncated=False)]
    """
    stops = StopStrings(tokenizer, stop_strings)
    ids = [list(prompt) for prompt in prompts]
    config = _greedy_config(model, tokenizer, max_new_tokens)
    completions: list[Completion | None] = [None] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        for batch in _batches_by_length([len(row) for row in ids], max_new_tokens, token_budget):
            done = _generate_batch(model, tokenizer, [ids[i] for i in batch], config, stops)
            for i, completion in zip(batch, done, strict=True):
                completions[i] = completion
    finally:
        model.train(was_training)
    return [completion for completion in completions if completion is not None]


def _greedy_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        # What is not set here comes from the model's own file; Qwen2.5-Instruct asks for 1.1.
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(end_token_ids(model, tokenizer)),
        bos_token_id=tokenizer.bos_token_id,
    )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Token ids that end a completion: the tokenizer's, and the model's where it lists more."""
    listed = model.generation_config.eos_token_id
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return {int(token) for token in ids if token is not None}


def _batches_by_length(
    lengths: Sequence[int], max_new_tokens: int, token_budget: int
) -> Iterator[list[int]]:
    """Longest prompts first, so that the largest batch, and an out-of-memory error, come first."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    start = 0
    while start < len(order):
        size = max(1, token_budget // (lengths[order[start]] + max_new_tokens))
        yield order[start : start + size]
        start += size


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
        _completion(row, tokenizer, end_ids, stops) for row in output_ids[:, prompt_T:].tolist()
    ]


def _completion(
    token_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: set[int],
    stops: StopStrings,
) -> Completion:
    end = next((i + 1 for i, token in enumerate(token_ids) if token in end_ids), None)
    # The stop string comes first if there are both: behind it there is only padding.
    stop = stops.length(token_ids[:end])
    kept = token_ids[: end if stop is None else stop]
    text = stops.cut(tokenizer.decode(kept, skip_special_tokens=True))
    return Completion(text=text, token_count=len(kept), truncated=end is None and stop is None)
