"""Problems are reported once, in plain words; usual settings and metrics are not mentioned."""

import io
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
        (["--warmup_steps", "100"], "never reaches 0.0005; try --warmup_steps 10"),
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


def test_constant_rewards_of_the_first_batch() -> None:
    (found,) = findings(history(frac_reward_zero_std=[1.0], reward_std=[0.0]), 64)
    assert found[0] == "first rewards"
    assert "earned the same (0.5)" in found[1]
    assert topics(history(frac_reward_zero_std=[1.0], reward_std=[0.4])) == []
    assert topics(history(frac_reward_zero_std=[0.5], reward_std=[0.0])) == []


@pytest.mark.parametrize(("right", "fix"), [(1.0, "take harder ones"), (0.0, "take easier")])
def test_no_signal_for_long(right: float, fix: str) -> None:
    columns = {"frac_reward_zero_std": [0.5] + [1.0] * 5, "degenerate/all_right": [right] * 6}
    (found,) = findings({"reward": [0.0] * 6, **columns}, 64)
    assert fix in found[1]
    columns["frac_reward_zero_std"][-2] = 0.9
    assert topics({"reward": [0.0] * 6, **columns}) == []


@pytest.mark.parametrize(
    ("format_after", "right_after", "expected"),
    [(0.9, 0.1, ["format alone"]), (0.9, 0.2, []), (0.0, 0.1, [])],
)
def test_a_gain_of_format_alone(
    format_after: float, right_after: float, expected: list[str]
) -> None:
    metrics = history(
        rewards__strict_format__mean=[-0.2] * TREND + [format_after] * TREND,
        rewards__answer_correctness__mean=[0.1] * TREND + [right_after] * TREND,
    )
    assert topics(metrics) == expected


# --- the callback ---------------------------------------------------------------------------------


def diagnosis() -> tuple[Diagnosis, io.StringIO]:
    shown = io.StringIO()
    return Diagnosis(Console(file=shown, width=60), 64), shown


def log(callback: Diagnosis, step: int, **logs: Any) -> None:
    state = SimpleNamespace(global_step=step, is_world_process_zero=True)
    callback.on_log(None, state, None, logs)


def test_each_topic_is_said_once_in_one_line() -> None:
    callback, shown = diagnosis()
    for step in (1, 2):
        log(callback, step, reward=0.0, **{"completions/clipped_ratio": 1.0})
    (line,) = shown.getvalue().splitlines()
    assert line.startswith("warning  step 1: every completion of the first batch was cut off at 64")


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
    callback.on_optimizer_step(None, None, None, model=model)


def test_an_adapter_that_does_not_move() -> None:
    callback, shown = diagnosis()
    update(callback, rate=0.0, change=0.0)  # the first step of a warm-up
    update(callback, rate=1e-6, change=0.0, gradient=0.0)  # a batch without signal
    assert not shown.getvalue()
    update(callback, rate=1e-6, change=0.0)
    assert "has not changed the adapter" in shown.getvalue()


def test_an_adapter_that_moves_a_little() -> None:
    callback, shown = diagnosis()
    update(callback, rate=1e-6, change=1e-6)
    update(callback, rate=1e-6, change=0.0)  # looked at once only
    assert not shown.getvalue()
