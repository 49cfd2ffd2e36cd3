"""Secrets: a run must not give them away, and data and models must not run code or write files."""

import ast
import json
import os
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rewards import RewardSpecError, load_rewards
from scripts import exit_code, load_script, printed_by, refusal, run_here
from server import Ended, Server
from sologrpo.config.checks import check_settings
from sologrpo.config.parsing import CONFIG_CLASSES
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


PASSWORD, TOKEN, BEARER, USER = (
    "hunter2-planted",
    "hf_" + "Planted1" * 4,
    "p1anted-bearer",
    "me:pw1",
)
JUDGE = """
calls = []
def judge(completions, api_key="", headers=None, fails=False, **kwargs):
    assert api_key == "hunter2-planted", api_key
    if fails:
        raise ValueError(f"refused: {dict(api_key=api_key)} {headers}, http://{'me:pw1'}@host")
    return [len(completion[0]["content"]) for completion in completions]
"""


@pytest.fixture
def secretive(tmp_path: Path, tiny_llama: Path, tiny_data: Path) -> dict[str, Any]:
    """Settings with secrets, and the reward that needs one."""
    (tmp_path / "my_judge.py").write_text(JUDGE)
    headers = {"Authorization": BEARER, "X": f"Bearer {BEARER}"}
    rewards = ["strict_format", {"my_judge:judge": {"api_key": PASSWORD, "headers": headers}}]
    return tiny_config(tiny_llama, tiny_data, tmp_path / "run") | {
        "rewards": rewards, "model_init_kwargs": {"token": TOKEN}, "save_steps": 1,
        "vllm_server_base_url": f"http://{USER}@host:8000",
    }  # fmt: skip


def leaks(text: str) -> list[str]:
    return [secret for secret in (PASSWORD, TOKEN, BEARER, USER) if secret in text]


def test_a_secret_in_a_setting_is_used_and_nowhere_to_be_found(
    server: Server, tmp_path: Path, secretive: dict[str, Any]
) -> None:
    config, run = tmp_path / "c.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(secretive))
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(run)}
    plan = server.run_command("train", "--config", config, "--dry_run", cwd=tmp_path)
    more = ("--report_to", "wandb", "--hub_token", ARGUMENT)
    trained = server.run_command(
        "train", "--config", config, *more, cwd=tmp_path, environment=wandb
    )
    page = server.run_command("report", "run", cwd=tmp_path)
    for ended in (plan, trained, page):
        assert ended.code == 0, ended
        assert not leaks(ended.out + ended.err)
    assert "{'my_judge:judge': {'api_key': '***'" in plan.out
    tables = [str(pq.read_table(path).to_pydict()) for path in run.rglob("*.parquet")]
    files = all_bytes(run)
    assert tables
    assert any(path.suffix == ".wandb" for path in files)
    for text in [*tables, *(content.decode("utf-8", "replace") for content in files.values())]:
        assert not leaks(text)
        assert ARGUMENT not in text
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["rewards"][1]["my_judge:judge"]["api_key"] == "***"
    assert saved["model_init_kwargs"] == {"token": "***"}
    assert saved["vllm_server_base_url"] == "http://***@host:8000"
    assert "***" in (run / "report.html").read_text()


def test_a_resumed_run_asks_for_its_secrets(
    server: Server, tmp_path: Path, secretive: dict[str, Any]
) -> None:
    config = tmp_path / "c.yaml"

    def train(settings: dict[str, Any], *more: object) -> Ended:
        config.write_text(yaml.safe_dump(settings))
        return server.run_command("train", "--config", config, *more, cwd=tmp_path)

    assert train(secretive).code == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    copied = train({key: saved[key] for key in secretive}, "--resume")
    assert copied.code == 2
    assert copied.err.startswith("error: rewards holds ***, which stands for a secret")
    without = secretive | {"model_init_kwargs": None}
    forgotten = train(without, "--resume")
    assert forgotten.code == 2
    assert forgotten.err.startswith("error: --resume: model_init_kwargs held a secret, which is")
    assert copied.err.count("\n") == forgotten.err.count("\n") == 1
    # Another token, and a URL without its password in the config but on the command line.
    given = {"model_init_kwargs": {"token": TOKEN[::-1]}, "vllm_server_base_url": "http://***@h:1"}
    url = ("--vllm_server_base_url", f"http://{USER}2@host:8000")
    again = train(secretive | given, "--resume", *url)
    assert again.code == 0, again
    assert "settings changed" not in again.err
    dropped = train(without, "--resume", "--accept_changes", "--max_steps", 3)
    assert dropped.code == 0, dropped
    assert "model_init_kwargs {'token': '***'} -> None" in dropped.err


