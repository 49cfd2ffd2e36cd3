"""Runs that are killed, stopped or cut off at any step end like an uninterrupted one."""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from digits import digit_share
from scripts import exit_code, train_without_report
from server import Server
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.data.dataset import build_prompts
from sologrpo.model.loading import load_tokenizer
from sologrpo.startup import finishing_step, stopped_by
from sologrpo.training.checkpoint import (
    EpochSampler,
    incomplete_reason,
    train_from,
)
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import rows

STEPS = 10  # of 8 in an epoch: the last two are of the second
SETTINGS: dict[str, Any] = {
    # 4 prompts x 4 completions a generation batch; 2 steps a pass, 2 passes: 4 steps on each.
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "generation_batch_size": 16,
    "num_iterations": 2,
    "max_completion_length": 12,
    "max_steps": STEPS,
    "learning_rate": 0.01,
    "lr_scheduler_type": "linear",
    "bf16": False,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": STEPS + 5,
    "seed": 3,
}
# What a clock or the machine decides, and so differs between two runs.
MEASURED = ("time", "per_second", "memory", "runtime", "train_loss", "total_flos")

Metrics = list[dict[str, Any]]


def without_measured(metrics: Metrics) -> Metrics:
    return [
        {key: value for key, value in row.items() if not any(part in key for part in MEASURED)}
        for row in metrics
        if "train_runtime" not in row  # a summary of the steps of one process
    ]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(str(folder / "adapter_model.safetensors"))
    return weights


def assert_equal_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


# -- the trainer: every step is an exact place to resume from ------------------------------------


def prompts(count: int) -> Dataset:
    return build_prompts(Dataset.from_list(rows(count)), RunArguments(system_prompt=""))


def trained_from(
    checkpoint: Path | None, output: Path, model: Path, **settings: Any
) -> tuple[Metrics, list[torch.Tensor]]:
    """Train to the last step; the log, and the completions that each step was given."""
    torch.manual_seed(0)
    args = SoloGRPOConfig(
        output_dir=str(output), report_to="none", disable_tqdm=True, num_completions_to_print=0,
        gradient_checkpointing=False, **SETTINGS | {"logging_steps": 1} | settings,
    )  # fmt: skip
    trainer = SoloGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32),
        reward_funcs=[digit_share],
        args=args,
        train_dataset=prompts(8),
        eval_dataset=prompts(2),
        processing_class=load_tokenizer(str(model)),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    given = []
    compute_loss = trainer.compute_loss

    def record(model: Any, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        given.append(inputs["completion_ids"])
        loss: torch.Tensor = compute_loss(model, inputs, **kwargs)
        return loss

    trainer.compute_loss = record
    train_from(trainer, checkpoint)
    trainer.save_model(str(output / "end"))
    return without_measured(trainer.state.log_history), given


@pytest.fixture(scope="module")
def whole_training(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path
) -> tuple[Path, Metrics, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole")
    return (folder, *trained_from(None, folder, tiny_llama))


# 1-3 and 5-7 are inside a generation batch: after one of two mini-batches, between the two passes,
# before the last. 4 is between two batches, 8 between two epochs, 9 inside a batch of the second.
@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 8, 9])
def test_every_step_is_an_exact_place_to_resume_from(
    step: int,
    whole_training: tuple[Path, Metrics, list[torch.Tensor]],
    tmp_path: Path,
    tiny_llama: Path,
) -> None:
    folder, metrics, given = whole_training
    resumed, given_after = trained_from(folder / f"checkpoint-{step}", tmp_path, tiny_llama)
    assert len(given) == STEPS
    assert len(given_after) == STEPS - step
    assert all(map(torch.equal, given[step:], given_after))
    assert resumed == metrics
    assert_equal_weights(adapter_of(folder / "end"), adapter_of(tmp_path / "end"))


