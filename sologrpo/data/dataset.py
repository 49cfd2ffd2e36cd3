"""Data sets: from a hub name, folder or file to rows with `prompt`, `answer` and other columns."""

import logging
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sologrpo.base.errors import LIBRARY_ERRORS, InputError, first_line, refusing
from sologrpo.base.files import BUNDLED, check_name
from sologrpo.base.hub import check_hub, why_not_found
from sologrpo.base.schema import (
    Schema,
    advising,
    parse,
    read_bytes,
    read_json,
    read_json_lines,
    read_text,
    read_yaml,
)
from sologrpo.config.arguments import RunArguments
from sologrpo.prompts import MARK, PROMPT_FORMATS, Prompt, PromptFormat, WorkedExample
from sologrpo.scoring.records import Gold

logger = logging.getLogger(__name__)

FILE_TYPES = (".jsonl", ".json", ".parquet")
QUICKSTART = "quickstart"  # the problems that travel with the package
HUB_CONFIGS = {"openai/gsm8k": "main"}  # this data set has no default configuration
# Columns that prompts, TRL 1.16 (grpo_trainer.py:1584-1627, 2336-2403) or the object of a reward
# use: one of a data set would be lost, or end the run.
RESERVED = (
    "prompt", "prompt_format", "prompts", "completion", "completions", "completion_ids",
    "trainer_state", "log_extra", "log_metric", "environment", "environments", "image", "images",
    "self",
)  # fmt: skip
MOST_KINDS = 20  # a metric each: more would fill the rows of metrics.jsonl
# Raised for a table that is damaged, or holds what a data set cannot.
TABLE_ERRORS = (pa.ArrowException, *LIBRARY_ERRORS)
ROW_FORM = 'write {"question": …, "answer": "… #### 42"}: docs/configuration.md, Data'


class _Row(Schema):
    """A row of a data set; rewards may use further columns."""

    question: str
    answer: Gold
    kind: str | None = None


def load_rows(name: str, split: str, config: str | None = None) -> Dataset:
    """Load the rows of one split, in GSM8K's schema: at least `question` and `answer`.

    Args:
        name: name on the hub; a local folder with a JSONL or Parquet file per split, or Parquet
            shards as on the hub; or one such file, of which the split is ignored.

    Raises:
        InputError: if no data is found, or a row has no gold answer after `####`.
    """
    path = Path(name)
    if not path.exists():
        path = Path(os.path.expanduser(name))  # unlike pathlib's, keeps the name of an unknown user
    if name == QUICKSTART and not path.exists():
        path = BUNDLED / QUICKSTART
    rows = _load_local(path, split) if path.exists() else _load_from_hub(name, split, config)
    _check_schema(rows, f"{name} ({split})")
    return rows if isinstance(rows, Dataset) else _from_rows(rows, name)


def _load_local(path: Path, split: str) -> Dataset | list[dict[str, Any]]:
    files = [path] if path.is_file() else _files_of_split(path, split)
    suffix = files[0].suffix
    if suffix not in FILE_TYPES:
        raise InputError(f"{path}: expected one of {', '.join(FILE_TYPES)}")
    if suffix != ".parquet":
        return [row for file in files for row in _read_json(file)]
    with refusing(f"cannot read {files[0]}", TABLE_ERRORS):
        tables = [pq.ParquetFile(pa.BufferReader(read_bytes(file))).read() for file in files]
        return Dataset(pa.concat_tables(tables))


def _read_json(file: Path) -> list[dict[str, Any]]:
    """Read a file with one object per line, or with a list of objects.

    `load_dataset("json")` gives no line number in its errors, and pyarrow 26.0 crashes the process
    at a line that is `null`.
    """
    with advising(ROW_FORM):
        if read_text(file).lstrip().startswith("["):
            return read_json(file, list[dict[str, Any]])
        return read_json_lines(file, dict[str, Any])


def _from_rows(rows: list[dict[str, Any]], name: str) -> Dataset:
    columns = {}
    for column in _columns(rows):
        with refusing(f"{name}: column {column!r}", TABLE_ERRORS):
            columns[column] = pa.array([row.get(column) for row in rows])
    return Dataset(pa.table(columns))


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _files_of_split(folder: Path, split: str) -> list[Path]:
    check_name(split, "split")
    for suffix in FILE_TYPES:
        for pattern in (f"{split}{suffix}", f"{split}-*{suffix}"):
            if files := sorted(folder.glob(pattern)):
                return files
    raise InputError(f"{folder} has no {split}.jsonl or {split}.parquet")


def _load_from_hub(name: str, split: str, config: str | None) -> Dataset:
    check_hub(name)
    try:
        return load_dataset(name, config or HUB_CONFIGS.get(name), split=split)
    except (DatasetsError, OSError, ValueError, RuntimeError, LookupError) as error:
        raise InputError(
            f"cannot load dataset {name!r} (split {split!r}): {why_not_found(name, error)}; a "
            f"folder with {split}.jsonl works without a hub: --dataset_name path/to/folder"
        ) from error


