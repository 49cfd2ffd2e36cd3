"""Sampling engines: the choice between them, log-probs, batches and memory."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from sologrpo.base.errors import InputError, RunError
from sologrpo.model.loading import load_tokenizer
from sologrpo.model.merging import merged_bytes
from sologrpo.sampling import sampler as sampler_module
from sologrpo.sampling.decoding import Request, Sampled, generate_fast
from sologrpo.sampling.sampler import (
    FREE_SHARE,
    LOGIT_BYTES,
    Sampler,
    Score,
    bytes_of_batch,
    check_vllm,
    rows_of_whole_groups,
)
from sologrpo.sampling.shared_cache import cached_tokens
from sologrpo.sampling.stopping import StopStrings
from tiny import rows, with_adapter

G = 4


def request_of(path: Path, n_prompts: int = 4, new_tokens: int = 24, **settings: Any) -> Request:
    """Prompts of different lengths, each `G` times."""
    tokenizer = load_tokenizer(str(path))
    texts = [row["question"] + " Why?" * (i % 3) for i, row in enumerate(rows(n_prompts))]
    padded = tokenizer([text for text in texts for _ in range(G)], padding=True)
    return Request(
        torch.tensor(padded["input_ids"]),
        torch.tensor(padded["attention_mask"]),
        GenerationConfig(
            max_new_tokens=new_tokens,
            eos_token_id=[tokenizer.eos_token_id],
            pad_token_id=tokenizer.pad_token_id,
            **{"do_sample": True, "top_k": 0} | settings,
        ),
        StopStrings(tokenizer, []),
    )


def tokens_of(asked: Request, n_rows: int) -> int:
    """Tokens that the cache of the first rows holds."""
    rows = zip(asked.input_ids, asked.attention_mask.bool(), strict=True)
    prompts = [ids[mask].tolist() for ids, mask in rows]
    return cached_tokens(prompts, asked.config.max_new_tokens)[n_rows - 1]


def scorer(model: Any, temperature: float = 1.0) -> Score:
    """Log-probs of a plain forward pass."""

    def score(input_ids: torch.Tensor, mask: torch.Tensor, T: int) -> torch.Tensor:
        with torch.no_grad():
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            output = model(input_ids=input_ids, attention_mask=mask, position_ids=positions)
        all_BTV = (output.logits[:, -T - 1 : -1].float() / temperature).log_softmax(dim=-1)
        return all_BTV.gather(2, input_ids[:, -T:, None]).squeeze(2)

    return score


def said_by(logger: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == logger]


# -- log-probs ------------------------------------------------------------------------------------


# -- the rule ------------------------------------------------------------------------


def test_fp32_weights_are_merged_without_a_test(tiny_llama: Path) -> None:
    def score(*args: Any) -> Any:
        raise AssertionError("there is nothing to test")

    for requested in ("auto", "merged"):
        sampler = Sampler(requested, score)
        sampler.prepare(with_adapter(tiny_llama), request_of(tiny_llama))
        assert sampler.engine == "merged"
        assert sampler.is_exact


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "Embedding"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "separate bias"),
        ({"dtype": "bfloat16"}, "GiB are free"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_sampled_unmerged(
    settings: dict[str, Any],
    obstacle: str,
    tiny_qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, asked = with_adapter(tiny_qwen, **settings), request_of(tiny_qwen)
    free = merged_bytes(model) if obstacle == "GiB are free" else 2**30
    monkeypatch.setattr(sampler_module, "free_bytes", lambda device: free)
    sampler = Sampler("auto", scorer(model))
    sampler.prepare(model, asked)
    assert sampler.engine == "adapter"
    assert obstacle in caplog.text
    with pytest.raises(InputError, match=f"{obstacle}.*set sampling_engine: adapter"):
        Sampler("merged", scorer(model)).prepare(model, asked)


@pytest.fixture
def half_precision(tiny_llama: Path) -> tuple[PeftModel, Request]:
    return with_adapter(tiny_llama, dtype="bfloat16"), request_of(tiny_llama)


def test_the_rule(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(sampler_module, "generate_fast", lambda *args: tried.append(args))
    for settings, half, engine in (
        ({}, None, "merged"),
        ({"nf4": True}, None, "merged"),  # in fp32, which is exact
        ({"nf4": True}, torch.bfloat16, "adapter"),
        ({"nf4": True, "dtype": "bfloat16"}, None, "adapter"),
    ):
        model = with_adapter(tiny_llama, **settings)
        sampler = Sampler("auto", scorer(model), half)
        sampler.prepare(model, request_of(tiny_llama))
        assert sampler.engine == engine
        assert sampler.is_exact
    assert tried == []


def test_in_half_precision_merged_weights_are_compared_with_the_trainer(
    half_precision: tuple[PeftModel, Request], caplog: pytest.LogCaptureFixture
) -> None:
    model, asked = half_precision
    tested: list[bool] = []

    def score(*args: Any) -> torch.Tensor:
        tested.append(is_merged(model))
        return scorer(model)(*args)

    sampler = Sampler("auto", score)
    sampler.prepare(model, asked)
    sampler.prepare(model, asked)  # only once
    assert tested == [False]
    assert sampler.engine == "merged"
    assert not sampler.is_exact
    assert caplog.messages == []


def is_merged(model: Any) -> bool:
    return not any(hasattr(module, "lora_A") for module in model.modules())


def wrong_log_probs(done: Sampled) -> Sampled:
    assert done.log_probs is not None
    return replace(done, log_probs=done.log_probs - 0.3)


def not_a_number(done: Sampled) -> Sampled:
    assert done.log_probs is not None
    return replace(done, log_probs=done.log_probs * math.nan)


def raising(done: Sampled) -> Sampled:
    raise NotImplementedError("no kernel for this\nwith details")


def out_of_memory(done: Sampled) -> Sampled:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


BROKEN = [
    (wrong_log_probs, r"0\.[23].. nats per token off the trainer"),
    (not_a_number, "nan nats"),
    (raising, "NotImplementedError: no kernel for this$"),
    (out_of_memory, "OutOfMemoryError: CUDA out of memory"),
]


def break_merged(monkeypatch: pytest.MonkeyPatch, how: Callable[[Sampled], Sampled]) -> None:
    """Spoil what is sampled from merged weights."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Sampled:
        done = generate_fast(model, *args, **kwargs)
        return how(done) if is_merged(model) else done

    monkeypatch.setattr(sampler_module, "generate_fast", broken)


