"""Run rewards in a worker process. This is the process; `rewards.remote` starts it.

It answers one request at a time, in its main thread, where a reward may set an alarm. Calls of
async rewards share one event loop in a thread, and run concurrently.
"""

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rewards import load_reward, name_of_spec
from rewards.checking import about, check_signature, start
from rewards.errors import RewardSpecError

SIGNALLED = 128  # exit codes above it stand for a signal, as in a shell


def main(connection: int, trace: int, timeout: float) -> None:
    """Answer requests until the trainer is gone.

    Args:
        connection: file descriptor that requests come from.
        trace: file descriptor for the traceback of a crash or a reward that takes too long.
        timeout: seconds until that traceback; 0 for no limit.
    """
    _guard(connection, trace)
    with contextlib.suppress(ValueError):
        faulthandler.enable(file=trace)
    # Standard output is standard error here (`rewards.remote`); lines appear when they are printed.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    _Server(Connection(connection), trace, timeout).serve()


def _guard(*open_files: int) -> None:
    """Fork. The child returns, and is the worker; this process ends with it.

    Standard input is a pipe that only the trainer can write to. When it closes, the trainer is
    gone, killed perhaps, and this process ends the worker and all that the worker started.
    """

    def ended(*_: object) -> None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else SIGNALLED - code)

    signal.signal(signal.SIGCHLD, ended)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return
    for file in open_files:
        os.close(file)
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


class _Server:
    def __init__(self, connection: Connection, trace: int, timeout: float) -> None:
        self._connection = connection
        self._trace = trace
        self._timeout = timeout
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._rewards: dict[str, Any] = {}

    def serve(self) -> None:
        while True:
            try:
                number, task, *request = self._connection.recv()
            except EOFError:
                return
            if self._timeout:
                faulthandler.dump_traceback_later(self._timeout, file=self._trace)
            try:
                if task == "load":
                    self._load(number, *request)
                else:
                    self._score(number, *request)
            except RewardSpecError as error:
                self._send(number, error)

    def _load(self, number: int, spec: Any, columns: Sequence[str] | None) -> None:
        reward = self._reward(spec)
        if columns is not None:
            check_signature(name_of_spec(spec), reward, columns)
        self._send(number, about(reward))

    def _reward(self, spec: Any) -> Any:
        key = repr(spec)
        if key not in self._rewards:  # a process that was started again loads it again
            self._rewards[key] = load_reward(spec)
        return self._rewards[key]

    def _score(self, number: int, spec: Any, seed: int, arguments: bytes) -> None:
        reward = self._reward(spec)
        _seed(seed)
        outcome = start(reward, pickle.loads(arguments))
        outcome.add_done_callback(lambda done: self._send(number, done.result()))

    def _send(self, number: int, answer: Any) -> None:
        if os.getpid() != self._pid:  # the reward forked, and its child came back here
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        with self._sending:
            self._connection.send((number, answer))


def _seed(seed: int) -> None:
    """Seed what a reward draws from, so that a resumed run draws the same."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