def _check_schema(rows: Dataset | list[dict[str, Any]], where: str) -> None:
    if not len(rows):
        raise InputError(f"{where} has no rows")
    columns = rows.column_names if isinstance(rows, Dataset) else _columns(rows)
    if taken := [column for column in RESERVED if column in columns]:
        raise InputError(
            f"{where}: the trainer uses the name of column {taken[0]!r} itself: rename or remove it"
        )
    if isinstance(rows, Dataset):
        rows = rows.select_columns([name for name in _Row.model_fields if name in columns])
    with advising(ROW_FORM):
        for number, row in enumerate(rows, start=1):
            parse(_Row, row, f"{where}, row {number}")


def build_prompts(
    rows: Dataset,
    run: RunArguments,
    tokenizer: PreTrainedTokenizerBase | None = None,
    names: Sequence[str] = (),
) -> Dataset:
    """Add the columns `prompt` and `prompt_format`; the others stay, for the rewards.

    A prompt is a list of chat messages, or a string in plain text, which formats with both use for
    a tokenizer without a chat template. Several formats, if there are `names`, take turns by row.

    Raises:
        InputError: if a format needs a chat template and the tokenizer has none, or formats cannot
            share a batch.
    """
    formats = [prompt_format_of(run, name) for name in names or [run.prompt_format]]
    _check_alike(formats, tokenizer)
    chat = _asks_in_chat(formats[0], tokenizer)
    draws = any(f.num_drawn_examples for f in formats)
    pool = _as_examples(_load_train_rows(run)) if draws else []

    def add_prompt(row: dict[str, Any], index: int) -> dict[str, Any]:
        prompt_format = formats[index % len(formats)]
        prompt_format = _with_drawn_examples(prompt_format, pool, row["question"])
        build = prompt_format.messages if chat else prompt_format.text
        return {"prompt": build(row["question"]), "prompt_format": prompt_format.name}

    return rows.map(add_prompt, with_indices=True)


def prompt_format_of(run: RunArguments, name: str | None = None) -> PromptFormat:
    """Return a prompt format, with what a run replaces in it.

    Worked examples replace those that a format draws only where the run trains on it; a system
    prompt describes only `prompt_format`.
    """
    prompt_format = PROMPT_FORMATS[name or run.prompt_format]
    if run.system_prompt is not None and prompt_format.name == run.prompt_format:
        prompt_format = replace(prompt_format, system_prompt=run.system_prompt)
    is_trained = prompt_format.name in (run.prompt_formats or [run.prompt_format])
    if run.worked_examples is not None and (is_trained or not prompt_format.num_drawn_examples):
        examples = tuple(load_worked_examples(run.worked_examples))  # an empty list asks for none
        return replace(prompt_format, worked_examples=examples, num_drawn_examples=0)
    return prompt_format


def load_worked_examples(spec: Any) -> list[WorkedExample]:
    """Read worked examples from the config's list, or from the YAML file that it names."""
    if not spec:
        return []
    if isinstance(spec, list) and isinstance(spec[0], str) and len(spec) == 1:
        (spec,) = spec  # a command line makes lists
    with advising("give a list of {question, thinking, answer}, or a YAML file with one"):
        if not isinstance(spec, str):
            return parse(list[WorkedExample], spec, "worked_examples")
        return read_yaml(Path(spec), list[WorkedExample])