@pytest.mark.parametrize(("how", "reason"), BROKEN)
def test_merged_weights_that_do_not_work_are_not_used(
    how: Callable[[Sampled], Sampled],
    reason: str,
    half_precision: tuple[PeftModel, Request],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, asked = half_precision
    break_merged(monkeypatch, how)
    sampler = Sampler("auto", scorer(model))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sampler.prepare(model, asked)
    assert torch.equal(torch.get_rng_state(), state)  # the test draws no number of the run
    assert sampler.engine == "adapter"
    assert sampler.is_exact
    (line,) = said_by("sologrpo.sampling.sampler", caplog)
    assert re.search(f"^sampling engine adapter, not merged: .*{reason}", line)
    # Requested by name, it ends the run with what to write instead.
    with pytest.raises(InputError) as caught:
        Sampler("merged", scorer(model)).prepare(model, asked)
    problem, fix = str(caught.value).split("; set ")
    assert re.search(f"^sampling_engine merged: .*{reason}", problem)
    assert fix == "sampling_engine: adapter"


# -- batches and memory ---------------------------------------------------------------------------


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of every batch that the loop samples."""
    sizes: list[int] = []

    def counted(model: Any, request: Request, with_log_probs: bool) -> Sampled:
        sizes.append(len(request.input_ids))
        return generate_fast(model, request, with_log_probs)

    monkeypatch.setattr(sampler_module, "generate_fast", counted)
    return sizes


def sample(model: Any, asked: Request, seed: int = 0, **settings: Any) -> Sampled:
    sampler = Sampler("merged", scorer(model), **settings)
    sampler.prepare(model, asked)
    torch.manual_seed(seed)
    with sampler.weights(model):
        return sampler.sample(model, asked)


def test_the_adapter_is_cast_once_per_batch(tiny_llama: Path) -> None:
    """Not for every token, as the forward pass would do that accelerate has wrapped."""
    model = with_adapter(tiny_llama)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    adapter = {p.untyped_storage()._cdata for p in model.parameters() if p.requires_grad}

    class CountCasts(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            if function is torch.ops.aten._to_copy.default:
                casts.update({args[0].untyped_storage()._cdata} & adapter)
            return function(*args, **kwargs or {})

    for new_tokens in (2, 8):
        casts: Counter[int] = Counter()
        with CountCasts():
            sampler = Sampler("adapter", scorer(model), torch.bfloat16)
            sampler.sample(model, request_of(tiny_llama, 1, new_tokens))
        assert casts.total() == len(casts) == len(adapter)


def test_batches_are_whole_groups(tiny_llama: Path, batches: list[int]) -> None:
    model, asked = with_adapter(tiny_llama), request_of(tiny_llama, n_prompts=5, do_sample=False)
    whole = sample(model, asked).completion_ids
    for rows_at_once, sizes in {20: [20], 19: [12, 8], 9: [8, 8, 4]}.items():
        batches.clear()
        parts = sample(model, asked, token_budget=tokens_of(asked, rows_at_once)).completion_ids
        assert batches == sizes
        assert torch.equal(parts, whole)  # batches change no greedy completion
    assert rows_of_whole_groups([6, 7], 5) == 5  # no group fits


def test_batches_sample_the_same_distribution(tiny_llama: Path) -> None:
    model, asked = with_adapter(tiny_llama), request_of(tiny_llama, n_prompts=1, new_tokens=1)
    n = 4000
    many = replace(
        asked,
        input_ids=asked.input_ids[:1].expand(n, -1),
        attention_mask=asked.attention_mask[:1].expand(n, -1),
    )
    with torch.no_grad():
        probabilities = model(many.input_ids[:1]).logits[0, -1].softmax(dim=-1)
    tokens = sample(model, many, token_budget=tokens_of(many, 300)).completion_ids[:, 0]
    counts = Counter(tokens.tolist())
    for token, p in enumerate(probabilities.tolist()):
        assert abs(counts[token] - n * p) < 5 * math.sqrt(n * p) + 5
    again = sample(model, many, token_budget=tokens_of(many, 300)).completion_ids[:, 0]
    assert torch.equal(again, tokens)


def test_out_of_memory_halves_the_batches(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, asked = with_adapter(tiny_llama), request_of(tiny_llama, do_sample=False)
    expected = sample(model, asked).completion_ids
    tried = []

    def run(model: Any, request: Request, with_log_probs: bool) -> Sampled:
        tried.append(len(request.input_ids))
        # The second batch of eight finds less memory than the first.
        if len(request.input_ids) > (8 if len(tried) < 3 else 4):
            raise torch.OutOfMemoryError
        return generate_fast(model, request, with_log_probs)

    monkeypatch.setattr(sampler_module, "generate_fast", run)
    with caplog.at_level(logging.WARNING, "sologrpo.model.memory"):
        assert torch.equal(sample(model, asked).completion_ids, expected)
    assert tried == [16, 8, 8, 4, 4]
    first, second = said_by("sologrpo.model.memory", caplog)
    assert first.startswith("out of memory in sampling")
    assert second.startswith("out of memory in sampling")


@pytest.mark.parametrize(
    ("how", "error"),
    [(out_of_memory, torch.OutOfMemoryError), (raising, NotImplementedError)],
    ids=["a single row out of memory", "another error"],
)
def test_an_error_that_smaller_batches_cannot_fix_ends_the_run(
    how: Callable[[Sampled], Sampled],
    error: type[Exception],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_merged(monkeypatch, how)
    with pytest.raises(error):
        sample(with_adapter(tiny_llama), request_of(tiny_llama, new_tokens=1))


def test_batches_are_made_to_fit_into_memory(
    tiny_llama: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = with_adapter(tiny_llama), request_of(tiny_llama)
    size = bytes_of_batch(model, tokens_of(asked, 11), rows=11)
    # 2 layers x 2 heads x 16 wide x keys and values in fp32, and what the logits take.
    assert size == tokens_of(asked, 11) * 2 * 2 * 2 * 16 * 4 + 11 * 512 * LOGIT_BYTES
    sampler = Sampler("merged", scorer(model))
    sampler.prepare(model, asked)
    monkeypatch.setattr(sampler_module, "free_bytes", lambda device: math.ceil(size / FREE_SHARE))
    with sampler.weights(model):
        sampler.sample(model, asked)
    assert batches == [8, 8]


# -- vLLM -----------------------------------------------------------------------------------------


def test_vllm_without_a_log_prob_of_a_token() -> None:
    sampled, mask = torch.tensor([[-1.0, math.nan, -9.0]]), torch.tensor([[1, 1, 0]])
    measured = check_vllm(sampled, torch.tensor([[-1.01, -2.0, -3.0]]), mask)
    assert measured == pytest.approx({"sampling/kl": 0.01, "sampling/max_gap": 0.01})
    assert check_vllm(sampled, sampled, mask * 0) == {}  # all completions masked as truncated
    with pytest.raises(RunError, match="vLLM is nan nats"):
        check_vllm(sampled, sampled, torch.tensor([[0, 1, 0]]))


def test_vllm_is_allowed_what_top_p_adds() -> None:
    sampled, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 1]])
    off = sampled - 0.25
    with pytest.raises(RunError, match=r"vLLM is 0\.250 .* at most 0\.2 is"):
        check_vllm(sampled, off, mask)
    assert check_vllm(sampled, off, mask, top_p=0.9)["sampling/kl"] == pytest.approx(0.25)
    with pytest.raises(RunError, match=r"at most 0\.305 is"):
        check_vllm(sampled, sampled - 0.5, mask, top_p=0.9)
