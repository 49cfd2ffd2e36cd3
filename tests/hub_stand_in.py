"""A small Hub on loopback: accounts, repositories, uploads of small and large files, and failures.

It keeps the promises of the real one to the client: a commit is complete or not there, a large file
that arrived once is not asked for again, and unchanged files make no commit.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = 10_000  # bytes: from here on a file goes through the large file storage
TOKENS = {"hf_writes": "write", "hf_reads": "read"}  # all of them ana's
CUT = -1  # instead of a status: close the connection without an answer


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Fault:
    """Answer the next `times` requests of this method and path with `status`."""

    method: str
    path: str
    status: int
    times: int = 1


class HubStandIn:
    """The state of the Hub, and a log of the requests that it got."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.endpoint = ""

    def fail(self, method: str, path: str, status: int, times: int = 1) -> None:
        self.faults.append(Fault(method, path, status, times))

    def asked(self, method: str, path: str) -> int:
        """Count the requests of this method and path."""
        return sum(
            request.startswith(method + " ") and re.search(path, request) is not None
            for request in self.requests
        )

    def fault_of(self, method: str, path: str) -> int | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                fault.times -= 1
                return fault.status
        return None


Answer = tuple[int, dict[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method, path = self.command, self.path.partition("?")[0]
        with self.hub.lock:
            self.hub.requests.append(f"{method} {path}")
            status, content = self._dispatch(method, path, body)
        if status == CUT:
            self.close_connection = True
            return
        # A gateway that is down answers with a page.
        encoded = json.dumps(content).encode() if status < 500 else b"<html>Bad gateway</html>"
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status < 500 else "text/html")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    do_GET = do_POST = do_PUT = _answer

    def _dispatch(self, method: str, path: str, body: bytes) -> Answer:
        fault = self.hub.fault_of(method, path)
        if fault is not None:
            return fault, {"error": f"made to fail with {fault}"}
        if path.startswith("/storage/") and method == "PUT":  # signed: no token
            return self._store(path.rpartition("/")[2], body)
        role = TOKENS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        if role is None:
            return 401, {"error": "Invalid username or password."}
        for wanted_method, pattern, handle in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == wanted_method:
                return handle(self, role, body, *match.groups())
        return 404, {"error": f"the stand-in does not know {method} {path}"}

    def _store(self, oid: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "the content does not have this hash"}
        self.hub.large_files[oid] = body
        return 200, {}

    # -- accounts and repositories --

    def _whoami(self, role: str, body: bytes) -> Answer:
        return 200, {"type": "user", "name": "ana", "auth": {"accessToken": {"role": role}}}

    def _create(self, role: str, body: bytes) -> Answer:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'ana'}/{asked['name']}"
        if role != "write" or not name.startswith("ana/"):
            return 403, {"error": "You don't have the rights to create a model under this name"}
        if name in self.hub.repositories:
            return 409, {"error": "You already created this model repo",
                         "url": f"{self.hub.endpoint}/{name}"}  # fmt: skip
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[name] = Repository(private)
        return 200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name}

    def _may_write(self, role: str, body: bytes, name: str) -> Answer:
        if name not in self.hub.repositories:
            return 404, {"error": "Repository not found"}
        if role != "write":
            return 403, {"error": "no write permission"}
        return 200, {}

    def _info(self, role: str, body: bytes, name: str) -> Answer:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return 404, {"error": "Repository not found"}
        sha = hashlib.sha1(json.dumps(repository.commits).encode()).hexdigest()
        return 200, {"id": name, "private": repository.private, "sha": sha, "siblings": []}

    def _validate_card(self, role: str, body: bytes) -> Answer:
        assert json.loads(body)["content"].startswith("---\n")
        return 200, {"errors": [], "warnings": []}

    # -- files --

    def _preupload(self, role: str, body: bytes, name: str) -> Answer:
        files = self.hub.repositories[name].files
        return 200, {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": _oid(files[file["path"]]) if file["path"] in files else None,
                }
                for file in json.loads(body)["files"]
            ]
        }

    def _batch(self, role: str, body: bytes, name: str) -> Answer:
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.large_files:
                href = f"{self.hub.endpoint}/storage/{wanted['oid']}"
                entry["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(entry)
        return 200, {"transfer": "basic", "objects": objects}

    def _commit(self, role: str, body: bytes, name: str) -> Answer:
        if role != "write":
            return 403, {"error": "no write permission"}
        changed: dict[str, bytes] = {}
        summary = ""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                summary = value["summary"]
            elif entry["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif value["oid"] in self.hub.large_files:
                changed[value["path"]] = self.hub.large_files[value["oid"]]
            else:
                return 400, {"error": f"no content of {value['path']} was uploaded"}
        repository = self.hub.repositories[name]
        repository.files |= changed
        repository.commits.append(summary)
        oid = hashlib.sha1(body).hexdigest()
        return 200, {
            "commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "commitOid": oid,
            "success": True, "hookOutput": "",
        }  # fmt: skip


def _oid(content: bytes) -> str:
    """Name a file as the Hub does: a large one by its SHA-256, any other as git does."""
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", _Handler._whoami),
    ("POST", "/api/repos/create", _Handler._create),
    ("GET", f"/api/models/{_NAME}/auth-check/write", _Handler._may_write),
    ("GET", f"/api/models/{_NAME}(?:/revision/main)?", _Handler._info),
    ("POST", "/api/validate-yaml", _Handler._validate_card),
    ("POST", f"/api/models/{_NAME}/preupload/main", _Handler._preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    ("POST", f"/api/models/{_NAME}/commit/main", _Handler._commit),
]


@contextmanager
def running_hub() -> Iterator[HubStandIn]:
    """Run a Hub on a free port of the loopback."""
    hub = HubStandIn()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
