"""Find the files of the package, and write files atomically. Imports nothing heavy."""

import os
from pathlib import Path

# Names inside a run directory.
RUN_CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
COMPLETIONS = "completions"
COMPLETIONS_FILE = "completions_{:05d}.parquet"  # of a step, as TRL names it
CHECKPOINT = "checkpoint-{}"  # of a step, as transformers names it
LOCK = ".lock"
ADAPTER = "adapter"
EVALUATIONS = "eval"  # one folder per label
RECORDS = "records.jsonl"  # of an evaluation
RESULTS = "results.json"
PRECISION_TABLE = "precisions.json"
REWARD_CURVE = "reward_curve.png"
REPORT = "report.html"

# Names inside an adapter or a checkpoint, as peft writes them.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_PACKAGE = Path(__file__).resolve().parent
# A wheel holds the scripts, recipes and problems in a folder of the package (pyproject.toml). In a
# checkout, and an editable install of one, they are next to the package.
BUNDLED = next(folder for folder in (_PACKAGE / "bundled", _PACKAGE.parent) if folder.is_dir())


def recipes() -> dict[str, Path]:
    """List the recipes that travel with the package, by name."""
    return {path.stem: path for path in sorted((BUNDLED / "configs").glob("*.yaml"))}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Text is written as UTF-8; half a surrogate pair, which a tokenizer can emit, becomes "?".
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
