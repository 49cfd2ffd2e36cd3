"""Generation: batches, padding and order change nothing about a completion."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig

from sologrpo.data import render_prompt
from sologrpo.generation import Completion, end_token_ids, generate_greedily
from sologrpo.model import load_base_model, load_tokenizer
from sologrpo.prompts import PROMPT_FORMATS
from tiny import rows

NEW_TOKENS = 40


@cache
def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = ModelConfig(model_name_or_path=str(path), dtype="float32", load_in_4bit=False)
    return load_base_model(config), load_tokenizer(str(path))


def ragged_prompts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    xml = PROMPT_FORMATS["xml"]
    questions = [row["question"] + " Why?" * (i * 3 % 7) for i, row in enumerate(rows(10))]
    return [render_prompt(xml.messages(question), tokenizer) for question in questions]


def by_hand(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Completion:
    """One prompt, one token at a time, no cache, no padding."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    new: list[int] = []
    while len(new) < NEW_TOKENS and tokenizer.eos_token_id not in new:
        with torch.no_grad():
            logits = model(torch.tensor([ids + new], device=model.device)).logits
        new.append(int(logits[0, -1].argmax()))
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Completion(text, len(new), tokenizer.eos_token_id not in new)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen"])
def test_batches_equal_one_by_one(family: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = load(request.getfixturevalue(family))
    prompts = ragged_prompts(tokenizer)
    expected = [by_hand(model, tokenizer, prompt) for prompt in prompts]
    # The prompts must exercise what is claimed: both endings, several lengths, different texts.
    assert {completion.truncated for completion in expected} == {True, False}
    assert len({completion.text for completion in expected}) > 5
    # All in one batch; batches of two or three; one a batch.
    for token_budget in (16384, 600, 1):
        done = generate_greedily(model, tokenizer, prompts, NEW_TOKENS, token_budget)
        assert done == expected


def test_order_of_the_prompts_is_kept(tiny_llama: Path) -> None:
    model, tokenizer = load(tiny_llama)
    prompts = ragged_prompts(tokenizer)
    forward = generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    backward = generate_greedily(model, tokenizer, prompts[::-1], NEW_TOKENS)
    assert backward == forward[::-1]
    assert forward != backward


def test_limit_cuts_and_says_so(tiny_llama: Path) -> None:
    model, tokenizer = load(tiny_llama)
    prompts = ragged_prompts(tokenizer)
    whole = generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    ended = min((c for c in whole if not c.truncated), key=lambda c: c.token_count)
    index = whole.index(ended)
    (exact,) = generate_greedily(model, tokenizer, [prompts[index]], ended.token_count)
    (short,) = generate_greedily(model, tokenizer, [prompts[index]], ended.token_count - 1)
    assert exact == ended  # the end-of-text token itself still fits
    assert short == Completion(ended.text, ended.token_count - 1, truncated=True)


def test_sampling_settings_of_the_model_are_not_used(tiny_llama: Path) -> None:
    model, tokenizer = load(tiny_llama)
    prompts = ragged_prompts(tokenizer)
    expected = generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    shipped = model.generation_config
    # The keys that Qwen2.5-Instruct ships, exaggerated.
    model.generation_config = GenerationConfig(
        eos_token_id=shipped.eos_token_id,
        pad_token_id=shipped.pad_token_id,
        do_sample=True,
        temperature=5.0,
        top_k=2,
        top_p=0.5,
        repetition_penalty=3.0,
    )
    try:
        assert generate_greedily(model, tokenizer, prompts, NEW_TOKENS) == expected
    finally:
        model.generation_config = shipped


def test_every_end_token_of_the_model_ends(tiny_llama: Path) -> None:
    model, tokenizer = load(tiny_llama)
    digit = tokenizer.convert_tokens_to_ids("4")
    shipped = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, digit]
    try:
        assert end_token_ids(model, tokenizer) == {tokenizer.eos_token_id, digit}
        done = generate_greedily(model, tokenizer, ragged_prompts(tokenizer), NEW_TOKENS)
    finally:
        model.generation_config.eos_token_id = shipped
    assert any(c.text.endswith("4") and not c.truncated for c in done)
    assert not any("4" in c.text[:-1] for c in done)


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_model_is_restored(tiny_llama: Path, training: bool) -> None:
    model, tokenizer = load(tiny_llama)
    model.train(training)
    generate_greedily(model, tokenizer, ragged_prompts(tokenizer)[:1], 1)
    assert model.training is training
