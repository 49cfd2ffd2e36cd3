"""A model, a tokenizer and a data set that are small enough to train in a test.

The weights are random, so nothing here is clever; the shapes, files and code paths are real.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import ModelConfig

from sologrpo.model.loading import load_base_model

ROOT = Path(__file__).resolve().parents[1]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512
NEW_TOKENS = 16  # of a completion in `tiny_config`
# Multiples of 64, the block of bitsandbytes NF4.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
NAMES = ("Ana", "Max", "Leo", "Eli", "Ida", "Tom")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that was trained on word problems."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(ROOT / "tests/golden/tokenizer.json")),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=SIZES["max_position_embeddings"],
    )


def build_model(
    family: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0, tied: bool = False
) -> PreTrainedModel:
    config_class, model_class = FAMILIES[family]
    config = config_class(
        **SIZES | {"vocab_size": max(VOCABULARY, len(tokenizer)), "tie_word_embeddings": tied},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
    _make_numbers_and_endings_likely(model, tokenizer)
    return model


def _make_numbers_and_endings_likely(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Completions then differ in length and hold numbers that a judge can find."""
    head = model.get_output_embeddings().weight
    digits = [i for token, i in tokenizer.get_vocab().items() if token.isdigit()]
    with torch.no_grad():
        head[digits] *= 2.0
        head[tokenizer.eos_token_id] *= 3.0


def save_model(folder: Path, family: str, seed: int = 0, tied: bool = False) -> Path:
    tokenizer = build_tokenizer()
    build_model(family, tokenizer, seed, tied).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def with_adapter(path: Path, dtype: str = "float32", nf4: bool = False, **lora: Any) -> PeftModel:
    """A model whose adapter already does something: both of its factors are random."""
    settings = ModelConfig(
        model_name_or_path=str(path), dtype=dtype, load_in_4bit=nf4, use_bnb_nested_quant=nf4
    )
    base = load_base_model(settings)
    torch.manual_seed(0)
    defaults = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(base, LoraConfig(**defaults | lora, init_lora_weights=False))


def rows(count: int, offset: int = 0) -> list[dict[str, str]]:
    """Problems in GSM8K's schema, half of them additions, half subtractions."""
    made = []
    for i in range(offset, offset + count):
        name, kind = NAMES[i % len(NAMES)], "add" if i % 2 == 0 else "subtract"
        sign, verb = ("+", "gets") if kind == "add" else ("-", "gives away")
        left, right = 20 + 3 * i, 2 + i
        result = left + right if kind == "add" else left - right
        made.append(
            {
                "question": f"{name} has {left} shells and {verb} {right}. How many are left?",
                "answer": f"{left} {sign} {right} = <<{left}{sign}{right}={result}>>{result}\n"
                f"#### {result}",
                "kind": kind,
            }
        )
    return made


def write_rows(path: Path, content: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return path


def save_dataset(folder: Path) -> Path:
    write_rows(folder / "train.jsonl", rows(12))
    write_rows(folder / "test.jsonl", rows(6, offset=12))
    return folder


def tiny_config(model: Path, data: Path, output: Path) -> dict[str, Any]:
    """Settings of `train.py` for two steps on two prompts each."""
    return {
        "model_name_or_path": str(model),
        "dataset_name": str(data),
        "output_dir": str(output),
        "load_in_4bit": False,
        "dtype": "float32",
        "bf16": False,
        "rewards": ["strict_format", "digits:digit_share"],
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": NEW_TOKENS,
        "max_steps": 2,
        "learning_rate": 0.01,
        "lora_r": 4,
        "seed": 3,
    }


# Sizes of a shipped recipe in a test, and the number format, which would be measured. Nothing else
# of it is changed.
SIZES_OF_A_RECIPE: dict[str, Any] = {
    "max_steps": 2, "save_steps": 1, "max_completion_length": 8, "lora_r": 2,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4,
    "generation_batch_size": 16, "num_validation_examples": 2, "eval_steps": 1,
    "max_train_examples": 16, "warmup_steps": 1, "dtype": "float32",
}  # fmt: skip
ADDED_SIZES = {"save_steps", "lora_r", "dtype"}  # also to recipes that leave them at their defaults


def short_recipe(name: str) -> dict[str, Any]:
    """The settings of a shipped recipe in the sizes of a test."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    settings: dict[str, Any] = yaml.safe_load(text)
    sizes = {
        key: size
        for key, size in SIZES_OF_A_RECIPE.items()
        if key in settings or key in ADDED_SIZES
    }
    return settings | sizes