def _check_alike(
    formats: Sequence[PromptFormat], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuse formats that differ in what holds for a whole batch: chat or not, and stop strings."""

    def ends(prompt_format: PromptFormat) -> tuple[str, ...]:
        plain_text = prompt_format.plain_text
        in_chat = _asks_in_chat(prompt_format, tokenizer)
        return plain_text.stop_strings if plain_text and not in_chat else ()

    first, *others = formats
    for other in others:
        if ends(other) != ends(first):
            raise InputError(
                f"prompt_formats {first.name} and {other.name} cannot share a batch: their "
                "completions end in different ways; leave one out"
            )


def _load_train_rows(run: RunArguments) -> Dataset:
    return load_rows(run.dataset_name, run.dataset_train_split, run.dataset_config)


def _as_examples(rows: Iterable[dict[str, Any]]) -> list[WorkedExample]:
    """Turn solved rows into worked examples, with GSM8K's `<<9*2=18>>`."""
    examples = []
    for row in rows:
        thinking, _, answer = row["answer"].rpartition(MARK)
        examples.append(WorkedExample(row["question"].strip(), thinking.strip(), answer.strip()))
    return examples


def _with_drawn_examples(
    prompt_format: PromptFormat, pool: Sequence[WorkedExample], question: str
) -> PromptFormat:
    """Show examples of the pool, but never the question itself; the same ones every time."""
    count = prompt_format.num_drawn_examples
    if not count:
        return prompt_format
    drawn = random.Random(question).sample(pool, min(count + 1, len(pool)))
    others = [example for example in drawn if example.question != question.strip()]
    return replace(prompt_format, worked_examples=tuple(others[:count]))


def stop_strings(dataset: Dataset | IterableDataset) -> list[str]:
    """List the strings that end a completion of these prompts, besides the end-of-text token.

    None for chat, where the model ends its turn, nor for prompts that `build_prompts` did not make.
    """
    row: dict[str, Any] = next(iter(dataset), {})
    if "prompt_format" not in row or not isinstance(row["prompt"], str):
        return []
    plain_text = PROMPT_FORMATS[row["prompt_format"]].plain_text
    return list(plain_text.stop_strings) if plain_text else []


def can_be_graded(dataset: Any) -> bool:
    """Check whether these are rows of `build_prompts`, whose answers we know how to judge."""
    needed = {"prompt", "question", "answer", "prompt_format"}
    return isinstance(dataset, Dataset) and needed <= set(dataset.column_names)


def has_few_kinds(dataset: Any) -> bool:
    """Check whether rows have a column `kind` of text, with few enough to log a metric of each."""
    if not isinstance(dataset, Dataset) or "kind" not in dataset.column_names:
        return False
    if dataset.features["kind"] not in (Value("string"), Value("large_string")):
        return False
    # Of the whole table: `Dataset.unique` copies the selected rows, 8 s for 290,000 of them.
    return len(dataset.data.column("kind").drop_null().unique()) <= MOST_KINDS


def _asks_in_chat(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    if not prompt_format.chat:
        return False
    if tokenizer is None or tokenizer.chat_template is not None:
        return True
    if prompt_format.plain_text is None:
        plain = " or ".join(f.name for f in PROMPT_FORMATS.values() if f.plain_text is not None)
        raise InputError(
            f"{tokenizer.name_or_path} has no chat template: use prompt_format {plain}, or the "
            "instruct version of the model"
        )
    return False


def load_train_and_validation(
    run: RunArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Load the training rows, and the seeded slice of them that is held out for validation."""
    rows = _load_train_rows(run)
    prompts = build_prompts(rows, run, tokenizer, run.prompt_formats or ())
    train = _within_limit(prompts, tokenizer, run.max_prompt_tokens)
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
        train = train.select(range(min(run.max_train_examples, len(train))))
    return train, validation


def load_test_prompts(
    run: RunArguments,
    limit: int | None = None,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Dataset:
    """Load the test split with its prompts, or `limit` rows of it that the seed chooses."""
    rows = load_rows(run.dataset_name, run.dataset_test_split, run.dataset_config)
    if limit is not None and limit < len(rows):
        rows = rows.shuffle(seed=seed).select(range(limit))
    return build_prompts(rows, run, tokenizer)


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


def prompt_token_ids(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Tokenize every prompt exactly as TRL does in training.

    A chat template writes its special tokens itself; to plain text the tokenizer adds them, such as
    Llama's `<|begin_of_text|>`.

    Raises:
        InputError: if the tokenizer makes an empty prompt, or adds an end token to plain text.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    rendered = texts or [render_prompt(prompt, tokenizer) for prompt in prompts]
    # grpo_trainer.py:1758 of TRL 1.16: `self.processing_class(text=prompts)["input_ids"]`
    ids: list[list[int]] = tokenizer(rendered, add_special_tokens=bool(texts))["input_ids"]
    if not all(ids):
        raise InputError(
            f"{tokenizer.name_or_path} makes an empty prompt: its chat template or its vocabulary "
            "is damaged; download the model again"
        )
    if texts and ids[0][-1] == tokenizer.eos_token_id:
        raise InputError(
            f"{tokenizer.name_or_path} ends every text with {tokenizer.eos_token}, even a prompt: "
            "set add_eos_token to false in its tokenizer_config.json"
        )
    return ids


def render_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render one prompt as the model will see it, special tokens included.

    Raises:
        InputError: if the chat template refuses the messages.
    """
    if isinstance(prompt, str):
        opening: str = tokenizer.decode(tokenizer("")["input_ids"])
        return opening + prompt
    options = getattr(tokenizer, "chat_template_kwargs", {})  # as `load_tokenizer` was given them
    try:
        text: str = tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, **options
        )
    except TemplateError as error:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path} refuses a prompt: {first_line(error)}; "
            "use another prompt_format; if it takes no system message, boxed, or set system_prompt "
            "to '' and show the format in worked_examples"
        ) from error
    return text


def prompt_lengths(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Count the tokens of every prompt."""
    return [len(ids) for ids in prompt_token_ids(dataset["prompt"], tokenizer)]


def describe_lengths(lengths: Sequence[int]) -> str:
    """Summarise token counts in one line: mean, 95th percentile, maximum."""
    ordered = sorted(lengths)
    p95 = ordered[int(0.95 * (len(ordered) - 1))]
    return f"mean {mean(ordered):.0f}, p95 {p95}, max {ordered[-1]} tokens"
