"""Folders of saved models: a manifest that lists files, written last, proves that one is complete.

A manifest without files, written first, tells what is being made: a second call makes an
interrupted model again, and no folder with files of anyone else is written to.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from sologrpo.base.errors import InputError
from sologrpo.base.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    REWARD_CURVE,
    inside,
    make_folder,
    write_atomically,
)
from sologrpo.base.manifest import MANIFEST, damage, sha256, write_manifest
from sologrpo.base.schema import Schema, advising, read_json
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.config.export import ExportArguments
from sologrpo.export.model_card import public_name
from sologrpo.export.parity import Gap

# All that an adapter folder needs. Anything else in it (training_args.bin, say) is not pushed.
ADAPTER_FILES = (
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", REWARD_CURVE,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.*", "merges.txt",
)  # fmt: skip
# What safetensors and `write_atomically` leave behind when they are killed.
LEFTOVERS = (".tmp*", ".*.tmp")


class _Made(Schema):
    """Describe what a manifest records of an export; an interrupted one has no gap."""

    made_from: dict[str, Any] | None = None
    gap: Gap | None = None


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
    """Read the gap of a model saved earlier, None if it is to be made; refuse any other folder."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    with advising(f"remove {folder}, or give another folder"):
        made = read_json(folder / MANIFEST, _Made) if (folder / MANIFEST).is_file() else _Made()
    if made.made_from is None:
        raise InputError(f"{folder} is not empty: give another folder, or empty it")
    if made.made_from != made_from:
        raise InputError(
            f"{folder} holds an export of another adapter or with other flags: remove it, or give "
            "another folder"
        )
    if made.gap is None:
        return None
    if problem := damage(folder, ignored=["README.md", REWARD_CURVE]):
        raise InputError(f"{folder} is damaged, {problem}: remove it, or give another folder")
    return made.gap


def begin_folder(folder: Path, made_from: dict[str, Any]) -> Path:
    """Write into an empty folder, or into that of an interrupted export, what is being made."""
    write_atomically(make_folder(folder) / MANIFEST, json.dumps({"made_from": made_from}))
    return folder


def finish_folder(folder: Path, made_from: dict[str, Any], gap: Gap) -> Gap:
    """Prove that a folder is complete; return the gap of its model."""
    for pattern in LEFTOVERS:
        for file in folder.glob(pattern):
            file.unlink()
    write_manifest(folder, made_from=made_from, gap=gap.model_dump())
    return gap


def copy_adapter(adapter: Path, target: Path, base_on_hub: str | None) -> Path:
    """Copy the adapter, over an earlier copy, without anything that belongs to this machine.

    `base_on_hub` names the base model on the Hub if the run has a local folder.
    """
    copied: dict[str, Any] = {"kind": "adapter"}
    finished_gap(target, copied)
    begin_folder(target, copied)
    for pattern in ADAPTER_FILES:
        for file in sorted(adapter.glob(pattern)):
            shutil.copy(inside(adapter, file.name), target)  # a link could lead to a secret
    config = read_json(target / ADAPTER_CONFIG, dict[str, Any])
    base = config["base_model_name_or_path"]
    config["base_model_name_or_path"] = public_name(base, base_on_hub)
    write_atomically(target / ADAPTER_CONFIG, json.dumps(config, indent=2))
    write_manifest(target, made_from=copied)
    return target
