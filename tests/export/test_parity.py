"""Parity: what the gap measures, and which gap is too wide."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import ModelConfig

from sologrpo.errors import InputError
from sologrpo.export.parity import (
    Gap,
    Problem,
    Reference,
    Trained,
    coarse_kl,
    why_not_the_trained_model,
)
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import dequantised, merge_adapter, save_merged
from tiny import rows

GAP = Gap(
    name="merged", problems=2, tokens=20, kl=0.001, training_kl=0.1, mean_logprob_gap=0.01,
    max_logprob_gap=0.1, top1_agreement=1.0, greedy_agreement=1.0, accuracy_trained=0.5,
    accuracy=0.5, delta=0.0, delta_ci95=(-0.1, 0.1),
)  # fmt: skip


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def top(p: torch.Tensor, q: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = p.topk(count)
    return best.values, q.gather(1, best.indices)


def test_coarse_kl_of_all_tokens_is_exact() -> None:
    p, q = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    torch.testing.assert_close(coarse_kl(*top(p, q, 40)), kl(p, q), atol=1e-5, rtol=1e-4)


def test_coarse_kl_is_never_above_the_exact_and_grows_towards_it() -> None:
    p, q = torch.randn(2, 9, 400, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    exact = kl(p, q)
    coarse = [coarse_kl(*top(p, q, count)) for count in (10, 100, 300)]
    assert all((value <= exact + 1e-5).all() for value in coarse)
    means = [value.mean() for value in coarse]
    assert means == sorted(means)
    assert means[-1] > 0.7 * exact.mean()


def test_coarse_kl_of_a_certain_token() -> None:
    # Nothing is left for the other tokens, in one of the two or in both.
    certain = torch.tensor([[0.0, -math.inf]])
    assert coarse_kl(certain.clamp_min(-100), certain.clamp_min(-100)).item() == 0.0
    halves = torch.tensor([[0.5, 0.25]]).log()
    assert coarse_kl(certain.clamp_min(-100), halves).item() == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kl": 0.0099}, None),
        ({"kl": 0.0101}, "0.01 nats a token, over 0.01"),
        ({"kl": 0.004, "training_kl": 0.0079}, "more than 50% of what training changed (0.0079)"),
        ({"kl": 0.004, "training_kl": 0.0081}, None),
        ({"kl": 0.0, "training_kl": 0.0}, None),  # untrained: there is nothing to lose
    ],
)
def test_bounds(changes: dict[str, float], says: str | None) -> None:
    reason = why_not_the_trained_model(replace(GAP, **changes))
    assert (reason is None) == (says is None)
    assert says is None or says in str(reason)


def test_bound_of_the_users_own() -> None:
    assert why_not_the_trained_model(replace(GAP, kl=0.02), max_kl=0.05) is None
    assert why_not_the_trained_model(GAP, max_kl=0.0005) is not None


@pytest.fixture(scope="module")
def trained(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An adapter on NF4 weights."""
    model = ModelConfig(
        model_name_or_path=str(tiny_llama), dtype="float32", load_in_4bit=True,
        use_bnb_nested_quant=True,
    )  # fmt: skip
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(load_base_model(model), config).save_pretrained(str(folder))
    return Trained(model, folder, trust_remote_code=False, max_new_tokens=12, stop_strings=[])


def problems() -> list[Problem]:
    return [
        Problem([{"role": "user", "content": row["question"]}], row["answer"], "xml")
        for row in rows(4)
    ]


def save(trained: Trained, folder: Path, in_4bit: bool, adapter: bool = True) -> Path:
    base = dequantised(load_base_model(replace(trained.model, load_in_4bit=in_4bit)))
    model = merge_adapter(base, trained.adapter) if adapter else base
    save_merged(model, load_tokenizer(str(trained.model.model_name_or_path)), folder)
    return folder


def test_gap_tells_the_trained_model_from_its_neighbours(trained: Trained, tmp_path: Path) -> None:
    with Reference(trained, problems()) as reference:
        right = reference.gap("right", save(trained, tmp_path / "right", in_4bit=True))
        wrong = reference.gap("wrong", save(trained, tmp_path / "wrong", in_4bit=False))
        before = reference.gap("before", save(trained, tmp_path / "before", True, adapter=False))
    assert right.problems == 4
    assert 4 <= right.tokens <= 48
    assert right.kl < 1e-6
    assert right.max_logprob_gap < 1e-3
    assert (right.top1_agreement, right.greedy_agreement) == (1.0, 1.0)
    assert right.accuracy == right.accuracy_trained
    assert wrong.kl > 100 * right.kl
    assert wrong.max_logprob_gap >= wrong.mean_logprob_gap > right.max_logprob_gap
    # What training changed is the way back to the model before it.
    assert before.kl == pytest.approx(right.training_kl, rel=1e-3)
    assert why_not_the_trained_model(right) is None
    assert why_not_the_trained_model(before) is not None


def test_model_with_another_chat_template_is_refused(trained: Trained, tmp_path: Path) -> None:
    folder = save(trained, tmp_path / "model", in_4bit=True)
    template = folder / "chat_template.jinja"
    template.write_text("Q: " + template.read_text(encoding="utf-8"), encoding="utf-8")
    with (
        Reference(trained, problems()) as reference,
        pytest.raises(InputError, match=r"tokenizer or chat template is not the trained model's"),
    ):
        reference.gap("model", folder)
