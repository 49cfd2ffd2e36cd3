"""Find the files of the package, and write files atomically. Imports nothing heavy.

Text from a run, a data set or a command line becomes a file name by `check_name` alone. What is
written or removed in a run directory lies `inside` it: a link there that leads out is not followed.
"""

import errno
import os
import re
import tempfile
from pathlib import Path

from sologrpo.base.errors import InputError

# Names inside a run directory.
RUN_CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
WARNINGS = "warnings.jsonl"  # what the diagnosis has printed
COMPLETIONS = "completions"
COMPLETIONS_FILE = "completions_{:05d}.parquet"  # of a step, as TRL names it
CHECKPOINT = "checkpoint-{}"  # of a step, as transformers names it
LOCK = ".lock"
ADAPTER = "adapter"
EVALUATIONS = "eval"  # one folder per label
BASELINE = "baseline"  # labels of the base model begin with it, and no others
RECORDS = "records.jsonl"  # of an evaluation
RESULTS = "results.json"
UNFINISHED = "unfinished.json"  # until there are results
FORMAT_TABLE = "prompt_formats{}.json"  # in `eval`, of the evaluations whose labels end alike
REWARD_CURVE = "reward_curve.png"
REPORT = "report.html"

# Names inside an adapter or a checkpoint, as peft writes them.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# Settings of a recipe that decide its result; all are numbers or plain words.
RECIPE_SETTINGS = (
    "prompt_format", "max_completion_length", "temperature", "top_p", "num_generations",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_steps",
    "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps", "beta", "epsilon",
    "loss_type", "scale_rewards", "outcome_reward", "lora_r", "lora_alpha", "lora_dropout",
    "use_rslora", "use_dora", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "dtype", "seed",
)  # fmt: skip

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel holds the scripts, recipes and problems in a folder of the package (pyproject.toml). In a
# checkout, and an editable install of one, they are next to the package.
BUNDLED = next(folder for folder in (_PACKAGE / "bundled", _PACKAGE.parent) if folder.is_dir())


def recipes() -> dict[str, Path]:
    """List the recipes that travel with the package, by name."""
    return {path.stem: path for path in sorted((BUNDLED / "configs").glob("*.yaml"))}


def find_config(name: str) -> Path:
    """Find a config file by its path, or by the name of a recipe."""
    if os.path.isfile(name):
        return Path(name)
    if name in recipes():
        return recipes()[name]
    raise InputError(
        f"no config {name!r} in {os.getcwd()}: give a file or a recipe: {', '.join(recipes())}"
    )


def describe_recipes(gibibytes: float) -> str:
    """Name the recipes for a GPU of this size, 0 for none, and what the others need.

    A card has less than its name says: an L4 of 24 GB has 22 GiB.
    """
    needed: dict[int, list[str]] = {}
    for name, path in recipes().items():
        found = re.search(r"^# GPU: +(\d+) GB", path.read_text(encoding="utf-8"), re.MULTILINE)
        needed.setdefault(int(found[1]) if found else 0, []).append(name)
    fitting = [name for size in needed if 0.9 * size <= gibibytes for name in needed[size]]
    larger = [
        f"{size} GB: {', '.join(needed[size])}" for size in sorted(needed) if 0.9 * size > gibibytes
    ]
    return "; on a GPU of ".join([f"here fit {', '.join(fitting)}", *larger])


def check_name(name: str, what: str) -> str:
    """Return a text that can be the name of a file or folder; `what` names it in the error.

    >>> check_name("../x", "--label")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    sologrpo.base.errors.InputError: --label '../x': use up to 100 letters, ...
    """
    if re.fullmatch(r"\w[\w.+-]{0,99}", name, re.ASCII) is None:
        raise InputError(
            f"{what} {name!r:.80}: use up to 100 letters, digits, '.', '-', '_' and '+'"
        )
    return name


def inside(folder: Path, *names: str) -> Path:
    """Join names to a folder, to write or remove something there; refuse a link that leads out."""
    path = folder.joinpath(*names)
    try:
        resolved = path.resolve()
        leads_out = not resolved.is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InputError(f"{path} is a loop of links: remove it") from error
    if leads_out:
        raise InputError(f"{path} is a link to {resolved}: nothing is written outside {folder}")
    return path


def make_folder(folder: Path) -> Path:
    """Make a folder and its parents, and check that files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write to {folder}: {reason}: give another folder") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Text is written as UTF-8; half a surrogate pair, which a tokenizer can emit, becomes "?".
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    if not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # never through a link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
