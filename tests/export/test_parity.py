"""Parity: what the gap measures, and which gap is too wide."""

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel
from trl import ModelConfig

from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.console import Terminal
from sologrpo.data.dataset import build_prompts
from sologrpo.errors import InputError
from sologrpo.export import parity
from sologrpo.export.parity import Gap, ParityCheck, coarse_kl, parity_failure
from sologrpo.model import fitting
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import dequantize, merge_adapter, save_4bit, save_merged
from tiny import rows

GAP = Gap(
    name="merged", problems=2, tokens=20, kl=0.001, training_kl=0.1, top1_agreement=1.0,
    greedy_agreement=1.0, accuracy=0.5, delta=0.0, delta_ci95=(-0.1, 0.1),
)  # fmt: skip


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
    return replace(settings, model=model, trained_in_4bit=True)


def check_on(trained: EvaluationSettings, count: int | None = 4) -> ParityCheck:
    tokenizer = load_tokenizer(str(trained.model.model_name_or_path))
    problems = build_prompts(Dataset.from_list(rows(20)), trained.data, tokenizer)
    return ParityCheck(trained, problems, 1, Terminal(), count)


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
    assert right.problems == 4
    assert 4 <= right.tokens <= 48
    assert right.kl < 1e-6
    assert (right.top1_agreement, right.greedy_agreement) == (1.0, 1.0)
    assert right.delta == 0
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


@pytest.mark.parametrize(("seconds", "count"), [(1e-9, 8), (1e9, 20)])
def test_the_speed_of_the_machine_decides_on_the_number_of_problems(
    trained: EvaluationSettings,
    seconds: float,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parity, "SECONDS", seconds)
    check_on(trained, None)
    assert f"compare   on {count} training problems, about" in capfd.readouterr().out


def test_log_probs_are_those_of_each_row_alone(tiny_llama: Path) -> None:
    model = load_base_model(ModelConfig(model_name_or_path=str(tiny_llama), dtype="float32"))
    same = list(range(3, 40))
    rows = [([*same, 7, 8], [9, 10, 11]), ([*same, 12], [13]), ([*same, 14, 15, 16], [17, 18])]
    for (prompt, answer), found in zip(rows, parity._each_log_probs(model, rows), strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].detach()
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class LlamaStandIn:
    """Lists what llama.cpp would, with a model of transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def likeliest(self, prompt: list[int], count: int) -> dict[int, float]:
        logits = self._model(input_ids=torch.tensor([prompt])).logits[0, -1].detach()
        best = logits.log_softmax(-1).topk(count)
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_llama_scores_as_transformers_do(tiny_llama: Path) -> None:
    model = load_base_model(ModelConfig(model_name_or_path=str(tiny_llama), dtype="float32"))
    prompt, tokens = list(range(3, 20)), [5, 9, 7, 40]
    (log_probs_TV,) = parity._each_log_probs(model, [(prompt, tokens)])
    top = (0.8 * log_probs_TV).log_softmax(-1).topk(8)  # of another model
    answer = parity._Answer(prompt, tokens, top.values, top.indices.int(), top.values[:, 0])
    found = parity._distances_in_llama(LlamaStandIn(model), answer)  # type: ignore[arg-type]
    torch.testing.assert_close(found, parity._distances(log_probs_TV, answer), atol=1e-4, rtol=1e-3)


def test_a_model_with_other_likeliest_tokens_is_far(tiny_llama: Path) -> None:
    """Tokens that llama.cpp does not list must not count as the same rest of the probability."""
    answer = parity._Answer(
        [1], [2], torch.tensor([[0.9, 0.05]]).log(), torch.tensor([[2, 3]]), torch.tensor([0.1])
    )

    class Other:
        def likeliest(self, prompt: list[int], count: int) -> dict[int, float]:
            return {7: math.log(0.9), 8: math.log(0.05)}

    kl_T, same_T = parity._distances_in_llama(Other(), answer)  # type: ignore[arg-type]
    assert kl_T.item() > 2
    assert same_T.item() == 0


def test_a_merge_that_does_not_fit_on_the_gpu_is_compared_in_main_memory(
    trained: EvaluationSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    merge = save(trained, tmp_path / "right", in_4bit=True)
    save_4bit(merge, tmp_path / "4bit")
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 2**18)
    monkeypatch.setattr(parity, "SECONDS", 1e9)  # time is not what bounds the problems
    check = check_on(trained, None)
    said = capfd.readouterr().out
    assert "compare   on 8 training problems, slowly, merged models in main memory: " in said
    on_gpu: list[str] = []
    monkeypatch.setattr(parity, "one_device", lambda: on_gpu.append("4bit") or "cpu")
    assert check.measure("right", merge).kl < 1e-6
    assert on_gpu == []
    check.measure("4bit", tmp_path / "4bit")  # it takes as little as the trained one
    assert on_gpu == ["4bit"]
