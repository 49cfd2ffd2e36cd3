"""Run command lines of the project quickly: in forks of a process that has imported everything.

Importing torch, transformers and TRL takes seconds; a fork has them at once. A job with `command`
is a separate program instead, started as a user does.
"""

import atexit
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

T, R = TypeVar("T"), TypeVar("R")
ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
GRACE = 20.0  # seconds between Ctrl-C and kill -9
ADDRESS_SPACE = 16 * 2**30  # bytes
PATIENCE = 0.01  # seconds between two looks at a child


@dataclass
class Job:
    """A command line to run.

    Attributes:
        argv: arguments of `sologrpo`; of `command` if there is one.
        cwd: folder to run it in.
        output: folder for `out` and `err`, what it prints.
        timeout: seconds after which it gets Ctrl-C.
        command: program to start instead of calling `sologrpo.cli.main`.
        environment: added to the server's own; None takes a name out of it.
        file_size: bytes beyond which no file can be written, as if the disk were full.
        terminal: device to print to instead of `out` and `err`.
        stdin: file to read standard input from, seen from `cwd`.
        kill_after: seconds after which it gets `kill -9`, with all its children.
        kill_when: file or folder whose appearance starts those seconds; by default, they start
            with the process.
    """

    argv: list[str]
    cwd: str
    output: str
    timeout: float = 60.0
    command: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)
    file_size: int = resource.RLIM_INFINITY
    terminal: str = ""
    stdin: str = os.devnull
    kill_after: float | None = None
    kill_when: str = ""


@dataclass
class Ended:
    """Describe the end of a job: `code` is negative for a signal; a timeout sets `interrupted`."""

    code: int
    seconds: float
    interrupted: bool
    out: str
    err: str


@dataclass
class Running:
    """A command that runs; `ended` once it has been waited for."""

    pid: int
    output: Path
    ended: Ended | None = None

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        return not Path(f"/proc/{self.pid}").exists()

    def wait_until_started(self) -> None:
        """Wait until it handles signals, which is the first thing that it does."""
        while not catches(self.pid, signal.SIGTERM):
            time.sleep(PATIENCE)


class Server:
    """The process that forks; one job at a time."""

    def __init__(self, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self._outputs = (scratch / f"job-{number}" for number in count())
        caches = {"HF_HOME": "hf", "HF_DATASETS_CACHE": "datasets", "MPLCONFIGDIR": "matplotlib"}
        environment = os.environ | {name: str(scratch / folder) for name, folder in caches.items()}
        environment |= {
            "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "agg", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled",
            "PIP_NO_INDEX": "1", "COLUMNS": "200",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def run(self, job: Job) -> Ended:
        self._start(job)
        return self._wait(job)

    def run_command(self, *argv: object, cwd: Path, **options: Any) -> Ended:
        """Run a command of `sologrpo` to its end; `options` are those of `Job`."""
        return self.run(self._job(argv, cwd, options))

    @contextmanager
    def running_command(self, *argv: object, cwd: Path, **options: Any) -> Iterator["Running"]:
        """Start a command; it is waited for after the block, which may send it signals."""
        job = self._job(argv, cwd, options)
        running = Running(self._start(job), Path(job.output))
        try:
            yield running
        except BaseException:
            running.send_signal(signal.SIGKILL)
            raise
        finally:
            running.ended = self._wait(job)

    def _job(self, argv: Iterable[object], cwd: Path, options: dict[str, Any]) -> Job:
        return Job([*map(str, argv)], str(cwd), str(next(self._outputs)), **options)

    def _start(self, job: Job) -> int:
        assert self._process.stdin is not None
        Path(job.output).mkdir(parents=True, exist_ok=True)
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _wait(self, job: Job) -> Ended:
        answer: dict[str, Any] = self._answer()
        out, err = (
            Path(job.output, name).read_text(encoding="utf-8", errors="replace")
            for name in ("out", "err")
        )
        return Ended(**answer, out=out, err=err)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Servers:
    """Several servers, which share work."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._all = servers

    @classmethod
    def start(cls, scratch: Path, number: int) -> "Servers":
        return cls([Server(scratch / f"server-{i}") for i in range(number)])

    def map(self, function: Callable[[Server, T], R], items: Iterable[T]) -> Iterator[R]:
        """Call the function with a free server and each item; yield its results in order."""
        free: SimpleQueue[Server] = SimpleQueue()
        for server in self._all:
            free.put(server)

        def call(item: T) -> R:
            server = free.get()
            try:
                return function(server, item)
            finally:
                free.put(server)

        with ThreadPoolExecutor(len(self._all)) as pool:
            yield from pool.map(call, items)

    def close(self) -> None:
        for server in self._all:
            server.close()


def serve() -> Job | None:
    """Answer jobs until stdin ends. In the fork of a job, return the job."""
    for line in sys.stdin:
        job = Job(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            become(job)
            return job
        print(pid, flush=True)
        print(json.dumps(wait_for(pid, job)), flush=True)
    return None


def become(job: Job) -> None:
    """Turn the fork into a process such as a shell starts."""
    os.setsid()
    from wandb.sdk.data_types import _private  # imported before: TRL does

    # Else each fork would remove, at its end, the folder of the process that has imported W&B.
    atexit.unregister(_private.MEDIA_TMP.cleanup)
    _private.MEDIA_TMP._finalizer.detach()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(job.cwd)
    for name, value in job.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.dup2(os.open(job.stdin, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        os.dup2(os.open(Path(job.output, name), flags), number)
    if job.terminal:
        for number in range(3):
            os.dup2(os.open(job.terminal, os.O_RDWR), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # the server's has read jobs
    resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_size, job.file_size))
    # A shell starts background jobs with Ctrl-C ignored, and they inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job.command:
        os.execvp(job.command[0], [*job.command, *job.argv])


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (number - 1))


def wait_for(pid: int, job: Job) -> dict[str, Any]:
    start, interrupts = time.monotonic(), 0
    marked = None if job.kill_when else start
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - start
        if ended:
            break
        if marked is None and os.path.exists(job.kill_when):
            marked = time.monotonic()
        if job.kill_after is not None and marked and time.monotonic() - marked > job.kill_after:
            _signal(pid, signal.SIGKILL)
        elif seconds > job.timeout + GRACE * interrupts:
            if not (interrupts or job.command):
                _signal(pid, signal.SIGUSR1)
            # The second Ctrl-C is for a run that finishes its step after the first.
            _signal(pid, signal.SIGINT if interrupts < 2 else signal.SIGKILL)
            interrupts += 1
        time.sleep(PATIENCE)
    _signal(pid, signal.SIGKILL)  # children that survive it
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "seconds": round(seconds, 2), "interrupted": bool(interrupts)}


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def import_everything() -> None:
    import gc
    import runpy

    import sologrpo.cli
    import sologrpo.export.export
    import sologrpo.plan.doctor
    import sologrpo.plan.reward_check
    import sologrpo.report.command
    import sologrpo.report.reward_curve
    import sologrpo.scoring  # noqa: F401

    runpy.run_path(str(ROOT / "train.py"))
    gc.collect()
    gc.freeze()


def call(argv: list[str]) -> None:
    """Run the command line as the `sologrpo` program does, and end this process."""
    from sologrpo.cli import main

    faulthandler.register(signal.SIGUSR1)  # shows where a process hangs
    sys.argv = ["sologrpo", *argv]
    try:
        main()
        code: Any = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    # What Python does at exit, up to the libraries: those do not expect to be forked.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    import_everything()
    sys.path.remove(str(Path(__file__).parent))
    if (mine := serve()) is not None:
        call(mine.argv)
