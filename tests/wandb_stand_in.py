"""Serve as W&B on loopback: enough for its client to log a run, until it is told to stop."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

VIEWER = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
BUCKET = {
    "id": "1", "name": "run", "displayName": "run", "sweepName": "", "historyLineCount": 0,
    "project": {"id": "1", "name": "project", "entity": {"id": "1", "name": "me"}},
}  # fmt: skip


class WandbStandIn:
    """Record every request; a request for `/go` stops the server."""

    def __init__(self) -> None:
        asked = self.asked = list[str]()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                query = json.loads(body) if self.path == "/graphql" else {}
                asked.append(query.get("operationName") or self.path)
                answer = json.dumps({"data": stand_in._answer_to(query)} if query else {}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
                if self.path == "/go":
                    stand_in.close()

            do_GET = do_PUT = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer_to(self, query: dict[str, Any]) -> dict[str, Any]:
        variables = query.get("variables") or {}
        match query["operationName"]:
            case "UpsertBucket":
                bucket = BUCKET | {"name": variables.get("name") or "run"}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                files = [
                    {"name": name, "uploadUrl": f"{self.url}/{name}"} for name in variables["files"]
                ]
                return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
            case _:
                return {"viewer": VIEWER}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def running_wandb() -> Iterator[WandbStandIn]:
    server = WandbStandIn()
    try:
        yield server
    finally:
        server.close()
