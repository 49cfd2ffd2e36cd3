"""Trackers and the Hub during a run: their failures cause a warning and never end the run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hub_stand_in import HubStandIn
from scripts import Printed, last_line, run_here, run_script, script_environment, steps_of
from tiny import ROOT
from wandb_stand_in import running_wandb

# -- trackers ------------------------------------------------------------------------------------


def with_wandb(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return an environment with a W&B server that does not answer."""
    own = {name: value for name, value in script_environment().items() if "WANDB_" not in name}
    return own | more | {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_DIR": str(tmp_path)}


def test_a_tracker_that_cannot_be_reached(config_file: Path, tmp_path: Path) -> None:
    environment = with_wandb(tmp_path, WANDB_API_KEY="0" * 40)
    command = ("--config", config_file, "--report_to", "wandb")
    ended = run_script("train", *command, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert steps_of(tmp_path / "run") == [1, 2]
    assert "warning  W&B does not answer" in ended.stdout
    (offline,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))


def test_a_tracker_that_dies_in_the_middle(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "killing.py").write_text(
        "import psutil\n"
        "calls = []\n"
        "def digits(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        mine = psutil.Process().children(recursive=True)\n"
        "        (tracker,) = [child for child in mine if child.name() == 'wandb-core']\n"
        "        tracker.kill()\n"
        "    return [len(completion[0]['content']) for completion in completions]\n"
    )
    environment = with_wandb(tmp_path, WANDB_MODE="offline")
    environment["PYTHONPATH"] += f":{tmp_path}"
    command = ("--config", config_file, "--report_to", "wandb", "--max_steps", "4")
    command += ("--rewards", "killing:digits", "--reward_workers", "0")  # whose children it kills
    ended = run_script("train", *command, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert ended.stdout.count("warning  wandb failed (") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("lost", [False, True])
def test_a_tracker_whose_server_is_lost_in_the_middle(
    config_file: Path, tmp_path: Path, lost: bool
) -> None:
    impatient = (
        "import runpy, sologrpo.training.tracking as tracking; tracking.PATIENCE = 4; "
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    with running_wandb() as server:
        (tmp_path / "going.py").write_text(
            "from urllib.request import urlopen\n"
            "calls = []\n"
            "def digits(completions, **kwargs):\n"
            "    calls.append(1)\n"
            f"    if len(calls) == 2 and {lost}:\n"
            f"        urlopen('{server.url}/go').read()\n"
            "    return [len(completion[0]['content']) for completion in completions]\n"
        )
        environment = with_wandb(tmp_path, WANDB_API_KEY="0" * 40)
        environment["WANDB_BASE_URL"] = server.url
        environment["PYTHONPATH"] += f":{tmp_path}"
        ended = subprocess.run(
            [sys.executable, "-c", impatient, "--config", str(config_file), "--max_steps", "4",
             "--report_to", "wandb", "--rewards", "going:digits"],
            env=environment, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert "Traceback" not in ended.stderr
    assert "UpsertBucket" in server.asked
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert list(folder.glob("*.wandb"))
    printed = " ".join(ended.stdout.split())
    assert (f"finish it with `wandb sync {folder}`" in printed) == lost


def test_a_tracker_without_a_login(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no netrc has this server
    ended = run_here("train", "--config", config_file, "--report_to", "wandb")
    assert ended.code == 2
    assert "`wandb login`" in last_line(ended)
    assert not (tmp_path / "run").exists()


# -- the Hub ---------------------------------------------------------------------------------------


def push_while_training(config: Path) -> Printed:
    return run_here(
        "train", "--config", config, "--push_to_hub", "true", "--hub_model_id", "mine",
        "--hub_always_push", "true",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("failures", "warned"),
    [(1, ["checkpoint-1"]), (9, ["checkpoint-1", "checkpoint-2", "the adapter"])],
)
def test_a_hub_that_refuses_in_the_middle(
    config_file: Path, tmp_path: Path, hub: HubStandIn, failures: int, warned: list[str]
) -> None:
    hub.fail("POST", "/commit/", 403, times=failures)
    ended = push_while_training(config_file)
    files = hub.repositories["ana/mine"].files
    assert ended.code == 0, ended
    assert "Traceback" not in ended
    printed = " ".join(ended.stdout.split())
    assert (
        re.findall(r"warning (\S+|the adapter) is not on the Hub: the token may", printed) == warned
    )
    assert (tmp_path / "run/report.html").exists()
    if failures == 1:
        assert "pushed " in printed
        assert json.loads(files["last-checkpoint/trainer_state.json"])["global_step"] == 2
        adapter = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
        assert files["adapter_model.safetensors"] == adapter
        assert not any("training_args" in name for name in files)
    else:
        fix = f"sologrpo export --run {tmp_path / 'run'} --push_to_hub ana/mine"
        assert fix in printed
        assert files == {}


def test_a_hub_that_refuses_from_the_start(
    config_file: Path, tmp_path: Path, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    ended = push_while_training(config_file)
    assert ended.code == 2
    assert "(403)" in last_line(ended)
    assert "Traceback" not in ended
    assert not (tmp_path / "run").exists()
