"""Run a GGUF file in llama.cpp, in a separate process: a damaged file can make it abort."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.request import ProxyHandler, Request, build_opener

import torch

from sologrpo.base.errors import InputError

SERVER = Path(__file__).with_name("llama_server.py")
_ERROR = re.compile(r"^\S+ E [^:]+: (?:error loading model: )?(.+)$", re.MULTILINE)
_TIMEOUT = 600  # seconds for one answer, on a slow machine


@contextmanager
def running_llama(file: Path, context: int) -> Iterator["Llama"]:
    """Run a GGUF file in llama.cpp, with prompts and completions of up to `context` tokens."""
    # -P: the modules of this folder must not replace those that llama.cpp's bindings import.
    command = [sys.executable, "-P", str(SERVER), str(file), str(context)]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            [*command, str(torch.get_num_threads())],
            stdin=subprocess.PIPE,  # closed if this process ends, which ends the other
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            # Threads that wait by spinning took six times as long on a busy machine (docs/LOG.md).
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        ) as process,
    ):
        try:
            yield Llama(file, process, log)
        finally:
            process.kill()


class Llama:
    """A GGUF file that llama.cpp has loaded; see `running_llama`."""

    def __init__(self, file: Path, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.file, self._process, self._log = file, process, log
        self._open = build_opener(ProxyHandler({})).open  # a proxy does not reach this machine
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if not words:
            raise self._failure(f"it ended with code {process.wait()}")
        self._address, self._key = words
        self._plain = self.tokenize("a")[-1]

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a prompt as llama.cpp and Ollama do, special tokens included."""
        asked = {"content": text, "add_special": True, "parse_special": True}
        ids: list[int] = self._post("/tokenize", asked)["tokens"]
        return ids

    def likeliest(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        """Find the likeliest next tokens; return their log-probabilities in descending order."""
        # The server lists nothing with a token whose bytes are not complete characters, so it is
        # made to choose another one. The log-probabilities are those before that choice.
        asked = {"prompt": list(prompt), "n_predict": 1, "temperature": 0.0, "n_probs": count}
        found = self._post("/completion", asked | {"logit_bias": [[self._plain, 1e6]]})
        (place,) = found["completion_probabilities"]
        return {token["id"]: _number(token["logprob"]) for token in place["top_logprobs"]}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = Request(self._address + path, json.dumps(body).encode(), headers)
        try:
            with self._open(request, timeout=_TIMEOUT) as response:
                return json.load(response)
        except OSError as error:
            raise self._failure(str(error)) from error

    def _failure(self, reason: str) -> InputError:
        self._log.seek(0)
        found = _ERROR.search(self._log.read())
        return InputError(f"llama.cpp cannot run {self.file}: {found[1] if found else reason}")


def _number(log_prob: float | None) -> float:
    return math.nan if log_prob is None else log_prob  # JSON has no NaN
