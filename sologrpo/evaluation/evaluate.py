"""Evaluate models: generate completions, judge them, and write records and results.

The judge is `rewards.grading`, as in training.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.data.dataset import prompt_token_ids, render_prompt, stop_strings
from sologrpo.environment import environment
from sologrpo.errors import InputError
from sologrpo.evaluation.completion_log import CompletionLog, Completions, check_place, open_log
from sologrpo.evaluation.identity import describe_identity, describe_loaded
from sologrpo.evaluation.precisions import (
    add_adapter,
    describe_precision,
    fit_precision,
    load_untrained,
)
from sologrpo.files import EVALUATIONS, FORMAT_TABLE, inside, make_folder, write_atomically
from sologrpo.locking import lock_folder
from sologrpo.model.memory import is_out_of_memory
from sologrpo.sampling.generation import (
    Completion,
    generate_greedily,
    generate_in_batches,
    greedy_config,
    sampling_config,
)
from sologrpo.scoring.comparison import compare
from sologrpo.scoring.formats import compare_formats
from sologrpo.scoring.records import (
    Evaluated,
    Problem,
    Record,
    hash_text,
    judge_answer,
    make_record,
    write_evaluated,
)
from sologrpo.scoring.summary import summarise

Prompts = Sequence[Sequence[int]]
Batches = Iterator[list[tuple[int, Completion]]]

# The metrics of validation; docs/metrics.md explains each.
VALIDATION_SCORES = (
    "n", "accuracy", "accuracy_lenient", "format_rate", "truncated_rate", "trailing_text_rate",
    "mean_completion_tokens",
)  # fmt: skip


# -- all models of one command -------------------------------------------------------------------


def evaluate_models(
    settings: EvaluationSettings,
    tokenizer: PreTrainedTokenizerBase,
    problems: Mapping[str, Dataset],
) -> dict[str, Evaluated]:
    """Evaluate the base model, add the adapter, and evaluate the trained model.

    Both in the same precision, see `fit_precision`.

    Args:
        settings: which models, and how.
        tokenizer: of the base model.
        problems: by prompt format, the test problems from `load_test_prompts`. Each model answers
            all of them before the next one, because a merge cannot be undone.

    Returns:
        By label: the baselines, unless `baseline` is off, then the trained model. Without an
        adapter, the model alone.

    Raises:
        InputError: if nothing can be written, a model or adapter cannot be loaded, or `--resume`
            finds an evaluation with other settings.
    """
    settings = fit_precision(settings)
    asked = [(settings.in_format(name), dataset) for name, dataset in problems.items()]
    both = settings.adapter is not None and settings.baseline
    untrained = [(now.of_baseline(), dataset) for now, dataset in asked if both]
    before, after = (
        [Task.plan(now, dataset, tokenizer) for now, dataset in each] for each in (untrained, asked)
    )
    make_folder(settings.output_dir)
    with ExitStack() as locks:
        for task in (*before, *after):
            lock = lock_folder(make_folder(task.folder), "writes an evaluation")
            if lock is not None:
                locks.callback(lock.release)
            task.check_place()
        model = load_untrained(settings)
        baselines = {task.settings.label: evaluate(model, tokenizer, task) for task in before}
        if settings.adapter is not None:
            model = add_adapter(model, settings)
        return baselines | {
            task.settings.label: evaluate(
                model, tokenizer, task, baselines.get(task.settings.baseline_label)
            )
            for task in after
        }


def evaluate_formats(
    settings: EvaluationSettings,
    tokenizer: PreTrainedTokenizerBase,
    problems: Mapping[str, Dataset],
) -> dict[str, Any]:
    """Evaluate both models under several prompts; write `eval/prompt_formats.json`.

    Arguments and errors as in `evaluate_models`.

    Returns:
        What `compare_formats` returns, and the file holds.
    """
    evaluated = evaluate_models(settings, tokenizer, problems)
    comparison = compare_formats(evaluated, settings.trained_formats)
    suffix = f"-{settings.given_label}" if settings.given_label else settings.suffix
    path = inside(settings.output_dir, EVALUATIONS, FORMAT_TABLE.format(suffix))
    write_atomically(path, json.dumps(comparison, indent=2))
    return comparison


# -- one model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Hold what one model is asked, and how.

    Attributes:
        dataset: rows with `prompt`, from `load_test_prompts`.
        problems: the same, described.
        identity: what decides the completions, as far as it is known without the model.
    """

    settings: EvaluationSettings
    dataset: Dataset
    problems: list[Problem]
    identity: dict[str, Any]

    @classmethod
    def plan(
        cls, settings: EvaluationSettings, dataset: Dataset, tokenizer: PreTrainedTokenizerBase
    ) -> "Task":
        """Describe the problems, and hash what the answers depend on."""
        problems = describe_problems(dataset, tokenizer)
        return cls(settings, dataset, problems, describe_identity(tokenizer, settings, problems))

    @property
    def folder(self) -> Path:
        """The folder of the records and results."""
        return inside(self.settings.output_dir, EVALUATIONS, self.settings.label)

    def check_place(self, loaded: Mapping[str, Any] = {}) -> None:
        """Refuse to mix with, or to replace, another evaluation; `loaded` is known of the model."""
        identity = self.identity | dict(loaded)
        check_place(self.folder, identity, self.settings.adapter, self.settings.resume)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    baseline: Evaluated | None = None,
) -> Evaluated:
    """Evaluate one model, and write its records and results to `eval/<label>/`.

    Args:
        model: with its adapter, if the task's settings name one.
        tokenizer: of the base model.
        task: describes the model; its label names the folder.
        baseline: to compare with.

    Raises:
        InputError: if the folder holds an evaluation with other settings, or memory runs out.
    """
    settings, loaded = task.settings, describe_loaded(model)
    task.check_place(loaded)
    identity = task.identity | loaded
    limit, stops = settings.max_completion_length, stop_strings(task.dataset)
    configs = {
        True: greedy_config(model, tokenizer, limit),
        False: sampling_config(model, tokenizer, limit, settings.temperature, settings.top_p),
    }

    def complete(prompts: Prompts, greedy: bool) -> Batches:
        return generate_in_batches(
            model, tokenizer, prompts, configs[greedy], stop_strings=stops, seed=settings.seed
        )

    log = open_log(task.folder, identity, settings.resume)
    prompts = prompt_token_ids(task.dataset["prompt"], tokenizer)
    complete_all(complete, prompts, log, settings.num_samples)
    records = judge_all(task.problems, log.completions, settings.num_samples)
    results = summarise(records) | log.describe_speed() | {
        "label": settings.label,
        "model": settings.model.model_name_or_path,
        "adapter": None if settings.adapter is None else str(settings.adapter),
        "precision": describe_precision(settings, model.dtype),
        "prompt_format": settings.data.prompt_format,
        "max_completion_length": settings.max_completion_length,
        "dataset": settings.data.dataset_name,
        "split": settings.data.dataset_test_split,
        "seed": settings.seed,
        "settings": identity,
    } | environment()  # fmt: skip
    evaluated = Evaluated(records, results)
    if baseline is not None:
        results |= compare(baseline, evaluated) | {"baseline": baseline.results["label"]}
    write_evaluated(task.folder, evaluated)
    log.delete()
    return evaluated


