"""Faults in the middle of a run, through the real command line on a tiny model."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from digits import digit_share
from scripts import Printed, last_line, printed_by, steps_of, train_without_report
from server import Server
from sologrpo.base.errors import cannot_write
from sologrpo.training.checkpoint import last_complete_checkpoint
from tiny import rows, short_recipe, write_rows

Train = Callable[..., Printed]


@pytest.fixture
def config_file(tmp_path: Path, tiny_llama: Path) -> Path:
    """The shipped quickstart, in small."""
    path = tmp_path / "quickstart.yaml"
    settings = short_recipe("quickstart") | {
        "model_name_or_path": str(tiny_llama), "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.fixture
def train(config_file: Path, capfd: pytest.CaptureFixture[str]) -> Train:
    """Run `train.py` on the shipped quickstart, in this process."""
    return lambda *arguments: printed_by(
        train_without_report(), capfd, "--config", config_file, *arguments
    )


# -- the disk ------------------------------------------------------------------------------------


def test_a_disk_that_is_full_loses_only_what_was_not_saved(
    train: Train, server: Server, config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = ("--max_steps", "3", "--save_total_limit", "5")
    assert train(*more, "--max_steps", "2").code == 0
    # The state of the optimizer does not fit; what is written before it does.
    room = (run / "checkpoint-1" / "optimizer.pt").stat().st_size - 1
    command = ("--config", config_file, "--resume", *more)
    ended = server.run_command("train", *command, cwd=tmp_path, file_size=room)
    assert ended.code == 1, ended
    assert "Traceback" not in ended.err
    assert last_line(ended.err).startswith("error: cannot write: ")
    assert "checkpoint-2 is complete: resume with --resume" in ended.err
    assert last_complete_checkpoint(run) == run / "checkpoint-2"
    resumed = train("--resume", *more)
    assert resumed.code == 0, resumed
    assert "checkpoint-3 is incomplete" in resumed
    assert steps_of(run) == [1, 2, 3]


def test_a_disk_that_is_full_from_the_start(
    train: Train, server: Server, config_file: Path, tmp_path: Path
) -> None:
    ended = server.run_command("train", "--config", config_file, cwd=tmp_path, file_size=3000)
    assert ended.code == 1, ended
    assert last_line(ended.err).startswith("error: cannot write: ")
    assert train("--resume").code == 0


def test_other_errors_are_not_taken_for_a_full_disk() -> None:
    assert cannot_write(FileNotFoundError(2, "No such file or directory")) is None
    assert cannot_write(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


# -- two runs in one directory -------------------------------------------------------------------


def test_another_process_trains_in_the_same_directory(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = train("--resume")
        assert ended.code == 2
        assert last_line(ended).startswith(f"error: {run} is in use: another process trains there")
        assert [path.name for path in run.iterdir()] == [".lock"]
    assert train("--resume").code == 0


# -- rewards -------------------------------------------------------------------------------------


def test_a_reward_that_hangs(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_rewards.py").write_text(
        "import time\n"
        "calls = []\n"
        "def ask_somebody(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        time.sleep(3600)\n"
        "    return [len(completion[0]['content']) for completion in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    start = time.monotonic()
    ended = train("--rewards", "slow_rewards:ask_somebody", "--reward_weights", "1",
                  "--reward_timeout", "3")  # fmt: skip
    assert time.monotonic() - start < 60
    assert ended.code == 1
    assert last_line(ended) == (
        "error: reward 'ask_somebody' took longer than 3 s: make it faster, or raise reward_timeout"
    )
    assert 'slow_rewards.py", line 6 in ask_somebody' in ended  # where it hangs
    assert "checkpoint-1 is complete: resume with --resume" in ended


# -- model and tokenizer -------------------------------------------------------------------------


def test_a_tokenizer_without_pad_token_and_chat_template(
    train: Train, tmp_path: Path, tiny_llama: Path
) -> None:
    folder = tmp_path / "plain"
    AutoModelForCausalLM.from_pretrained(str(tiny_llama)).save_pretrained(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_llama))
    tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(str(folder))
    ended = train("--model_name_or_path", folder)
    assert ended.code == 2
    assert "chat template" in last_line(ended)
    plain = ("--prompt_format", "r1_zero", "--rewards", "strict_format", "--reward_weights", "1")
    ended = train("--model_name_or_path", folder, *plain)
    assert ended.code == 0, ended
    assert steps_of(tmp_path / "run") == [1, 2]


def test_completions_that_are_empty(train: Train, tmp_path: Path, tiny_llama: Path) -> None:
    folder = tmp_path / "silent"
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_llama))
    # Whatever the tokens, the hidden state is the first unit vector; the end token wins there.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
        model.get_output_embeddings().weight.zero_()[tokenizer.eos_token_id, 0] = 10.0
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    ended = train("--model_name_or_path", folder, "--max_steps", 5)
    assert ended.code == 0, ended
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5]
    table = pyarrow.parquet.read_table(tmp_path / "run/completions/completions_00001.parquet")
    assert {message[0]["content"] for message in table.to_pydict()["completion"]} == {""}
    assert "no group had a signal for 5 steps" in ended.stdout


def test_a_prompt_longer_than_the_context(train: Train, tmp_path: Path) -> None:
    problems = rows(8)
    problems[2]["question"] = "And then? " * 700
    ended = train("--dataset_name", write_rows(tmp_path / "long.jsonl", problems))
    assert ended.code == 2
    assert "longer than the model's context of 1024" in last_line(ended)
    assert "max_prompt_tokens" in last_line(ended)
    assert not (tmp_path / "run").exists()


# -- the clock -----------------------------------------------------------------------------------


def test_a_clock_that_is_set_back(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = tmp_path / "run", [time.time()]
    tomorrow = now[0] + 86400

    def back() -> float:
        now[0] -= 3600
        return now[0]

    def set_back(completions: list[Any], **kwargs: Any) -> list[float]:
        for checkpoint in run.glob("checkpoint-*"):  # saved before the clock was set back
            os.utime(checkpoint, (tomorrow, tomorrow))
        return digit_share(completions, **kwargs)

    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(set_back, "__name__", "digit_share")
    monkeypatch.setattr("digits.digit_share", set_back)
    ended = train("--save_total_limit", "1", "--reward_workers", "0")
    assert ended.code == 0, ended
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [
        value
        for row in map(json.loads, lines)
        for key, value in row.items()
        if key.startswith("time/")
    ]
    assert seconds
    assert min(seconds) >= 0
    assert load_file(str(run / "adapter" / "adapter_model.safetensors"))
