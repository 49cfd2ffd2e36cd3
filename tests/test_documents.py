"""The documents: every path, link and test that they name exists."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
FOLDERS = "benchmarks|configs|docs|quickstart|rewards|sologrpo|tests"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./*-]*)(?:::[\w…]+)?`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
TEST = re.compile(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)::(\w+)(…?)`")


def exists(pattern):
    return any(ROOT.glob(pattern)) or any(ROOT.glob(f"tests/{pattern}"))


@cache
def names_in(test_file):
    """The names of the test functions in all test files of this name."""
    files = [
        path for path in ROOT.glob("tests/**/*.py") if path.as_posix().endswith(f"/{test_file}")
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    return re.findall(r"^\s*def (test_\w+)", text, re.MULTILINE)


def anchors(text):
    """The anchors that a Markdown renderer gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        "#" + re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in headings
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_links_and_tests_exist(document):
    text = document.read_text(encoding="utf-8")
    missing = [path for path in PATH.findall(text) if not exists(path.rstrip("/"))]
    for target, anchor in LINK.findall(text):
        path = document.parent / target if target else document
        if not path.exists():
            missing.append(target)
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            missing.append(target + anchor)
    for file, test, rest in TEST.findall(text):
        found = [
            name for name in names_in(file) if name == test or (rest and name.startswith(test))
        ]
        if not found:
            missing.append(f"{file}::{test}{rest}")
    assert not missing
