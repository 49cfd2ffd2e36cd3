"""`evaluate.py --engine vllm` with the real vLLM, on SmolLM2-135M and an adapter of every layer."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from trl import ModelConfig

from scripts import command_of, run_script, script_environment
from sologrpo.evaluation.completion_log import LOG
from sologrpo.model.loading import load_base_model
from tiny import ROOT

MODEL = ROOT / "models/SmolLM2-135M-Instruct"
PROBLEMS = 16
TIMEOUT = 280  # seconds
EQUAL = 0.95  # the engines round differently, so a near tie may go either way


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as `train.py` leaves it, trained in 4 bits."""
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "model_name_or_path": str(MODEL), "dataset_name": "quickstart", "load_in_4bit": True,
        "use_bnb_nested_quant": True, "dtype": "float32", "max_completion_length": 32,
        "worked_examples": [],
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, lora_alpha=1, target_modules="all-linear", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    base = load_base_model(ModelConfig(str(MODEL), dtype="float32"))
    get_peft_model(base, config).save_pretrained(str(folder / "adapter"))
    return folder


def command(run: Path, engine: str, *options: object) -> list[object]:
    return ["--run", run, "--engine", engine, "--baseline", "false", "--limit", PROBLEMS, *options]


def evaluate(run: Path, engine: str, *options: object) -> list[dict[str, Any]]:
    """Evaluate the trained model; return its records."""
    output = run / "-".join([engine, *map(str, options)])
    done = run_script("evaluate", *command(run, engine, "--output_dir", output, *options))
    assert done.returncode == 0, done.stderr
    (records,) = output.glob("eval/*/records.jsonl")
    return [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def ours(run: Path) -> list[dict[str, Any]]:
    return evaluate(run, "transformers")


def share_equal(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    keys = ("completion", "completion_tokens", "stop_reason", "correct")
    pairs = zip(first, second, strict=True)
    return sum(all(a[key] == b[key] for key in keys) for a, b in pairs) / len(first)


@pytest.mark.parametrize("precision", ["merged_dequantised", "nf4_adapter"])
def test_greedy_completions_are_those_of_our_loop(
    precision: str, run: Path, ours: list[dict[str, Any]]
) -> None:
    """From merged weights, and from the unpacked base with the adapter: the same weights."""
    found = evaluate(run, "vllm", "--precision", precision)
    assert share_equal(found, ours) >= EQUAL
    assert len({row["completion"] for row in found}) > PROBLEMS / 2
    assert {row["stop_reason"] for row in found} > {"end_token"}


def test_a_killed_engine_is_one_line_and_the_same_command_continues(
    run: Path, ours: list[dict[str, Any]]
) -> None:
    output = run / "killed"
    options = command(run, "vllm", "--output_dir", output, "--resume")
    process = subprocess.Popen(
        command_of("evaluate", *options), cwd=ROOT, env=script_environment(), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = output / "eval" / "trained" / LOG
    try:
        wait_for(lambda: log.exists() and log.read_text().count("\n") > 1, process)
        engine = next(child for child in psutil.Process(process.pid).children() if is_engine(child))
        os.kill(engine.pid, signal.SIGKILL)
        _, printed = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 1, printed
    # Python's own warning about vLLM's shared memory may follow.
    (line,) = (line for line in printed.splitlines() if line.startswith("error:"))
    assert line.startswith("error: vLLM's process has ended"), printed
    lines = log.read_text(encoding="utf-8").splitlines()[1:]
    kept = sum(len(json.loads(line)["done"]) for line in lines)
    assert 0 < kept < PROBLEMS

    done = run_script("evaluate", *options)
    assert done.returncode == 0, done.stderr
    records = (output / "eval/trained/records.jsonl").read_text(encoding="utf-8")
    assert share_equal([json.loads(row) for row in records.splitlines()], ours) >= EQUAL
    assert not log.exists()


def is_engine(process: psutil.Process) -> bool:
    return "EngineCore" in " ".join([process.name(), *process.cmdline()])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
