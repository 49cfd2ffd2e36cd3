"""Manifest: the size and SHA-256 of every file in a folder, written last.

A folder with a valid manifest is complete and unchanged; any other was interrupted or damaged.
"""

import hashlib
import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Flush every file of a finished folder to disk, and then write its manifest.

    Call it in one process, after all have written. Once it returns, older copies may be deleted.

    Args:
        folder: with subfolders, if any; a manifest in it is replaced.

    Raises:
        OSError: if the disk is full or read-only.
    """
    files = {path.relative_to(folder).as_posix(): _flushed(path) for path in _files(folder)}
    text = json.dumps({"files": files}, indent=1)
    temporary = folder / f".{MANIFEST}.{os.getpid()}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST)
    finally:
        temporary.unlink(missing_ok=True)
    for directory in (folder, folder.parent):
        _flush_names(directory)


def damage(folder: Path, ignored: Collection[str] = ()) -> str | None:
    """Name the first file that is missing or changed since the manifest was written.

    Files that the manifest does not list are not looked at.

    Args:
        folder: to check.
        ignored: names of files that may change, such as a README.

    Returns:
        What is wrong, to follow the name of the folder and a comma; None if nothing is.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}"
    listed = _read(path)
    if listed is None:
        return f"{MANIFEST} is damaged"
    for name in sorted(listed.keys() - set(ignored)):
        file = folder / name
        try:
            if not file.is_file():
                return f"it has no {name}"
            # The size first: it costs nothing, and tells what happened.
            size = file.stat().st_size
            if size != listed[name]["bytes"]:
                return f"{name} has {size} bytes instead of {listed[name]['bytes']}"
            if sha256(file) != listed[name]["sha256"]:
                return f"{name} has changed since it was saved"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def sha256(path: Path) -> str:
    """Hash the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST
    )


def _flushed(path: Path) -> dict[str, Any]:
    """Flush a file to disk and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _flush_names(directory: Path) -> None:
    """Flush the names of the files in a directory, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path) -> dict[str, dict[str, Any]] | None:
    """Read what a manifest lists; None if it is not one that `write_manifest` wrote."""
    try:
        files = json.loads(path.read_bytes())["files"]
        valid = all(
            isinstance(name, str) and _is_inside(name) and set(listed) == {"bytes", "sha256"}
            for name, listed in files.items()
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return files if valid and files else None


def _is_inside(name: str) -> bool:
    """Check that a listed name cannot lead out of the folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
