"""Offline, with its own data set cache, and with models small enough to train in a test."""

import os
import tempfile
from pathlib import Path

import pytest

# Read by the libraries when they are imported, so set here, before any test module is.
_CACHE = tempfile.TemporaryDirectory(prefix="sologrpo-tests-")
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_CACHE": _CACHE.name,
    "MPLBACKEND": "agg",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny-qwen", "qwen2")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_dataset

    return save_dataset(tmp_path_factory.mktemp("data") / "shells")


@pytest.fixture
def config_file(tmp_path: Path, tiny_llama: Path, tiny_data: Path) -> Path:
    """A config of two steps with a checkpoint after each; its run goes to `tmp_path / "run"`."""
    import yaml

    from tiny import tiny_config

    path = tmp_path / "tiny.yaml"
    settings = tiny_config(tiny_llama, tiny_data, tmp_path / "run")
    path.write_text(yaml.safe_dump(settings | {"save_steps": 1}), encoding="utf-8")
    return path