@pytest.mark.parametrize(
    "text",
    [
        f"rewards: [{{a: {{api_key: {PASSWORD}}}, b: 1}}]",
        f"rewards: [strict_format, {{trailing_text: {{api_key: {PASSWORD}}}}}]",
        f"rewards: [{{api_key: {PASSWORD} ]",
        f"hub_token: [{PASSWORD}]",
        f'hub_token: "{PASSWORD}\\n"',
        f"hub_token: '{PASSWORD}' '",
        f"model_init_kwargs: [{{token: {PASSWORD}}}]",
        f'model_init_kwargs: \'{{"token": "{PASSWORD}"\'',
        f"generation_kwargs: {{password: {PASSWORD}}}",
        f"run_name: {TOKEN}",
        f"system_prompt: Send {TOKEN}",
        f"output_dir: https://{USER}@host",
        f"worked_examples: [{{question: {TOKEN}, thinking: a, answer: b}}]",
        f"vllm_server_base_url: 'http://{USER}@host\a'",
    ],
)
def test_an_error_quotes_no_secret(tmp_path: Path, tiny_llama: Path, tiny_data: Path, text: str,
                                   capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    settings = tiny_config(tiny_llama, tiny_data, tmp_path / "run")
    settings.pop(text.partition(":")[0], None)
    config = tmp_path / "c.yaml"
    config.write_text(f"{yaml.safe_dump(settings)}{text}\n")
    printed = printed_by(load_script("train"), capfd, "--config", config, "--dry_run")
    assert printed.code == 2
    assert not leaks(printed + printed.stdout)


@pytest.mark.parametrize("command", [("train",), ("rewards", "check")])
def test_a_reward_that_quotes_its_secret(
    server: Server, tmp_path: Path, secretive: dict[str, Any], command: tuple[str]
) -> None:
    secretive["rewards"][1]["my_judge:judge"]["fails"] = True
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(secretive))
    ended = server.run_command(*command, "--config", "c.yaml", cwd=tmp_path)
    assert ended.code == 1
    assert "refused: {'api_key': '***'}" in ended.out + ended.err
    assert not leaks(ended.out + ended.err)


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


# It starts the process in which a user's reward runs, and sends it the batch; it judges nothing.
PROCESSES = {"contained.py"}
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
    from sologrpo.base.environment import environment

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


# -- what a config may not do ----------------------------------------------------------------------

# Nothing but Python's own library: a child of Python imports a browser that is a shell.
VARIABLES = {
    "PYTHONWARNINGS": "all:0:antigravity.x:0:0",
    "BROWSER": '/bin/sh -c "touch owned" #%s',
}
CODE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }} $(touch owned) | touch owned; "
    "__import__('os').system('touch owned')"
)
KEYS = [field.name for group in CONFIG_CLASSES for field in fields(group)]
CONFIG_COMMANDS = {
    "train": ("train", "--dry_run"), "check": ("rewards", "check"), "resume": ("train", "--resume"),
}  # fmt: skip


