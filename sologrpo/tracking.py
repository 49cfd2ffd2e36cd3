"""Trackers, looked at before a run: a missing login or a missing network must not cost one."""

import os
import subprocess
import sys

from rich.console import Console

from sologrpo.config import SoloGRPOConfig
from sologrpo.diagnosis import print_warning
from sologrpo.errors import InputError

TIMEOUT = 10  # seconds that W&B gets to reach its server; it does not always keep to them
NO_LOGIN, NO_ANSWER = 3, 4  # exit codes
# In a process of its own: where W&B has looked once, it keeps its settings, and could no longer be
# told to work offline. `viewer` asks the server who we are.
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
    """Let W&B write to this machine only, if its server cannot be reached.

    Raises:
        InputError: if W&B is asked for and has no key.
    """
    if "wandb" not in args.report_to or args.process_index != 0:
        return
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    command = [sys.executable, "-c", PROBE]
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
            f"W&B does not answer ({reason}): it logs to the folder wandb/, and `wandb sync` "
            "brings that to the server later",
        )
