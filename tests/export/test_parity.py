"""Parity: what the gap measures, and which gap is too wide."""

import gc
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig

from sologrpo.base.console import Terminal
from sologrpo.base.errors import InputError
from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.data.dataset import build_prompts
from sologrpo.export import parity
from sologrpo.export.parity import Gap, ParityCheck, coarse_kl, parity_failure
from sologrpo.model import fitting
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import dequantize, merge_adapter, save_4bit, save_merged
from tiny import rows

GAP = Gap(name="merged", kl=0.001, training_kl=0.1)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def top(p: torch.Tensor, q: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = p.topk(count)
    return best.values, q.gather(1, best.indices)


def test_coarse_kl_of_all_tokens_is_exact() -> None:
    p, q = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    torch.testing.assert_close(coarse_kl(*top(p, q, 40)), kl(p, q), atol=1e-5, rtol=1e-4)


def test_coarse_kl_is_a_lower_bound_that_grows_with_the_tokens() -> None:
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
    ("kl", "training_kl", "max_kl", "message"),
    [
        (0.0099, 0.1, 0.01, None),
        (0.0101, 0.1, 0.01, "0.01 nats per token, over 0.01"),
        (0.004, 0.0079, 0.01, "more than 50% of what training changed (0.0079)"),
        (0.004, 0.0081, 0.01, None),
        (0.0, 0.0, 0.01, None),  # untrained: there is nothing to lose
        (0.02, 0.1, 0.05, None),
        (0.001, 0.1, 0.0005, "over 0.0005"),
        (math.nan, 0.1, 0.01, "nan nats per token, over 0.01"),
    ],
)
def test_bounds(kl: float, training_kl: float, max_kl: float, message: str | None) -> None:
    failure = parity_failure(GAP.model_copy(update={"kl": kl, "training_kl": training_kl}), max_kl)
    assert (failure is None) == (message is None)
    assert message is None or message in str(failure)


@pytest.fixture(scope="module")
def trained(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationSettings:
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
    arguments = ["--model", str(tiny_llama), "--adapter", str(folder)]
    arguments += ["--max_completion_length", "12"]
    settings = parse_evaluation(arguments)
    return replace(settings, model=model)


def check_on(trained: EvaluationSettings) -> ParityCheck:
    tokenizer = load_tokenizer(str(trained.model.model_name_or_path))
    problems = build_prompts(Dataset.from_list(rows(4)), trained.data, tokenizer)
    return ParityCheck(trained, problems, Terminal())


def save(trained: EvaluationSettings, folder: Path, in_4bit: bool, adapter: bool = True) -> Path:
    assert trained.adapter is not None
    base = dequantize(load_base_model(replace(trained.model, load_in_4bit=in_4bit)))
    model = merge_adapter(base, trained.adapter) if adapter else base
    save_merged(model, load_tokenizer(str(trained.model.model_name_or_path)), folder)
    return folder


def count_models() -> int:
    return sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects())


def test_gap_separates_the_trained_model_from_similar_ones(
    trained: EvaluationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = save(trained, tmp_path / "right", in_4bit=True)
    other_merge = save(trained, tmp_path / "wrong", in_4bit=False)
    untrained = save(trained, tmp_path / "before", True, adapter=False)
    gc.collect()
    others = count_models()
    load, in_memory = PreTrainedModel.from_pretrained.__func__, []

    def counting(cls: type, *args: object, **kwargs: object) -> PreTrainedModel:
        in_memory.append(count_models() - others)
        return load(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(counting))
    check = check_on(trained)
    right, wrong = check.measure("right", merge), check.measure("wrong", other_merge)
    before = check.measure("before", untrained)
    assert in_memory == [0] * 4  # one model at a time: the trained one and three saved ones
    assert count_models() == others
    assert right.kl < 1e-6
    assert wrong.kl > 100 * right.kl
    # What training changed is the distance to the model before it.
    assert before.kl == pytest.approx(right.training_kl, rel=1e-3)
    assert parity_failure(right) is None
    assert parity_failure(before) is not None


def test_model_with_another_chat_template_is_refused(
    trained: EvaluationSettings, tmp_path: Path
) -> None:
    folder = save(trained, tmp_path / "model", in_4bit=True)
    template = folder / "chat_template.jinja"
    template.write_text("Q: " + template.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer or chat template is not the trained model's"):
        check_on(trained).measure("model", folder)


class LlamaStandIn:
    """Reads prompts and lists the likeliest tokens as llama.cpp does, with a saved model."""

    def __init__(self, folder: Path, listed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._listed = listed

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def likeliest(self, prompt: list[int], count: int) -> dict[int, float]:
        logits = self._model(input_ids=torch.tensor([prompt])).logits[0, -1].detach()
        best = logits.log_softmax(-1).topk(min(self._listed, len(logits)))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def in_llama(check: ParityCheck, stand_in: LlamaStandIn, patch: pytest.MonkeyPatch) -> Gap:
    patch.setattr(parity, "running_llama", lambda file, context: nullcontext(stand_in))
    return check.measure_gguf("gguf", Path("model.gguf"))[0]


def test_llama_scores_as_transformers_do(
    trained: EvaluationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save(trained, tmp_path / "other", in_4bit=False)
    check = check_on(trained)
    expected = check.measure("other", other)
    assert expected.kl > 0.01
    found = in_llama(check, LlamaStandIn(other, listed=2**20), monkeypatch)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3)
    assert found.training_kl == expected.training_kl


def test_tokens_that_llama_does_not_list_do_not_count_as_the_same_rest(
    trained: EvaluationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained = save(trained, tmp_path / "before", True, adapter=False)
    check = check_on(trained)
    gap = in_llama(check, LlamaStandIn(untrained, listed=2), monkeypatch)
    assert parity_failure(gap) is not None


def test_a_merge_that_does_not_fit_on_the_gpu_is_compared_in_main_memory(
    trained: EvaluationSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    merge = save(trained, tmp_path / "right", in_4bit=True)
    save_4bit(merge, tmp_path / "4bit")
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 2**18)
    check = check_on(trained)
    on_gpu: list[str] = []
    monkeypatch.setattr(parity, "one_device", lambda: on_gpu.append("4bit") or "cpu")
    assert check.measure("right", merge).kl < 1e-6
    assert "compare   right, slowly in main memory: " in capfd.readouterr().out
    assert on_gpu == []
    check.measure("4bit", tmp_path / "4bit")  # it takes as little as the trained one
    assert on_gpu == ["4bit"]
