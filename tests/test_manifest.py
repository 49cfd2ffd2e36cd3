"""A manifest finds every change to the files of a folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sologrpo.base.manifest import MANIFEST, MODEL_FILES, damage, hash_files, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"0123456789")
    (folder / "sub" / "notes.txt").write_text("notes")
    (folder / "empty").touch()
    write_manifest(folder)
    return folder


def test_a_folder_as_it_was_saved_is_whole(folder: Path) -> None:
    assert damage(folder) is None
    assert [path.name for path in folder.rglob("*.tmp")] == []
    (folder / "later.txt").write_text("not listed")
    assert damage(folder) is None
    write_manifest(folder)  # again
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert sorted(listed) == ["empty", "later.txt", "sub/notes.txt", "weights.bin"]


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def list_only(listed: object) -> Callable[[Path], object]:
    return write(MANIFEST, json.dumps({"files": listed}).encode())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (write("weights.bin", b"\0" * 10), "weights.bin has changed since it was saved"),
        (write("weights.bin", b"0123"), "weights.bin has 4 bytes instead of 10"),
        (write("weights.bin", b""), "weights.bin has 0 bytes instead of 10"),
        (write("sub/notes.txt", b"Notes"), "sub/notes.txt has changed since it was saved"),
        (write("empty", b"x"), "empty has 1 bytes instead of 0"),
        (lambda folder: (folder / "empty").unlink(), "it has no empty"),
        (lambda folder: (folder / MANIFEST).unlink(), f"it has no {MANIFEST}"),
        *(
            (write(MANIFEST, content), f"{MANIFEST} is damaged")
            for content in (b"", b"\0" * 100, b'{"files": {', b"[]", b"{}", b"[" * 9999, b"\xff")
        ),
        *(
            (list_only(listed), f"{MANIFEST} is damaged")
            for listed in ([], {"a": 1}, {"a": {}}, {"a": {"bytes": "1", "sha256": ""}})
        ),
    ],
)  # fmt: skip
def test_each_damage_is_named(
    folder: Path, change: Callable[[Path], object], expected: str
) -> None:
    change(folder)
    assert damage(folder) == expected


def test_files_that_may_change_can_be_left_out(folder: Path) -> None:
    (folder / "sub" / "notes.txt").unlink()
    assert damage(folder, ignored=["sub/notes.txt"]) is None


def test_a_hash_covers_names_and_contents_of_the_files_that_match(tmp_path: Path) -> None:
    def hash_of(weights: bytes, config: bytes = b"{}") -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_bytes(config)
        (tmp_path / "README.md").write_bytes(weights[::-1])
        return hash_files(tmp_path, MODEL_FILES)

    first = hash_of(b"abc")
    assert first == hash_of(b"abc")
    assert len({first, hash_of(b"abd"), hash_of(b"ab"), hash_of(b"abc", b"{ }")}) == 4
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert hash_files(tmp_path, MODEL_FILES) != hash_of(b"abc", b"{ }")
