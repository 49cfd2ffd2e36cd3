"""Problems are reported once, in plain words; usual settings and metrics are not mentioned."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sologrpo.config.parsing import parse_config
from sologrpo.model.loading import load_tokenizer
from sologrpo.plan.warnings import suspicious_settings
from sologrpo.training.diagnosis import TREND, Diagnosis, findings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = {"question": "2 + 3?", "thinking": "2 + 3 = 5", "answer": "5"}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_llama))


def suspicions(tokenizer: PreTrainedTokenizerBase, *arguments: str, steps: int = 100) -> list[str]:
    config = ["--config", str(ROOT / "configs/quickstart.yaml"), *arguments]
    run, args, _ = parse_config(config)
    run.worked_examples = [EXAMPLE]
    return list(suspicious_settings(run, args, steps, tokenizer))


def test_usual_settings_are_not_mentioned(tokenizer: PreTrainedTokenizerBase) -> None:
    assert suspicions(tokenizer, "--max_completion_length", "400") == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--warmup_steps", "100"], "never reaches 0.0002; try --warmup_steps 10"),
        (
            ["--lr_scheduler_kwargs", '{"num_decay_steps": 99}'],
            """try --lr_scheduler_kwargs '{"num_decay_steps": 33}'""",
        ),
        (["--learning_rate", "1e-3"], "or set beta 0.02"),
        (["--temperature", "0.2"], "temperature 0.2: the completions of a group"),
        (["--max_completion_length", "3"], "the model cannot write what the prompt shows"),
        (["--save_steps", "100"], "a crash would lose everything; set save_steps 10"),
        (["--save_strategy", "no"], "no checkpoint before step 100"),
        (["--trust_remote_code", "true"], "runs on this machine with your rights"),
    ],
)
def test_a_suspicious_setting(
    tokenizer: PreTrainedTokenizerBase, arguments: list[str], says: str
) -> None:
    (said,) = suspicions(tokenizer, "--max_completion_length", "400", *arguments)
    assert says in said


def test_a_high_learning_rate_is_fine_with_a_kl_term(tokenizer: PreTrainedTokenizerBase) -> None:
    usual = ("--max_completion_length", "400", "--learning_rate", "1e-3", "--beta", "0.02")
    assert suspicions(tokenizer, *usual) == []


def history(**columns: list[float]) -> dict[str, list[float]]:
    n = max(map(len, columns.values()))
    return {"reward": [0.5] * n} | {key.replace("__", "/"): value for key, value in columns.items()}


def topics(metrics: dict[str, list[float]]) -> list[str]:
    return [topic for topic, _ in findings(metrics, 64)]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0], ["truncation"]),
        ([0.9], []),
        ([0.9] + [0.6] * (TREND - 1), ["truncation"]),
        ([0.9] + [0.6] * (TREND - 2), []),
        ([0.9] * TREND + [0.1], []),
    ],
)
def test_truncation(ratios: list[float], expected: list[str]) -> None:
    assert topics(history(completions__clipped_ratio=ratios)) == expected


@pytest.mark.parametrize(
    ("right", "fix"),
    [(1.0, "100% were all right: take harder"), (0.0, "100% were all wrong: take easier")],
)
def test_no_signal_for_long(right: float, fix: str) -> None:
    columns = {
        "frac_reward_zero_std": [0.5] + [1.0] * 5,
        "degenerate/all_right": [right] * 6,
        "degenerate/all_wrong": [1 - right] * 6,
    }
    ((topic, text),) = findings({"reward": [0.0] * 6, **columns}, 64)
    assert topic == "signal"
    assert fix in text
    assert text.count("were all") == 1
    columns["frac_reward_zero_std"][-2] = 0.9
    assert topics({"reward": [0.0] * 6, **columns}) == []


SHARES = ("frac_reward_zero_std", "degenerate/all_right", "degenerate/all_wrong")


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (0.5, 0.1, "60% of the groups had no signal in the last 10 steps; 50% were all right: "),
        (0.1, 0.5, "60% of the groups had no signal in the last 10 steps; 50% were all wrong: "),
        (0.3, 0.3, "30% were all right: take harder problems; 30% were all wrong: take easier"),
        (0.0, 0.0, "steps; take other problems, or a larger num_generations"),
        (0.25, 0.25, None),
    ],
)
def test_more_than_half_without_signal(right: float, wrong: float, says: str | None) -> None:
    silent = right + wrong if right + wrong else 0.6
    steps = [[share] * TREND for share in (silent, right, wrong)]
    metrics = {"reward": [0.0] * TREND} | dict(zip(SHARES, steps, strict=True))
    found = list(findings(metrics, 64))
    assert [says in text for _, text in found] == ([True] if says else [])
    if says and right != wrong:
        assert found[0][1].count("take ") == 1, "only the cause that matters"
    for values in metrics.values():
        values.pop()
    assert topics(metrics) == [], "nine steps are too few"


def collapsed(
    entropy: float = 0.09,
    silent: float = 0.35,
    right: float = 0.1,
    steps: int = 2 * TREND - 3,
    reward: float = 0.0,
) -> dict[str, list[float]]:
    """A run whose first three steps had an entropy of 1, and the last ten another reward."""
    return {
        "reward": [0.0] * (3 + steps - TREND) + [reward] * TREND,
        "entropy": [0.9, 1.0, 1.1] + [entropy] * steps,
        "frac_reward_zero_std": [0.0] * 3 + [silent] * steps,
        "degenerate/all_right": [0.0] * 3 + [right] * steps,
    }


def test_entropy_that_collapsed() -> None:
    ((topic, text),) = findings(collapsed(), 64)
    assert topic == "entropy"
    assert "entropy fell from 1 to 0.09 nats per token, 25% of the groups have no" in text
    for setting in ("learning_rate", "temperature", "epsilon_high 0.28"):
        assert setting in text
    without_outcome = collapsed()
    del without_outcome["degenerate/all_right"]
    assert topics(without_outcome) == ["entropy"]


@pytest.mark.parametrize(
    "change",
    [
        {"entropy": 0.11},  # usual
        {"right": 0.25},  # the silent groups are solved
        {"silent": 0.25},
        {"steps": 2 * TREND - 4},
        {"reward": 0.01},  # still learning
    ],
)
def test_entropy_that_is_low_for_a_reason(change: dict[str, Any]) -> None:
    assert topics(collapsed(**change)) == []


def test_metrics_that_are_missing_or_not_a_number() -> None:
    nothing = {"reward": [float("nan")] * 30, "entropy": [float("nan")] * 30}
    assert topics(nothing) == []
    assert topics(nothing | {"frac_reward_zero_std": [float("nan")] * 30}) == []


def kinds(steps: int = 20, **rates: list[float]) -> dict[str, list[float]]:
    return {"reward": [0.0] * steps} | {f"accuracy/{kind}": rate for kind, rate in rates.items()}


def test_a_kind_that_is_never_right() -> None:
    metrics = kinds(add=[0.0] * 15 + [0.5] * 5, divide=[0.0] * 5, rare=[0.0] * 4)
    ((topic, text),) = findings(metrics, 64)
    assert topic == "kind divide"
    assert "no problem of kind 'divide' was ever solved, in 5 steps that had one" in text


@pytest.mark.parametrize(
    "metrics",
    [
        kinds(steps=19, add=[0.5] * 19, divide=[0.0] * 19),  # early
        kinds(add=[0.5] * 20, divide=[0.0] * 4),  # rare
        kinds(add=[0.5] * 20, divide=[0.1] + [0.0] * 19),  # right once
        kinds(add=[0.5] + [0.0] * 19, divide=[0.0] * 20),  # nothing is right any more
        kinds(divide=[0.0] * 20),
    ],
)
def test_a_kind_that_may_still_be_learned(metrics: dict[str, list[float]]) -> None:
    assert topics(metrics) == []


# --- the callback ---------------------------------------------------------------------------------

ARGS = SimpleNamespace(output_dir=".")


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def diagnosis() -> tuple[Diagnosis, io.StringIO]:
    shown = io.StringIO()
    return Diagnosis(Console(file=shown, width=60), 64), shown


def log(callback: Diagnosis, step: int, **logs: Any) -> None:
    state = SimpleNamespace(global_step=step, is_world_process_zero=True)
    callback.on_log(ARGS, state, None, logs)


def test_warnings_are_written_for_the_report() -> None:
    callback, shown = diagnosis()
    for step in (3, 4):
        log(callback, step, reward=0.0, **{"completions/clipped_ratio": 1.0})
    (line,) = Path("warnings.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert written["topic"] == "truncation"
    assert shown.getvalue() == f"warning  step 3: {written['text']}\n"
    state = SimpleNamespace(global_step=5, is_world_process_zero=False)
    callback._warn(ARGS, state, 5, "signal", "said by the first process")
    assert len(Path("warnings.jsonl").read_text().splitlines()) == 1


def test_steps_without_completions_of_their_own_do_not_count() -> None:
    callback, shown = diagnosis()
    log(callback, 1, loss=0.1)
    log(callback, 1, eval_accuracy=0.5, eval_runtime=1.0)
    assert not shown.getvalue()


def update(callback: Diagnosis, rate: float, change: float, gradient: float = 1.0) -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    model.weight.grad = torch.full_like(model.weight, gradient)
    optimizer = SimpleNamespace(param_groups=[{"lr": rate}])
    callback.on_pre_optimizer_step(None, None, None, model=model, optimizer=optimizer)
    with torch.no_grad():
        model.weight[0, 0] += change
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    callback.on_optimizer_step(ARGS, state, None, model=model)


def test_an_adapter_that_does_not_move() -> None:
    callback, shown = diagnosis()
    update(callback, rate=0.0, change=0.0)  # the first step of a warm-up
    update(callback, rate=1e-6, change=0.0, gradient=0.0)  # a batch without signal
    assert not shown.getvalue()
    update(callback, rate=1e-6, change=0.0)
    assert "step 1: the first update has not changed the adapter" in shown.getvalue()


def test_an_adapter_that_moves_a_little() -> None:
    callback, shown = diagnosis()
    update(callback, rate=1e-6, change=1e-6)
    update(callback, rate=1e-6, change=0.0)  # looked at once only
    assert not shown.getvalue()
