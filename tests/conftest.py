"""Offline, with its own data set cache, and with models small enough to train in a test."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hub_stand_in import HubStandIn
    from server import Server

# Read by the libraries when they are imported, so set here, before any test module is.
_CACHE = tempfile.TemporaryDirectory(prefix="sologrpo-tests-")
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_CACHE": _CACHE.name,
    "MPLBACKEND": "agg",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}


# These files take longest. A file stays in one process, so one that starts late is waited for.
FIRST = {
    "test_hostile.py", "test_startup.py", "test_resume_recipes.py", "test_two_processes.py",
    "test_first_hour.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every later garbage collection, of which runs do many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny-qwen", "qwen2")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SmolLM2. Random weights that are tied repeat themselves, so most tests take others."""
    from tiny import save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny-tied", "llama", tied=True)


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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """Runs commands in forks of a process that has imported everything, which takes seconds."""
    from server import Server

    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Iterator[HubStandIn]":
    """A stand-in that the real client talks to, with a token that can write."""
    import huggingface_hub.constants
    from huggingface_hub.utils import _http

    from hub_stand_in import running_hub

    with running_hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        # The stand-in speaks the plain large file protocol, not that of hf_xet's own servers.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", "hf_writes")
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        _http.close_session()  # it was made for another endpoint, or to refuse all
        yield running
    _http.close_session()
