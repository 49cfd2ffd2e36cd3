"""Command lines with a forgotten flag or a wrong path, before any library is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import command_of, script_environment
from sologrpo.base.errors import InputError
from sologrpo.cli import understand


@pytest.mark.parametrize(
    ("command", "given", "meant"),
    [
        ("train", "quickstart", "--config quickstart"),
        ("train", "quickstart --seed 3", "--config quickstart --seed 3"),
        ("train", "--config quickstart --beta -1", "--config quickstart --beta -1"),
        ("train", "--config quickstart --beta -inf", "--config quickstart --beta -inf"),
        ("train", "--config nowhere -x --help", "--help"),
        ("train", "--output_dir a=b", "--output_dir a=b"),
        ("evaluate", "RUN", "--run RUN"),
        ("evaluate", "RUN --limit 3", "--run RUN --limit 3"),
        ("evaluate", "--model x", "--model x"),
        ("chat", "RUN", "--run RUN"),
        ("export", "RUN -h", "--help"),
        ("report", "--run RUN", "RUN"),
        ("rewards", "score --gold -18 x=18", "score --gold -18 x=18"),
    ],
)
def test_a_forgotten_flag_is_understood(
    command: str, given: str, meant: str, tmp_path: Path
) -> None:
    def words(text: str) -> list[str]:
        return text.replace("RUN", str(tmp_path)).split(" ")

    assert understand(command, words(given)) == words(meant)


@pytest.mark.parametrize(
    ("command", "given", "says"),
    [
        ("train", ["qickstart"], "give a file or a recipe: boxed-fewshot"),
        ("train", ["--config", "a/b.yaml"], "no config 'a/b.yaml' in"),
        ("train", ["--config="], "no config ''"),
        ("train", ["--config"], "no config ''"),
        ("evaluate", ["runs/x"], "no run directory 'runs/x' in"),
        ("evaluate", ["--run", "mine"], "did you mean runs/mine?"),
        ("export", ["--run=mine"], "did you mean runs/mine?"),
    ],
)
def test_a_wrong_path_is_named_with_the_folder(
    command: str, given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        understand(command, given)
    assert says in str(error.value)
    assert f" in {tmp_path}: " in str(error.value)


@pytest.mark.parametrize("script", ["train", "evaluate"])
def test_a_wrong_path_is_found_before_the_libraries_load(script: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    paths = {"PYTHONPATH": f"{tmp_path}:{script_environment()['PYTHONPATH']}"}
    done = subprocess.run(
        command_of(script, "no/such"), capture_output=True, text=True, check=False, cwd=tmp_path,
        env=script_environment(**paths),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: no ")
    assert done.stderr.count("\n") == 1


def test_the_version_is_printed() -> None:
    command = [sys.executable, "-m", "sologrpo", "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=script_environment()
    )
    assert done.stdout.strip()
