"""TensorBoard and trackio have every number of a run, read back with their own readers."""

import json
import sqlite3
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from scripts import last_line, run_script, script_environment
from tiny import ROOT

RECIPE = (ROOT / "configs/smoke-xml.yaml").read_text(encoding="utf-8")
STEPS = 3


def train(folder: Path, model: Path, *flags: str) -> CompletedProcess[str]:
    """Train the recipe in `folder` with both trackers; they write to folders of it."""
    config = folder / "recipe.yaml"
    config.write_text(f"{RECIPE}\nreport_to: [tensorboard, trackio]\n", encoding="utf-8")
    short = ("--max_steps", str(STEPS), "--save_steps", "1", "--max_completion_length", "16")
    named = ("--config", config, "--model_name_or_path", model, "--run_name", "shells")
    # trackio reads the variable when it is imported: each run is a separate process.
    environment = {"TRACKIO_DIR": str(folder / "t"), "TENSORBOARD_LOGGING_DIR": str(folder / "b")}
    return run_script(
        "train", *named, *short, "--output_dir", folder / "run", *flags,
        cwd=folder, env=script_environment(**environment),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trackers")
    done = train(folder, tiny_llama)
    assert done.returncode == 0, done.stderr
    return folder


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step in `metrics.jsonl`, under the names that trackers give them."""
    lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    return {row["step"]: {f"train/{name}": row[name] for name in row} for row in rows}


def in_tensorboard(folder: Path) -> dict[int, dict[str, list[float]]]:
    # Not above: `make test` looks for examples in every module, without these packages.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, dict[str, list[float]]] = {}
    for file in sorted((folder / "b").rglob("events.*")):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                found.setdefault(event.step, {}).setdefault(name, []).append(event.value)
    return found


def in_trackio(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return what trackio stored: (run, row) pairs. Its reader knows one folder per process."""
    (file,) = (folder / "t").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    return [(name, json.loads(metrics)) for name, metrics in rows]


def test_tensorboard_has_every_number(folder: Path) -> None:
    found, steps = in_tensorboard(folder), logged(folder)
    assert len(steps) == STEPS
    for step, row in steps.items():
        for name in row.keys() - {"train/step"}:  # `epoch` comes again with the totals of a run
            assert found[step][name][0] == pytest.approx(row[name], rel=1e-6), (step, name)


def test_trackio_has_every_number(folder: Path) -> None:
    steps = logged(folder)
    rows = [row for name, row in in_trackio(folder) if "train/loss" in row and name == "shells"]
    assert [row["train/global_step"] for row in rows] == list(steps)
    for row in rows:
        expected = steps[row["train/global_step"]]
        assert {name: row.get(name) for name in expected.keys() - {"train/step"}} == {
            name: value for name, value in expected.items() if name != "train/step"
        }


def test_trackio_has_the_completions(folder: Path) -> None:
    tables = [row["completions"] for _, row in in_trackio(folder) if "completions" in row]
    rows = [row for table in tables for row in table["_value"]]
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert all(isinstance(row["completion"][0]["content"], str) for row in rows)


def test_a_resumed_run_is_one_run_in_both(folder: Path, tiny_llama: Path) -> None:
    before = len(in_trackio(folder))
    done = train(folder, tiny_llama, "--resume", "--max_steps", "4")
    assert done.returncode == 0, done.stderr
    assert {name for name, _ in in_trackio(folder)} == {"shells"}
    added = [row for _, row in in_trackio(folder)[before:] if "train/loss" in row]
    assert [row["train/global_step"] for row in added] == [4]
    assert len(in_tensorboard(folder)[4]["train/loss"]) == 1


@pytest.mark.parametrize(
    ("tracker", "variable"),
    [("tensorboard", "TENSORBOARD_LOGGING_DIR"), ("trackio", "TRACKIO_DIR")],
)
def test_a_tracker_without_a_place_to_write(
    tracker: str, variable: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """TensorBoard refuses at once; trackio warns, and the run is complete without it."""
    (tmp_path / "file").touch()
    done = run_script(
        "train", "--config", "smoke-xml", "--model_name_or_path", tiny_llama, "--max_steps", "1",
        "--max_completion_length", "16", "--output_dir", tmp_path / "run", "--report_to", tracker,
        env=script_environment(**{variable: str(tmp_path / "file/x")}),
    )  # fmt: skip
    if tracker == "trackio":
        assert done.returncode == 0, done.stderr
        assert "could not be persisted" in done.stderr
        assert (tmp_path / "run/adapter/manifest.json").is_file()
    else:
        assert done.returncode == 2
        assert last_line(done.stderr).startswith("error: report_to tensorboard: "), done.stderr
