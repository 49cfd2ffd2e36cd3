"""`sologrpo train` without `--config`: the recipe for a machine, and a run as with `--config`."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from huggingface_hub import constants

from scripts import exit_code, load_script, steps_of, train_without_report
from sologrpo import hub
from sologrpo.files import recipes
from sologrpo.plan import recipe_choice
from sologrpo.plan.recipe_choice import CARDS, choose_recipe

OPEN, LARGE = "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-8B"
GATED = "meta-llama/Llama-3.1-8B-Instruct"
GSM8K = "openai/gsm8k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, which answers unless a test asks it not to."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def put_into(cache: Path, name: str) -> None:
    """Put the weights of a model, or a data set, where the libraries keep them."""
    if name == GSM8K:
        (cache / "datasets" / "openai___gsm8k").mkdir(parents=True)
        return
    folder = cache / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "model.safetensors.index.json").write_text("{}")


def use_card(monkeypatch: pytest.MonkeyPatch, gibibytes: float, native_bf16: bool = True) -> None:
    card = SimpleNamespace(name="a card", total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: native_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)


def choice(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """The arguments that a process has after the choice."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    choose_recipe()
    return sys.argv[1:]


# What torch reports for a T4, an L4, an A100 of 40 GB, an L40S and an A100 of 80 GB.
@pytest.mark.parametrize(
    ("gibibytes", "cached", "expected"),
    [
        (11.8, [], "quickstart"),
        (14.6, [], "qwen2.5-1.5b"),
        (22.0, [], "qwen2.5-1.5b"),
        (22.0, [GATED], "llama3.1-8b"),
        (39.4, [GATED], "llama3.1-8b"),
        (44.4, [], "r1-zero-on-policy"),
        (79.3, [GATED], "r1-zero-on-policy"),
    ],
)
def test_the_largest_recipe_for_a_card_whose_files_can_be_had(
    gibibytes: float, cached: list[str], expected: str, cache: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(recipe_choice, "unreachable", lambda: "")
    use_card(monkeypatch, gibibytes, native_bf16=gibibytes > 20)
    for name in cached:
        put_into(cache, name)
    assert choice(monkeypatch, "--seed", "3") == ["--seed", "3", "--config", expected]
    shown = capsys.readouterr().out
    dtype = "bfloat16" if gibibytes > 20 else "float16"
    device = f"a card, {gibibytes:.0f} GiB, {dtype}"
    assert shown.startswith(f"recipe   {expected}, for {device}: never tried on a GPU; --config")
    larger = list(CARDS)[: [*CARDS, "quickstart"].index(expected)]
    assert re.findall(r"(\S+?):? (?:needs \d+ GB|\S+ is gated)", shown) == larger
    assert len(shown.splitlines()) == (2 if larger else 1)


@pytest.mark.parametrize(
    ("cached", "arguments", "expected"),
    [
        ([], [], "quickstart"),
        ([OPEN], [], "quickstart"),
        ([OPEN, GSM8K], [], "qwen2.5-1.5b"),
        ([OPEN], ["--dataset_name", "mine.jsonl"], "qwen2.5-1.5b"),
        ([LARGE, GSM8K], [], "r1-zero-on-policy"),
    ],
)
def test_without_the_hub_the_cache_decides(
    cached: list[str], arguments: list[str], expected: str, cache: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.unreachable.cache_clear()
    use_card(monkeypatch, 79.3)
    for name in cached:
        put_into(cache, name)
    assert choice(monkeypatch, *arguments)[-1] == expected
    reason = "is not in the Hub's local cache, and HF_HUB_OFFLINE is set"
    assert (reason in capsys.readouterr().out) == (expected != "r1-zero-on-policy")


@pytest.mark.parametrize(
    "arguments",
    [["--config", "quickstart"], ["--config"], ["--model_name_or_path", "x"],
     ["--seed", "3", "--model-name-or-path=x"], ["--help"]],
    ids=" ".join,
)  # fmt: skip
def test_a_named_recipe_or_model_is_left_alone(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choice(monkeypatch, *arguments) == arguments
    assert capsys.readouterr().out == ""


def test_the_cards_are_those_of_the_headers() -> None:
    for name, gigabytes in CARDS.items():
        header = recipes()[name].read_text(encoding="utf-8")
        assert re.search(rf"^# GPU:     {gigabytes} GB( or more)? ", header, re.MULTILINE), name
    assert list(CARDS.values()) == sorted(CARDS.values(), reverse=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_run_is_the_same_as_with_the_recipe(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert exit_code(load_script("train"), "--dry_run") == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("recipe   quickstart, for CPU, ")
    assert shown.err.splitlines()[-1].endswith("download it with `sologrpo model`")

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(tiny_llama)
    short = ("--num_generations", 2, "--per_device_train_batch_size", 4, "--dtype", "float32",
             "--max_completion_length", 6, "--save_steps", 1)  # fmt: skip
    train = train_without_report()
    assert exit_code(train, *short, "--max_steps", 1) == 0
    assert exit_code(train, *short, "--max_steps", 2, "--resume") == 0
    assert steps_of(tmp_path / "runs" / "quickstart") == [1, 2]
    named = ("--config", "quickstart", "--output_dir", "runs/named")
    assert exit_code(train, *named, *short, "--max_steps", 2) == 0
    chosen, named_one = (
        yaml.safe_load((tmp_path / "runs" / run / "config.yaml").read_text())
        for run in ("quickstart", "named")
    )
    differing = {key for key in chosen if chosen[key] != named_one[key]}
    assert differing <= {"output_dir", "resume", "run_name", "logging_dir"}