def evaluate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> dict[str, float]:
    """Validate a model during training: judge one greedy completion per prompt.

    Args:
        model: with its adapter.
        tokenizer: of the base model.
        dataset: rows with `prompt`, `question`, `answer` and `prompt_format`.
        max_new_tokens: limit of a completion, in tokens.

    Returns:
        `VALIDATION_SCORES`, and `accuracy/<kind>` for each kind of problem.
    """
    summary = summarise(generate_records(model, tokenizer, dataset, max_new_tokens))
    scores = {name: summary[name] for name in VALIDATION_SCORES}
    by_kind = summary["by_kind"].items()
    return scores | {f"accuracy/{kind}": group["accuracy"] for kind, group in by_kind}


def generate_records(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> list[Record]:
    """Generate a greedy completion for every prompt, and judge it; arguments as above."""
    prompts = prompt_token_ids(dataset["prompt"], tokenizer)
    stops = stop_strings(dataset)
    generated = generate_greedily(model, tokenizer, prompts, max_new_tokens, stop_strings=stops)
    completions = {(index, 0): completion for index, completion in enumerate(generated)}
    return judge_all(describe_problems(dataset, tokenizer), completions)


# -- generating ----------------------------------------------------------------------------------


def complete_all(
    complete: Callable[[Prompts, bool], Batches],
    prompts: Prompts,
    log: CompletionLog,
    samples: int = 0,
) -> None:
    """Generate the completions that the log lacks: a greedy one per prompt, then the samples.

    Args:
        complete: completes prompts, greedily if the second argument is true.
        prompts: token ids of each prompt.
        log: receives the completions.
        samples: per prompt.

    Raises:
        InputError: if a single prompt does not fit into memory. The log keeps what is generated.
    """
    for greedy, numbers in ((True, range(1)), (False, range(1, samples + 1))):
        keys = [(index, number) for index in range(len(prompts)) for number in numbers]
        missing = [key for key in keys if key not in log.completions]
        if not missing:
            continue
        start = time.perf_counter()
        try:
            for batch in complete([prompts[index] for index, _ in missing], greedy):
                done = {missing[row]: completion for row, completion in batch}
                log.append(done, time.perf_counter() - start)
                start = time.perf_counter()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                "out of memory with a single prompt: lower --max_completion_length; "
                f"{len(log.completions)} completions are kept for --resume"
            ) from error


# -- judging -------------------------------------------------------------------------------------


def describe_problems(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Describe every row; its prompt is written out as the model sees it."""
    return [
        Problem(
            index=index,
            question_hash=hash_text(row["question"]),
            question=row["question"],
            gold=row["answer"],
            prompt_format=row["prompt_format"],
            prompt=render_prompt(row["prompt"], tokenizer),
            kind=row.get("kind"),
        )
        for index, row in enumerate(dataset)
    ]


def judge_all(
    problems: Sequence[Problem], completions: Completions, samples: int = 0
) -> list[Record]:
    """Judge the completions of every problem.

    Args:
        problems: in order.
        completions: by (index of the problem, number): 0 is greedy, 1 to `samples` are sampled.
        samples: per problem.

    Raises:
        KeyError: if a completion is missing. A score never leaves out a problem.
    """
    records = []
    for problem in problems:
        found = (completions[problem.index, number] for number in range(samples + 1))
        greedy, *sampled = (
            judge_answer(c.text, c.token_count, c.stop_reason, problem.gold, problem.prompt_format)
            for c in found
        )
        records.append(make_record(problem, greedy, sampled))
    return records
