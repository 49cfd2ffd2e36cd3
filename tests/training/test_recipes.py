"""Recipes match docs/recipes.md: numbers, names, and the metrics of each family.

The smoke recipes run through `train.py` from their own files, with a tiny model and data.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from trl import ModelConfig

from rewards.completions import text_of
from scripts import exit_code, train_without_report
from sologrpo.base.errors import InputError
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.config.parsing import parse_config
from sologrpo.config.schedule import check_fills_a_batch
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import ROOT, build_model, build_tokenizer

SMOKE = {
    "smoke-xml": "llama3.1-8b",
    "smoke-r1-zero-on-policy": "r1-zero-on-policy",
    "smoke-r1-zero-off-policy": "r1-zero-off-policy",
    "smoke-dr-grpo": "dr-grpo",
    "smoke-boxed": "boxed-fewshot",
}
# What makes a family; model, data, sizes, learning rate and its schedule are the smoke run's own.
FAMILY_KEYS = (
    "prompt_format", "rewards", "reward_weights", "loss_type", "scale_rewards", "advantage_eps",
    "epsilon", "epsilon_high", "num_iterations", "beta", "temperature", "top_p", "top_k",
    "adam_beta1", "adam_beta2", "mask_truncated_completions",
)  # fmt: skip
UNEVEN_STEPS = (
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --generation_batch_size 24"
)
CLOSING = "</answer>"


@pytest.fixture(autouse=True)
def in_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(name: str, *argv: str) -> tuple[RunArguments, SoloGRPOConfig, ModelConfig]:
    return parse_config(["--config", f"configs/{name}.yaml", *argv])


def settings_of(name: str) -> dict[str, Any]:
    return {key: value for part in config_of(name) for key, value in vars(part).items()}


# -- shipped files -------------------------------------------------------------------------------


@pytest.mark.parametrize("smoke", SMOKE)
def test_smoke_recipe_is_of_its_family(smoke: str) -> None:
    small, large = settings_of(smoke), settings_of(SMOKE[smoke])
    assert {key: small[key] for key in FAMILY_KEYS} == {key: large[key] for key in FAMILY_KEYS}
    assert small["dataset_name"] == "quickstart"


def test_make_smoke_runs_every_smoke_recipe() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (families,) = re.findall(r"^SMOKE := (.+)$", makefile, flags=re.MULTILINE)
    assert {f"smoke-{family}" for family in families.split()} == set(SMOKE)
    assert {path.stem for path in Path("configs").glob("smoke-*.yaml")} == set(SMOKE)


# -- the document --------------------------------------------------------------------------------


def document() -> str:
    return (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def table(first_column: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this header."""
    lines = document().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_recipe_is_in_the_table() -> None:
    named = [quoted(row[0])[0] for row in table("Recipe")]
    assert sorted(named) == sorted(path.name for path in Path("configs").glob("*.yaml"))


# -- sizes that do not divide evenly -------------------------------------------------------------


def the_error(*argv: str) -> str:
    with pytest.raises(InputError) as caught:
        config_of("quickstart", *argv)
    return str(caught.value)


# Each setting, the step that the message shows, and the sizes that it offers.
UNEVEN = {
    "--num_generations 3": (64, [192]),
    "--per_device_train_batch_size 3 --gradient_accumulation_steps 7": (21, [168]),
    "--generation_batch_size 100": (64, [64, 128]),
    UNEVEN_STEPS: (16, [16, 32]),
    "--per_device_train_batch_size 12 --generation_batch_size 36": (12, [24, 48]),
    "--gradient_accumulation_steps 4 --steps_per_generation 6": (256, [256, 512]),
    "--per_device_train_batch_size 4 --steps_per_generation 3": (4, [8, 16]),
}


@pytest.mark.parametrize("setting", UNEVEN)
def test_uneven_sizes_are_answered_with_sizes_that_work(setting: str) -> None:
    step, offers = UNEVEN[setting]
    message = the_error(*setting.split())
    assert f"= {step})" in message
    assert f"set generation_batch_size {' or '.join(map(str, offers))} without" in message
    kept = setting.partition(" --steps_per_generation")[0]
    for size in offers:
        config_of("quickstart", *kept.split(), "--generation_batch_size", str(size))


