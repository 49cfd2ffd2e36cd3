"""Damaged files and wrong values of every class end in one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from sologrpo.base.errors import InputError
from sologrpo.base.schema import Number, Schema, parse, read_json, read_json_lines, read_yaml


class Row(Schema):
    """A made-up schema."""

    name: str
    rate: Number = 0.0
    limit: int | None = None
    tags: tuple[str, ...] = Field((), strict=False)


def refusal(attempt: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refused:
        attempt()
    line = str(refused.value)
    assert "\n" not in line
    assert line.isprintable()
    return line


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        (Row, {}, "a.yaml: name: missing"),
        (Row, 5, "a.yaml: 5; expected key: value pairs"),
        (Row, {"name": None}, "a.yaml: name: None; expected a valid string"),
        (Row, {"name": "a", "rate": True}, "rate: True; expected a valid number"),
        (Row, {"name": "a", "rate": float("nan")}, "rate: nan; expected a finite number"),
        (Row, {"name": "a", "rate": "1e999"}, "rate: inf; expected a finite number"),
        (Row, {"name": "a", "rate": "fast"}, "rate: 'fast'; expected a valid number"),
        (Row, {"name": "a", "limit": "5"}, "limit: '5'; expected a valid integer"),
        (Row, {"name": "a", "limit": 5.0}, "limit: 5.0; expected a valid integer"),
        (Row, {"name": "a", "tags": ["b", 1]}, "tags.1: 1; expected a valid string"),
        (Row, {"name": "a", "tags": "b"}, "tags: 'b'; expected a valid tuple"),
        (Row, {"name": ["\x1b[31m" * 99]}, "name: ['\\x1b[31m"),
        (Row, {"name": 16**5000}, "name: a int; expected a valid string"),
        (dict[str, int | str], {"a": 1.5}, "a: 1.5; expected a valid integer or a valid string"),
        (list[Row], [{"name": "a"}, {}], "a.yaml: 1.name: missing"),
    ],
)
def test_wrong_values(schema: Any, value: object, says: str) -> None:
    assert says in refusal(lambda: parse(schema, value, "a.yaml"))


def test_numbers_may_be_spelled_as_yaml_reads_them_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("name: '1'\nrate: 1e-6\nlater: 5")
    assert read_yaml(path, Row) == Row(name="1", rate=1e-6)


def missing(path: Path) -> None:
    pass


def folder(path: Path) -> None:
    path.mkdir()


def broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def loop(path: Path) -> None:
    path.symlink_to(path)


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (missing, "no file"),
    (folder, "give a regular file"),
    (broken_link, "no file"),
    (loop, "cannot read"),
    (os.mkfifo, "give a regular file"),
    (content(b""), "is empty"),
    (content(b" \n\n"), "is empty"),
    (content(bytes(99)), "is not valid"),
    (content('{"name": "ä"}'.encode("latin-1")), "is not UTF-8"),
    (content('{"name": "ä"}'.encode("utf-16")), "is not UTF-8"),
    (content(b'{"name": "a", "rate'), "is not valid"),
    (content(b'{"name": "a\0"}'), "is not valid"),
    (content(b'{"name": "a", "name": "b"}'), "'name' is there twice"),
    (content(b"[" * 99_999), "nested too deeply"),
    (content(b"7"), "7; expected key: value pairs"),
]


@pytest.mark.parametrize("read", [read_json, read_yaml])
@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_damaged_files(
    tmp_path: Path, read: Callable[..., object], damage: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "a"
    damage(path)
    line = refusal(lambda: read(path, Row))
    assert says in line
    assert str(path) in line


@pytest.mark.parametrize("name", ["a\0b", "a" * 300, "a/" * 3000, "\ud800"])
def test_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        read_json(tmp_path / name, Row)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("name: a")

    def denied(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # root may read everything

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert refusal(lambda: read_yaml(path, Row)) == f"cannot read {path}: Permission denied"


def test_a_relative_path_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(lambda: read_yaml(Path("a"), Row)) == f"no file a in {tmp_path}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1: a", "the key 1 is not a text: put it in quotes line 1"),
        ("yes: a", "the key True"),
        ("null: a", "the key None"),
        ("[a]: b", "is not a text"),
        ("name: {a: 1, b: 2, a: 3}", "the key 'a' is there twice"),
        ("a: &x [1]\nname: *x", "alias *x: write the value out"),
        ("name: &x [*x]", "alias *x"),
        ("a: &x {b: 1}\n<<: *x", "alias *x"),
        ("name: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        *((f"name: !!{tag}", "is not valid YAML") for tag in ("int ''", "timestamp x", "bool x")),
        ("name: !!float x", "is not valid YAML"),
        ("name: !!binary é", "is not valid YAML"),
        ("name: 2024-13-45", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("a: 1\n--- \nb: 2", "is not valid YAML"),
        ("\tname: a", "is not valid YAML"),
        ("name: " + "9" * 9999, "is not valid YAML"),
    ],
)
def test_yaml_that_would_be_guessed_or_lost(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert says in refusal(lambda: read_yaml(path, Row))


def test_json_lines_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"name": "a\u2028b"}\n\n{"name": "c"}\n', encoding="utf-8")
    assert [row.name for row in read_json_lines(path, Row)] == ["a\u2028b", "c"]
    path.write_text('{"name": "a"}\n{"name": 1}')
    assert "a.jsonl, line 2: name: 1; expected" in refusal(lambda: read_json_lines(path, Row))
