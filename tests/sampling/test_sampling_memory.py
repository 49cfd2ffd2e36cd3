"""The memory that sampling is planned with is what it takes."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks._live_memory import LiveMemory
from sologrpo.sampling import shared_cache
from sologrpo.sampling.decoding import Request, generate_fast
from sologrpo.sampling.sampler import bytes_of_batch
from sologrpo.sampling.shared_cache import cached_tokens
from sologrpo.sampling.stopping import StopStrings

PROMPTS, PROMPT_T, NEW_T = 8, 385, 64


class NoTokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {}


@torch.no_grad()
def test_caches_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Keys and values are most of what this model computes, as at the sizes that matter.
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(shared_cache, "PREFILL_TOKENS", 1)  # several passes, as of long prompts
    prompts = [[3 + i, *range(3, 2 + PROMPT_T)] for i in range(PROMPTS)]
    ids = torch.tensor([[token % 32 for token in prompt] for prompt in prompts])
    ends: dict[str, Any] = {"eos_token_id": [-1], "pad_token_id": 0}
    request = Request(
        ids,
        torch.ones_like(ids),
        GenerationConfig(max_new_tokens=NEW_T, do_sample=False, **ends),
        StopStrings(NoTokenizer(), []),  # type: ignore[arg-type]
    )
    planned = bytes_of_batch(model, cached_tokens(ids.tolist(), NEW_T)[-1], len(ids))
    with LiveMemory() as live:
        generate_fast(model, request)
    assert 0.9 < live.peak / planned < 1.25
