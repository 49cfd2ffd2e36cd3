"""The Hub: the real client against a stand-in on loopback, failures included."""

import hashlib
from pathlib import Path
from typing import Any

import hf_xet
import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import _http

from hub_stand_in import CUT, HubStandIn, Repository
from sologrpo.base.errors import InputError
from sologrpo.export.hub import HubError, check_repository_name, open_repository, push_folder

CARD = b"---\ntags: [grpo]\n---\n# A model\n"
WEIGHTS = bytes(range(256)) * 200
COMMIT = "/commit/main"
UPLOADED = f"/storage/{hashlib.sha256(WEIGHTS).hexdigest()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "README.md").write_bytes(CARD)
    (made / "model.safetensors").write_bytes(WEIGHTS)
    (made / "notes.json").write_text("{}")
    return made


def push(folder: Path) -> str:
    return push_folder(folder, open_repository("mine"), "Upload", ignore=["notes.json"])


def failed_push(folder: Path) -> str:
    with pytest.raises(HubError) as caught:
        push(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_files_arrive_except_those_ignored(hub: HubStandIn, folder: Path) -> None:
    url = push(folder)
    repository = hub.repositories["ana/mine"]
    assert repository.files == {"README.md": CARD, "model.safetensors": WEIGHTS}
    assert repository.commits == ["Upload"]
    assert not repository.private
    assert url.startswith(f"{hub.endpoint}/ana/mine/commit/")


def test_second_push_sends_nothing(hub: HubStandIn, folder: Path) -> None:
    push(folder)
    push(folder)
    assert len(hub.repositories["ana/mine"].commits) == 1
    assert hub.asked("PUT", UPLOADED) == 1


def test_private(hub: HubStandIn) -> None:
    assert open_repository("ana/hidden", private=True) == "ana/hidden"
    assert hub.repositories["ana/hidden"].private
    assert open_repository("hidden", private=True) == "ana/hidden"  # it exists already
    hub.repositories["ana/open"] = Repository(private=False)
    with pytest.raises(HubError, match=r"ana/open exists already and is public.*another name"):
        open_repository("open", private=True)


@pytest.mark.parametrize("name", ["a/b/c", "with space", "-x", "", "x.git"])
def test_invalid_repository_name(name: str) -> None:
    with pytest.raises(InputError, match="is not a repository name: write NAME or USER/NAME"):
        check_repository_name(name)


# -- before any work is done -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "name", "exists", "message"),
    [
        (None, "mine", False, "no Hub token"),
        (None, "ana/mine", False, "no Hub token"),
        ("hf_unknown", "mine", False, "does not accept the token (401)"),
        ("hf_reads", "mine", False, "may not write to ana/mine (403)"),
        ("hf_reads", "mine", True, "may not write to ana/mine (403)"),  # create_repo accepts this
        ("hf_writes", "bob/mine", False, "may not write to bob/mine (403)"),
    ],
)
def test_refused(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, token: str | None, name: str, exists: bool,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    if exists:
        hub.repositories["ana/mine"] = Repository(private=False)
    with pytest.raises(HubError) as caught:
        open_repository(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hf_" not in str(caught.value)  # no token
    if token is None:
        assert hub.requests == []
    if token == "hf_unknown":
        assert hub.requests == ["GET /api/whoami-v2"]


def test_offline(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _http.close_session()
    assert "HF_HUB_OFFLINE is set: unset it" in failed_push(folder)


def test_unreachable(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the connection to http://127.0.0.1:9 broke off (ConnectError)" in failed_push(folder)


# -- failures on the way ---------------------------------------------------------------------------

BEFORE = [("GET", "/api/whoami-v2"), ("POST", "/api/repos/create"), ("GET", "/auth-check/write")]
RETRIED = [("POST", "/preupload/main"), ("POST", "/objects/batch"), ("PUT", "/storage/")]


@pytest.mark.parametrize("status", [500, CUT])
@pytest.mark.parametrize(("method", "path"), RETRIED)
def test_transfers_are_retried(
    hub: HubStandIn, folder: Path, method: str, path: str, status: int
) -> None:
    hub.fail(method, path, status)
    push(folder)
    assert hub.asked(method, path) >= 2
    assert hub.repositories["ana/mine"].files["model.safetensors"] == WEIGHTS
    assert len(hub.repositories["ana/mine"].commits) == 1


@pytest.mark.parametrize(("method", "path"), [*BEFORE, *RETRIED, ("POST", COMMIT)])
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "does not accept the token (401)"),
        (403, "mine (403): give another name, or"),
        (412, "the Hub answers 412 for "),
        (500, "the Hub answers 500 for "),
        (CUT, "broke off (RemoteProtocolError)"),
    ],
)
def test_lasting_failure_is_one_line_and_nothing_is_lost(
    hub: HubStandIn, folder: Path, method: str, path: str, status: int, message: str
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.fail(method, path, status, times=1000)
    assert message in failed_push(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not any(made.commits for made in hub.repositories.values())  # not half a model

    hub.faults.clear()
    sent = hub.asked("PUT", UPLOADED) if path == COMMIT else 0
    push(folder)
    assert hub.repositories["ana/mine"].files["model.safetensors"] == WEIGHTS
    assert not sent or hub.asked("PUT", UPLOADED) == sent  # what arrived is not sent again


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hf_xet.XetAuthenticationError("no access to\nthe storage"), "failed: no access to the"),
        (RuntimeError("Data processing error: reset by peer"), "failed: Data processing"),
        (ConnectionResetError(104, "reset"), "broke off (ConnectionResetError)"),
    ],
)
def test_failures_of_the_storage_client(
    hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(self: HfApi, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    assert message in failed_push(folder)
