"""A tracker that cannot start ends a run with one line; a Hub that refuses costs a warning."""

import json
import re
from pathlib import Path

import pytest

from hub_stand_in import HubStandIn
from scripts import Printed, last_line, run_here

# -- trackers ------------------------------------------------------------------------------------


def test_a_tracker_without_a_login(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no netrc has this server
    ended = run_here("train", "--config", config_file, "--report_to", "wandb")
    assert ended.code == 2
    assert last_line(ended).startswith("error: report_to wandb: ")
    assert "wandb login" in last_line(ended)
    assert "Traceback" not in ended


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
