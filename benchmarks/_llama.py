"""Llama-shaped models with random weights, and a tokenizer for them: nothing to download.

Speed and memory depend on the shape alone. The values of the weights do not matter here, except
that random weights practically never end a text: completions have full length, the worst case.
"""

import copy
import random
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from trl import ModelConfig, get_quantization_config

from sologrpo.base.device import one_device
from sologrpo.model.loading import (
    dtype_name,
    keep_nf4_trainable,
    keep_one_input_hook,
    pick_dtype,
)

# Sizes of Llama 3.1 8B and Llama 3.2 3B and 1B, from their config.json, and two small ones.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "tie_word_embeddings": False},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "tie_word_embeddings": True},
    "25m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12,
            "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 16384,
            "tie_word_embeddings": True},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024},
}  # fmt: skip
SPECIAL_TOKENS = ["<pad>", "<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def build_config(shape: str) -> LlamaConfig:
    """Return the configuration of a shape, with the RoPE scaling of Llama 3.1."""
    sizes = {"vocab_size": 128256, "num_key_value_heads": 8, **SHAPES[shape]}
    vocabulary = sizes["vocab_size"]
    return LlamaConfig(
        **sizes,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        pad_token_id=vocabulary - 6,
        bos_token_id=vocabulary - 4,
        eos_token_id=vocabulary - 3,
    )  # fmt: skip


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """Make a word-level tokenizer whose words are t0, t1, ... and whose last six are special."""
    words = ["system", "user", "assistant"]
    words += [f"t{i}" for i in range(vocab_size - len(words) - len(SPECIAL_TOKENS))]
    vocabulary = {word: i for i, word in enumerate(words + SPECIAL_TOKENS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_prompts(count: int, tokens: int, vocab_size: int) -> Dataset:
    """Make `count` different chat prompts of `tokens` tokens, the template's own included."""
    rng = random.Random(0)
    words = tokens - 5  # start, role and end of the message; start and role of the answer
    rows = [
        " ".join(f"t{rng.randrange(vocab_size - 16)}" for _ in range(words)) for _ in range(count)
    ]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": row}] for row in rows]})


@dataclass(frozen=True)
class _Drawn:
    """A weight that is drawn on the device when it is loaded, as a slice of a file is read then."""

    name: str
    shape: torch.Size

    def __getitem__(self, _: Any) -> torch.Tensor:
        weight = torch.ones(self.shape, dtype=torch.bfloat16, device=one_device())
        if self.name.endswith("norm.weight"):
            return weight
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(self.name.encode()))
        return weight.normal_(0.0, 0.02, generator=generator)


def random_model(config: LlamaConfig, model_args: ModelConfig) -> PreTrainedModel:
    """Load a model whose weights are drawn instead of read: no file, and no copy in main memory."""
    args = copy.copy(model_args)
    args.dtype = dtype_name(pick_dtype(model_args.dtype))  # of the 4-bit computation too
    with torch.device("meta"):
        parameters = LlamaForCausalLM(config).named_parameters()
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict={name: _Drawn(name, parameter.shape) for name, parameter in parameters},
        dtype=getattr(torch, args.dtype),
        attn_implementation="sdpa",
        quantization_config=get_quantization_config(args),
        device_map={"": one_device()},
    )
    keep_nf4_trainable(model)
    keep_one_input_hook(model)
    return model


def step_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of weights that one decoding step must read, as they are stored.

    An embedding that is not also the LM head is left out: a step reads single rows of it.
    """
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    total = 0
    for parameter in model.parameters():  # tied weights come once
        if parameter is embedding and embedding is not head:
            continue
        total += parameter.numel() * parameter.element_size()
        state = getattr(parameter, "quant_state", None)
        while state is not None:  # block scales, and with double quantization their own scales
            total += state.absmax.numel() * state.absmax.element_size()
            state = getattr(state, "state2", None)
    return total
