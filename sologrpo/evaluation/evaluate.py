"""Evaluate models: the plan of one command, and for each model its records and results."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.base.environment import environment
from sologrpo.base.files import EVALUATIONS, FORMAT_TABLE, inside, make_folder, write_atomically
from sologrpo.base.locking import lock_folder
from sologrpo.config.evaluation import EvaluationSettings, PlannedEvaluation
from sologrpo.evaluation.answer import Questions, Samples, answer, judge_again
from sologrpo.evaluation.identity import check_place, describe_identity, describe_loaded
from sologrpo.evaluation.precisions import (
    add_adapter,
    describe_precision,
    fit_precision,
    load_untrained,
)
from sologrpo.model.fitting import explaining_out_of_memory
from sologrpo.scoring.comparison import compare
from sologrpo.scoring.formats import compare_formats
from sologrpo.scoring.records import Evaluated, RecordLog
from sologrpo.scoring.summary import summarise


@dataclass(frozen=True)
class Task:
    """An evaluation of the plan, with what is known of its identity before the model is loaded."""

    settings: EvaluationSettings
    planned: PlannedEvaluation
    questions: Questions
    identity: dict[str, Any]

    @classmethod
    def of(
        cls,
        settings: EvaluationSettings,
        planned: PlannedEvaluation,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
    ) -> "Task":
        """Tokenize the questions, and hash what the answers depend on."""
        questions = Questions.of(dataset, tokenizer)
        identity = describe_identity(tokenizer, settings, planned, questions.problems)
        return cls(settings, planned, questions, identity)

    @property
    def folder(self) -> Path:
        """The folder of the records and results."""
        return inside(self.settings.output_dir, EVALUATIONS, self.planned.label)

    def check_place(self, loaded: Mapping[str, Any] = {}) -> None:
        """Refuse to mix with, or to replace, another evaluation; `loaded` is known of the model."""
        identity = self.identity | dict(loaded)
        check_place(self.folder, identity, self.planned.adapter, self.settings.resume)


def evaluate_models(
    settings: EvaluationSettings,
    tokenizer: PreTrainedTokenizerBase,
    problems: Mapping[str, Dataset],
) -> dict[str, Evaluated]:
    """Evaluate the base model, add the adapter, and evaluate the trained model.

    Both have the same precision, see `fit_precision`. Problems come by prompt format; each model
    answers all of them before the next one, because a merge cannot be undone. What is returned is
    by label, in the order of `settings.plan()`.
    """
    settings = fit_precision(settings)
    tasks = [
        Task.of(settings, planned, problems[planned.data.prompt_format], tokenizer)
        for planned in settings.plan()
    ]
    make_folder(settings.output_dir)
    evaluated: dict[str, Evaluated] = {}
    with ExitStack() as locks:
        for task in tasks:
            lock = lock_folder(make_folder(task.folder), "writes an evaluation")
            if lock is not None:
                locks.callback(lock.release)
            task.check_place()
        model = load_untrained(settings)
        for adapter, of_model in groupby(tasks, key=lambda task: task.planned.adapter):
            if adapter is not None:
                model = add_adapter(model, settings)
            for task in of_model:
                baseline = evaluated.get(task.planned.baseline or "")
                evaluated[task.planned.label] = evaluate(model, tokenizer, task, baseline)
    return evaluated


def evaluate_formats(
    settings: EvaluationSettings,
    tokenizer: PreTrainedTokenizerBase,
    problems: Mapping[str, Dataset],
) -> dict[str, Any]:
    """Evaluate both models under several prompts; write and return `eval/prompt_formats.json`."""
    evaluated = evaluate_models(settings, tokenizer, problems)
    comparison = compare_formats(evaluated, settings.trained_formats)
    name = FORMAT_TABLE.format(settings.table_suffix)
    path = inside(settings.output_dir, EVALUATIONS, name)
    write_atomically(path, json.dumps(comparison, indent=2))
    return comparison


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    baseline: Evaluated | None = None,
) -> Evaluated:
    """Evaluate one model, and write its records and results to `eval/<label>/`."""
    loaded = describe_loaded(model)
    task.check_place(loaded)
    log = RecordLog(task.folder, task.identity | loaded, task.settings.resume)
    log.records = judge_again(task.questions.problems, log.records)
    complete_records(model, tokenizer, task, log)
    records = sorted(log.records, key=lambda record: record.index)
    tokens = sum(a.completion_tokens for record in records for a in (record, *record.samples))
    results = summarise(records) | {
        "seconds": log.seconds,
        "tokens_per_second": tokens / log.seconds if log.seconds else 0.0,
        **describe(task, model),
        "settings": log.settings,
    } | environment()  # fmt: skip
    evaluated = Evaluated(records, results)
    if baseline is not None:
        results |= compare(baseline, evaluated) | {"baseline": baseline.results["label"]}
    log.finish(evaluated)
    return evaluated


def complete_records(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, log: RecordLog
) -> None:
    """Answer the problems of which the log has no records; it keeps them if memory runs out."""
    settings = task.settings
    samples = Samples(settings.num_samples, settings.temperature, settings.top_p, settings.seed)
    answered = {record.index for record in log.records}
    limit = settings.max_completion_length
    start = time.perf_counter()
    with explaining_out_of_memory("lower --max_completion_length; --resume keeps what is done"):
        for batch in answer(model, tokenizer, task.questions, limit, samples, answered):
            log.append(batch, time.perf_counter() - start)
            start = time.perf_counter()


def describe(task: Task, model: PreTrainedModel) -> dict[str, Any]:
    """Describe what was evaluated, in the words of `results.json`."""
    settings, planned = task.settings, task.planned
    adapter = planned.adapter
    return {
        "label": planned.label,
        "model": settings.model.model_name_or_path,
        "adapter": None if adapter is None else str(adapter),
        "precision": describe_precision(settings, model.dtype, adapter is not None),
        "prompt_format": planned.data.prompt_format,
        "max_completion_length": settings.max_completion_length,
        "dataset": planned.data.dataset_name,
        "split": planned.data.dataset_test_split,
        "seed": settings.seed,
    }
