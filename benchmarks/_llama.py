"""Llama-shaped models with random weights, and a tokenizer for them: nothing to download.

Speed and memory depend on the shape alone. The values of the weights do not matter here, except
that random weights practically never end a text: completions have full length, the worst case.
"""

import random
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

# Sizes of Llama 3.1 8B, Llama 3.2 3B and 1B and of SmolLM2 360M and 135M, from their config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "tie_word_embeddings": False},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
           "num_attention_heads": 24, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "tie_word_embeddings": True},
    "360m": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
             "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49152,
             "tie_word_embeddings": True},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
             "tie_word_embeddings": True},
    "25m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12,
            "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 16384,
            "tie_word_embeddings": True},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024},
}  # fmt: skip
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
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


def save_random_checkpoint(config: LlamaConfig, folder: Path, device: torch.device) -> None:
    """Save a model with random bf16 weights as safetensors, initialised on `device`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    model.save_pretrained(folder, max_shard_size="4GB")


def load(folder: Path, device: torch.device, nf4: bool) -> PreTrainedModel:
    """Load a checkpoint as a training script does, in NF4 or in bf16."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        device_map={"": 0 if device.type == "cuda" else "cpu"},
        **({"quantization_config": quantization} if nf4 else {}),
    )
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # On CPU, evaluation repacks the weights into a form that has no backward pass.
            module.support_avx512bf16_for_cpu = False
    return model


def lora_config() -> LoraConfig:
    """Build the LoRA config of a widely copied notebook."""
    return LoraConfig(
        r=8, lora_alpha=32, lora_dropout=0.05, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
    )


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


def kv_bytes(config: LlamaConfig, tokens: float) -> float:
    """Compute the bytes of bf16 keys and values of `tokens` cached tokens."""
    heads = config.num_key_value_heads * config.head_dim
    return 2 * 2 * config.num_hidden_layers * heads * tokens


def linear_parameters(config: LlamaConfig) -> int:
    """Count the weights of the decoder layers' projections: 2 FLOP each per token and pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner
    return config.num_hidden_layers * layer
