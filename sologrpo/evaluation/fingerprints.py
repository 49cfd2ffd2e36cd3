"""Fingerprints of models and adapters: enough to notice another one, cheap for any size."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

# Files up to this size are read whole, which takes a fraction of a second.
WHOLE_BYTES = 64 * 2**20
# Of larger ones so many blocks of this size, evenly spread from the first byte to the last.
BLOCKS, BLOCK_BYTES = 64, 64 * 2**10

# What decides a model's output: weights, architecture, and the tokens that end a completion.
MODEL_FILES = ("*.safetensors", "*.bin", "config.json", "generation_config.json")
ADAPTER_FILES = ("adapter_model.*", "adapter_config.json")


def hash_folder(folder: Path, patterns: Iterable[str]) -> str:
    """Hash the files of a folder that fit a pattern: their names, sizes and contents.

    Of files over 64 MiB, 64 blocks of 64 KiB are read: the first one, which holds the names and
    shapes of a safetensors file, the last, and 62 spread between them. That tells apart any two
    trainings of one model, and does not notice a few changed bytes: it guards against mistakes,
    not against forgery. The beginning of the result says which it was.

    Returns:
        `sha256:...` if all files were read whole, otherwise `sampled-sha256:...`.

    Example:
        >>> hash_folder(Path("models/SmolLM2-135M-Instruct"), MODEL_FILES)  # doctest: +SKIP
        'sampled-sha256:7d0c...'
    """
    digest, sampled = hashlib.sha256(), False
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        size = path.stat().st_size
        sampled |= size > WHOLE_BYTES
        digest.update(f"{path.name} {size}\n".encode())
        for start, length in _parts(size):
            with path.open("rb") as file:
                file.seek(start)
                digest.update(file.read(length))
    return f"{'sampled-' if sampled else ''}sha256:{digest.hexdigest()}"


def _parts(size: int) -> list[tuple[int, int]]:
    """(start, length) of what is read."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    last = size - BLOCK_BYTES
    return [(last * i // (BLOCKS - 1), BLOCK_BYTES) for i in range(BLOCKS)]
