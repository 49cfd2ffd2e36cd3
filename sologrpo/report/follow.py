"""Serve the report of a run on this machine, and keep it up to date while the run trains.

    sologrpo report --follow runs/x

Two addresses are answered: the page, and the page without Plotly's library, from which its script
takes the parts that have changed. No file is served, other machines cannot connect, and a page of
another site cannot read it: the name in a request must be that of this machine.
"""

import errno
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from sologrpo.console import time_left
from sologrpo.errors import InputError, printable
from sologrpo.files import (
    ADAPTER,
    COMPLETIONS,
    ENVIRONMENT,
    EVALUATIONS,
    LOCK,
    METRICS,
    RECORDS,
    RESULTS,
    RUN_CONFIG,
    WARNINGS,
)
from sologrpo.report.metrics import Metrics
from sologrpo.report.reading import read_files
from sologrpo.report.report import content_policy, render, run_page
from sologrpo.report.summary import TIMES
from sologrpo.report.values import Record

HOST = "127.0.0.1"
LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.ASCII)
PORT, PORTS_TRIED = 8765, 20
SETTLED = 0.3  # seconds after the last write: the trainer may be in the middle of a file
PAUSE = 10  # times what the last page took: training keeps its cores
WATCHED = (RUN_CONFIG, ENVIRONMENT, METRICS, WARNINGS, ADAPTER)


def follow(run_dir: Path, port: int | None = None) -> None:
    """Serve the report of a run until Ctrl-C. The run may begin later, end, and be resumed.

    Args:
        run_dir: as `train.py` writes it, or will.
        port: on this machine; by default the first free one from 8765.

    Raises:
        InputError: if the port is taken, or something else than a folder has the name.
    """
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
    """Listen on a port of this machine, or on the first free one of a few."""
    ports = range(PORT, PORT + PORTS_TRIED) if port is None else [port]
    for number in ports:
        try:
            return Server((HOST, number), _Handler)
        except OverflowError as error:
            raise InputError(f"--port {number}: give a number from 0 to 65535") from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise InputError(f"--port {number}: {error.strerror}: give another") from error
    raise InputError(
        f"the ports {ports[0]} to {ports[-1]} are taken: give --port"
        if port is None
        else f"--port {port} is taken: give another"
    )


# --- state of the run ------------------------------------------------------------------------


