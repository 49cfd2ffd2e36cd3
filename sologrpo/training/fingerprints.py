"""Fingerprints: what a run is made from, by content, to compare when it is resumed."""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash
from trl import ModelConfig

from rewards import Reward
from sologrpo.base.manifest import MODEL_FILES, hash_files
from sologrpo.config import RunArguments
from sologrpo.data.dataset import build_prompts, render_prompt

_SAMPLE = {"question": "1 + 1", "answer": "#### 2"}


def take_fingerprints(
    run: RunArguments,
    model: ModelConfig,
    datasets: tuple[Dataset, Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    rewards: Sequence[Reward],
) -> dict[str, str]:
    """Hash what a run is made from, by names that an error message can give."""
    train, validation = datasets
    found = {
        "base weights": _model(model),
        "training rows": _rows(train),
        "prompts (system prompt, worked examples or chat template)": _prompt(run, tokenizer),
    }
    if validation is not None:
        found["validation rows"] = _rows(validation)
    return found | {f"reward {reward.__name__}": reward.source_hash for reward in rewards}


def _rows(dataset: Dataset) -> str:
    """Hash the rows in order, without their prompts, which `_prompt` covers."""
    columns = [name for name in dataset.column_names if name != "prompt"]
    return _digest(json.dumps(row, default=str) for row in dataset.select_columns(columns))


def _prompt(run: RunArguments, tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash one prompt as the model sees it, of a question that is always the same."""
    (row,) = build_prompts(Dataset.from_list([_SAMPLE]), run, tokenizer)
    return _digest([render_prompt(row["prompt"], tokenizer)])


def _model(model: ModelConfig) -> str:
    """Return the commit of a model on the hub, or hash the files of a local folder."""
    folder = Path(str(model.model_name_or_path))
    if folder.is_dir():
        return hash_files(folder, MODEL_FILES)
    file = cached_file(str(folder), "config.json", revision=model.model_revision)
    return str(extract_commit_hash(file, None))


def _digest(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "replace") + b"\n")
    return digest.hexdigest()
