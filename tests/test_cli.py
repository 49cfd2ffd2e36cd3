"""The installed command: which commands there are, and what each of them runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from sologrpo.base.files import recipes
from sologrpo.cli import COMMANDS, main
from tiny import ROOT

HEAVY = ("torch", "transformers", "trl", "datasets", "matplotlib", "yaml")


def exit_code(*argv: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sologrpo"])
        patch.setattr(sys, "path", [*sys.path])
        try:
            main(argv)
        except SystemExit as error:
            return int(error.code or 0)
    return 0


def test_help_names_every_command_and_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"  # an import of one now fails
        "sys.argv[1:] = ['--help']\n"
        "runpy.run_module('sologrpo', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ")]
    assert set(COMMANDS) <= set(listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: sologrpo {command}")
    assert shown.err == ""


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["recipes", "copy", "quikstart"], "quickstart"),
        (["recipes", "copy", "quickstart", "no/such/folder/x.yaml"], "no folder no/such/folder"),
        (["train", "--config", "quikstart"], "qwen2.5-1.5b"),
        (["train", "--config", "quickstart", "--lerning_rate", "1"], "did you mean"),
        (["evaluate", "--rnu", "x"], "did you mean 'run'"),
        (["export", "--run", "nowhere"], "nowhere"),
        (["report", "runs/x", "--prot", "1"], "did you mean 'port'"),
        (["doctor", "--quick"], "unknown key 'quick'"),
        (["rewards", "scoer"], "scoer"),
        (["rewards", "check", "--config", "nowhere"], "no config 'nowhere' in"),
        (["model", "--wehel", "x"], "--wehel"),
    ],
)
def test_mistakes_end_in_a_line_that_tells_what_to_write(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*argv) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in line
    assert says in line


def test_recipes_are_listed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes())
    headers = [line.partition(" ")[2].strip() for line in lines]
    for header, path in zip(headers, recipes().values(), strict=True):
        comment = path.read_text(encoding="utf-8").replace("\n# ", " ")
        assert comment.startswith(f"# {header}")
        assert len(header) > 20

    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "quickstart.yaml"
    assert exit_code("recipes", "copy", "quickstart") == 0
    assert copy.read_bytes() == recipes()["quickstart"].read_bytes()
    copy.write_text("mine")
    assert exit_code("recipes", "copy", "quickstart") == 2
    assert copy.read_text() == "mine"
    assert exit_code("recipes", "copy", "quickstart", "other.yaml") == 0


def test_the_quickstart_needs_no_file_of_a_checkout(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert exit_code("train", "--config", "quickstart", "--dry_run") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        f"error: no folder models/SmolLM2-135M-Instruct in {tmp_path}: download it with "
        "`sologrpo model`"
    )
    model = ("--model_name_or_path", str(tiny_llama))
    assert exit_code("train", "--config", "quickstart", "--dry_run", *model) == 0
    assert "quickstart: 2000 prompts" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_rewards_of_a_recipe_are_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = ("--reward_weights", "1.0", "0.0")
    assert exit_code("rewards", "check", "--config", "quickstart", *weights) == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = [line for line in lines if line.startswith("wrong number, perfect format")]
    assert wrong.split()[-3:] == ["1.00", "1.00", "FAIL"]
    assert lines[-1].endswith("failed")
