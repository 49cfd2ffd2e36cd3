"""The operations of a pass are counted as PyTorch counts them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from sologrpo.training.utilisation import fastest_product, useful_operations


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_operations_are_those_of_a_pass(request: pytest.FixtureRequest, family: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(f"tiny_{family}"))
    model = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    T = 8
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(T)[None]).logits.sum().backward()
    products = counter.get_flop_counts()["Global"]
    counted = sum(n for operation, n in products.items() if "mm" in str(operation))
    # The input of the first layer needs no gradient, which is more of a tiny model.
    assert useful_operations(model, T, T) == pytest.approx(counted, rel=0.15)
    assert useful_operations(model, T, 0) < useful_operations(model, T, T)


def test_the_fastest_product_is_measured_once() -> None:
    first = fastest_product(64, torch.device("cpu"), torch.float32)
    assert first > 1e6
    assert fastest_product(64, torch.device("cpu"), torch.float32) == first
