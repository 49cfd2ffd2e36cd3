"""Data: a hub name, folder or file becomes rows of `prompt`, `answer` and the row's own columns."""

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError
from transformers import PreTrainedTokenizerBase

from rewards.grading import parse_gold
from sologrpo.config import RunArguments
from sologrpo.errors import InputError
from sologrpo.prompts import PROMPT_FORMATS, load_worked_examples

logger = logging.getLogger(__name__)

FILE_TYPES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
HUB_CONFIGS = {"openai/gsm8k": "main"}  # this data set has no default configuration


def load_rows(name: str, split: str, config: str | None = None) -> Dataset:
    """Load the rows of one split, in GSM8K's schema.

    Args:
        name: name on the hub, a local folder with a JSONL or Parquet file (or Parquet shards, as on
            the hub) a split, or one such file.
        split: name of the split; ignored for a single file.
        config: configuration on the hub.

    Returns:
        Dataset with at least `question` and `answer`.

    Raises:
        InputError: if nothing is found, or a row has no gold answer after `####`.
    """
    path = Path(name).expanduser()
    rows = _load_local(path, split) if path.exists() else _load_from_hub(name, split, config)
    _check_schema(rows, name, split)
    return rows


def _load_local(path: Path, split: str) -> Dataset:
    files = [path] if path.is_file() else _files_of_split(path, split)
    suffix = files[0].suffix
    if suffix not in FILE_TYPES:
        raise InputError(f"{path}: expected one of {', '.join(FILE_TYPES)}")
    try:
        data_files = [str(file) for file in files]
        return load_dataset(FILE_TYPES[suffix], data_files=data_files, split="train")
    except Exception as error:  # datasets wraps every reader's own exceptions in several layers
        raise InputError(f"cannot read {files[0]}: {_first_line(error)}") from error


def _files_of_split(folder: Path, split: str) -> list[Path]:
    for suffix in FILE_TYPES:
        for pattern in (f"{split}{suffix}", f"{split}-*{suffix}"):
            if files := sorted(folder.glob(pattern)):
                return files
    raise InputError(f"{folder} has no {split}.jsonl or {split}.parquet")


def _load_from_hub(name: str, split: str, config: str | None) -> Dataset:
    try:
        return load_dataset(name, config or HUB_CONFIGS.get(name), split=split)
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        raise InputError(
            f"cannot load dataset {name!r} (split {split!r}): no such local path, and the hub "
            f"says: {_first_line(error)}; a folder with {split}.jsonl works without a hub: "
            "--dataset_name path/to/folder"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_schema(rows: Dataset, name: str, split: str) -> None:
    missing = [column for column in ("question", "answer") if column not in rows.column_names]
    if missing:
        raise InputError(
            f"{name} ({split}) has no column {' and no '.join(missing)}; "
            f"it has {', '.join(rows.column_names)}"
        )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row["question"], str):
            raise InputError(f"{name} ({split}), row {number}: question is no text")
        try:
            parse_gold(row["answer"])
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{name} ({split}), row {number}: {_first_line(error)}") from error


def build_prompts(rows: Dataset, run: RunArguments) -> Dataset:
    """Add the columns `prompt` and `prompt_format`; the others stay, for the rewards."""
    prompt_format = PROMPT_FORMATS[run.prompt_format]
    examples = load_worked_examples(run.worked_examples)

    def add_prompt(row: dict[str, Any]) -> dict[str, Any]:
        prompt = prompt_format.messages(row["question"], examples, run.system_prompt)
        return {"prompt": prompt, "prompt_format": prompt_format.name}

    return rows.map(add_prompt)


def load_train_and_validation(
    run: RunArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Load the training rows and the seeded slice that is held out of them for validation."""
    rows = load_rows(run.dataset_name, run.dataset_train_split, run.dataset_config)
    train = _within_limit(build_prompts(rows, run), tokenizer, run.max_prompt_tokens)
    train = train.shuffle(seed=seed)
    validation = None
    if run.num_validation_examples:
        if run.num_validation_examples >= len(train):
            raise InputError(
                f"num_validation_examples {run.num_validation_examples} leaves nothing of the "
                f"{len(train)} training rows"
            )
        validation = train.select(range(run.num_validation_examples))
        train = train.select(range(run.num_validation_examples, len(train)))
    if run.max_train_examples is not None:
        _check_at_least_one("max_train_examples", run.max_train_examples)
        train = train.select(range(min(run.max_train_examples, len(train))))
    return train, validation


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{name} {value} leaves no rows: give 1 or more, or leave it out")


def load_test_prompts(run: RunArguments, limit: int | None = None, seed: int = 0) -> Dataset:
    """Load the test split with its prompts; `limit` takes a seeded choice of the rows."""
    if limit is not None:
        _check_at_least_one("limit", limit)
    rows = load_rows(run.dataset_name, run.dataset_test_split, run.dataset_config)
    if limit is not None and limit < len(rows):
        rows = rows.shuffle(seed=seed).select(range(limit))
    return build_prompts(rows, run)


def _within_limit(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> Dataset:
    if limit is None:
        return dataset
    lengths = prompt_lengths(dataset, tokenizer)
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    if not kept:
        raise InputError(f"all prompts are longer than max_prompt_tokens {limit}: raise the limit")
    if len(kept) < len(dataset):
        logger.warning(
            "left out %d of %d rows: prompt longer than max_prompt_tokens %d (longest: %d)",
            len(dataset) - len(kept), len(dataset), limit, max(lengths),
        )  # fmt: skip
    return dataset.select(kept)


def render_prompt(prompt: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Render one chat prompt by the tokenizer's own chat template, as the model will see it.

    Raises:
        InputError: if the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path} has no chat template: use the instruct version of the model"
        )
    text: str = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text


def prompt_lengths(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Count the tokens of every rendered prompt."""
    texts = [render_prompt(prompt, tokenizer) for prompt in dataset["prompt"]]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [len(row) for row in ids]


def describe_lengths(lengths: Sequence[int]) -> str:
    """Summarise token counts in one line: mean, 95th percentile, maximum."""
    ordered = sorted(lengths)
    p95 = ordered[int(0.95 * (len(ordered) - 1))]
    return f"mean {mean(ordered):.0f}, p95 {p95}, max {ordered[-1]} tokens"
