"""Hash files. Manifest: the size and SHA-256 of every file in a folder, written last.

A folder with a valid manifest is complete and unchanged; any other was interrupted or damaged.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sologrpo.base.errors import InputError
from sologrpo.base.files import write_atomically
from sologrpo.base.schema import Schema, read_json

MANIFEST = "manifest.json"
# Of a local model: what decides its weights and its tokens.
MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")
THREADS = 4  # hashing waits for the disk, and leaves Python while it computes


class _Listed(Schema):
    bytes: int
    sha256: str


class _Manifest(Schema):
    files: dict[str, _Listed]


def write_manifest(folder: Path, **facts: Any) -> None:
    """Flush every file of a finished folder to disk, and then write its manifest.

    Call it in one process, after all have written. Once it returns, older copies may be deleted.
    """
    listed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            name = path.relative_to(folder).as_posix()
            listed[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_atomically(folder / MANIFEST, json.dumps({"files": listed, **facts}, indent=1))


def damage(folder: Path, ignored: Collection[str] = ()) -> str | None:
    """Name the first file that is missing or changed since the manifest was written, or None.

    Files that the manifest does not list are not looked at. The text follows a folder and a comma.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}"
    try:
        listed = read_json(path, _Manifest).files
    except InputError:
        return f"{MANIFEST} is damaged"
    for name in sorted(listed.keys() - set(ignored)):
        file = folder / name
        if not file.is_file():
            return f"it has no {name}"
        if file.stat().st_size != listed[name].bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {listed[name].bytes}"
        if sha256(file) != listed[name].sha256:
            return f"{name} has changed since it was saved"
    return None


def sha256(path: Path) -> str:
    """Hash the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, patterns: Iterable[str]) -> str:
    """Hash the files of a folder that match one of the patterns: their names and contents."""
    files = sorted({f for pattern in patterns for f in folder.glob(pattern) if f.is_file()})
    with ThreadPoolExecutor(THREADS) as threads:
        hashes = threads.map(sha256, files)
        lines = [f"{file.name} {value}\n" for file, value in zip(files, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
