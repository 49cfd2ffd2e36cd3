"""Training metrics: every name is documented, and the values are correct."""

import json
import os
import re
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import TrainerCallback
from trl import GRPOTrainer

from digits import digit_share
from fixed_rollouts import CONSTANT, MIXED, config, fixed_reward, make_trainer, problems
from server import Server
from sologrpo.data.dataset import render_prompt
from sologrpo.training.callbacks import MetricsFile
from sologrpo.training.progress import PARTS, StepMeter, peak_memory
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import ROOT, tiny_config

Row = dict[str, Any]
HALF = len(MIXED) // 2


def rows_of(run: Path) -> list[Row]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def logged(
    model: Path,
    run: Path,
    reward: Any,
    trainer_class: type = SoloGRPOTrainer,
    callbacks: tuple[TrainerCallback, ...] = (),
    **settings: Any,
) -> list[Row]:
    """Train; the rows of `metrics.jsonl`."""
    args = config(run, logging_steps=1, **settings)
    trainer = make_trainer(
        trainer_class, model, args, reward,
        eval_dataset=problems(2), callbacks=[MetricsFile(), *callbacks],
    )  # fmt: skip
    trainer.train()
    return rows_of(run)


def steps(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "loss" in row]


# -- the glossary ---------------------------------------------------------------------------------


