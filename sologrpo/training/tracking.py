"""Trackers: a missing login, a lost network or a crash of theirs must not end a run."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.console import print_warning
from sologrpo.errors import InputError, first_line

TIMEOUT = 10  # seconds that W&B gets to reach its server; it does not always keep to them
PATIENCE = 600  # seconds that W&B gets at the end of a run to send the rest
NO_LOGIN, NO_ANSWER = 3, 4  # exit codes
# In a separate process: once W&B has read its settings it keeps them, and could no longer be
# switched to offline mode. `viewer` asks the server who we are.
PROBE = f"""
import sys, wandb
from wandb.errors import CommError, UsageError
try:
    wandb.Api(timeout={TIMEOUT}).viewer
except UsageError:
    sys.exit({NO_LOGIN})
except CommError as error:
    print(str(error).splitlines()[0])
    sys.exit({NO_ANSWER})
"""


def prepare_trackers(args: SoloGRPOConfig, console: Console) -> None:
    """Switch W&B to offline mode if its server cannot be reached.

    Args:
        args: `report_to` names the trackers.
        console: for the warning.

    Raises:
        InputError: if W&B is asked for and has no key.
    """
    if "wandb" not in args.report_to or args.process_index != 0:
        return
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    command = [sys.executable, "-P", "-c", PROBE]  # nothing of the current folder
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            timeout=2 * TIMEOUT,
        )  # fmt: skip
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, said = NO_ANSWER, f"nothing for {2 * TIMEOUT} s"
    if code == NO_LOGIN:
        raise InputError(
            "report_to: wandb needs a login: run `wandb login`, or set WANDB_MODE=offline"
        )
    if code == NO_ANSWER:
        os.environ["WANDB_MODE"] = "offline"
        reason = said.strip().splitlines()[-1]
        print_warning(
            console,
            f"W&B does not answer ({reason}): logging to the folder wandb/ instead; upload it "
            "later with `wandb sync`",
        )


@contextmanager
def tolerate_tracker_failures(trainer: Trainer, console: Console) -> Iterator[None]:
    """Keep what runs inside safe from a tracker that fails, and from W&B's last upload.

    Logging to a tracker that fails is disabled, with a warning. W&B's client waits for its server
    without limit; at the end it gets `PATIENCE` seconds.

    Args:
        trainer: already constructed, so that it has its trackers' callbacks.
        console: for the warnings.
    """
    names = {INTEGRATION_TO_CALLBACK[name]: name for name in trainer.args.report_to}
    for callback in trainer.callback_handler.callbacks:
        if type(callback) in names:
            _MayFail(names[type(callback)], console).guard(callback)
    code = 1
    try:
        yield
        code = 0
    finally:
        wandb = sys.modules.get("wandb")
        if getattr(wandb, "run", None) is not None:
            _end_wandb(wandb, code, console)


def _end_wandb(wandb: Any, code: int, console: Console) -> None:
    folder = Path(wandb.run.dir).parent

    def end() -> None:
        with suppress(Exception):  # its process is gone: reported when it happened
            wandb.teardown(code)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        thread.join(PATIENCE)
    finally:  # also where the user does not wait
        if thread.is_alive():
            print_warning(
                console,
                f"the upload to W&B is incomplete: finish it with `wandb sync {folder}`",
            )
            for child in psutil.Process().children():
                if child.name() == "wandb-core":
                    child.kill()


class _MayFail:
    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console
        self._lost = False

    def guard(self, callback: TrainerCallback) -> None:
        """Guard what a callback does once training has begun."""
        begin = callback.on_train_begin

        def on_train_begin(*args: Any, **kwargs: Any) -> Any:
            control = begin(*args, **kwargs)
            # TRL 1.16 also logs without the callback, through the module's function, which the
            # tracker replaces when it starts (extras/profiling.py:120-131,
            # grpo_trainer.py:3336-3345).
            module = sys.modules.get(self._name)
            for name in ("log", "log_metrics"):  # W&B and Trackio; MLflow
                if hasattr(module, name):
                    setattr(module, name, self._guarded(getattr(module, name)))
            return control

        for event in dir(callback):
            if event.startswith("on_") and event != "on_init_end":
                setattr(callback, event, self._guarded(getattr(callback, event)))
        callback.on_train_begin = on_train_begin

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._lost:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self._lost = True
                print_warning(
                    self._console,
                    f"{self._name} failed ({first_line(error)}): logging to it is disabled for "
                    "this run; metrics.jsonl and the report are complete",
                )
                return None

        return guarded
