"""Serve the report of a run on this machine, and make it again while the run trains.

One address is answered, no file is served, other machines cannot connect, and a page of another
site cannot read it: the name in a request must be that of this machine.
"""

import hashlib
import os
import re
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from sologrpo.base.console import time_left
from sologrpo.base.errors import InputError, printable
from sologrpo.base.files import ADAPTER, COMPLETIONS, EVALUATIONS, METRICS
from sologrpo.base.locking import is_locked
from sologrpo.base.logs import Metrics
from sologrpo.report.reading import read_files
from sologrpo.report.report import content_policy, render, run_page
from sologrpo.report.summary import seconds_per_step, steps_of_total
from sologrpo.report.values import Record

HOST = "127.0.0.1"
LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.ASCII)
PORT, PORTS_TRIED = 8765, 20
PAUSE = 10  # times what the last page took: training keeps its cores


def follow(run_dir: Path, port: int | None = None) -> None:
    """Serve the report of a run until Ctrl-C. The run may begin later, end, and be resumed."""
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir} is not a run directory: name one that train.py made, or will")
    with open_server(port) as server:
        server.page = LivePage(run_dir)
        os.nice(10)
        if not run_dir.exists():
            print(printable(f"{run_dir} is not there yet: waiting for it"))
        print(f"http://{HOST}:{server.server_port}/  (Ctrl-C stops)", flush=True)
        server.serve_forever()


def open_server(port: int | None) -> "Server":
    """Listen on a port of this machine, by default the first free one from 8765."""
    problem = ""
    for number in range(PORT, PORT + PORTS_TRIED) if port is None else [port]:
        try:
            return Server((HOST, number), _Handler)
        except OverflowError:
            problem = f"--port {number}: give a number from 0 to 65535"
        except OSError as error:
            problem = f"--port {number}: {error.strerror}: give another"
    raise InputError(problem)


# --- state of the run ------------------------------------------------------------------------


def describe_state(run_dir: Path, metrics: Metrics, training: bool | None) -> Record:
    """Describe what the run is doing: its `kind`, `title` and `text`.

    The kind is waiting, training, finished, stopped or unknown; `training` is of `is_locked`.
    """
    steps = steps_of_total(metrics)
    share = metrics.get("progress", [(0, 0.0)])[-1][1]
    if training and not steps:
        return _state("training", "Training", "no step is logged yet")
    if training:
        return _state("training", f"Training: step {steps}", _time_left(metrics), _last(run_dir))
    if not steps:
        return _state("waiting", "Waiting", f"nothing is training in {run_dir} yet")
    if training is None:
        where = "this file system has no locks, so it may be training or not"
        return _state("unknown", f"Step {steps}", where, _last(run_dir))
    if (run_dir / ADAPTER).is_dir() and share >= 1:
        return _state("finished", f"Finished: step {steps}", _last(run_dir))
    hint = "the same command with --resume continues from the last checkpoint"
    return _state("stopped", f"Stopped at step {steps}", _last(run_dir), hint)


def _state(kind: str, title: str, *parts: str) -> Record:
    return {"kind": kind, "title": title, "text": "; ".join(filter(None, parts))}


def _time_left(metrics: Metrics) -> str:
    step, share = metrics.get("progress", [(0, 0.0)])[-1]
    left = seconds_per_step(metrics) * step * (1 / share - 1) if share else 0.0
    return f"about {time_left(left)}" if left else ""


def _last(run_dir: Path) -> str:
    written = time.localtime((run_dir / METRICS).stat().st_mtime)
    return f"last step logged at {time.strftime('%H:%M:%S', written)}"


# --- page ------------------------------------------------------------------------------------


class LivePage:
    """Hold the page of a run, which may not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._making = threading.Lock()
        self._not_before = 0.0
        self._version, self._body = "", b""

    def latest(self) -> tuple[str, bytes]:
        """Return the version of the page, and the page, made again if the run has changed."""
        with self._making:
            version = _version(self._run_dir)
            if version != self._version and time.monotonic() >= self._not_before:
                start = time.thread_time()
                self._body = self._make(version)
                self._version = version
                self._not_before = time.monotonic() + PAUSE * (time.thread_time() - start)
            return self._version, self._body

    def _make(self, version: str) -> bytes:
        run = read_files(self._run_dir)
        state = describe_state(self._run_dir, run.metrics, is_locked(self._run_dir))
        page = run_page(run) | {"live": state | {"version": version}}
        return render(page).encode("utf-8", "replace")


def _version(run_dir: Path) -> str:
    """Identify what the page depends on: whether training runs, times and sizes of files."""
    latest = max((run_dir / COMPLETIONS).glob("*.parquet"), default=run_dir)
    paths = [*run_dir.glob("*"), latest, *(run_dir / EVALUATIONS).glob("**/*")]
    seen: list[Any] = [is_locked(run_dir)]
    for path in sorted(paths):
        with suppress(OSError):  # removed since
            stat = path.stat()
            seen.append((path.name, stat.st_mtime_ns, stat.st_size))
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


# --- server ----------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answer requests for one page, each in a thread that ends with the process."""

    daemon_threads = True
    page: LivePage


class _Handler(BaseHTTPRequestHandler):
    """Answer GET and HEAD; the base class refuses every other method."""

    server: Server
    server_version, sys_version = "sologrpo", ""
    timeout = 30  # seconds that a connection may be silent
    HEADERS: ClassVar[dict[str, str]] = {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    def do_GET(self) -> None:
        """Send the page, or an error."""
        # A site of any name can have its name lead to this machine, and its scripts read what they
        # get then (DNS rebinding). Ports may differ: the page may be reached through a tunnel.
        if not LOCAL.fullmatch(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif self.path == "/":
            self._send(*self.server.page.latest())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _send(self, version: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        policy = f"{content_policy(live=True)}; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": policy, "ETag": f'"{version}"'}
        for name, value in (self.HEADERS | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # the tab was closed
                self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: a request every few seconds is not news."""