def test_two_processes_take_twice_the_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = the_error("--per_device_train_batch_size", "5")
    assert "a generation batch of 10 completions" in message
    assert "generation_batch_size 40 without" in message


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("--num_generations 1", "at least 2 generations"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size: 0; expected greater"),
        ("--generation_batch_size 64 --steps_per_generation 2", "give one"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(setting: str, says: str) -> None:
    assert says in the_error(*setting.split())


def test_too_few_rows_to_fill_a_batch() -> None:
    _, args, _ = config_of("quickstart", "--generation_batch_size", "256")
    check_fills_a_batch(args, 32)
    with pytest.raises(InputError, match=r"31 training rows do not fill .* give at least 32 rows"):
        check_fills_a_batch(args, 31)


# -- metrics of the families ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def closing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that write `</answer>`, one token here, and continue after it."""
    folder = tmp_path_factory.mktemp("closing")
    tokenizer = build_tokenizer()
    model = build_model("llama", tokenizer)
    tokenizer.add_tokens([CLOSING])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[-1] = 4.0 * head[100]
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


Rows = list[dict[str, Any]]
Train = Callable[..., tuple[Rows, list[str]]]


@pytest.fixture(scope="module")
def train(tiny_llama: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run a recipe in small; give the rows of its metrics and the texts of its completions."""

    @cache
    def run(
        name: str, reward: str = "digit_share", model: Path = tiny_llama, steps: int = 3
    ) -> tuple[Rows, list[str]]:
        output = tmp_path_factory.mktemp(name)
        small = {
            "model_name_or_path": model, "dataset_name": tiny_data, "output_dir": output,
            "dtype": "float32", "bf16": "false", "max_completion_length": 12, "max_steps": steps,
            "learning_rate": 0.02, "rewards": f"digits:{reward}", "save_strategy": "no",
        }  # fmt: skip
        argv = [part for key, value in small.items() for part in (f"--{key}", str(value))]
        assert exit_code(train_without_report(), "--config", f"configs/{name}.yaml", *argv) == 0
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        tables = map(pyarrow.parquet.read_table, sorted((output / "completions").iterdir()))
        texts = [text_of(cell) for part in tables for cell in part["completion"].to_pylist()]
        return [row for row in rows if "trained_completions" in row], texts

    return run


@pytest.mark.parametrize("name", [name for name in SMOKE if "off-policy" not in name])
def test_one_update_a_batch_is_on_policy(name: str, train: Train) -> None:
    rows, _ = train(name)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["ratio/mean"] == row["ratio/min"] == row["ratio/max"] == 1.0
        assert row["clip_ratio/region_mean"] == 0.0
        assert row["grad_norm"] > 0.0


def test_off_policy_updates(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    original = SoloGRPOTrainer._prepare_inputs

    def prepare(trainer: SoloGRPOTrainer, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = original(trainer, inputs)
        used.append((batch["completion_ids"].clone(), batch["old_per_token_logps"].clone()))
        return batch

    monkeypatch.setattr(SoloGRPOTrainer, "_prepare_inputs", prepare)
    rows, _ = train("smoke-r1-zero-off-policy", steps=8)
    # The ratio to the old policy starts at one and leaves it.
    assert ["reward" in row for row in rows] == [True, False, False, False] * 2
    for i, row in enumerate(rows):
        if i % 4 == 0:
            assert row["ratio/min"] == pytest.approx(1.0, abs=1e-3)
            assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3)
            assert row["clip_ratio/region_mean"] == 0.0
        else:
            assert row["ratio/min"] < 0.99 or row["ratio/max"] > 1.01
    assert any(row["clip_ratio/region_mean"] > 0.0 for row in rows)
    # Old log-probs are frozen: two rollout batches x two passes x two mini-batches.
    for first, second in [(0, 2), (1, 3), (4, 6), (5, 7)]:
        assert torch.equal(used[first][0], used[second][0])
        assert torch.equal(used[first][1], used[second][1])
    assert not torch.equal(used[0][0], used[1][0])
    assert not torch.equal(used[0][0], used[4][0])


def test_boxed_leaves_out_the_groups_without_signal(train: Train) -> None:
    rows, texts = train("smoke-boxed", reward="share_in_additions")
    total = len(texts) / len(rows)
    assert total == 32
    for row in rows:
        assert row["trained_completions"] == total * (1 - row["frac_reward_zero_std"])
    assert any(row["frac_reward_zero_std"] > 0.0 for row in rows)
    assert all(row["trained_completions"] > 0 for row in rows)


@pytest.mark.parametrize("name", [name for name in SMOKE if "r1-zero" in name or "dr-" in name])
def test_nothing_follows_the_closing_tag(name: str, train: Train, closing_model: Path) -> None:
    _, texts = train(name, model=closing_model)
    closed = [text for text in texts if CLOSING in text]
    assert len(closed) >= 3
    assert all(text.index(CLOSING) + len(CLOSING) == len(text) for text in closed)


def test_kl_of_the_xml_family_grows_from_zero(train: Train) -> None:
    rows, _ = train("smoke-xml")
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["kl"] > 1e-4
