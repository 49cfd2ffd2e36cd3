"""Names on the Hub: without a network a wrong one fails at once, and says where it was looked."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import datasets
import pytest
from huggingface_hub import constants, is_offline_mode

from sologrpo.base import hub
from sologrpo.base.errors import InputError
from sologrpo.data.dataset import load_rows
from sologrpo.model.loading import load_tokenizer


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the libraries use the network, as far as there is one."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    forget = hub.unreachable.cache_clear
    forget()
    yield
    forget()


@pytest.fixture(params=["refuses", "is silent", "has no name"])
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Hub that cannot be reached."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            server.listen()
        host = "no-such-host.invalid" if request.param == "has no name" else "127.0.0.1"
        url = f"http://{host}:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


def test_without_a_hub_a_wrong_name_fails_at_once(endpoint: str) -> None:
    started = time.monotonic()
    with pytest.raises(InputError) as model:
        load_tokenizer("no/such-model")
    with pytest.raises(InputError) as rows:
        load_rows("no/such-rows", "train")
    assert time.monotonic() - started < 10  # 70 s with the retries of the libraries
    for name, error in (("no/such-model", model), ("no/such-rows", rows)):
        assert f"there is no {name} in {os.getcwd()}" in str(error.value)
        assert "not in the Hub's local cache" in str(error.value)
        assert endpoint in str(error.value)
    assert is_offline_mode()


def test_a_hub_that_answers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        answer = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        assert hub.unreachable() == ""
        thread.join(5)
    assert not is_offline_mode()


@pytest.mark.parametrize(
    "name", ["./model", "runs/x/merged", "/no/such", "a b", "../no-such", "~/no-such"]
)
def test_a_path_is_never_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: pytest.fail("the Hub was asked"))
    with pytest.raises(InputError, match="there is no"):
        load_tokenizer(name)
    with pytest.raises(InputError, match="there is no"):
        load_rows(name, "train")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "config.json"),
        ({"config.json": ""}, "config.json"),
        ({"config.json": "[1]"}, "config.json"),
        ({"config.json": '{"model_type": "llama"}', "tokenizer.json": "{"}, "tokenizer.json"),
        ({"config.json": '{"model_type": 7}', "tokenizer.json": "{}"}, "model"),
    ],
)
def test_a_folder_that_holds_no_model_is_explained(
    files: dict[str, str], says: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        load_tokenizer(str(tmp_path))
    assert says in str(error.value)
    assert "object has no attribute" not in str(error.value)