def test_averages_over_several_steps_survive_a_save_between_them(
    tmp_path: Path, tiny_llama: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    settings = {"logging_steps": 3, "log_completions": True, "max_steps": 6}
    metrics, _ = trained_from(None, whole, tiny_llama, **settings)
    resumed, _ = trained_from(whole / "checkpoint-5", part, tiny_llama, **settings)
    assert resumed == metrics
    assert [row["step"] for row in metrics if "loss" in row] == [3, 6]
    # Step 6 learns from completions that were sampled before step 5.
    tables = [
        pandas.read_parquet(folder / "completions/completions_00006.parquet")
        for folder in (whole, part)
    ]
    assert len(tables[0]) == 16
    pandas.testing.assert_frame_equal(*tables)


def test_a_finished_run_that_keeps_its_best_checkpoint_keeps_it_again(
    whole_training: tuple[Path, Metrics, list[torch.Tensor]], tmp_path: Path, tiny_llama: Path
) -> None:
    last, best = (
        shutil.copytree(whole_training[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
        for step in (STEPS, 6)
    )
    state = json.loads((last / "trainer_state.json").read_text())
    (last / "trainer_state.json").write_text(
        json.dumps(state | {"best_model_checkpoint": str(best)})
    )
    for asked, expected in ((True, best), (False, last)):
        out = tmp_path / str(asked)
        settings = {"load_best_model_at_end": asked, "eval_strategy": "steps", "eval_steps": 1}
        _, given = trained_from(last, out, tiny_llama, **settings)
        assert given == []
        assert_equal_weights(adapter_of(out / "end"), adapter_of(expected))


def test_generation_state_is_small_between_batches_and_loads_without_running_code(
    whole_training: tuple[Path, Metrics, list[torch.Tensor]],
) -> None:
    inside, between = (
        torch.load(whole_training[0] / f"checkpoint-{step}/generation_state.pt", weights_only=True)
        for step in (2, 4)
    )
    assert (inside["step"], between["step"]) == (2, 4)
    assert [len(batch["advantages"]) for batch in inside["buffered_inputs"]] == [8, 8]
    assert between["buffered_inputs"] is None


def test_order_of_an_epoch_is_that_of_trl() -> None:
    sizes = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 5}
    straight = EpochSampler(range(9), **sizes)  # never told the epoch, it is TRL's own
    epochs = [list(straight) for _ in range(3)]
    assert epochs[0] != epochs[1]
    for epoch in (2, 0, 1):
        resumed = EpochSampler(range(9), **sizes)
        resumed.set_epoch(epoch)
        assert list(resumed) == epochs[epoch]


# -- the command line ----------------------------------------------------------------------------

Train = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def config_file(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_data: Path
) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    settings = SETTINGS | {
        "model_name_or_path": str(tiny_llama),
        "dataset_name": str(tiny_data),
        "load_in_4bit": False,
        "dtype": "float32",
        "lora_r": 4,
        "rewards": ["strict_format", "digits:digit_share"],
        "reward_workers": 0,  # tests replace the reward in this process
        "num_validation_examples": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def train_here(config: Path, output: Path, *arguments: str) -> int:
    """Run `train.py` in this process, without the report at its end; its exit code."""
    options = ("--config", config, "--output_dir", output)
    return exit_code(train_without_report(), *options, *arguments)


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str], config_file: Path) -> Train:
    """`train_here` on the tiny config: its exit code, and what it printed on stderr."""

    def run(output: Path, *arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        return train_here(config_file, output, *arguments), capfd.readouterr().err

    return run


def metrics_of(run: Path) -> Metrics:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        # The last line may be half written.
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        if f'{{"step": {step},' in text:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{run} never came to step {step}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> Path:
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert train_here(config_file, run) == 0
    return run


def copy_up_to(step: int, run: Path, copy: Path) -> Path:
    """Copy the run as a kill after the save of `step` would have left it."""
    shutil.copytree(run, copy)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(copy / f"checkpoint-{later}")
    shutil.rmtree(copy / "adapter")
    return copy


def assert_same_run(run: Path, uninterrupted: Path) -> None:
    assert without_measured(metrics_of(run)) == without_measured(metrics_of(uninterrupted))
    assert_equal_weights(adapter_of(run / "adapter"), adapter_of(uninterrupted / "adapter"))


def test_killed_three_times(
    train: Train, server: Server, config_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run, moments = tmp_path / "run", random.Random(7)
    command = ("train", "--config", config_file, "--output_dir", run, "--resume")
    for earliest in (1, 3, 5):
        with server.running_command(*command, cwd=tmp_path) as process:
            wait_for_step(run, earliest + moments.randrange(2))
            time.sleep(moments.uniform(0.0, 0.3))
            process.send_signal(signal.SIGKILL)
        assert process.ended is not None
        assert process.ended.code == -signal.SIGKILL
    code, stderr = train(run, "--resume")
    assert code == 0
    assert "resuming from" in stderr
    assert_same_run(run, uninterrupted)
    validations = [row["step"] for row in metrics_of(run) if "eval_n" in row]
    assert validations == [3, 6, 9, 10]


@pytest.fixture
def ctrl_c_allowed() -> Any:
    """Allow Ctrl-C: a shell starts background jobs with it ignored, and they inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_allowed")
@pytest.mark.parametrize(
    ("number", "code", "saving"),
    [
        (signal.SIGTERM, 0, ("--save_steps", "100")),
        (signal.SIGINT, 130, ("--save_strategy", "no")),
    ],
)
def test_a_signal_saves_and_stops(
    train: Train,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
    saving: tuple[str, str],
) -> None:
    run, calls = tmp_path / "run", []

    def interrupting(completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 2:  # of the second generation batch, for the steps 5 to 8
            os.kill(os.getpid(), number)
        return digit_share(completions, **kwargs)

    monkeypatch.setattr("digits.digit_share", interrupting)
    interrupting.__name__ = "digit_share"
    stopped, stderr = train(run, *saving)
    assert stopped == code
    assert f"stopped; {run / 'checkpoint-5'} is complete: resume with --resume" in stderr
    assert f"{number.name}: this step is finished and saved" in stderr
    assert "Traceback" not in stderr
    assert not (run / "adapter").exists()
    assert train(run, "--resume", *saving)[0] == 0
    assert_same_run(run, uninterrupted)


def test_sys_exit_in_training_is_a_failure(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaving(*_: object) -> None:
        sys.exit(0)

    monkeypatch.setattr("sologrpo.training.run.train_from", leaving)
    code, stderr = train(tmp_path / "run")
    assert code == 1
    assert stderr.splitlines()[-1].startswith("error: sys.exit(0) was called during training")


@pytest.mark.usefixtures("ctrl_c_allowed")
def test_second_ctrl_c_stops_at_once() -> None:
    with finishing_step():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # whoever ends jobs may ask twice
        assert stopped_by() == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stopped_by() is None


def test_steps_after_the_last_complete_checkpoint_are_repeated(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    run = copy_up_to(7, uninterrupted, tmp_path / "run")
    (run / "checkpoint-7/trainer_state.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    code, stderr = train(run, "--resume", "--max_steps", "7", "--lr_scheduler_type", "constant")
    assert code == 0, stderr
    assert f"{run / 'checkpoint-7'} is incomplete, it has no trainer_state.json" in stderr
    assert f"resuming from {run / 'checkpoint-6'}" in stderr
    assert "lr_scheduler_type linear -> constant, max_steps 10 -> 7" in stderr
    assert (run / "partial-checkpoint-7").is_dir()
    assert incomplete_reason(run / "checkpoint-7") is None
    steps = [row["step"] for row in metrics_of(run) if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    kept = without_measured(metrics_of(uninterrupted))
    assert without_measured(metrics_of(run))[: len(kept[:8])] == kept[:8]  # 6 steps, 2 validations
    assert len(list((run / "completions").iterdir())) == 7


def test_resume_without_a_checkpoint_starts_from_the_beginning(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoint-1").mkdir(parents=True)
    for file in ("metrics.jsonl", "config.yaml"):
        shutil.copy(uninterrupted / file, run / file)
    code, stderr = train(run, "--resume", "--max_steps", "1", "--seed", "4")
    assert code == 0, stderr
    assert f"{run / 'checkpoint-1'} is incomplete" in stderr
    assert f"{run} has no checkpoint yet: starting from the beginning" in stderr
    assert {row["step"] for row in metrics_of(run)} == {1}


def remove(pattern: str) -> Callable[[Path], None]:
    def prepare(run: Path) -> None:
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return prepare


@pytest.mark.parametrize(
    ("prepare", "arguments", "says"),
    [
        (remove("nothing"), "", "already holds a run: add --resume"),
        (remove("config.yaml"), "", "already holds a run: add --resume"),
        (remove("checkpoint-*"), "--resume", "finished run without complete checkpoints"),
        (
            remove("nothing"),
            "--resume --num_generations 8 --seed 4 --beta 0.1",
            "was started with num_generations 4, seed 3: give the same",
        ),
    ],
)
def test_a_run_that_cannot_be_resumed_is_left_as_it_is(
    train: Train,
    uninterrupted: Path,
    tmp_path: Path,
    prepare: Callable[[Path], None],
    arguments: str,
    says: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    prepare(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, stderr = train(run, *arguments.split())
    assert code == 2
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert says in stderr.strip().splitlines()[-1]


def test_a_run_is_resumed_in_the_dtype_that_it_resolved_to(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    run = copy_up_to(9, uninterrupted, tmp_path / "run")
    config, environment = run / "config.yaml", run / "environment.json"
    config.write_text(config.read_text().replace("dtype: float32", "dtype: auto"))
    facts = json.loads(environment.read_text())
    environment.write_text(json.dumps(facts | {"dtype": "float16"}))
    code, stderr = train(run, "--resume")
    assert code == 2
    assert "add --dtype float16" in stderr
    environment.write_text(json.dumps(facts))
    code, stderr = train(run, "--resume", "--dtype", "float32")
    assert code == 0, stderr
    assert "dtype auto -> float32" in stderr
    assert_same_run(run, uninterrupted)
