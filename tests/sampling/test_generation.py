"""Generation: batches, padding and order change nothing about a completion."""

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import ModelConfig

from sologrpo.data.dataset import prompt_token_ids
from sologrpo.model.loading import end_token_ids, load_base_model, load_tokenizer
from sologrpo.prompts import PROMPT_FORMATS
from sologrpo.sampling import generation
from sologrpo.sampling.generation import (
    CPU_TOKENS,
    SHORTEST_ROW,
    Completion,
    default_token_budget,
    generate_greedily,
)
from sologrpo.sampling.sampler import FREE_SHARE, bytes_of_batch
from sologrpo.sampling.shared_cache import SharedCache
from tiny import rows

NEW_TOKENS = 40


@cache
def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = ModelConfig(model_name_or_path=str(path), dtype="float32", load_in_4bit=False)
    return load_base_model(config), load_tokenizer(str(path))


def ragged_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    xml = PROMPT_FORMATS["xml"]
    questions = [row["question"] + " Why?" * (i * 3 % 7) for i, row in enumerate(rows(10))]
    return prompt_token_ids([xml.messages(question) for question in questions], tokenizer)


def by_hand(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    stop_strings: Sequence[str] = (),
) -> Completion:
    """One prompt, one token at a time, no cache, no padding."""
    new: list[int] = []
    text = ""
    while len(new) < NEW_TOKENS:
        with torch.no_grad():
            logits = model(torch.tensor([ids + new], device=model.device)).logits
        new.append(int(logits[0, -1].argmax()))
        text = tokenizer.decode(new, skip_special_tokens=True)
        if new[-1] == tokenizer.eos_token_id:
            return Completion(text, len(new), "end_token")
        for length in range(len(text) + 1):
            if text[:length].endswith(tuple(stop_strings)):
                return Completion(text[:length], len(new), "stop_string")
    return Completion(text, len(new), "length")


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen"])
def test_batches_equal_one_by_one(family: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = load(request.getfixturevalue(family))
    prompts = ragged_prompts(tokenizer)
    expected = [by_hand(model, tokenizer, prompt) for prompt in prompts]
    # The prompts must exercise what is claimed: both endings, several lengths, different texts.
    assert {c.stop_reason for c in expected} == {"length", "end_token"}
    assert len({completion.text for completion in expected}) > 5
    # All in one batch; batches of two or three; batches of one.
    for token_budget in (16384, 600, 1):
        done = generate_greedily(model, tokenizer, prompts, NEW_TOKENS, token_budget)
        assert done == expected


# Texts that the tiny models write: of one token, of several, and within a longer token.
STOP_STRINGS = {"tiny_llama": ("gg", "12201"), "tiny_qwen": ("ead", "1317")}


@pytest.mark.parametrize("by_transformers", [False, True])
@pytest.mark.parametrize("pad_token", ["<|endoftext|>", "<|im_end|>"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen"])
def test_stop_strings_end_each_completion_by_itself(
    family: str,
    pad_token: str,
    by_transformers: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(family)
    model, tokenizer = load(path)[0], load_tokenizer(str(path))
    tokenizer.pad_token = pad_token
    prompts, stop_strings = ragged_prompts(tokenizer), STOP_STRINGS[family]
    expected = [by_hand(model, tokenizer, prompt, stop_strings) for prompt in prompts]
    # The prompts must exercise what is claimed: every stop string ends some, and some continue.
    assert all(any(c.text.endswith(string) for c in expected) for string in stop_strings)
    assert not all(c.text.endswith(stop_strings) for c in expected)
    if by_transformers:
        monkeypatch.setattr("sologrpo.sampling.generation.can_generate_fast", lambda *args: False)
    for token_budget in (16384, 600, 1):
        done = generate_greedily(model, tokenizer, prompts, NEW_TOKENS, token_budget, stop_strings)
        assert done == expected


def test_where_our_loop_is_wrong_transformers_generates(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = load(tiny_llama)
    prompts = ragged_prompts(tokenizer)
    expected = generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    original = SharedCache.attend
    monkeypatch.setattr(SharedCache, "attend", lambda *args: original(*args) * 0.9)
    untried = load.__wrapped__(tiny_llama)[0]
    assert generate_greedily(untried, tokenizer, prompts, NEW_TOKENS) == expected
    (line,) = caplog.messages
    assert line.startswith("completions are generated by transformers: in our loop, log-probs are")


def test_a_batch_that_does_not_fit_is_repeated_in_halves(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load(tiny_llama)
    prompts = ragged_prompts(tokenizer)
    expected = generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    original, tried = generation.generate_batch, []

    def generate_batch(model: PreTrainedModel, tokenizer: object, ids: list, *args: object) -> list:
        tried.append(len(ids))
        if len(ids) > most:
            raise MemoryError
        return original(model, tokenizer, ids, *args)

    monkeypatch.setattr(generation, "generate_batch", generate_batch)
    most = 3
    assert generate_greedily(model, tokenizer, prompts, NEW_TOKENS) == expected  # all of them
    assert tried[:2] == [10, 4]  # half of the tokens, of which the root is a part
    assert max(tried[3:]) <= most
    most = 0
    with pytest.raises(MemoryError):
        generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    assert tried[-1] == 1


def test_batches_fill_the_memory_of_a_gpu(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_llama)[0]
    assert default_token_budget(model) == CPU_TOKENS
    elsewhere = copy.deepcopy(model).to("meta")
    budgets = []
    for free in (2**28, 2**30):
        monkeypatch.setattr(generation, "free_bytes", lambda device, free=free: free)
        budgets.append(default_token_budget(elsewhere))
        rows = budgets[-1] // SHORTEST_ROW  # the shorter they are, the more logits
        needed = bytes_of_batch(elsewhere, budgets[-1], rows)
        assert FREE_SHARE * free / 2 < needed <= FREE_SHARE * free
    assert budgets[1] == 4 * budgets[0]
    # What little was taken since the first try changes nothing.
    monkeypatch.setattr(generation, "free_bytes", lambda device: int(0.999 * 2**30))
    assert default_token_budget(elsewhere) == budgets[1]


def test_limit_cuts_and_says_so(tiny_llama: Path) -> None:
    model, tokenizer = load(tiny_llama)
    prompts = ragged_prompts(tokenizer)
    whole = generate_greedily(model, tokenizer, prompts, NEW_TOKENS)
    ended = min((c for c in whole if c.stop_reason != "length"), key=lambda c: c.token_count)
    index = whole.index(ended)
    (exact,) = generate_greedily(model, tokenizer, [prompts[index]], ended.token_count)
    (short,) = generate_greedily(model, tokenizer, [prompts[index]], ended.token_count - 1)
    assert exact == ended  # the end-of-text token itself still fits
    assert short == Completion(ended.text, ended.token_count - 1, "length")


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
    assert any(c.text.endswith("4") and c.stop_reason != "length" for c in done)
    assert not any("4" in c.text[:-1] for c in done)


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_model_is_restored(tiny_llama: Path, training: bool) -> None:
    model, tokenizer = load(tiny_llama)
    model.train(training)
    generate_greedily(model, tokenizer, ragged_prompts(tokenizer)[:1], 1)
    assert model.training is training
