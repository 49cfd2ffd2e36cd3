"""The server of `sologrpo report --follow`: who is answered, with what, and when a page is made."""

import http.client
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from test_report import Page, assert_inert

from made_up_run import attack_everywhere, grow, write_eval
from serving import serving
from sologrpo.base.errors import InputError
from sologrpo.base.locking import is_locked
from sologrpo.report import follow
from sologrpo.report.command import main
from sologrpo.report.follow import HOST, PORT, LivePage, describe_state, open_server
from sologrpo.report.reading import read_files
from tiny import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    grow(tmp_path / "run", range(1, 3))
    return tmp_path / "run"


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with serving(run) as address:
        yield address.removeprefix("http://")


def ask(
    address: str, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


# --- who is answered, with what --------------------------------------------------------------


def test_the_page_and_its_headers(address: str) -> None:
    status, headers, body = ask(address)
    assert status == 200
    page = Page(body.decode())
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "connect-src 'self'; " in policy
    assert "script-src 'unsafe" not in policy
    (in_page,) = page.with_attribute("http-equiv")
    assert policy == f"{in_page['content']}; frame-ancestors 'none'"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    (element,) = page.with_attribute("data-version")
    assert headers["ETag"] == f'"{element["data-version"]}"'
    assert ask(address, method="HEAD")[::2] == (200, b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil.localhost", "127.0.0.1@evil", "", "["]
)
def test_another_name_is_refused(address: str, host: str) -> None:
    status, _, body = ask(address, Host=host)
    assert status == 421
    assert b"step" not in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "localhost:9000"])
def test_a_tunnel_is_answered(address: str, host: str) -> None:
    assert ask(address, Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_only_get_and_head(address: str, method: str) -> None:
    assert ask(address, method=method)[0] == 501


@pytest.mark.parametrize(
    "path",
    ["/config.yaml", "/../config.yaml", "/%2e%2e/etc/passwd", "/?x", "/report.html"],
)  # fmt: skip
def test_no_file_is_served(address: str, path: str) -> None:
    assert ask(address, path)[0] == 404


def test_only_this_machine_is_listened_to(run: Path) -> None:
    with open_server(0) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_hostile_output_stays_text(tmp_path: Path) -> None:
    attack_everywhere(tmp_path)
    assert_inert(Page(LivePage(tmp_path).latest()[1].decode()))


# --- when a page is made ---------------------------------------------------------------------


def test_a_page_is_made_again_only_if_the_run_has_changed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "PAUSE", 0)
    page = LivePage(run)
    first = page.latest()
    assert page.latest()[1] is first[1]
    grow(run, range(3, 4))
    assert b"Stopped at step 3 of 40" in page.latest()[1]
    (run / "warnings.jsonl").write_text('{"step": 3, "topic": "x", "text": "a problem"}\n')
    assert b"a problem" in page.latest()[1]
    with FileLock(run / ".lock"):
        assert b"Training: step 3 of 40" in page.latest()[1]
    write_eval(run, "trained", [True])
    version, body = page.latest()
    assert b"100.0% (trained)" in body
    assert version != first[0]


def test_pages_leave_time_for_training(run: Path) -> None:
    page = LivePage(run)
    first = page.latest()
    grow(run, range(3, 4))
    assert page.latest() == first


# --- state -----------------------------------------------------------------------------------


def test_states_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lock = FileLock(run / ".lock")

    def state() -> str:
        found = describe_state(run, read_files(run).metrics, is_locked(run))
        return f"{found['kind']}: {found['title']}"

    assert state() == "waiting: Waiting"
    grow(run, range(0))
    assert state() == "waiting: Waiting"
    with lock:
        assert state() == "training: Training"
        grow(run, range(1, 3))
        assert state() == "training: Training: step 2 of 40"
    assert state() == "stopped: Stopped at step 2 of 40"
    (run / "adapter").mkdir()  # of an earlier run, that was prolonged
    assert state() == "stopped: Stopped at step 2 of 40"
    with lock:
        grow(run, range(3, 41))
        assert state() == "training: Training: step 40 of 40"
    assert state() == "finished: Finished: step 40 of 40"


def test_a_look_at_the_lock_leaves_it_as_it_is(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".lock")
    with lock:
        pass
    assert is_locked(tmp_path) is False
    with lock:
        assert is_locked(tmp_path) is True
        with pytest.raises(TimeoutError):
            FileLock(tmp_path / ".lock", blocking=False).acquire()
    assert is_locked(tmp_path) is False


def test_a_file_system_without_locks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    (run / ".lock").touch()
    monkeypatch.setattr("fcntl.flock", unsupported)
    assert is_locked(run) is None
    state = describe_state(run, read_files(run).metrics, None)
    assert state["kind"] == "unknown"
    assert "may be training or not" in state["text"]


# --- command line ----------------------------------------------------------------------------


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {taken}: Address already in use: "):
            open_server(taken)
    with open_server(None) as first, open_server(None) as second:
        assert PORT <= first.server_port < second.server_port
    for port in (-1, 70_000):
        with pytest.raises(InputError, match="from 0 to 65535"):
            open_server(port)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--follow", "{run}", "--output", "x.html"], "--follow serves the page, and writes none"),
        (["{run}", "--port", "8000"], "--port is for --follow"),
        (["--follow", "{run}/config.yaml"], "is not a run directory"),
    ],
)
def test_mistakes(
    arguments: list[str], says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([argument.format(run=run) for argument in arguments])
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error


def test_ctrl_c_ends_it_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sologrpo", "report", "--follow", str(tmp_path / "later"),
               "--port", "0"]  # fmt: skip
    served = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert served.stdout is not None
    assert served.stdout.readline() == f"{tmp_path / 'later'} is not there yet: waiting for it\n"
    found = re.fullmatch(
        r"http://(127\.0\.0\.1:\d+)/  \(Ctrl-C stops\)\n", served.stdout.readline()
    )
    assert found is not None
    assert b"nothing is training in" in ask(found[1])[2]
    served.send_signal(signal.SIGINT)
    rest, error = served.communicate(timeout=60)
    assert (served.returncode, rest, error) == (130, "", "error: stopped by Ctrl-C\n")
