"""Find what a command line must never do, whatever was typed or damaged."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import rewards
import sologrpo
from cases import Case
from sandbox import RUN, Entry
from server import Ended

TRACEBACK = "Traceback (most recent call last)"
OWN_SOURCES = tuple(path for package in (rewards, sologrpo) for path in package.__path__)
FRAME = re.compile(r'File "([^"]+)", line')
# What a command may change below `home`, besides a place that the command line names.
WRITES = {
    "train": ["runs/new", RUN],
    "evaluate": [
        "runs/new",
        f"{RUN}/eval",
        f"{RUN}/export",
        f"{RUN}/report.html",
        f"{RUN}/reward_curve.png",
    ],
    "export": ["out", f"{RUN}/eval", f"{RUN}/export"],
    "report": [f"{RUN}/report.html", f"{RUN}/reward_curve.png"],
    "recipes copy": ["mine.yaml", "quickstart.yaml"],
    "model": ["models"],
}
# Content that is never lost, wherever it is moved to.
SAVED = tuple(f"home/{name}" for name in (f"{RUN}/checkpoint-", f"{RUN}/completions",
                                          f"{RUN}/adapter", "models"))  # fmt: skip
# Exit 1 of a command that worked: it found something.
FINDS = ("rewards check", "doctor")


def faults(
    case: Case, ended: Ended, before: Mapping[str, Entry], after: Mapping[str, Entry], adapter: str
) -> list[str]:
    """Name everything that is wrong with how a case ended.

    Args:
        case: as drawn.
        ended: as run.
        before: the folder, once the case's damage was done.
        after: the folder at the end.
        adapter: hash of the adapter that an undisturbed `--resume` ends with.

    Returns:
        The faults; empty if all is well.
    """
    found = _exit_faults(case, ended) + _output_faults(case, ended)
    found += _file_faults(case, before, after)
    weights = after.get(f"home/{RUN}/adapter/adapter_model.safetensors")
    if case.resumes and ended.code == 0 and (weights is None or weights.content != adapter):
        found.append("resumed to another adapter")
    return found


def _exit_faults(case: Case, ended: Ended) -> list[str]:
    if ended.code < 0:
        return ["hangs" if ended.interrupted else f"killed by signal {-ended.code}"]
    found = []
    if ended.interrupted and case.bad:
        found.append("hangs")
    if ended.code == 0 and case.bad:
        found.append("wrongly accepted")
    if ended.code == 0 and case.named not in ended.out + ended.err:
        found.append("damage not named")
    # accelerate exits with its own 1; a reward that fails stops a run; so does a failed download.
    one = case.command in (*FINDS, "model") or case.kind == "reward"
    one = one or (case.real and case.command == "train")
    if ended.code not in {0, 2, 130, *([1] if one else [])}:
        found.append(f"exit {ended.code}")
    return found


def _output_faults(case: Case, ended: Ended) -> list[str]:
    text = f"{ended.out}\n{ended.err}"
    errors = re.findall(r"^error:(.*)$", text, re.MULTILINE)
    found = []
    # Of a reward that raises, the frames from its module on are shown, and none of ours.
    frames = FRAME.findall(text)
    own = any(path.startswith(OWN_SOURCES) for path in frames)
    shown = case.kind == "reward" and not own and "my_rewards" in "".join(frames[:1])
    if (
        TRACEBACK in text
        and not (ended.interrupted and case.real)
        and not shown
        and "--traceback" not in case.argv
    ):
        found.append("traceback")
    elif len(errors) != (ended.code > 0) and not (ended.code == 1 and case.command in FINDS):
        found.append(f"{len(errors)} error lines, exit {ended.code}")
    if any(len(error.strip()) < 10 for error in errors):
        found.append("an error line that says nothing")
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\u202a-\u202e\u2066-\u2069]", text):
        found.append("control characters in the output")
    if "hidden@" in text and "--traceback" not in case.argv:
        found.append("credentials in the output")
    return found


def _file_faults(case: Case, before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[str]:
    found = []
    changed = [path for path in {*before, *after} if before.get(path) != after.get(path)]
    places = [f"home/{place}" for place in WRITES.get(case.command, [])]
    if "label" not in case.what:
        places.append(os.path.normpath(Path("home", case.chosen)))
    if case.command == "model":  # an old folder is moved aside
        places.append("home/models")
    outside = [path for path in changed if not _is_below(path, places, after)]
    if outside and not (case.kind == "reward" and case.real):
        found.append(f"changed {min(outside)}")
    kept = {entry.content for entry in after.values()}
    lost = [
        path for path, entry in before.items()
        if path.startswith(SAVED) and entry.kind == "file" and entry.content not in kept
    ]  # fmt: skip
    if case.command == "train" and "--resume" in case.argv:  # the run continues
        lost = [path for path in lost if f"{RUN}/adapter" not in path]
    if lost and "save_total_limit" not in case.what:
        found.append(f"lost {min(lost)}")
    return found


def _is_below(path: str, places: list[str], after: Mapping[str, Entry]) -> bool:
    if path in after and after[path].kind == "folder":
        return any(f"{place}/".startswith(f"{path}/") or f"{path}/".startswith(f"{place}/")
                   for place in places)  # fmt: skip
    return any(path == place or path.startswith(f"{place}/") for place in places)
