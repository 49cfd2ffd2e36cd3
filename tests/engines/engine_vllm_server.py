"""Training on a real vLLM server that is given the adapter after every update; SmolLM2-135M."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import command_of, last_line, run_script, script_environment, steps_of
from sologrpo.sampling.vllm_engine import MEMORY_BACKED
from tiny import ROOT

MODEL = "models/SmolLM2-135M-Instruct"
TIMEOUT = 280  # seconds
STEPS = 3
# The command `vllm serve` of the CPU build does not start: it looks for a package named vllm.
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
FLAGS = (
    "--dtype", "float32", "--enable-lora", "--max-lora-rank", "8", "--max-model-len", "512",
    "--logprobs-mode", "processed_logprobs", "--enforce-eager",
)  # fmt: skip


class VllmServer:
    """A server in separate processes, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://localhost:{self.port}"
        self.log = folder / "server.log"
        self.start()

    def start(self) -> None:
        more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self.log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*SERVE, *FLAGS, "--port", str(self.port)], cwd=ROOT, stdout=log, stderr=log,
                env=script_environment(**more), start_new_session=True,
            )  # fmt: skip
        wait_for(self._answers, self._process)

    def _answers(self) -> bool:
        try:
            return bool(self.models())
        except OSError:
            return False

    def models(self) -> list[str]:
        """The base model, and the adapters that are loaded."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return [model["id"] for model in json.load(answer)["data"]]

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


def options(vllm: VllmServer, output: Path, *more: object) -> list[object]:
    recipe = output.with_suffix(".yaml")
    settings = {
        "model_name_or_path": MODEL, "dataset_name": "quickstart", "worked_examples": [],
        "output_dir": str(output), "load_in_4bit": False, "dtype": "float32", "lora_r": 8,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16,
        "learning_rate": 1e-3, "max_steps": STEPS, "save_steps": 1, "temperature": 0.8,
        "rewards": ["digits:digit_share"], "use_vllm": True, "vllm_mode": "server",
        "vllm_server_base_url": vllm.url, "vllm_server_timeout": 0,
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return ["--config", recipe, *more]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


def test_every_update_is_sampled_by_the_server(vllm: VllmServer, tmp_path: Path) -> None:
    """Its log-probs are the trainer's, of the adapter as it is then, and no old adapter stays."""
    run = tmp_path / "run"
    done = run_script("train", *options(vllm, run), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 <= row["reward"] <= 1 for row in rows)
    assert max(row["sampling/max_gap"] for row in rows) < 1e-3
    assert rows[1]["grad_norm"] > 0
    log = vllm.log.read_text(encoding="utf-8")
    assert log.count('"POST /v1/load_lora_adapter HTTP/1.1" 200') == 1 + STEPS  # first one of zeros
    assert len(vllm.models()) == 2
    assert not list(MEMORY_BACKED.glob("sologrpo-vllm-*"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--lora_r", 16), "LoRA rank 16 is greater than max_lora_rank 8"),
        (("--load_in_4bit", "true"), "serves models/SmolLM2-135M-Instruct unquantised"),
        (("--vllm_server_base_url", "http://localhost:1"), "did not answer within 0 seconds"),
    ],
)
def test_a_server_that_does_not_fit(
    setting: tuple[str, object], message: str, vllm: VllmServer, tmp_path: Path
) -> None:
    done = run_script("train", *options(vllm, tmp_path / "run", *setting), cwd=ROOT)
    assert done.returncode == 2, done.stderr
    line = last_line(done.stderr)
    assert line.startswith("error: the vLLM server at http://localhost:")
    assert message in line
    assert not (tmp_path / "run").exists()


def test_a_killed_server_is_one_line_and_the_run_resumes(vllm: VllmServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        command_of("train", *options(vllm, run, "--max_steps", 50)), cwd=ROOT, text=True,
        env=script_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(lambda: (run / "checkpoint-1" / "manifest.json").is_file(), process)
        vllm.kill()
        _, printed = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        vllm.start()
    assert process.returncode == 1, printed
    assert "no longer answers: start it again, and continue with --resume" in last_line(printed)
    taken = max(steps_of(run))

    more = ("--max_steps", taken + 1, "--resume")
    done = run_script("train", *options(vllm, run, *more), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == list(range(1, taken + 2))
