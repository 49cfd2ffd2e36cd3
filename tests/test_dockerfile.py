"""The Dockerfile, as far as it can be checked without Docker: its files make a complete wheel."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]

# Continued lines joined, comments left out.
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and line[0] != "#"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def files_of_wheel(source: Path, out: Path) -> set[str]:
    """Build a wheel as `pip install .` does; return the names in it."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), str(source)],
        check=True, timeout=240,
    )  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_copied_files_make_the_wheel_of_the_checkout(tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    for line in arguments("COPY"):
        *sources, target = shlex.split(line)
        for source in sources:
            if (ROOT / source).is_dir():
                skip = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, context / target, ignore=skip)
            else:
                shutil.copy(ROOT / source, context / target)
    assert files_of_wheel(context, tmp_path / "copied") == files_of_wheel(ROOT, tmp_path / "all")


def test_versions_are_pinned_and_agree() -> None:
    (image,) = arguments("FROM")
    cuda, ubuntu = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu([\d.]+)", image).groups()  # type: ignore[union-attr]
    assert f"libraries of CUDA {cuda}." in TEXT
    python = {"24.04": "3.12"}[ubuntu]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    (install,) = (line for line in arguments("RUN") if "pip install" in line)
    assert install.endswith("pip install -c constraints.txt .")


def test_it_runs_the_command_as_an_ordinary_user() -> None:
    names = [name for name, _ in STEPS]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    (user,) = arguments("USER")
    assert any(f"useradd --create-home {user} " in line for line in arguments("RUN"))
    (entry,) = arguments("ENTRYPOINT")
    assert re.findall(r'"(.+?)"', entry) == list(PROJECT["scripts"])
    caches = [value for line in arguments("ENV") for value in re.findall(r"=(/cache\S*)", line)]
    assert len(caches) == 2
    (volumes,) = arguments("VOLUME")
    folders = re.findall(r'"(.+?)"', volumes)
    assert folders == ["/cache", arguments("WORKDIR")[-1]]
    assert any(line.endswith(" ".join(folders)) for line in arguments("RUN"))
