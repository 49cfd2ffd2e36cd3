"""The client of a vLLM server, on a stand-in for one. tests/engines has the real one."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trl.generation import vllm_client

from sologrpo.base.errors import InputError, RunError
from sologrpo.sampling.vllm_server import AdapterServer
from tiny import with_adapter

NOT_FOUND = (404, {"detail": "Not Found"})


class StandIn(BaseHTTPRequestHandler):
    """Answers as `vllm serve` of 0.32.0 does; `answers` replaces answers by the path's end."""

    answers: dict[str, tuple[int, Any]]
    adapters: dict[str, Any]  # by name: what the files held
    asked: list[str]  # the model of each completion
    log_prob: float

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "base", "root": "models/base"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        end = self.path.split("/")[-1]
        if end in self.answers:
            self._send(*self.answers[end])
        elif end == "load_lora_adapter":
            (file,) = Path(body["lora_path"]).rglob("*.safetensors")
            self.adapters[body["lora_name"]] = load_file(file)
            self._send(200, "Success")
        elif end == "unload_lora_adapter":
            self._send(200 if self.adapters.pop(body["lora_name"], None) else 404, "")
        else:
            self.asked.append(body["model"])
            log_probs = {
                "tokens": ["token_id:1"], "token_logprobs": [self.log_prob], "top_logprobs": [None]
            }  # fmt: skip
            choice = {"prompt_token_ids": [0], "token_ids": [1], "logprobs": log_probs}
            self._send(200, {"choices": [choice]})

    def _send(self, status: int, content: Any) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[StandIn]]]:
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda **_: True)
    state = {"answers": {}, "adapters": {}, "asked": [], "log_prob": 0.0}
    handler = type("Handler", (StandIn,), state)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:secret@localhost:{server.server_port}", handler
        server.shutdown()


def test_the_newest_adapter_is_asked_and_no_other_stays(
    running: tuple[str, type[StandIn]], tiny_llama: Path
) -> None:
    url, handler = running
    server, model = AdapterServer(url), with_adapter(tiny_llama)
    names = []
    for _ in range(2):
        server.load(model)
        server.generate([[0]])
        (name,) = handler.adapters
        names.append(name)
    assert handler.asked == names
    assert names[0] != names[1]
    weights = {key: p for key, p in model.named_parameters() if "lora_" in key}
    assert len(handler.adapters[name]) == len(weights)
    for key, saved in handler.adapters[name].items():
        assert saved.equal(weights[key.replace(".weight", ".default.weight")])


def test_a_server_that_was_started_again_is_used(
    running: tuple[str, type[StandIn]], tiny_llama: Path
) -> None:
    url, handler = running
    server, model = AdapterServer(url), with_adapter(tiny_llama)
    server.load(model)
    handler.adapters.clear()
    server.load(model)
    assert len(handler.adapters) == 1


def error(message: str) -> tuple[int, Any]:
    return 500, {"error": {"message": message}}


@pytest.mark.parametrize(
    ("name", "in_4bit", "answers", "log_prob", "message"),
    [
        ("models/base", False, {}, 0.0, None),
        ("elsewhere/base", False, {}, 0.0, None),
        ("unpacked", True, {}, 0.0, None),
        ("models/other", False, {}, 0.0, "serves models/base, and models/other is trained"),
        ("models/base", True, {}, 0.0, "serves models/base unquantised"),
        ("models/base", False, {}, -0.5, "--logprobs-mode processed_logprobs"),
        ("models/base", False, {"load_lora_adapter": NOT_FOUND}, 0.0, "RUNTIME_LORA_UPDATING=True"),
        ("models/base", False, {"load_lora_adapter": error("rank 4")}, 0.0, "adapter: rank 4: "),
    ],
)
def test_a_server_is_tried_at_the_start(
    name: str, in_4bit: bool, answers: dict[str, Any], log_prob: float, message: str | None,
    running: tuple[str, type[StandIn]], tiny_llama: Path,
) -> None:  # fmt: skip
    url, handler = running
    handler.answers, handler.log_prob = answers, log_prob
    server, model = AdapterServer(url), with_adapter(tiny_llama)
    if message is None:
        server.check(model, name, in_4bit)
        assert not handler.adapters
        return
    with pytest.raises(InputError) as caught:
        server.check(model, name, in_4bit)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_gone_or_refuses(
    running: tuple[str, type[StandIn]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    url, handler = running
    server = AdapterServer(url)
    handler.answers = {"completions": (400, {"error": "too long"})}
    with pytest.raises(RunError, match=r"localhost:\d+: Request failed: 400, .*too long"):
        server.generate([[0]])
    server.base_url = "http://localhost:1"
    monkeypatch.setattr("urllib3.util.retry.time.sleep", lambda seconds: None)
    with pytest.raises(RunError, match=r"no longer answers: start it again, .* --resume"):
        server.generate([[0]])
    for seconds in (0, 0.1):
        with pytest.raises(InputError, match=f"did not answer within {seconds} seconds"):
            AdapterServer("http://localhost:1", connection_timeout=seconds)
    waiting = "waiting up to 0.1 seconds for the vLLM server at http://localhost:1"
    assert caplog.messages[-1] == waiting
