"""Rehearse the largest step before a run, without a trace in it."""

import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from scripts import printed_by, train_without_report
from sologrpo.config import parse_config
from sologrpo.data import load_train_and_validation
from sologrpo.errors import RunError
from sologrpo.model import load_base_model, load_tokenizer
from sologrpo.training import SoloGRPOTrainer, build_trainer, rehearse
from tiny import NEW_TOKENS, rows, tiny_config, write_rows

LINE = re.compile(
    r"rehearsal prompts of up to (\d+) tokens, completions of (\d+): about (\d+\.\d) s per step, "
    r"at most (\d+\.\d) GiB; (\d+) steps like this take \d+ min"
)
Start = Callable[..., tuple[Any, Any, io.StringIO]]


@pytest.fixture
def config(tmp_path: Path, tiny_llama: Path) -> Path:
    problems = rows(12)
    problems[7]["question"] += " Think twice." * 20
    write_rows(tmp_path / "data" / "train.jsonl", problems)
    path = tmp_path / "tiny.yaml"
    settings = tiny_config(tiny_llama, tmp_path / "data", tmp_path / "run") | {"rehearse": True}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.fixture
def rehearsed(config: Path) -> Callable[..., tuple[SoloGRPOTrainer, str]]:
    """Rehearse the tiny run with further arguments; return the trainer and what was printed."""

    def run(
        *arguments: str, before: Callable[[SoloGRPOTrainer], None] | None = None
    ) -> tuple[SoloGRPOTrainer, str]:
        settings = parse_config(["--config", str(config), *arguments])
        tokenizer = load_tokenizer(str(settings[2].model_name_or_path))
        datasets = load_train_and_validation(settings[0], tokenizer, 0)
        console = Console(file=io.StringIO(), width=300)
        model = load_base_model(settings[2], False)
        trainer = build_trainer(settings, model, [letters], datasets, tokenizer, console)
        if before is not None:
            before(trainer)
        rehearse(trainer, settings[0], console)
        return trainer, console.file.getvalue()  # type: ignore[attr-defined]

    return run


def letters(completions: list[Any], **kwargs: Any) -> list[float]:
    raise AssertionError("a rehearsal calls no reward: it may count its calls")


def test_the_longest_prompt_and_full_completions(rehearsed: Any, tmp_path: Path) -> None:
    sampled, trained = [], []

    def record(trainer: SoloGRPOTrainer) -> None:
        generate, compute_loss = trainer._generate_single_turn, trainer.compute_loss

        def generate_and_record(*args: Any) -> Any:
            sampled.append(generate(*args))
            return sampled[-1]

        def compute_and_record(model: Any, inputs: Any) -> Any:
            trained.append(inputs["completion_mask"].sum(dim=1).tolist())
            return compute_loss(model, inputs)

        trainer._generate_single_turn = generate_and_record
        trainer.compute_loss = compute_and_record

    _, text = rehearsed("--max_steps", "50", before=record)
    found = LINE.search(text)
    assert found is not None, text
    assert int(found[1]) > 100  # the long one; the others have half as many
    assert int(found[2]) == NEW_TOKENS
    assert 0.1 < float(found[4]) < 10
    assert int(found[5]) == 50
    assert [[len(ids) for ids in call[0]] for call in sampled] == [[8] * 8, [NEW_TOKENS] * 8]
    assert trained == [[NEW_TOKENS] * 8]
    assert "warning" not in text
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_what_would_take_long_is_sampled_in_part_and_progress_is_shown(
    rehearsed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def status(console: Console, text: str) -> Any:
        shown.append(text)
        return nullcontext()

    monkeypatch.setattr(Console, "status", status)
    monkeypatch.setattr("sologrpo.training.rehearsal.SAMPLING_SECONDS", 0.0)
    _, text = rehearsed()
    assert f"completions of {NEW_TOKENS} (8 sampled): about" in text
    assert shown == ["rehearsal: 8 tokens per completion", "rehearsal: forward and backward pass"]


def test_nothing_stays_in_the_trainer(rehearsed: Any) -> None:
    kept: dict[str, Any] = {}

    def remember(trainer: SoloGRPOTrainer) -> None:
        kept.update(vars(trainer))
        kept["random"] = torch.get_rng_state()
        kept["weights"] = {n: p.clone() for n, p in trainer.model.named_parameters()}

    trainer, _ = rehearsed(before=remember)
    assert torch.equal(torch.get_rng_state(), kept.pop("random"))
    weights = kept.pop("weights")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None
    assert vars(trainer).keys() == kept.keys()
    assert all(vars(trainer)[name] is value for name, value in kept.items())
    assert not any(trainer._metrics["train"].values())
    assert trainer.state.num_input_tokens_seen == 0
    assert trainer.generation_config.max_new_tokens == NEW_TOKENS
    assert trainer.optimizer is None


# Off-policy, where two steps share what is sampled for the first; a format with stop strings.
@pytest.mark.parametrize(
    "more",
    [["--num_iterations", "2"], ["--prompt_format", "r1_zero", "--rewards", "strict_format"]],
)
def test_a_run_is_the_same_with_and_without_one(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str]
) -> None:
    weights, metrics = [], []
    for choice in ("true", "false"):
        run = tmp_path / choice
        options = ("--config", config, "--output_dir", run, "--max_steps", "3", *more)
        printed = printed_by(train_without_report(), capfd, *options, "--rehearse", choice)
        assert printed.code == 0, printed
        assert ("\nrehearsal prompts" in printed.stdout) == (choice == "true")
        weights.append(load_file(str(run / "adapter" / "adapter_model.safetensors")))
        metrics.append(
            re.findall(
                r'"(?:reward|num_tokens|entropy)": [^,]+', (run / "metrics.jsonl").read_text()
            )
        )
        files = ".lock adapter checkpoint-3 completions config.yaml environment.json metrics.jsonl"
        written = {path.name for path in run.iterdir()}
        assert written - {"warnings.jsonl"} == set(files.split())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert metrics[0] == metrics[1]


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_row_that_does_not_fit_stops_the_run(rehearsed: Any) -> None:
    def fill(trainer: SoloGRPOTrainer) -> None:
        trainer.model.forward = out_of_memory

    with pytest.raises(RunError, match="do not fit into memory: lower max_completion_length"):
        rehearsed("--sampling_engine", "adapter", before=fill)


def test_passes_that_do_not_fit_get_a_warning(rehearsed: Any) -> None:
    def fill(trainer: SoloGRPOTrainer) -> None:
        forward = trainer.model.forward

        def forward_few(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and kwargs["input_ids"].numel() > 500:
                out_of_memory()
            return forward(*args, **kwargs)

        trainer.model.forward = forward_few

    _, text = rehearsed(before=fill)
    found = re.search(r"warning  out of memory in training: set train_token_budget (\d+)", text)
    assert found is not None, text
    assert 0 < int(found[1]) <= 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rehearse", "false"], False),
        (["--rehearse", "true", "--resume", "true"], False),
        (["--rehearse", "true", "--trainer", "stock"], False),
    ],
)
def test_when(rehearsed: Any, arguments: list[str], expected: bool) -> None:
    assert ("rehearsal" in rehearsed(*arguments)[1]) is expected