def explained() -> list[re.Pattern[str]]:
    """The names in the first column of the tables of `docs/metrics.md`, `<...>` for any word."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)
    assert len(names) == len(set(names))
    return [re.compile(re.sub("<[a-z]+>", "[^/]+", re.escape(name))) for name in names]


def unexplained(rows: list[Row], stock: bool = False) -> set[str]:
    patterns = explained()
    names = {name for row in rows for name in row}
    if stock:  # TRL validates with `eval_` before the names of training
        names = {name.removeprefix("eval_") for name in names if name not in STOCK_TIMES}
    return {name for name in names if not any(p.fullmatch(name) for p in patterns)}


STOCK_TIMES = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
VALIDATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
RUNS = [
    pytest.param({"max_steps": 2, **VALIDATED}, id="validated"),
    pytest.param({"beta": 0.05, "num_iterations": 2, "max_steps": 2}, id="kl-reused"),
    pytest.param({"loss_type": "dr_grpo", "scale_rewards": "none"}, id="unscaled"),
    pytest.param(
        {"scale_rewards": "batch", "include_num_input_tokens_seen": "all"}, id="input-tokens"
    ),
    pytest.param({"multi_objective_aggregation": "normalize_then_sum"}, id="by-reward"),
    pytest.param({"loss_type": "cispo"}, id="cispo"),
    pytest.param({"loss_type": "vespo"}, id="vespo"),
    pytest.param({"entropy_coef": 0.01}, id="entropy-bonus"),
    pytest.param({"importance_sampling_level": "sequence"}, id="sequence"),
]


@pytest.mark.parametrize("settings", RUNS)
def test_every_metric_is_explained(
    settings: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    rewards = [digit_share, fixed_reward("answer_correctness", MIXED)]
    rows = logged(tiny_llama, tmp_path, rewards, **settings)
    assert len(steps(rows)) == settings.get("max_steps", 1)
    assert unexplained(rows) == set()


def test_every_metric_of_the_stock_trainer_is_explained(tiny_llama: Path, tmp_path: Path) -> None:
    rows = logged(tiny_llama, tmp_path, digit_share, GRPOTrainer, **VALIDATED)
    assert any("eval_reward" in row for row in rows)
    assert unexplained(rows, stock=True) == set()


# -- the meter ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only when a test says so: `clock[0] += seconds`."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def metrics() -> dict[str, list[float]]:
    return defaultdict(list)


def end(meter: StepMeter, step: int = 1, max_steps: int = 4) -> None:
    state: Any = type("State", (), {"global_step": step, "max_steps": max_steps})
    meter.on_step_end(None, state, None)  # type: ignore[arg-type]


def begin(meter: StepMeter) -> None:
    meter.on_step_begin(None, None, None)  # type: ignore[arg-type]


def test_a_second_belongs_to_one_part(clock: list[float], metrics: dict[str, list[float]]) -> None:
    meter = StepMeter(metrics)
    begin(meter)
    clock[0] += 1  # training
    with meter.part("data"):
        clock[0] += 2
        with meter.part("sampling"):
            clock[0] += 4
            with meter.part("sync_weights"):
                clock[0] += 8
            clock[0] += 16
        clock[0] += 32
    clock[0] += 64
    end(meter)
    seconds = {name: metrics[f"time/{name}"] for name in PARTS}
    assert seconds == {
        "sampling": [20.0], "sync_weights": [8.0], "rewards": [0.0], "data": [34.0],
        "logprobs": [0.0], "training": [65.0],
    }  # fmt: skip


def test_what_lies_between_two_steps_is_not_counted(
    clock: list[float], metrics: dict[str, list[float]]
) -> None:
    meter = StepMeter(metrics)
    clock[0] += 5
    begin(meter)
    clock[0] += 1
    end(meter)
    with meter.part("sampling"):
        meter.count("sampling", 10)
        clock[0] += 7
    begin(meter)
    clock[0] += 2
    end(meter, step=2)
    assert metrics["time/training"] == [1.0, 2.0]
    assert metrics["time/sampling"] == [0.0, 0.0]
    assert "tokens_per_second/sampling" not in metrics


def test_a_part_that_raises_ends(clock: list[float], metrics: dict[str, list[float]]) -> None:
    meter = StepMeter(metrics)
    begin(meter)
    with pytest.raises(RuntimeError), meter.part("rewards"):
        raise RuntimeError
    clock[0] += 3
    end(meter)
    assert metrics["time/rewards"] == [0.0]
    assert metrics["time/training"] == [3.0]
    with pytest.raises(KeyError), meter.part("reward"):
        end(meter)


def test_rates_and_what_is_not_averaged(
    clock: list[float], metrics: dict[str, list[float]]
) -> None:
    meter = StepMeter(metrics)
    for step in (1, 2):
        begin(meter)
        meter.count("training", 30)
        meter.count("training", 10)
        clock[0] += 2 * step
        end(meter, step)
    assert metrics["tokens_per_second/training"] == [20.0, 10.0]
    assert metrics["progress"] == [0.5]
    assert len(metrics["memory/peak_rss_gib"]) == 1


def test_peak_memory_does_not_fall() -> None:
    (before,) = peak_memory().values()
    block = torch.ones(2**26)  # 0.25 GiB
    (during,) = peak_memory().values()
    del block
    assert 0 < before <= during <= peak_memory()["memory/peak_rss_gib"]
    assert during < 1024  # GiB, not bytes


def test_on_cuda_each_part_waits_for_the_device(
    metrics: dict[str, list[float]], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> None:
        clock[0] += queued.pop()

    queued = [0.0, 4.0, 0.0]  # seconds that kernels still take, from the last wait to the first
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 * 2**30)
    meter = StepMeter(metrics)
    begin(meter)
    with meter.part("sampling"):
        clock[0] += 1
    end(meter)
    assert metrics["time/sampling"] == [5.0]
    assert metrics["time/training"] == [0.0]
    assert metrics["memory/peak_gib"] == [3.0]
    assert metrics["memory/peak_reserved_gib"] == [4.0]


# -- the figures of a training --------------------------------------------------------------------


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Wall clock of the steps, taken apart from the meter."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds[-1] += time.perf_counter()


def test_parts_add_up_to_the_step(tiny_llama: Path, tmp_path: Path) -> None:
    def slow(completions: list[Any], **kwargs: Any) -> list[float]:
        time.sleep(0.3)
        return digit_share(completions)

    watch = Stopwatch()
    rows = steps(logged(tiny_llama, tmp_path, slow, callbacks=(watch,), max_steps=3, beta=0.05))
    for row, seconds in zip(rows, watch.seconds, strict=True):
        parts = {name: row[f"time/{name}"] for name in PARTS}
        assert sum(parts.values()) == pytest.approx(seconds, abs=0.02)
        assert sum(parts.values()) > row["step_time"]  # which leaves out the update
        assert parts["rewards"] >= 0.3
        assert all(parts.values())  # each of them did something


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a_step_on_old_completions_samples_nothing(
    loss_type: str, tiny_llama: Path, tmp_path: Path
) -> None:
    rows = steps(
        logged(
            tiny_llama, tmp_path, digit_share, loss_type=loss_type,
            num_iterations=2, max_steps=4, gradient_accumulation_steps=2,
            per_device_train_batch_size=HALF,
        )
    )  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, sampled in zip(rows, [True, False, True, False], strict=True):
        for part in ("sampling", "rewards", "data", "logprobs"):
            assert (row[f"time/{part}"] > 0) is sampled, part
        assert ("tokens_per_second/sampling" in row) is sampled
        assert ("reward" in row) is sampled
        assert row["time/training"] > 0
        assert row["tokens_per_second/training"] > 0
    assert [row["progress"] for row in rows] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_which_tokens_the_rates_count(loss_type: str, tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []  # prompt and completion tokens

    def reward(
        completions: list[Any], prompts: list[Any], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        seen.extend(zip(map(prompt_tokens, prompts), lengths, strict=True))
        return MIXED

    def prompt_tokens(prompt: Any) -> int:
        return len(tokenizer(render_prompt(prompt, tokenizer))["input_ids"])

    args = config(
        tmp_path, loss_type=loss_type, logging_steps=1, gradient_accumulation_steps=2,
        per_device_train_batch_size=HALF,
    )  # fmt: skip
    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, reward, callbacks=[MetricsFile()])
    tokenizer = trainer.processing_class
    trainer.train()
    row = steps(rows_of(tmp_path))[0]
    counted = {
        part: row[f"tokens_per_second/{part}"] * row[f"time/{part}"]
        for part in ("sampling", "training")
    }
    assert counted["sampling"] == pytest.approx(sum(completion for _, completion in seen))
    # Groups 2 and 4 of `MIXED` are constant: packed training leaves them out, TRL's does not.
    trained = seen if loss_type == "bnpo" else seen[:4] + seen[8:12]
    assert counted["training"] == pytest.approx(sum(map(sum, trained)))
    if loss_type == "dapo":
        # Each prompt once for its group but for the last token, which each completion begins with.
        prompts = seen[0][0] - 1 + seen[8][0] - 1
        root = row["tokens/computed"] - sum(completion for _, completion in trained) - prompts
        assert -min(seen[0][0], seen[8][0]) < root <= 0  # what both begin with comes once
        assert row["tokens/saved"] == sum(map(sum, seen)) - row["tokens/computed"]


def test_weights_are_sent_to_vllm_once_a_step(tiny_llama: Path, tmp_path: Path) -> None:
    class Engine:
        sent = 0

        def sync_weights(self) -> None:
            self.sent += 1
            time.sleep(0.1)

        def generate(self, prompts: list[Any], **kwargs: Any) -> tuple[Any, ...]:
            return None, [[20]] * len(prompts), [[[-1.0]]] * len(prompts), None

    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, config(tmp_path), digit_share)
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(), -1
    begin(trainer.meter)
    for _ in range(2):
        ids, _ = trainer._generate_single_turn([[5, 6]] * 3, None, {}, 3)
        assert ids == [[20]] * 3
    end(trainer.meter)
    figures = trainer._metrics["train"]
    assert trainer.vllm_generation.sent == 1
    assert 0.1 <= figures["time/sync_weights"][0] < 0.2
    assert 0 < figures["time/sampling"][0] < 0.1
    sampled = figures["tokens_per_second/sampling"][0] * figures["time/sampling"][0]
    assert sampled == pytest.approx(6)


def test_lowest_and_highest_reward(tiny_llama: Path, tmp_path: Path) -> None:
    rewards = [
        fixed_reward("first", [*MIXED[:-1], None]),
        fixed_reward("second", [-3.0] + [None] * 15),
    ]
    row = steps(logged(tiny_llama, tmp_path, rewards, reward_weights=[2.0, 0.5]))[0]
    assert row["reward_min"] == -1.5
    assert row["reward_max"] == 2.0
    assert row["reward_min"] < row["reward"] < row["reward_max"]
    judged_nothing = [fixed_reward("first", [None] * 16)]
    row = steps(logged(tiny_llama, tmp_path / "other", judged_nothing))[0]
    assert (row["reward"], row["reward_min"], row["reward_max"]) == (None, None, None)


def test_a_step_without_signal_is_logged(tiny_llama: Path, tmp_path: Path) -> None:
    rewards = fixed_reward("reward", CONSTANT)
    rows = steps(logged(tiny_llama, tmp_path, rewards, max_steps=2))
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["reward"], row["frac_reward_zero_std"], row["grad_norm"]) == (0.5, 1.0, 0.0)
        assert row["trained_completions"] == 0
        assert row["time/sampling"] > 0
        assert not {"entropy", "clip_ratio/region_mean", "tokens_per_second/training"} & row.keys()


# -- trackers -------------------------------------------------------------------------------------

# A closed port of this machine: whoever asks for the network is refused.
NO_NETWORK = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")


@pytest.fixture
def config_file(tiny_llama: Path, tiny_data: Path, tmp_path: Path) -> Path:
    settings = tiny_config(tiny_llama, tiny_data, tmp_path / "run") | {"max_steps": 1}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def records(path: Path) -> bytes:
    """Payload of a log of W&B (LevelDB's format): blocks of 32 KiB hold pieces of records."""
    content, payload, position = path.read_bytes(), b"", 7
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        (size,) = struct.unpack_from("<H", content, position + 4)
        payload += content[position + 7 : position + 7 + size]
        position += 7 + size
    return payload


def test_wandb_offline_needs_no_account(server: Server, config_file: Path, tmp_path: Path) -> None:
    environment = dict.fromkeys(name for name in os.environ if name.startswith("WANDB_"))
    environment |= {**NO_NETWORK, "WANDB_MODE": "offline", "HOME": str(tmp_path)}
    command = ("train", "--config", config_file, "--report_to", "wandb")
    done = server.run_command(*command, cwd=tmp_path, environment=environment)
    assert "step 1/1" in done.out, done.err
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = records(log)
    rows = rows_of(tmp_path / "run")
    assert unexplained(rows) == set()
    for name in steps(rows)[0]:
        if name != "step":
            assert f"train/{name}".encode() in content, name
