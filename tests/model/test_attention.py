"""Attention along a tree is switched on for a block only."""

import pytest
from transformers import LlamaConfig

from sologrpo.model.attention import SDPA, tree_attention_enabled


def test_the_attention_of_the_model_comes_back_after_an_error() -> None:
    config = LlamaConfig(attn_implementation="eager")

    def fail() -> None:
        with tree_attention_enabled(config):
            assert config._attn_implementation == SDPA
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert config._attn_implementation == "eager"
