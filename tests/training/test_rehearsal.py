"""The largest steps of a run are tried before it, and leave no trace in it."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from scripts import printed_by, train_without_report
from sologrpo.config.parsing import parse_config
from sologrpo.errors import RunError
from sologrpo.training import rehearsal
from sologrpo.training.rehearsal import (
    OUT_OF_MEMORY,
    Probe,
    Rehearsal,
    advice,
    describe,
    rehearse,
    rehearsed,
    should_rehearse,
)
from tiny import NEW_TOKENS, rows, tiny_config, write_rows


@pytest.fixture
def config(tmp_path: Path, tiny_llama: Path) -> Path:
    problems = rows(12)
    problems[7]["question"] += " Think twice." * 20
    write_rows(tmp_path / "data" / "train.jsonl", problems)
    path = tmp_path / "tiny.yaml"
    settings = tiny_config(tiny_llama, tmp_path / "data", tmp_path / "run")
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def test_a_rehearsal_sends_nothing_anywhere(config: Path) -> None:
    arguments = ["--config", str(config), "--push_to_hub", "true", "--report_to", "wandb"]
    args = rehearsed(parse_config(arguments)[1], "elsewhere")
    assert not args.push_to_hub
    assert args.report_to == []


def test_the_longest_prompt_and_full_completions(config: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(config), "--max_steps", "50"]
    _, args, _ = parse_config(arguments)
    text = io.StringIO()
    found = rehearse(arguments, args, Console(file=text, width=200))
    assert found is not None, text.getvalue()
    assert found.probe.prompts == 12
    assert found.probe.right is None  # no reward of this config judges answers
    assert 0 <= found.probe.no_signal < 1
    assert 0 <= found.probe.ended < 1
    assert 1 <= found.probe.p95_tokens <= NEW_TOKENS
    assert found.prompt_tokens > 100  # the long one; the others have half as many
    assert found.completion_tokens == NEW_TOKENS
    assert found.completions == 8
    assert found.steps == 50
    assert found.step_s > 0
    assert 0.1 < found.peak_gib < 10
    assert found.train_token_budget == args.train_token_budget
    assert "8 completions of 16 tokens behind prompts of up to" in text.getvalue()
    assert not (tmp_path / "run").exists()


def test_a_run_is_the_same_with_and_without_one(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = []
    for choice in ("true", "false"):
        run = tmp_path / choice
        # Off-policy, where two steps share what is sampled for the first.
        options = ("--config", config, "--output_dir", run, "--num_iterations", "2")
        printed = printed_by(train_without_report(), capfd, *options, "--rehearse", choice)
        assert printed.code == 0, printed
        assert ("\nrehearsal 8 completions" in printed.stdout) == (choice == "true")
        weights.append(load_file(str(run / "adapter" / "adapter_model.safetensors")))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Failed:
    stdout, stderr = "", "Traceback ...\nRuntimeError: no such kernel\n"

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, -9])
def test_what_does_not_fit_stops_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(rehearsal.subprocess, "run", lambda *_, **__: Failed(code))
    _, args, _ = parse_config(["--config", str(config)])
    with pytest.raises(RunError, match=r"do not fit into memory: lower max_completion_length"):
        rehearse([], args, Console(quiet=True))


def test_a_rehearsal_that_fails_otherwise_stops_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal.subprocess, "run", lambda *_, **__: Failed(1))
    _, args, _ = parse_config(["--config", str(config)])
    text = io.StringIO()
    assert rehearse([], args, Console(file=text, width=200)) is None
    assert "starts all the same: RuntimeError: no such kernel" in text.getvalue()


GOOD = Probe(prompts=64, right=0.4, no_signal=0.3, p95_tokens=80, ended=0.97)


def test_what_was_found_in_words(config: Path) -> None:
    _, args, _ = parse_config(["--config", str(config)])
    found = Rehearsal(GOOD, 300, 96, 32, 30.0, 14.2, args.train_token_budget, 100)
    probed, rehearsed = describe(found, args)
    assert "64 prompts x 4 completions: 40% right, 30% of the groups without signal" in probed
    assert "97% end by themselves, 95 % within 80 tokens" in probed
    assert "30.0 s a step, at most 14.2 GiB; 100 steps like this take 50 min" in rehearsed
    assert list(advice(found, args)) == []


@pytest.mark.parametrize(
    ("probe", "budget", "says"),
    [
        (GOOD, 100, "set train_token_budget 100, which fitted"),
        (replace(GOOD, ended=0.1), None, "90% of the completions are cut off at 16 tokens"),
        (replace(GOOD, right=0.95, no_signal=0.9), None, "take harder problems"),
        (replace(GOOD, right=0.01, no_signal=0.9), None, "take easier problems"),
        (replace(GOOD, right=0.5, no_signal=0.9), None, "raise num_generations (4)"),
    ],
)
def test_a_change_is_proposed(config: Path, probe: Probe, budget: int | None, says: str) -> None:
    _, args, _ = parse_config(["--config", str(config)])
    found = Rehearsal(probe, 300, 96, 32, 30.0, 14.2, budget or args.train_token_budget, 100)
    (text,) = advice(found, args)
    assert says in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], torch.cuda.is_available()),
        (["--rehearse", "true"], True),
        (["--rehearse", "true", "--resume", "true"], False),
        (["--rehearse", "true", "--trainer", "stock"], False),
        (["--rehearse", "false"], False),
    ],
)
def test_when(config: Path, arguments: list[str], expected: bool) -> None:
    run, args, _ = parse_config(["--config", str(config), *arguments])
    assert should_rehearse(run, args) is expected
