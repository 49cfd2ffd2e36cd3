"""Batched generation for validation and evaluation: greedy unless told otherwise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.sampling import can_generate_fast, generate_fast


@dataclass(frozen=True)
class Completion:
    """One generated completion.

    Attributes:
        text: decoded, without special tokens.
        token_count: tokens generated, the end-of-text token included.
        truncated: it met the length limit before it ended by itself.
    """

    text: str
    token_count: int
    truncated: bool


def generate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    token_budget: int = 16384,
) -> list[Completion]:
    """Complete every rendered prompt, in the given order.

    Args:
        prompts: rendered prompts, special tokens included.
        max_new_tokens: limit of a completion, in tokens.
        token_budget: tokens (prompt and completion, padding counted) of one batch.
    """
    ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    config = _greedy_config(model, tokenizer, max_new_tokens)
    completions: list[Completion | None] = [None] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        for batch in _batches_by_length([len(row) for row in ids], max_new_tokens, token_budget):
            done = _generate_batch(model, tokenizer, [ids[i] for i in batch], config)
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
) -> list[Completion]:
    padded = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    inputs = {name: tensor.to(model.device) for name, tensor in padded.items()}
    if can_generate_fast(model, config, inputs):
        output_ids = generate_fast(model, **inputs, config=config)
    else:
        output_ids = model.generate(**inputs, generation_config=config)
    prompt_T = inputs["input_ids"].size(1)
    end_ids = set(config.eos_token_id)
    return [_completion(row, tokenizer, end_ids) for row in output_ids[:, prompt_T:].tolist()]


def _completion(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, end_ids: set[int]
) -> Completion:
    end = next((i for i, token in enumerate(token_ids) if token in end_ids), None)
    kept = token_ids if end is None else token_ids[: end + 1]
    text = tokenizer.decode(kept, skip_special_tokens=True)
    return Completion(text=text, token_count=len(kept), truncated=end is None)
