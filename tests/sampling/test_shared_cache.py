"""Completions from a cache that holds what rows share once equal those of `model.generate`."""

from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sologrpo.model.attention import follows_trees
from sologrpo.model.loading import load_tokenizer
from sologrpo.model.merging import merged
from sologrpo.sampling import decoding, shared_cache
from sologrpo.sampling.decoding import Request, Sampled, can_generate_fast, generate_fast
from sologrpo.sampling.shared_cache import cached_tokens
from sologrpo.sampling.stopping import StopStrings
from tiny import FAMILIES, SIZES, with_adapter

PAD, NEW_TOKENS = 0, 8
TINY = SIZES | {"vocab_size": 24, "initializer_range": 0.15, "eos_token_id": 1, "bos_token_id": 2}
Prompts = list[list[int]]


@cache
def tiny(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Write few tokens, so that completions differ and end at different places."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**TINY | changes)).eval()
    return model


class NoTokenizer:
    """Write a character for each token."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(ord("a") + i): i for i in range(24)}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def batch_decode(self, rows: Prompts, **kwargs: Any) -> list[str]:
        return [self.decode(ids) for ids in rows]


def request_of(
    prompts: Prompts, ends: Sequence[int] = (), stops: Sequence[str] = (), **sampling: Any
) -> Request:
    width = max(map(len, prompts))
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, eos_token_id=list(ends) or [-1], pad_token_id=PAD, **sampling
    )
    return Request(
        torch.tensor([[PAD] * (width - len(ids)) + ids for ids in prompts]),
        torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
        config,
        StopStrings(NoTokenizer(), stops),  # type: ignore[arg-type]
    )


def alone(model: Any, ids: list[int], request: Request) -> list[int]:
    """Complete one prompt with `model.generate`, up to its end or stop string."""
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        generation_config=request.config,
        stopping_criteria=request.stops.criteria(len(ids)),
    )
    completion: list[int] = output[0, len(ids) :].tolist()
    return completion


@torch.no_grad()
def logits_of(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """(T, V) logits of a plain forward pass, from which each token of a completion comes."""
    logits: torch.Tensor = model(torch.tensor([prompt + completion])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def completions(request: Request, sampled: Sampled) -> Prompts:
    lengths = request.mask_of(sampled.completion_ids).sum(dim=1).tolist()
    return [ids[:n] for ids, n in zip(sampled.completion_ids.tolist(), lengths, strict=True)]


def assert_log_probs(model: Any, prompts: Prompts, request: Request, sampled: Sampled) -> None:
    assert sampled.log_probs is not None
    rows = zip(prompts, completions(request, sampled), sampled.log_probs, strict=True)
    for prompt, ids, found in rows:
        scaled = logits_of(model, prompt, ids) / (request.config.temperature or 1.0)
        expected = scaled.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(found[: len(ids)], expected, rtol=1e-5, atol=1e-5)


tokens = st.integers(3, 23)


@st.composite
def prompt_rows(draw: st.DrawFn) -> Prompts:
    """Prompts of 1 to 7 tokens with a root of 0 to 5, each with 1 to 4 rows."""
    root = draw(st.lists(tokens, max_size=5))
    stems = draw(st.lists(st.lists(tokens, min_size=1, max_size=7), min_size=1, max_size=4))
    sizes = [draw(st.integers(1, 4)) for _ in stems]
    return [root + stem for stem, size in zip(stems, sizes, strict=True) for _ in range(size)]


def one_pass_for_each_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_cache, "PREFILL_TOKENS", 1)
    patch.setattr(shared_cache, "ROOM", 1)


def as_on_a_gpu(patch: pytest.MonkeyPatch, look_every: int) -> None:
    for module in (decoding, shared_cache):
        patch.setattr(module, "keeps_shapes", lambda device: True)
    patch.setattr(decoding, "LOOK_EVERY", look_every)


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@settings(deadline=None, max_examples=40)
@given(
    prompts=prompt_rows(),
    ends=st.lists(tokens, max_size=4),
    stops=st.lists(st.text("defghijkl", min_size=1, max_size=2), max_size=3),
    leave_below=st.sampled_from([0.0, 0.75, 1.0]),
    family=st.sampled_from(["llama", "qwen2"]),
    is_small=st.booleans(),
    look_every=st.sampled_from([None, 1, 3, NEW_TOKENS, 2 * NEW_TOKENS]),
)
def test_greedy_completions_are_those_of_generate(
    prompts: Prompts, ends: list[int], stops: list[str], leave_below: float, family: str,
    is_small: bool, look_every: int | None,
) -> None:  # fmt: skip
    """Also with the loop of a GPU, which looks at what ended now and then."""
    model, asked = tiny(family), request_of(prompts, ends, stops, do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "LEAVE_BELOW", leave_below)
        if is_small:
            one_pass_for_each_prompt(patch)
        if look_every is not None:
            as_on_a_gpu(patch, look_every)
        sampled = generate_fast(model, asked, with_log_probs=True)
    assert completions(asked, sampled) == [alone(model, ids, asked) for ids in prompts]
    assert_log_probs(model, prompts, asked, sampled)


@settings(deadline=None, max_examples=25, derandomize=True)  # rounding may change a draw
@given(
    prompts=prompt_rows(),
    ends=st.lists(tokens, max_size=4),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.6]),
    temperature=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_sampled_tokens_come_from_the_distribution_of_each_row(
    prompts: Prompts, ends: list[int], top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    model = tiny()
    kept = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    asked = request_of(prompts, ends, do_sample=True, **kept)

    def sample(with_log_probs: bool) -> Sampled:
        torch.manual_seed(seed)
        return generate_fast(model, asked, with_log_probs=with_log_probs)

    sampled = sample(with_log_probs=True)
    assert_log_probs(model, prompts, asked, sampled)
    warpers = LogitsProcessorList([TopPLogitsWarper(top_p + 1e-5)] if top_p < 1 else [])
    if top_k:
        warpers.insert(0, TopKLogitsWarper(top_k))
    for prompt, ids in zip(prompts, completions(asked, sampled), strict=True):
        warped = warpers(None, logits_of(model, prompt, ids) / temperature)
        assert warped.gather(1, torch.tensor(ids)[:, None]).isfinite().all()
    with pytest.MonkeyPatch.context() as patch:
        one_pass_for_each_prompt(patch)
        again = sample(with_log_probs=False)
        assert torch.equal(again.completion_ids, sampled.completion_ids)


ROWS = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 9], [5, 6, 9], [5, 6, 10, 11, 12, 13]]


@pytest.mark.parametrize("kind", ["adapter", "merged", "nf4", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_other_weights(kind: str, family: str, request: pytest.FixtureRequest) -> None:
    """With an adapter, merged, in four bits and in half precision."""
    path: Path = request.getfixturevalue(f"tiny_{family}")
    is_half = kind.endswith("16")
    model = with_adapter(path, dtype=kind if is_half else "float32", nf4=kind == "nf4").eval()
    tokenizer = load_tokenizer(str(path))
    asked = request_of(ROWS, [tokenizer.eos_token_id], do_sample=False)
    if kind == "merged":
        with merged(model):
            sampled = generate_fast(model, asked, with_log_probs=True)
    else:
        sampled = generate_fast(model, asked, with_log_probs=True)
    found = completions(asked, sampled)
    if not is_half:
        assert found == [alone(model, ids, asked) for ids in ROWS]
        return
    assert sampled.log_probs is not None
    for prompt, ids, log_probs in zip(ROWS, found, sampled.log_probs, strict=True):
        expected = logits_of(model, prompt, ids).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(log_probs[: len(ids)], expected, rtol=0, atol=0.1)


def test_no_attention_that_plans_for_every_new_shape() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_autocast(model: PreTrainedModel) -> None:
    asked = request_of(ROWS, do_sample=False)
    with torch.autocast("cpu", torch.bfloat16):
        sampled = generate_fast(model, asked, with_log_probs=True)
        for prompt, ids in zip(ROWS, completions(asked, sampled), strict=True):
            best = logits_of(model, prompt, ids).max(dim=1).values
            chosen = logits_of(model, prompt, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert (best - chosen).max() < 0.1


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Phi3": {"sliding_window": None, "pad_token_id": 0},
    "Gemma": {"head_dim": 16},
    "Olmo2": {},
    "GPTNeoX": {},
    "SmolLM3": {"pad_token_id": 0},
    # Values are narrower than keys.
    "DeepseekV3": {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


def architecture(name: str, **changes: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**TINY | changes)
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name: str, attention: str) -> None:
    model = architecture(name, **ARCHITECTURES[name])
    model.set_attn_implementation(attention)
    asked = request_of(ROWS, do_sample=False)
    assert can_generate_fast(model, asked.config, {})
    sampled = generate_fast(model, asked, with_log_probs=True)
    assert model.config._attn_implementation == attention
    assert sampled.completion_ids.tolist() == [alone(model, ids, asked) for ids in ROWS]
    assert_log_probs(model, ROWS, asked, sampled)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Mistral", {"sliding_window": 4}), ("Nemotron", {}), ("Falcon", {}), ("Bloom", {})],
)
def test_a_model_that_hands_no_tree_to_every_layer_is_left_to_generate(
    name: str, changes: dict[str, Any]
) -> None:
    model = architecture(name, **changes)
    state = torch.get_rng_state()
    assert not can_generate_fast(model, request_of(ROWS, do_sample=False).config, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert name == "Mistral" or not follows_trees(model)


# -- what is held ---------------------------------------------------------------------------------


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    original = shared_cache.prefill

    def prefill(*args: Any) -> Any:
        made.append((result := original(*args))[0])
        return result

    monkeypatch.setattr(decoding, "prefill", prefill)
    return made


def tokens_held(held: Any) -> int:
    """Tokens of the first layer that the cache has memory for."""
    tensors = [held._root[0].keys, held._stems[0].keys, held._completions[0].keys]
    assert all(tensor.is_contiguous() for tensor in tensors)
    return sum(tensor.size(0) * tensor.size(2) for tensor in tensors)


def test_root_and_prompts_are_held_once(caches: list[Any]) -> None:
    prompts = list(chain.from_iterable([[3] * 50 + [4 + i]] * 6 for i in range(3)))
    asked = request_of(prompts, do_sample=False)
    generate_fast(tiny(), asked)
    # The last token is not put into the cache.
    assert tokens_held(caches[0]) == 50 + 3 + 18 * (NEW_TOKENS - 1)
    assert cached_tokens(prompts, NEW_TOKENS)[-1] == 50 + 3 + 18 * NEW_TOKENS


def test_prompts_leave_with_their_last_row(
    caches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "LEAVE_BELOW", 1.0)
    model, prompts = tiny(), [[3, 4 + i, 5] for i in range(12)]
    firsts = [alone(model, ids, request_of([ids], do_sample=False))[0] for ids in prompts]
    ended = max(set(firsts), key=firsts.count)
    assert 0 < firsts.count(ended) < len(prompts)
    generate_fast(model, request_of(prompts, [ended], do_sample=False))
    assert caches[0]._stems[0].keys.size(0) <= len(prompts) - firsts.count(ended)


@given(prompts=prompt_rows(), new_tokens=st.integers(1, 5))
def test_cached_tokens_grow_with_the_rows(prompts: Prompts, new_tokens: int) -> None:
    counts = cached_tokens(prompts, new_tokens)
    assert len(counts) == len(prompts)
    assert all(b - a >= new_tokens for a, b in pairwise(counts))
    assert counts[-1] <= len(prompts) * (max(map(len, prompts)) + new_tokens)
