"""A run that is resumed is made from what it was started with, or stops and names the change."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from scripts import exit_code, last_line, printed_by, train_without_report
from tiny import rows, write_rows

REWARD = """
def length(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]
"""
EXAMPLE = {"question": "1 + 1?", "thinking": "1 + 1 = 2", "answer": "2"}


# Relative paths: the folder can be copied, and the settings stay the same.
COMMAND = [
    "--config", "quickstart", "--model_name_or_path", "model", "--output_dir", "run",
    "--dataset_name", "rows.jsonl", "--num_validation_examples", "4", "--max_train_examples", "24",
    "--worked_examples", "examples.yaml", "--rewards", "strict_format", "fingerprinted:length",
    "--max_steps", "1", "--save_steps", "1", "--max_completion_length", "8", "--lora_r", "2",
    "--dtype", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The quickstart's run of one step, in a folder with all that it is made from."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_llama, folder / "model")
    write_rows(folder / "rows.jsonl", rows(40))
    (folder / "examples.yaml").write_text(yaml.safe_dump([EXAMPLE]))
    (folder / "fingerprinted.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert exit_code(train_without_report(), *COMMAND) == 0
    sys.modules.pop("fingerprinted", None)  # each copy has its own
    return folder


def edit_rows(folder: Path) -> None:
    file = folder / "rows.jsonl"
    file.write_text(file.read_text().replace("shells", "stones"))


def edit_one_weight(folder: Path) -> None:
    file = str(folder / "model" / "model.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][0] += 2**-10
    save_file(weights, file, metadata={"format": "pt"})


def edit_template(folder: Path) -> None:
    file = folder / "model" / "chat_template.jinja"
    file.write_text(file.read_text().replace("assistant", "helper"))


def edit_example(folder: Path) -> None:
    (folder / "examples.yaml").write_text(yaml.safe_dump([EXAMPLE | {"thinking": "two"}]))


def edit_reward(folder: Path) -> None:
    (folder / "fingerprinted.py").write_text(f"{REWARD}\n# changed")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (edit_rows, ["training rows", "validation rows"]),
        (edit_one_weight, ["base weights"]),
        (edit_template, ["base weights", "prompts"]),
        (edit_example, ["prompts"]),
        (edit_reward, ["reward length"]),
    ],
)
def test_a_change_is_named_and_recorded_if_accepted(
    change: Callable[[Path], None],
    named: list[str],
    saved: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "made"
    shutil.copytree(saved, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "fingerprinted", raising=False)
    record = folder / "run" / "environment.json"
    before = json.loads(record.read_text())["fingerprints"]
    train, again = train_without_report(), [*COMMAND, "--resume", "--max_steps", "2"]
    change(folder)
    refused = printed_by(train, capfd, *again)
    assert refused.code == 2, refused
    line = last_line(refused)
    assert "--accept_changes" in line
    for name in ("training rows", "validation rows", "base weights", "prompts", "reward length"):
        assert (name in line) == (name in named), line
    accepted = printed_by(train, capfd, *again, "--accept_changes")
    assert accepted.code == 0, accepted
    after = json.loads(record.read_text())
    assert {change["step"] for change in after["changes"]} == {1}
    assert len(after["changes"]) == len(named)
    for made in after["changes"]:
        assert made["what"].startswith(tuple(named))
        assert made["before"] == before[made["what"]] != made["now"]
        assert made["now"] == after["fingerprints"][made["what"]]
    # Nothing changes from now on, and the record of the change stays.
    assert printed_by(train, capfd, *again).code == 0
    assert json.loads(record.read_text())["changes"] == after["changes"]