def is_training(run_dir: Path) -> bool | None:
    """Return whether a process holds the lock of a run directory; None if that cannot be known.

    The system lifts the lock when the process ends, however it ends.
    """
    try:
        file = os.open(run_dir / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two pages do not meet
    except BlockingIOError:
        return True
    except OSError:  # some network file systems
        return None
    finally:
        os.close(file)
    return False


def describe_state(run_dir: Path, metrics: Metrics, training: bool | None) -> Record:
    """Describe what the run is doing.

    Args:
        run_dir: of the run.
        metrics: read from it.
        training: as `is_training` returned.

    Returns:
        `kind` (waiting, training, finished, stopped or unknown), `title` and `text`.
    """
    step, share = metrics.get("progress", metrics.get("step", [(0, 0.0)]))[-1]
    done = f"step {step}"
    if "progress" in metrics and share > 0:
        done += f" of {step / share:.0f}"
    if training and not step:
        return _state("training", "Training", "no step is logged yet")
    if training:
        return _state("training", f"Training: {done}", _time_left(metrics), _last_log(run_dir))
    if not step:
        return _state("waiting", "Waiting", f"nothing is training in {run_dir} yet")
    if training is None:
        where = "this file system has no locks, so it may be training or not"
        return _state("unknown", done.capitalize(), where, _last_log(run_dir))
    if (run_dir / ADAPTER).is_dir() and share >= 1:
        return _state("finished", f"Finished: {done}", _last_log(run_dir))
    hint = "the same command with --resume continues from the last checkpoint"
    return _state("stopped", f"Stopped at {done}", _last_log(run_dir), hint)


def _state(kind: str, title: str, *parts: str) -> Record:
    return {"kind": kind, "title": title, "text": "; ".join(filter(None, parts))}


def _time_left(metrics: Metrics) -> str:
    """Estimate the time of the remaining steps from the later half of those that are logged."""
    step, share = metrics.get("progress", [(0, 0.0)])[-1]
    times = [points for key, points in metrics.items() if key.startswith(TIMES)]
    if len(metrics.get("step", [])) < 2 or not share or not times:
        return ""
    seconds = sum(fmean(s for _, s in points[len(points) // 2 :]) for points in times)
    left = seconds * step * (1 / share - 1)
    return f"about {time_left(left)}" if left else ""


def _last_log(run_dir: Path) -> str:
    written = time.localtime((run_dir / METRICS).stat().st_mtime)
    return f"last step logged at {time.strftime('%H:%M:%S', written)}"


# --- page ------------------------------------------------------------------------------------


class LivePage:
    """Hold the page of a run, and make it again when the run has changed.

    Args:
        run_dir: of the run; it may not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._making = threading.Lock()
        self._seen: list[Any] | None = None
        self._not_before = 0.0
        self._page: Record = {}
        self._parts = b""
        content_policy(live=True)  # unpacks the library, once

    def whole(self) -> bytes:
        """Return the page with everything it needs."""
        self.parts()
        return render(self._page).encode("utf-8", "replace")

    def parts(self) -> bytes:
        """Return the page without the library that draws the charts."""
        with self._making:
            seen = list(_fingerprint(self._run_dir))
            if seen != self._seen and self._is_time(seen):
                start = time.thread_time()
                self._make(training=seen[0])
                self._seen, took = seen, time.thread_time() - start
                self._not_before = time.monotonic() + PAUSE * took
            return self._parts

    def _is_time(self, seen: list[Any]) -> bool:
        if not self._parts:
            return True
        newest = max((stat[0] for stat in seen[1:] if stat), default=0) / 1e9
        is_being_written = 0 <= time.time() - newest < SETTLED
        return time.monotonic() >= self._not_before and not is_being_written

    def _make(self, training: bool | None) -> None:
        run = read_files(self._run_dir)
        state = describe_state(self._run_dir, run.metrics, training)
        self._page = run_page(run) | {"live": state}
        parts = render(self._page, library=False)
        self._parts = parts.encode("utf-8", "replace")


def _fingerprint(run_dir: Path) -> Iterator[Any]:
    """List what the page depends on: whether training runs, then times and sizes of files."""
    yield is_training(run_dir)
    completions = run_dir / COMPLETIONS
    latest = max(completions.glob("*.parquet"), default=completions)
    folder = run_dir / EVALUATIONS
    found = (folder.glob(pattern) for pattern in (f"*/{RESULTS}", f"*/{RECORDS}", "*.json"))
    evaluations = sorted(chain.from_iterable(found))
    watched = [run_dir / name for name in WATCHED]
    for path in (*watched, completions, latest, *evaluations):
        stat = None
        with suppress(OSError):  # not there yet, or no longer
            stat = path.stat()
        yield stat and (stat.st_mtime_ns, stat.st_size)


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
    FIXED: ClassVar[dict[str, str]] = {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    def do_GET(self) -> None:
        """Send the page, its parts, or an error."""
        # A site of any name can have its name lead to this machine, and its scripts read what they
        # get then (DNS rebinding). Ports may differ: the page may be reached through a tunnel.
        if not LOCAL.fullmatch(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif self.path == "/":
            self._send(self.server.page.whole())
        elif self.path == "/parts":
            self._send(self.server.page.parts())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _send(self, body: bytes) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        same = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        policy = f"{content_policy(live=True)}; frame-ancestors 'none'"
        for name, value in (self.FIXED | {"Content-Security-Policy": policy, "ETag": tag}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(0 if same else len(body)))
        self.end_headers()
        if self.command == "GET" and not same:
            with suppress(ConnectionError):  # the tab was closed
                self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: a request every two seconds is not news."""