@pytest.fixture
def settings(tiny_llama: Path, tiny_data: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_config(tiny_llama, tiny_data, tmp_path / "run") | {"rewards": ["strict_format"]}


def written(config: Path, settings: dict[str, Any]) -> Path:
    config.parent.mkdir(exist_ok=True)
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return config


def assert_refused(ended: Ended, folder: Path) -> None:
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1
    assert not list(folder.rglob("owned"))


@pytest.mark.parametrize("command", CONFIG_COMMANDS)
@pytest.mark.parametrize(
    "more", [{"rewards": ["strict_format", "json:dumps"]}, {"report_to": "wandb"}]
)
@pytest.mark.parametrize("place", ["mine", "downloaded"])
def test_a_config_sets_no_environment_variables(
    server: Server, tmp_path: Path, settings: dict[str, Any], command: str, more: dict[str, Any],
    place: str,
) -> None:  # fmt: skip
    config = written(tmp_path / place / "config.yaml", settings | {"env": VARIABLES} | more)
    if place == "downloaded":
        (config.parent / "environment.json").touch()
    names = dict.fromkeys(VARIABLES) | {"WANDB_MODE": None}
    ended = server.run_command(
        *CONFIG_COMMANDS[command], "--config", config, cwd=tmp_path, environment=names
    )
    assert_refused(ended, tmp_path)
    assert "env is not taken from a file" in ended.err


@pytest.mark.parametrize(
    ("key", "value"),
    [("report_to", "wandb"), ("dataloader_multiprocessing_context", "spawn")],
)
def test_no_module_of_the_current_folder_is_imported(
    server: Server, tmp_path: Path, settings: dict[str, Any], key: str, value: str
) -> None:
    for name in ("wandb", "multiprocessing", "json", "random", "torch", "pip"):
        (tmp_path / f"{name}.py").write_text("open('owned', 'w')\n")
    config = written(tmp_path / "c.yaml", settings | {key: value, "dataloader_num_workers": 1})
    no_login = {"WANDB_MODE": None, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    ended = server.run_command("train", "--config", config, cwd=tmp_path, environment=no_login)
    assert ended.code == 2, ended
    assert not list(tmp_path.rglob("owned"))


def test_a_reward_of_a_library_downloads_no_code(
    server: Server, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """`transformers:pipeline` has this form, and runs the code of a model's repository."""
    (tmp_path / "library.py").write_text(
        "def pipeline(task=None, model=None, trust_remote_code=None, **kwargs):\n"
        "    open('owned', 'w')\n"
    )
    spec = {"library:pipeline": {"model": "someone/model", "trust_remote_code": True}}
    config = written(tmp_path / "c.yaml", settings | {"rewards": [spec]})
    ended = server.run_command("rewards", "check", "--config", config, cwd=tmp_path)
    assert_refused(ended, tmp_path)
    assert "name one of its parameters `completions`" in ended.err


@pytest.mark.parametrize(
    "spec",
    ["os:system", "builtins:exec", "runpy:run_path", {"timeit:timeit": {"stmt": "open('owned')"}},
     {"subprocess:run": {"input": "touch owned"}}, {"subprocess:getoutput": {"cmd": "touch owned"}},
     {"torch.hub:load": {"repo_or_dir": ".", "model": "x", "source": "local"}}],
)  # fmt: skip
def test_what_scores_no_completions_is_no_reward(spec: Any) -> None:
    with pytest.raises(RewardSpecError):
        load_rewards([spec], ["answer"])


# Settings that take any text and are used, or not, without a complaint.
ANY_TEXT = (
    "dataset_config", "dataset_test_split", "hub_model_id", "hub_revision", "hub_token",
    "label_names", "length_column_name", "include_for_metrics", "metric_for_best_model",
    "model_revision", "optim_target_modules", "project", "resume_from_checkpoint", "run_name",
    "system_prompt", "trackio_bucket_id", "trackio_space_id", "vllm_server_base_url",
    "vllm_server_host", "vllm_structured_outputs_regex",
)  # fmt: skip
ANY_DICTIONARY = ("chat_template_kwargs", "fsdp_config", "model_init_kwargs")


def test_code_in_all_settings_at_once_is_text(
    server: Server, tmp_path: Path, settings: dict[str, Any]
) -> None:
    code = dict.fromkeys(ANY_TEXT, CODE) | {key: {"x": CODE, CODE: "x"} for key in ANY_DICTIONARY}
    config = written(tmp_path / "c.yaml", settings | code)
    environment = {"HF_TOKEN": None}
    ended = server.run_command("train", "--config", config, cwd=tmp_path, environment=environment)
    assert ended.code == 0, ended
    assert not list(tmp_path.rglob("owned"))


def test_code_in_a_setting_is_refused_or_text(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tried = []
    for key in sorted({*KEYS} - {*ANY_TEXT, *ANY_DICTIONARY, "output_dir"}):
        for value in (CODE, {"x": CODE}):
            given = {key: value}
            if refusal(partial(check_settings, given, "", *CONFIG_CLASSES)) is None:
                tried.append(key)
                config = written(tmp_path / "c.yaml", settings | given)
                assert run_here("train", "--config", config, "--dry_run").code in (0, 2), key
    assert {"attn_implementation", "dataset_name", "rewards", "worked_examples"} <= {*tried}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml"]


def test_a_chat_template_runs_in_a_sandbox(
    server: Server, tmp_path: Path, settings: dict[str, Any], tiny_llama: Path
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(escape)
    config = written(tmp_path / "c.yaml", settings | {"model_name_or_path": "model"})
    ended = server.run_command("train", "--config", config, cwd=tmp_path)
    assert_refused(ended, tmp_path)
    assert "unsafe" in ended.err


def with_code(value: Any) -> Any:
    """Put code in the place of every text; what names a file or a class is one too."""
    if isinstance(value, dict):
        return {key: with_code(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_code(entry) for entry in value]
    return CODE if isinstance(value, str) else value


# Files by the command that reads them; those of one text are spoiled together.
READERS = {
    "train": ["config.yaml", "environment.json", "trainer_state.json"],
    "evaluate": ["config.yaml", "environment.json", "adapter_config.json", "results.json"],
    "report": ["config.yaml environment.json metrics.jsonl results.json records.jsonl"],
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, server: Server, tiny_llama: Path,
              tiny_data: Path) -> Path:  # fmt: skip
    """A finished run with its config next to it."""
    folder = tmp_path_factory.mktemp("evaluated")
    settings = tiny_config(tiny_llama, tiny_data, Path("run"))
    written(folder / "c.yaml", settings | {"rewards": ["strict_format"], "save_steps": 1})
    for command in (("train", "c.yaml"), ("evaluate", "run", "--limit", 2)):
        assert server.run_command(*command, cwd=folder).code == 0
    return folder


@pytest.mark.parametrize("command", READERS)
def test_files_of_a_run_are_never_evaluated(
    server: Server, evaluated: Path, tmp_path: Path, command: str
) -> None:
    options = {"train": ("c.yaml", "--resume"), "evaluate": ("run", "--limit", 2)}
    for names in READERS[command]:
        shutil.copytree(evaluated, tmp_path, dirs_exist_ok=True)
        run = tmp_path / "run"
        for file in (file for file in run.rglob("*.*") if file.name in names.split()):
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            file.write_text("".join(json.dumps(with_code(yaml.safe_load(x))) + "\n" for x in lines))
        ended = server.run_command(command, *options.get(command, ["run"]), cwd=tmp_path)
        assert ended.code in (0, 2), (names, ended)
    assert not list(tmp_path.rglob("owned"))
