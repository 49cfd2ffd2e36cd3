"""Secrets: a run must not give them away, and data and models must not run code or write files."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from scripts import exit_code, load_script, printed_by
from server import Server
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
    capfd: pytest.CaptureFixture[str], server: Server,
) -> None:  # fmt: skip
    run, config = tmp_path / "run", tmp_path / "tiny.yaml"
    settings = tiny_config(tiny_llama, tiny_data, run) | {"report_to": "wandb", "save_steps": 1}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)} | TOKENS
    command = ("train", "--config", config, "--hub_token", ARGUMENT)
    trained = server.run_command(*command, cwd=tmp_path, environment=environment)
    assert trained.code == 0, trained
    for name, token in TOKENS.items():
        monkeypatch.setenv(name, token)
    evaluated = printed_by(load_script("evaluate"), capfd, "--run", run, "--limit", 2)
    assert evaluated.code == 0, evaluated
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    printed = trained.out + trained.err + evaluated.stdout + evaluated
    files = all_bytes(tmp_path)
    assert run / "checkpoint-2" / "optimizer.pt" in files
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


# They start the process in which a user's reward runs, and send it the batch; they judge nothing.
PROCESSES = {"remote.py", "worker.py"}
REWARDS = sorted(p for p in (ROOT / "rewards").glob("*.py") if p.name not in PROCESSES)


@pytest.mark.parametrize("file", REWARDS, ids=lambda p: p.name)
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


# -- what a downloaded run may not do --------------------------------------------------------------


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_data: Path) -> Path:
    """A finished run whose model brings code, and whose config trusts it."""
    folder = tmp_path_factory.mktemp("downloaded")
    config = folder / "tiny.yaml"
    settings = tiny_config(tiny_llama, tiny_data, folder / "run")
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert exit_code(load_script("train"), "--config", config) == 0
    model = folder / "run" / tiny_llama.name
    shutil.copytree(tiny_llama, model)
    (model / "owned.py").write_text("open('owned', 'w')\nclass Owned: pass\n")
    change_json(model / "config.json", model_type="owned", auto_map=AUTO_MAP)
    change_json(model / "tokenizer_config.json", tokenizer_class="Owned", auto_map=AUTO_MAP)
    change_run(folder / "run", trust_remote_code=True, model_name_or_path=f"run/{model.name}")
    return folder / "run"


AUTO_MAP = {
    "AutoConfig": "owned.Owned",
    "AutoModelForCausalLM": "owned.Owned",
    "AutoTokenizer": ["owned.Owned", None],
}


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_run(run: Path, **changes: object) -> None:
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


@pytest.fixture
def there(downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run in the current folder."""
    shutil.copytree(downloaded, tmp_path / "run")
    with next((tmp_path / "run").glob("*/owned.py")).open("a") as code:
        code.write(f"# {tmp_path}")  # transformers runs the same code once
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


COMMANDS = {
    "evaluate": ("evaluate", "--limit", "1", "--no_baseline"),
    "export": ("sologrpo/export/export", "--save_merged", "merged"),
}


def refused(capfd: pytest.CaptureFixture[str], command: str) -> str:
    """Run a command on the run; return its one line."""
    script, *flags = COMMANDS[command]
    printed = printed_by(load_script(script), capfd, "--run", "run", *flags)
    assert printed.code == 2, printed
    line = str(printed).strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert not Path("owned").exists()
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_cannot_trust_its_own_code(
    there: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    assert "run/" in refused(capfd, command)
    script, *flags = COMMANDS[command]
    exit_code(load_script(script), "--run", "run", "--trust_remote_code", *flags)
    assert Path("owned").exists()  # the command line can: the trap works


@pytest.mark.parametrize("command", COMMANDS)
def test_pickled_weights_of_a_run_are_not_loaded(
    there: Path, capfd: pytest.CaptureFixture[str], tiny_llama: Path, command: str
) -> None:
    model = there / tiny_llama.name
    shutil.copytree(tiny_llama, model, dirs_exist_ok=True)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "cannot load model" in refused(capfd, command)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_implementation": "someone/kernel"}, "is code from the Hub"),
        ({"load_in_4bit": "yes"}, "load_in_4bit"),
        ({"dataset_name": ["a"]}, "dataset_name"),
        ({"prompt_format": "../../x"}, "prompt_format"),
        ({"max_completion_length": True}, "max_completion_length"),
        ({"seed": -1}, "seed"),
        ({"model_name_or_path": "a\0b"}, "model_name_or_path"),
    ],
)
def test_settings_of_a_run_are_checked_like_a_recipe(
    there: Path, capfd: pytest.CaptureFixture[str], tiny_llama: Path, command: str,
    changes: dict[str, object], says: str,
) -> None:  # fmt: skip
    change_run(there, **{"model_name_or_path": str(tiny_llama)} | changes)
    line = refused(capfd, command)
    assert "run/config.yaml" in line
    assert says in line


LINKS = {"evaluate": "eval", "export": "export"}


@pytest.mark.parametrize("command", COMMANDS)
def test_links_out_of_a_run_are_not_followed_to_write(
    there: Path, capfd: pytest.CaptureFixture[str], tiny_llama: Path, command: str
) -> None:
    change_run(there, model_name_or_path=str(tiny_llama))
    outside = there.parent / "outside"
    (outside / "trained").mkdir(parents=True)
    (outside / "trained" / "results.json").write_text("mine")
    (there / LINKS[command]).symlink_to(outside)
    script, *flags = COMMANDS[command]
    if command == "export":
        flags = ["--push_to_hub", "mine", "--dry_run", "--what", "merged"]
    printed = printed_by(load_script(script), capfd, "--run", "run", *flags)
    assert printed.code == 2
    assert "nothing is written outside run" in printed
    assert (outside / "trained" / "results.json").read_text() == "mine"
    assert [path.name for path in outside.rglob("*")] == ["trained", "results.json"]


def test_a_secret_that_a_link_leads_to_is_not_pushed(there: Path, capfd: pytest.CaptureFixture[str],
                                              tiny_llama: Path) -> None:  # fmt: skip
    change_run(there, model_name_or_path=str(tiny_llama))
    (there.parent / "id_rsa").write_text("secret")
    (there / "adapter" / "tokenizer_extra.json").symlink_to(there.parent / "id_rsa")
    flags = ("--run", "run", "--push_to_hub", "mine", "--dry_run")
    printed = printed_by(load_script("sologrpo/export/export"), capfd, *flags)
    assert printed.code == 2
    assert "is a link to" in printed


@pytest.mark.parametrize(
    "label",
    ["baseline", "Baseline-merged", "prompt_formats.json", "../../x", "..", ".", "a/b", "/tmp/x",
     "a\\b", "-x", ".hidden", "a b", "x" * 300, "\x1b[31m", "\u202eevil", "tréma"],
)  # fmt: skip
def test_labels_are_one_safe_name(
    there: Path, capfd: pytest.CaptureFixture[str], label: str
) -> None:
    printed = printed_by(load_script("evaluate"), capfd, "--run", "run", f"--label={label}")
    assert printed.code == 2
    assert "--label" in printed or "label" in printed
    assert "\x1b" not in printed
    assert not (there / "eval").exists()
