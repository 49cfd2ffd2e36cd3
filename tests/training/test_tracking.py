"""Trackers and the Hub during a run: their failures cause a warning and never end the run."""

import json
import os
import re
from pathlib import Path

import pytest

from hub_stand_in import HubStandIn
from scripts import Printed, last_line, run_here, steps_of
from server import Ended, Server
from wandb_stand_in import running_wandb

# -- trackers ------------------------------------------------------------------------------------


NO_SERVER = "http://127.0.0.1:9"  # nothing answers there


def train_with_wandb(
    server: Server, config: Path, *more: str, url: str = NO_SERVER, **environment: str
) -> Ended:
    own = dict.fromkeys(name for name in os.environ if "WANDB_" in name)
    own |= {"WANDB_BASE_URL": url, "WANDB_DIR": str(config.parent)} | environment
    command = ("train", "--config", config, "--report_to", "wandb", *more)
    return server.run_command(*command, cwd=config.parent, environment=own)


def test_a_tracker_that_cannot_be_reached(
    server: Server, config_file: Path, tmp_path: Path
) -> None:
    ended = train_with_wandb(server, config_file, WANDB_API_KEY="0" * 40)
    assert ended.code == 0, ended
    assert steps_of(tmp_path / "run") == [1, 2]
    assert "warning  W&B does not answer" in ended.out
    (offline,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))


def test_a_tracker_that_dies_in_the_middle(
    server: Server, config_file: Path, tmp_path: Path
) -> None:
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
    # In the process of the trainer, whose children it kills.
    more = ("--max_steps", "4", "--rewards", "killing:digits", "--reward_workers", "0")
    ended = train_with_wandb(server, config_file, *more, WANDB_MODE="offline")
    assert ended.code == 0, ended
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert ended.out.count("warning  wandb failed (") == 1
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("lost", [False, True])
def test_a_tracker_whose_server_is_lost_in_the_middle(
    server: Server, config_file: Path, tmp_path: Path, lost: bool
) -> None:
    with running_wandb() as wandb:
        (tmp_path / "going.py").write_text(
            "from urllib.request import urlopen\n"
            "from sologrpo.training import tracking\n"
            f"tracking.PATIENCE = {4 if lost else 60}\n"
            "calls = []\n"
            "def digits(completions, **kwargs):\n"
            "    calls.append(1)\n"
            f"    if len(calls) == 2 and {lost}:\n"
            f"        urlopen('{wandb.url}/go').read()\n"
            "    return [len(completion[0]['content']) for completion in completions]\n"
        )
        # In the process of the trainer, whose patience it shortens.
        more = ("--max_steps", "4", "--rewards", "going:digits", "--reward_workers", "0")
        ended = train_with_wandb(server, config_file, *more, url=wandb.url, WANDB_API_KEY="0" * 40)
    assert ended.code == 0, ended
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert "Traceback" not in ended.err
    assert "UpsertBucket" in wandb.asked
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert list(folder.glob("*.wandb"))
    printed = " ".join(ended.out.split())
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
