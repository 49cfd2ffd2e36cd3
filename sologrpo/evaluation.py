"""Evaluation: generate, grade, record, count. One judge, `rewards.grading`, as in training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rewards.format import has_asked_format, has_trailing_text
from rewards.grading import extract_answer, is_correct, lenient_is_correct
from sologrpo.config import EvaluationSettings
from sologrpo.data import prompt_token_ids, stop_strings
from sologrpo.device import describe_device
from sologrpo.files import write_atomically
from sologrpo.generation import Completion, generate_greedily
from sologrpo.run import versions
from sologrpo.statistics import compare_paired, wilson_interval


@dataclass(frozen=True)
class Record:
    """One graded problem; a line of `records.jsonl`."""

    index: int
    question: str
    gold: str
    completion: str
    extracted: str | None
    correct: bool
    lenient_correct: bool
    format_ok: bool
    trailing_text: bool
    truncated: bool
    completion_tokens: int
    kind: str | None = None


def generate_records(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> list[Record]:
    """Complete every prompt of the dataset greedily and grade it; all rows, in their order."""
    prompts = prompt_token_ids(dataset["prompt"], tokenizer)
    stops = stop_strings(dataset)
    completions = generate_greedily(model, tokenizer, prompts, max_new_tokens, stop_strings=stops)
    return [
        grade(index, row, completion)
        for index, (row, completion) in enumerate(zip(dataset, completions, strict=True))
    ]


def grade(index: int, row: Mapping[str, Any], completion: Completion) -> Record:
    """Judge one completion of one row."""
    text, gold, prompt_format = completion.text, row["answer"], row["prompt_format"]
    return Record(
        index=index,
        question=row["question"],
        gold=gold,
        completion=text,
        extracted=extract_answer(text, prompt_format),
        correct=is_correct(text, gold, prompt_format),
        lenient_correct=lenient_is_correct(text, gold),
        format_ok=has_asked_format(text, prompt_format),
        trailing_text=has_trailing_text(text),
        truncated=completion.truncated,
        completion_tokens=completion.token_count,
        kind=row.get("kind"),
    )


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Count what `results.json` reports; every rate is a share of all records."""
    n = len(records)
    correct = sum(record.correct for record in records)
    return {
        "n": n,
        "accuracy": correct / n,
        "accuracy_ci95": list(wilson_interval(correct, n)),
        "accuracy_lenient": mean(record.lenient_correct for record in records),
        "format_rate": mean(record.format_ok for record in records),
        "truncated_rate": mean(record.truncated for record in records),
        "trailing_text_rate": mean(record.trailing_text for record in records),
        "mean_completion_tokens": mean(record.completion_tokens for record in records),
        "by_kind": accuracy_by_kind(records),
    }


def accuracy_by_kind(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Accuracy of each kind of problem, where the data set names kinds; otherwise empty."""
    kinds = sorted({record.kind for record in records if record.kind is not None})
    groups = {kind: [r.correct for r in records if r.kind == kind] for kind in kinds}
    return {kind: {"n": len(group), "accuracy": mean(group)} for kind, group in groups.items()}


def evaluate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> dict[str, float]:
    """Validation scores, as plain numbers to log."""
    summary = summarise(generate_records(model, tokenizer, dataset, max_new_tokens))
    scores = {name: value for name, value in summary.items() if isinstance(value, float | int)}
    for kind, group in summary["by_kind"].items():
        scores[f"accuracy/{kind}"] = group["accuracy"]
    return scores


def save_evaluation(
    records: Sequence[Record],
    label: str,
    settings: EvaluationSettings,
    model: PreTrainedModel,
    adapter: Path | None,
    baseline: Sequence[Record] | None = None,
) -> dict[str, Any]:
    """Write `eval/<label>/results.json` and `records.jsonl`; return the results."""
    results = summarise(records) | {
        "model": settings.model.model_name_or_path,
        "adapter": None if adapter is None else str(adapter),
        "precision": describe_precision(settings, model, adapter),
        "prompt_format": settings.data.prompt_format,
        "max_completion_length": settings.max_completion_length,
        "dataset": settings.data.dataset_name,
        "split": settings.data.dataset_test_split,
        "seed": settings.seed,
        "device": describe_device(),
        "versions": versions(),
    }
    if baseline is not None:
        paired = compare_paired([r.correct for r in baseline], [r.correct for r in records])
        results |= asdict(paired)
    folder = settings.output_dir / "eval" / label
    write_atomically(folder / "results.json", json.dumps(results, indent=2))
    lines = (json.dumps(asdict(record), ensure_ascii=False) for record in records)
    write_atomically(folder / "records.jsonl", "\n".join(lines) + "\n")
    return results


def describe_precision(
    settings: EvaluationSettings, model: PreTrainedModel, adapter: Path | None
) -> str:
    """Name the weights that were measured: a 4-bit run's rounded weights are another model."""
    weights = "NF4 dequantised" if settings.model.load_in_4bit else "unquantised"
    merged = "" if adapter is None else ", adapter merged"
    return f"{weights}, {str(model.dtype).removeprefix('torch.')}{merged}"
