"""The Hub: the real client against a stand-in on loopback, failures included."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_xet
import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import _http

from hub_stand_in import CUT, HubStandIn, Repository, running_hub
from sologrpo.errors import InputError
from sologrpo.export import hub as hub_module
from sologrpo.export.hub import HubError, check_repository_name, open_repository, push_folder

CARD = b"---\ntags: [grpo]\n---\n# A model\n"
WEIGHTS = bytes(range(256)) * 200
COMMIT = "/commit/main"
UPLOADED = f"/storage/{hashlib.sha256(WEIGHTS).hexdigest()}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with running_hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        # The stand-in speaks the plain large file protocol, not that of hf_xet's own servers.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", "hf_writes")
        monkeypatch.setattr(hub_module, "WAITS", (0.0, 0.0))
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        _http.close_session()  # it was made for another endpoint, or to refuse all
        yield running
    _http.close_session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "README.md").write_bytes(CARD)
    (made / "model.safetensors").write_bytes(WEIGHTS)
    (made / ".export.json").write_text("{}")
    return made


def push(folder: Path, name: str = "mine") -> str:
    return push_folder(folder, open_repository(name), "Upload", leave_out=[".export.json"])


def test_all_files_arrive_but_those_left_out(hub: HubStandIn, folder: Path) -> None:
    address = push(folder)
    repository = hub.repositories["ana/mine"]
    assert repository.files == {"README.md": CARD, "model.safetensors": WEIGHTS}
    assert repository.commits == ["Upload"]
    assert not repository.private
    assert address.startswith(f"{hub.endpoint}/ana/mine/commit/")


def test_second_push_sends_nothing(hub: HubStandIn, folder: Path) -> None:
    push(folder)
    push(folder)
    assert len(hub.repositories["ana/mine"].commits) == 1
    assert hub.asked("PUT", UPLOADED) == 1


def test_private(hub: HubStandIn) -> None:
    assert open_repository("ana/hidden", private=True) == "ana/hidden"
    assert hub.repositories["ana/hidden"].private
    assert open_repository("hidden", private=True) == "ana/hidden"  # it is there already


def test_private_push_does_not_go_into_a_public_repository(hub: HubStandIn) -> None:
    hub.repositories["ana/open"] = Repository(private=False)
    with pytest.raises(HubError, match=r"ana/open exists already and is public.*another name"):
        open_repository("open", private=True)


# -- before any work is done -----------------------------------------------------------------------


def refusal(name: str = "mine", private: bool = False) -> str:
    with pytest.raises(HubError) as caught:
        open_repository(name, private)
    message = str(caught.value)
    assert "\n" not in message
    assert "hf_" not in message.replace("hf_xet", "")  # no token
    return message


def test_no_token(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "no Hub token" in refusal()
    assert hub.requests == []


def test_wrong_token_401(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    assert "does not accept the token (401)" in refusal()
    assert hub.requests == ["GET /api/whoami-v2"]  # asked once: it will not get better


def test_token_that_only_reads_403(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    assert "may not write to ana/mine (403)" in refusal()


def test_token_that_only_reads_a_repository_that_is_there(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `create_repo` lets this pass.
    hub.repositories["ana/mine"] = Repository(private=False)
    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    assert "may not write to ana/mine (403)" in refusal()


def test_name_of_somebody_else_403(hub: HubStandIn) -> None:
    assert "may not write to bob/mine (403)" in refusal("bob/mine")


def test_repository_that_is_there_409(hub: HubStandIn) -> None:
    hub.repositories["ana/mine"] = Repository(private=False)
    assert open_repository("mine") == "ana/mine"
    assert hub.asked("POST", "/api/repos/create") == 1


def test_offline(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _http.close_session()
    assert "HF_HUB_OFFLINE is set: unset it" in refusal()


def test_nobody_there(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the connection to http://127.0.0.1:9 broke off (ConnectError)" in refusal()


@pytest.mark.parametrize("name", ["a/b/c", "with space", "-x", "", "x.git"])
def test_name_that_no_repository_has(name: str) -> None:
    with pytest.raises(InputError, match="is no repository name: write NAME or USER/NAME"):
        check_repository_name(name)


# -- failures on the way ---------------------------------------------------------------------------

STEPS = [
    ("GET", "/api/whoami-v2"),
    ("POST", "/api/repos/create"),
    ("GET", "/auth-check/write"),
    ("POST", "/validate-yaml"),
    ("POST", "/preupload/main"),
    ("POST", "/objects/batch"),
    ("PUT", "/storage/"),
    ("POST", COMMIT),
]


@pytest.mark.parametrize("status", [500, CUT])
@pytest.mark.parametrize(("method", "path"), STEPS)
def test_failure_that_passes(
    hub: HubStandIn, folder: Path, method: str, path: str, status: int
) -> None:
    hub.fail(method, path, status)
    push(folder)
    assert hub.asked(method, path) >= 2
    assert hub.repositories["ana/mine"].files["model.safetensors"] == WEIGHTS
    assert len(hub.repositories["ana/mine"].commits) == 1


@pytest.mark.parametrize(("method", "path"), STEPS[4:])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "does not accept the token (401)"),
        (403, "may not write to ana/mine (403)"),
        (409, "the Hub answers 409 for ana/mine"),
        (500, "the Hub answers 500 for ana/mine"),
        (CUT, "broke off (RemoteProtocolError)"),
    ],
)
def test_failure_that_stays_is_one_line_and_nothing_is_lost(
    hub: HubStandIn, folder: Path, method: str, path: str, status: int, said: str
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.fail(method, path, status, times=1000)
    with pytest.raises(HubError) as caught:
        push(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert said in message
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert hub.repositories["ana/mine"].commits == []  # not half a model

    hub.faults.clear()
    push(folder)
    assert hub.repositories["ana/mine"].files["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize(
    ("error", "said", "tries"),
    [
        (hf_xet.XetAuthenticationError("no access to\nthe storage"), "no access to the", 1),
        (RuntimeError("Data processing error: reset by peer"), "failed: Data processing", 3),
        (ConnectionResetError(104, "reset"), "broke off (ConnectionResetError)", 3),
    ],
)
def test_failures_of_the_storage_client(
    hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str,
    tries: int,
) -> None:  # fmt: skip
    calls = []

    def fail(self: HfApi, **kwargs: Any) -> None:
        calls.append(kwargs)
        raise error

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    with pytest.raises(HubError) as caught:
        push(folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(calls) == tries


def test_interrupted_push_does_not_send_again_what_arrived(hub: HubStandIn, folder: Path) -> None:
    hub.fail("POST", COMMIT, 403, times=1)
    with pytest.raises(HubError):
        push(folder)
    assert hub.asked("PUT", UPLOADED) == 1
    push(folder)
    assert hub.asked("PUT", UPLOADED) == 1
    assert hub.repositories["ana/mine"].files["model.safetensors"] == WEIGHTS
