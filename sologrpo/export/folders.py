"""Folders of saved models: complete, or not there.

A model is saved in an unfinished folder next to its target and moved when it is complete. A marker
records what it was made from, so that a second call with the same adapter and flags finds it.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.config.export import ExportArguments
from sologrpo.errors import InputError
from sologrpo.export.model_card import public_name
from sologrpo.export.parity import Gap
from sologrpo.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    REWARD_CURVE,
    inside,
    make_folder,
    write_atomically,
)
from sologrpo.manifest import damage, sha256, write_manifest
from sologrpo.model.merging import check_adapter
from sologrpo.schema import Schema, advising, read_json

MARKER = ".export.json"  # is never pushed
# All that an adapter folder needs. Anything else in it (training_args.bin, say) is not pushed.
ADAPTER_FILES = (
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", REWARD_CURVE,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.*", "merges.txt",
)  # fmt: skip


class _Marker(Schema):
    made_from: dict[str, Any]
    gap: Gap


def fingerprint(settings: EvaluationSettings, arguments: ExportArguments) -> dict[str, Any]:
    """Describe everything that every saved model depends on, to compare two exports."""
    assert settings.adapter is not None
    return {
        "adapter_sha256": sha256(settings.adapter / ADAPTER_WEIGHTS),
        "base_model": public_name(str(settings.model.model_name_or_path)),
        "base_revision": settings.model.model_revision,
        "dtype": str(settings.model.dtype),
        "trained_in_4bit": settings.trained_in_4bit,
        "merge_into": arguments.merge_into,
    }


def finished_gap(folder: Path, made_from: dict[str, Any]) -> Gap | None:
    """Read the gap of a model that an earlier call saved; None if it is still to be made.

    Args:
        folder: where the model is, or will be.
        made_from: fingerprint of this export.

    Raises:
        InputError: if the folder holds anything else.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    marker = folder / MARKER
    if not marker.is_file():
        raise InputError(f"{folder} is not empty: give another folder, or empty it")
    with advising(f"remove {folder}, or give another folder"):
        content = read_json(marker, _Marker)
    if content.made_from != made_from:
        raise InputError(
            f"{folder} holds an export of another adapter or with other flags: remove it, or give "
            "another folder"
        )
    if problem := damage(folder, ignored=["README.md", REWARD_CURVE]):
        raise InputError(f"{folder} is damaged, {problem}: remove it, or give another folder")
    return content.gap


def unfinished_folder(target: Path, kind: str) -> Path:
    """Create an empty folder next to the target, on the same disk."""
    target = target.resolve()  # "." has no name
    return _empty_folder(target.with_name(f".{target.name}.{kind}.unfinished"))


def finish(folder: Path, target: Path, made_from: dict[str, Any], gap: Gap) -> None:
    """Mark an unfinished folder with what it was made from, and move it to its target.

    Args:
        folder: as `unfinished_folder` created it.
        target: where the model goes; empty, or not there.
        made_from: fingerprint of the export.
        gap: of the model.
    """
    marker = {"made_from": made_from, "gap": gap.model_dump()}
    write_atomically(folder / MARKER, json.dumps(marker, indent=2))
    write_manifest(folder)
    if target.is_dir():
        target.rmdir()
    os.replace(folder, target)


def copy_adapter(adapter: Path, target: Path, base_on_hub: str | None) -> Path:
    """Copy the adapter without anything that belongs to this machine; return the copy.

    Args:
        adapter: of the run.
        target: folder to copy to; what was there before is removed.
        base_on_hub: Hub name of the base model, if the run has a local folder.
    """
    _empty_folder(target)
    for pattern in ADAPTER_FILES:
        for file in sorted(adapter.glob(pattern)):
            shutil.copy(inside(adapter, file.name), target)  # a link could lead to a secret
    base = check_adapter(target, None).base_model_name_or_path
    config = read_json(target / ADAPTER_CONFIG, dict[str, Any])
    config["base_model_name_or_path"] = public_name(base, base_on_hub)
    write_atomically(target / ADAPTER_CONFIG, json.dumps(config, indent=2))
    write_manifest(target)
    return target


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return make_folder(folder)
