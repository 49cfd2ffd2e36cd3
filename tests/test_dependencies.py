"""Imports, the ranges in pyproject.toml and the two lists of exact versions agree."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tiny import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(line) for line in PROJECT["dependencies"]]
DECLARED = {canonicalize_name(requirement.name) for requirement in REQUIREMENTS}
OPTIONAL = {"vllm", "deepspeed", "xllamacpp"}
BY_NAME = {"wandb"}  # transformers imports it, where report_to names it
CODE = ["train.py", "evaluate.py", "sologrpo", "rewards", "quickstart"]


def versions_in(name: str) -> dict[str, str]:
    lines = re.findall(r"^([A-Za-z]\S*)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): version for package, version in lines}


def imported() -> set[str]:
    modules = set[str]()
    for file in (file for name in CODE for file in files_of(ROOT / name)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(str(node.module).split(".")[0])
    ours = {Path(name).stem for name in CODE}
    return modules - set(sys.stdlib_module_names) - ours - OPTIONAL


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    distributions = packages_distributions()
    packages = {canonicalize_name(distributions[module][0]) for module in imported()}
    assert packages | BY_NAME == DECLARED


def test_every_dependency_has_a_lowest_version_and_the_oldest_list_has_it() -> None:
    oldest = versions_in("constraints-oldest.txt")
    assert oldest.keys() == DECLARED
    for requirement in REQUIREMENTS:
        (lowest,) = (s.version for s in requirement.specifier if s.operator == ">=")
        version = oldest[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version)
        if requirement.name != "torch":  # its lowest version is admitted untried
            assert f"{version}.".startswith(f"{lowest}.")


def test_torch_is_capped_at_the_newest_minor_version_that_the_tests_ran() -> None:
    (torch,) = (requirement for requirement in REQUIREMENTS if requirement.name == "torch")
    major, minor, _ = versions_in("constraints.txt")["torch"].split(".")
    assert torch.specifier.contains(f"{major}.{minor}.99+cpu")
    assert not torch.specifier.contains(f"{major}.{int(minor) + 1}.0")


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-engines.txt"])
def test_the_list_of_exact_versions_has_every_dependency(name: str) -> None:
    exact = versions_in(name)
    for requirement in REQUIREMENTS:
        assert requirement.specifier.contains(exact[canonicalize_name(requirement.name)])
