"""Secrets: a run must not give them away, and data and models must not run code or write files."""

import ast
import os
from pathlib import Path

import pytest
import yaml

from scripts import exit_code, load_script, printed_by, run_script, script_environment
from tiny import ROOT, rows, tiny_config, write_rows

TOKENS = {
    "HF_TOKEN": "hf_" + "PlantedHub" * 3,
    "WANDB_API_KEY": "planted0wandb" * 3,
    "OPENAI_API_KEY": "sk-planted" + "openai" * 4,
}
ARGUMENT = "hf_" + "PlantedArgument" * 2


def all_bytes(*folders: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_no_token_is_written_or_printed(
    tmp_path: Path, tiny_llama: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, config = tmp_path / "run", tmp_path / "tiny.yaml"
    settings = tiny_config(tiny_llama, tiny_data, run) | {"report_to": "wandb", "save_steps": 1}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    environment = script_environment(WANDB_MODE="offline", WANDB_DIR=str(tmp_path), **TOKENS)
    command = ("--config", config, "--hub_token", ARGUMENT)
    trained = run_script("train", *command, env=environment, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    for name, token in TOKENS.items():
        monkeypatch.setenv(name, token)
    evaluated = printed_by(load_script("evaluate"), capfd, "--run", run, "--limit", 2)
    assert evaluated.code == 0, evaluated
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    printed = trained.stdout + trained.stderr + evaluated.stdout + evaluated
    files = all_bytes(tmp_path)
    assert run / "checkpoint-2" / "training_args.bin" in files
    for token in (*TOKENS.values(), ARGUMENT):
        assert token not in printed
        holding = [str(path) for path, content in files.items() if token.encode() in content]
        assert holding == []


def test_names_in_the_data_never_become_paths(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    escape = "../../../escaped"
    problems = [row | {"kind": escape, "id": escape, escape: escape} for row in rows(8)]
    for row in problems:
        row["question"] = f"{escape} {row['question']}"
    inside = tmp_path / "a" / "b" / "c" / "d"
    inside.mkdir(parents=True)
    for split in ("train", "test"):
        write_rows(inside / "data" / f"{split}.jsonl", problems)
    config = inside / "tiny.yaml"
    settings = tiny_config(tiny_llama, inside / "data", inside / "run") | {"save_steps": 1}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    monkeypatch.chdir(inside)
    assert exit_code(load_script("train"), "--config", config) == 0
    assert exit_code(load_script("evaluate"), "--run", inside / "run") == 0
    outside = [
        path for path in tmp_path.rglob("*") if path.is_file() and inside not in path.parents
    ]
    assert outside == []
    assert not any("escaped" in path.name for path in tmp_path.rglob("*"))


# What runs text as code, or as a command. `importlib` loads a reward that the user names.
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "literal_eval", "system", "popen", "Popen",
             "sympify", "parse_expr", "loads"}  # fmt: skip
JSON_ONLY = {"loads"}  # json.loads; pickle is not imported


@pytest.mark.parametrize("file", sorted((ROOT / "rewards").glob("*.py")), ids=lambda p: p.name)
def test_rewards_evaluate_nothing(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    if file.name == "__init__.py":
        imported.discard("os")  # the loader reads paths with it; what it calls is checked below
    assert not imported & {"pickle", "marshal", "subprocess", "os", "ctypes", "sympy"}
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    found = called & (RUNS_TEXT - JSON_ONLY)
    # re.compile is harmless.
    if found == {"compile"}:
        found = {
            "compile"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "compile"
        }
    assert not found


def test_no_pickle_is_loaded_with_code() -> None:
    # torch.load defaults to weights_only; nobody may turn that off.
    for file in [*(ROOT / "sologrpo").rglob("*.py"), ROOT / "train.py", ROOT / "evaluate.py"]:
        text = file.read_text(encoding="utf-8")
        assert "weights_only=False" not in text, file
        assert "import pickle" not in text, file


def test_the_environment_is_not_in_the_description_of_a_run() -> None:
    from sologrpo.environment import environment

    described = str(environment())
    for name in ("PATH", "HOME"):
        assert os.environ[name] not in described
