"""Stop strings: a row ends with the first token that brings one into its decoded text."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation import load, ragged_prompts
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sologrpo.base.errors import InputError
from sologrpo.sampling.decoding import LEAVE_BELOW, Request, generate_fast
from sologrpo.sampling.stopping import StopStrings
from tiny import build_tokenizer

NEW_TOKENS = 40
STOP_STRINGS = ("</answer>", "\n\n\n", "é", "€\n", " x", "a ", "aa", "\nQuestion:")


@cache
def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2, Llama 3, Qwen: a token is a run of bytes and may end within a character."""
    return build_tokenizer()


@cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2 and Gemma: text tokens, single bytes for the rest, no space at the beginning."""
    words = ["▁", "▁x", "x", "a", "aa", "a▁", "é", "\n", "</", "answer", ">", ">\n", "\n\n", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@cache
def stops_of(make: Callable[[], PreTrainedTokenizerBase], strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(make(), strings)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def first_stop(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], strings: Sequence[str]
) -> int | None:
    """The definition of stopping: decode every prefix."""
    for length in range(1, len(ids) + 1):
        if any(string in decode(tokenizer, ids[:length]) for string in strings):
            return length
    return None


@cache
def texts_of(make: Callable[[], PreTrainedTokenizerBase]) -> list[str]:
    """Text of each token inside a text; a part of a character is garbled."""
    tokenizer = make()
    before = tokenizer.convert_tokens_to_ids("x")
    return [decode(tokenizer, [before, i])[1:] for i in range(len(tokenizer))]


@st.composite
def spelt(draw: st.DrawFn, make: Callable[[], PreTrainedTokenizerBase]) -> list[int]:
    """A stop string in tokens chosen at random; the last one may reach beyond it."""
    rest, ids = draw(st.sampled_from(STOP_STRINGS)), list[int]()
    while rest:
        begins = [i for i, text in enumerate(texts_of(make)) if text and rest.startswith(text)]
        beyond = [i for i, text in enumerate(texts_of(make)) if text.startswith(rest)]
        if begins + beyond and draw(st.integers(0, 3)):
            ids.append(draw(st.sampled_from(begins + beyond)))
            rest = rest[len(texts_of(make)[ids[-1]]) :]
        else:
            ids += make()(rest[0], add_special_tokens=False)["input_ids"]
            rest = rest[1:]
    return ids


@st.composite
def token_rows(draw: st.DrawFn, make: Callable[[], PreTrainedTokenizerBase]) -> list[int]:
    """Stop strings, some broken by special or lost tokens, among random tokens."""
    size = len(make())
    garbled = [i for i, text in enumerate(texts_of(make)) if "\N{REPLACEMENT CHARACTER}" in text]
    noise = st.one_of(
        st.sampled_from(make().all_special_ids),
        st.sampled_from(garbled),
        st.integers(0, size + 1),  # embeddings are often padded beyond the vocabulary
    )
    pieces = st.lists(st.one_of(spelt(make), st.lists(noise, max_size=4)), min_size=1, max_size=5)
    row = [token for piece in draw(pieces) for token in piece] or [0]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(row) - 1))
        row[place : place + draw(st.integers(0, 1))] = [draw(noise)]
    return row


TOKENIZERS = pytest.mark.parametrize("make", [byte_level, byte_fallback])


@TOKENIZERS
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_a_row_ends_at_the_first_prefix_that_holds_a_stop_string(
    make: Callable[[], PreTrainedTokenizerBase], data: st.DataObject
) -> None:
    strings = tuple(data.draw(st.sets(st.sampled_from(STOP_STRINGS), min_size=1, max_size=3)))
    row = data.draw(token_rows(make))
    stops, end = stops_of(make, strings), first_stop(make(), row, strings)
    assert stops.length(row) == end
    for length in range(1, (end or len(row)) + 1):
        assert stops.ended(torch.tensor([row[:length]])).tolist() == [length == end]
    assert stops.ended(torch.tensor([row]), newest=len(row)).tolist() == [end is not None]
    kept = row[:end]
    text = stops.cut(decode(make(), kept))
    assert decode(make(), kept).startswith(text)
    assert text.endswith(strings) is (end is not None)
    assert not any(string in text[:-1] for string in strings)


EURO = ["<0xE2>", "<0x82>", "<0xAC>"]


@pytest.mark.parametrize(
    ("string", "tokens", "ends"),
    [
        # The decoder strips a space from the first token, so the last two would read "x".
        (" x", ["a", "▁", "x"], True),
        # As many tokens as it has bytes.
        ("€€a", ["x", *EURO, *EURO, "a"], True),
        # Special tokens in between take no place in the text.
        ("</answer>", ["</", "answer", *["<s>"] * 20, ">"], True),
        # One bad byte garbles all bytes next to it, also the three line breaks ...
        ("\n\n\n", ["<0xE2>", *["<0x0A>"] * 4], False),
        # ... and cutting the é in two would do so.
        ("\n\n\n", ["<0xC3>", "<0xA9>", *["<0x0A>"] * 3], True),
    ],
)
def test_what_the_last_tokens_alone_would_get_wrong(
    string: str, tokens: list[str], ends: bool
) -> None:
    ids = byte_fallback().convert_tokens_to_ids(tokens)
    assert (string in decode(byte_fallback(), ids)) is ends
    assert StopStrings(byte_fallback(), [string]).length(ids) == (len(ids) if ends else None)


def test_without_stop_strings_nothing_ends_or_is_cut() -> None:
    stops = StopStrings(byte_level(), ())
    ids = byte_level()("4</answer>\n\n\n")["input_ids"]
    assert stops.length(ids) is None
    assert stops.ended(torch.tensor([ids])).tolist() == [False]
    assert stops.cut("4</answer>\n\n\n") == "4</answer>\n\n\n"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="must not be empty"):
        StopStrings(byte_level(), ["</answer>", ""])


def test_the_same_for_vllm() -> None:
    tokenizer = byte_level()
    assert StopStrings(tokenizer, []).vllm_settings() == {}
    assert StopStrings(tokenizer, ["</answer>"]).vllm_settings() == {
        "stop": ["</answer>"],
        "include_stop_str_in_output": True,
    }


def test_trl_still_hands_generation_kwargs_to_vllm() -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    source = inspect.getsource(VLLMGeneration.generate)
    assert "generation_kwargs.update(self.generation_kwargs)" in source
    assert "SamplingParams(**generation_kwargs)" in source


# Texts of the tiny models, of one token and of several, also where a longer token ends them.
OF_THE_MODEL = {"tiny_llama": ["H2", "12201", " egg0"], "tiny_qwen": ["beads0", "1317", "tick2"]}
FAMILIES = pytest.mark.parametrize("family", list(OF_THE_MODEL))


def greedy(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> GenerationConfig:
    defaults = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": [tokenizer.eos_token_id],
        "pad_token_id": tokenizer.pad_token_id,
    }
    return GenerationConfig(**defaults | settings)


def complete(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    config: GenerationConfig,
    stops: StopStrings,
) -> torch.Tensor:
    return generate_fast(model, Request(**inputs, config=config, stops=stops)).completion_ids


def tensors(tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    ids = ragged_prompts(tokenizer)
    return dict(tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt"))


@FAMILIES
def test_a_stop_string_in_the_prompt_ends_nothing(
    family: str, request: pytest.FixtureRequest
) -> None:
    model, tokenizer = load(request.getfixturevalue(family))
    ids = torch.tensor(ragged_prompts(tokenizer)[:1])
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    no_stops = StopStrings(tokenizer, [])
    whole = torch.cat([ids, complete(model, prompt, greedy(tokenizer), no_stops)], dim=1)
    # The prompt now ends with the fourth token of the completion; the stop string with the fifth.
    start = prompt["input_ids"].size(1)
    T = start + 4
    prompt = {"input_ids": whole[:, :T], "attention_mask": torch.ones_like(whole[:, :T])}
    rest = whole[0, T:]
    straddling, in_prompt = decode(tokenizer, whole[0, start : T + 1]), "assistant\n"
    assert in_prompt in decode(tokenizer, whole[0, :T])
    assert straddling not in decode(tokenizer, rest)
    assert len(rest) > 1
    stops = StopStrings(tokenizer, [straddling, in_prompt])
    config = greedy(tokenizer, max_new_tokens=len(rest))
    assert complete(model, prompt, config, stops)[0].tolist() == rest.tolist()
    criteria = stops.criteria(T)
    by_transformers = model.generate(**prompt, generation_config=config, stopping_criteria=criteria)
    assert torch.equal(by_transformers, whole)
    # transformers' own rule reads back into the prompt.
    config.stop_strings = [straddling]
    assert model.generate(**prompt, generation_config=config, tokenizer=tokenizer).size(1) == T + 1


@FAMILIES
def test_rows_that_stopped_leave_the_batch(family: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = load(request.getfixturevalue(family))
    inputs, stops = tensors(tokenizer), StopStrings(tokenizer, OF_THE_MODEL[family])
    batch_sizes: list[int] = []

    def note_batch_size(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].size(1) == 1:
            batch_sizes.append(kwargs["input_ids"].size(0))

    hook = model.register_forward_pre_hook(note_batch_size, with_kwargs=True)
    try:
        rows = complete(model, inputs, greedy(tokenizer), stops).tolist()
    finally:
        hook.remove()
    ends = [stops.length(row) or first_end(tokenizer, row) for row in rows]
    for step, batch_size in enumerate(batch_sizes, start=1):
        writing = sum(end > step for end in ends)
        assert LEAVE_BELOW * batch_size <= writing <= batch_size
    assert batch_sizes[0] > 2 * batch_sizes[-1]


def first_end(tokenizer: PreTrainedTokenizerBase, row: list[int]) -> int:
    return row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
