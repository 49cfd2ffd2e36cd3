"""Identify an evaluation: everything that decides its completions, with hashes of the files."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.model.loading import dtype_name
from sologrpo.scoring.records import Problem, hash_text

# Files up to this size are read completely, which takes a fraction of a second.
COMPLETE_BYTES = 64 * 2**20
# Of larger files, this many blocks of this size, evenly spread from the first byte to the last.
BLOCKS, BLOCK_BYTES = 64, 64 * 2**10

# What decides a model's output: weights, architecture, and the tokens that end a completion.
MODEL_FILES = ("*.safetensors", "*.bin", "config.json", "generation_config.json")
ADAPTER_FILES = ("adapter_model.*", "adapter_config.json")


def describe_identity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """Collect everything that decides the completions; `--resume` compares it.

    Args:
        model: as it is evaluated.
        tokenizer: of the base model.
        settings: of this evaluation.
        problems: the problems, with their prompts.

    Returns:
        Plain JSON values. A local model is identified by its hash, a model from the hub by its
        revision. Paths are left out: a run that was moved is the same run.
    """
    folder = Path(str(settings.model.model_name_or_path))
    local = folder.is_dir()
    adapter, template = settings.adapter, tokenizer.chat_template
    samples = settings.num_samples > 0
    return {
        "model": folder.name if local else str(folder),
        "model_revision": getattr(model.config, "_commit_hash", None),
        "model_hash": hash_folder(folder, MODEL_FILES) if local else None,
        "adapter_hash": None if adapter is None else hash_folder(adapter, ADAPTER_FILES),
        "chat_template_hash": None if template is None else hash_text(str(template)),
        "precision": settings.precision,
        "dtype": dtype_name(model.dtype),
        "quantisation": _plain(getattr(model.config, "quantization_config", None)),
        "engine": settings.engine,
        "dataset": settings.data.dataset_name,
        "split": settings.data.dataset_test_split,
        "limit": settings.limit,
        "seed": settings.seed,
        "problems_hash": hash_text("".join(f"{p.question_hash} {p.gold}\n" for p in problems)),
        "prompts_hash": hash_text("".join(problem.prompt for problem in problems)),
        "prompt_format": settings.data.prompt_format,
        "max_completion_length": settings.max_completion_length,
        "num_samples": settings.num_samples,
        "temperature": settings.temperature if samples else None,
        "top_p": settings.top_p if samples else None,
    }


def _plain(config: Any) -> dict[str, Any] | None:
    """Keep the JSON values of a quantisation config."""
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    kinds = (str, int, float, bool)
    return {k: v for k, v in values.items() if isinstance(v, kinds) and not k.startswith("_")}


def hash_folder(folder: Path, patterns: Iterable[str]) -> str:
    """Hash the matching files of a folder: their names, sizes and contents.

    Of a file over 64 MiB, 64 blocks of 64 KiB are read: the first one, which holds the names and
    shapes of a safetensors file, the last, and 62 in between. That tells apart any two trainings
    of one model, but misses a few changed bytes: it guards against mistakes, not against forgery.

    Args:
        folder: of a model or an adapter.
        patterns: glob patterns of the files.

    Returns:
        `sha256:...` if all files were read completely, otherwise `sampled-sha256:...`.

    Example:
        >>> hash_folder(Path("models/SmolLM2-135M-Instruct"), MODEL_FILES)  # doctest: +SKIP
        'sampled-sha256:7d0c...'
    """
    digest, sampled = hashlib.sha256(), False
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        size = path.stat().st_size
        sampled |= size > COMPLETE_BYTES
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _blocks(size):
                file.seek(start)
                digest.update(file.read(length))
    return f"{'sampled-' if sampled else ''}sha256:{digest.hexdigest()}"


def _blocks(size: int) -> list[tuple[int, int]]:
    """Return (start, length) in bytes of each block to read."""
    if size <= COMPLETE_BYTES:
        return [(0, size)]
    last = size - BLOCK_BYTES
    return [(last * i // (BLOCKS - 1), BLOCK_BYTES) for i in range(BLOCKS)]
