"""Evaluation: generate, grade, record, count. One judge, `rewards.grading`, as in training."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.config.arguments import PRECISIONS
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.data.dataset import prompt_token_ids, render_prompt, stop_strings
from sologrpo.environment import environment
from sologrpo.errors import InputError
from sologrpo.evaluation.completion_log import CompletionLog, Done, check_same_settings
from sologrpo.evaluation.fingerprints import ADAPTER_FILES, MODEL_FILES, hash_folder
from sologrpo.evaluation.generators import Generator, Sampling
from sologrpo.evaluation.precisions import add_adapter, describe_precision, load_untrained
from sologrpo.files import EVALUATIONS, PRECISION_TABLE, RECORDS, RESULTS, write_atomically
from sologrpo.model.memory import is_out_of_memory, release_unused
from sologrpo.sampling.generation import Completion
from sologrpo.scoring.records import (
    END_TOKEN,
    LENGTH,
    STOP_STRING,
    Answer,
    Problem,
    Record,
    compare,
    hash_text,
    judge_answer,
    make_record,
    read_records,
    read_results,
    summarise,
    write_records,
)

LOG = "completions.partial.jsonl"

# What validation logs at every turn; docs/metrics.md explains each.
VALIDATION_SCORES = (
    "n", "accuracy", "accuracy_lenient", "format_rate", "truncated_rate", "trailing_text_rate",
    "mean_completion_tokens",
)  # fmt: skip

Completions = Mapping[tuple[int, int], Done]
Evaluated = tuple[list[Record], dict[str, Any]]


# -- completing and grading ----------------------------------------------------------------------


def generate_records(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> list[Record]:
    """Complete every prompt of the dataset greedily and grade it; all rows, in their order."""
    generator = Generator(model, tokenizer, max_new_tokens, stop_strings(dataset))
    prompts = prompt_token_ids(dataset["prompt"], tokenizer)
    problems = describe_problems(dataset, tokenizer)
    completions = {
        (index, 0): _done(index, 0, completion, generator.stop_strings)
        for batch in generator.complete(prompts)
        for index, completion in batch
    }
    return grade(problems, completions)


def describe_problems(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Say what is asked, row by row; the prompts are written out as the model sees them."""
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


def grade(problems: Sequence[Problem], completions: Completions, samples: int = 0) -> list[Record]:
    """Judge the completions of every problem.

    Args:
        problems: in their order.
        completions: by (index of the problem, number): 0 is greedy, 1 to `samples` are sampled.
        samples: of each problem.

    Raises:
        KeyError: if a completion is missing. No problem is ever left out of a score.
    """

    def judged(problem: Problem, number: int) -> Answer:
        done = completions[problem.index, number]
        return judge_answer(
            done.text, done.tokens, done.stop_reason, problem.gold, problem.prompt_format
        )

    return [
        make_record(
            problem, judged(problem, 0), [judged(problem, i) for i in range(1, samples + 1)]
        )
        for problem in problems
    ]


def _done(index: int, number: int, completion: Completion, stops: Sequence[str]) -> Done:
    return Done(
        index, number, completion.text, completion.token_count, stop_reason(completion, stops)
    )


def stop_reason(completion: Completion, stop_strings: Sequence[str]) -> str:
    """Why it ended: `length`, `stop_string` or `end_token`."""
    if completion.truncated:
        return LENGTH
    # A stop string ends the text wherever it occurs, so one at the end is what ended it.
    return STOP_STRING if completion.text.endswith(tuple(stop_strings)) else END_TOKEN


def complete_all(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    log: CompletionLog,
    samples: int = 0,
    sampling: Sampling | None = None,
) -> None:
    """Complete what the log does not have yet: greedily, then `samples` times by sampling.

    Raises:
        InputError: if a single prompt does not fit into memory. What is done stays in the log.
    """
    greedy = [(index, 0) for index in range(len(prompts))]
    sampled = [(index, number) for index in range(len(prompts)) for number in range(1, samples + 1)]
    for wanted, how in ((greedy, None), (sampled, sampling)):
        keys = [key for key in wanted if key not in log.done]
        if not keys:
            continue
        try:
            _complete(generator, [prompts[index] for index, _ in keys], keys, how, log)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                "out of memory with a single prompt: lower --max_completion_length; "
                f"{len(log.done)} completions are kept for --resume"
            ) from error


def _complete(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, int]],
    sampling: Sampling | None,
    log: CompletionLog,
) -> None:
    start = time.perf_counter()
    for batch in generator.complete(prompts, sampling):
        done = [_done(*keys[row], completion, generator.stop_strings) for row, completion in batch]
        log.append(done, time.perf_counter() - start)
        start = time.perf_counter()


def evaluate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> dict[str, float]:
    """Validation scores, as plain numbers to log."""
    summary = summarise(generate_records(model, tokenizer, dataset, max_new_tokens))
    scores = {name: summary[name] for name in VALIDATION_SCORES}
    for kind, group in summary["by_kind"].items():
        scores[f"accuracy/{kind}"] = group["accuracy"]
    return scores


# -- one evaluation, written down ----------------------------------------------------------------


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    settings: EvaluationSettings,
    label: str,
    adapter: Path | None = None,
    baseline: Sequence[Record] | None = None,
) -> Evaluated:
    """Evaluate a model and write `eval/<label>/results.json` and `records.jsonl`.

    Args:
        model: base model and adapter, already put together.
        tokenizer: of the base model.
        dataset: rows with `prompt`, from `load_test_prompts`.
        settings: of the command line.
        label: name of the folder.
        adapter: what is in the model; None for a base model.
        baseline: records of the model to compare with, on the same problems.

    Returns:
        The records, in the order of the rows, and what `results.json` holds.

    Raises:
        InputError: if `--resume` meets an evaluation with other settings.
    """
    prompts = prompt_token_ids(dataset["prompt"], tokenizer)
    problems = describe_problems(dataset, tokenizer)
    generator = Generator(
        model, tokenizer, settings.max_completion_length, stop_strings(dataset),
        settings.engine, settings.seed,
    )  # fmt: skip
    identity = describe_identity(model, tokenizer, settings, problems, adapter)
    folder = settings.output_dir / EVALUATIONS / label
    log = open_log(folder, identity, settings.resume)
    sampling = Sampling(settings.temperature, settings.top_p)
    complete_all(generator, prompts, log, settings.num_samples, sampling)

    records = grade(problems, log.done, settings.num_samples)
    results = summarise(records) | describe_speed(log) | {
        "label": label,
        "model": settings.model.model_name_or_path,
        "adapter": None if adapter is None else str(adapter),
        "precision": describe_precision(settings, model.dtype, adapter is not None),
        "prompt_format": settings.data.prompt_format,
        "max_completion_length": settings.max_completion_length,
        "dataset": settings.data.dataset_name,
        "split": settings.data.dataset_test_split,
        "seed": settings.seed,
        "settings": identity,
    } | environment()  # fmt: skip
    if baseline is not None:
        results |= compare(baseline, records) | {"baseline": settings.baseline_label}
    write_records(folder / RECORDS, records)
    write_atomically(folder / RESULTS, json.dumps(results, indent=2))
    log.close()
    return records, results


def open_log(folder: Path, identity: Mapping[str, Any], resume: bool) -> CompletionLog:
    """Begin the log of an evaluation; with `resume`, with what an earlier one has done.

    A finished evaluation has no log any more; its records then stand for it.
    """
    results = read_results(folder / RESULTS) if resume else {}
    finished = bool(results) and not (folder / LOG).exists()
    if finished:
        check_same_settings(results.get("settings", {}), identity)
    log = CompletionLog(folder / LOG, identity, resume)
    if finished:
        log.append(_completions(read_records(folder / RECORDS)), results["seconds"])
    return log


def _completions(records: Sequence[Record]) -> list[Done]:
    return [
        Done(r.index, number, a.completion, a.completion_tokens, a.stop_reason)
        for r in records
        for number, a in enumerate((r, *r.samples))
    ]


def describe_speed(log: CompletionLog) -> dict[str, float]:
    """Seconds of generation, loading left out, and completion tokens a second."""
    tokens, seconds = sum(done.tokens for done in log.done.values()), round(log.seconds, 3)
    return {"seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}


def describe_identity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    problems: Sequence[Problem],
    adapter: Path | None,
) -> dict[str, Any]:
    """Everything that decides the completions, as plain values; `--resume` asks for the same.

    `model_hash` is that of a local folder (see `evaluation.fingerprints`); a model
    from the hub is named by its revision instead.
    """
    folder = Path(str(settings.model.model_name_or_path))
    local = folder.is_dir()
    quantisation = getattr(model.config, "quantization_config", None)
    template = tokenizer.chat_template
    drawn = settings.num_samples > 0
    return {
        "model": folder.name if local else str(folder),
        "model_revision": getattr(model.config, "_commit_hash", None),
        "model_hash": hash_folder(folder, MODEL_FILES) if local else None,
        "adapter_hash": None if adapter is None else hash_folder(adapter, ADAPTER_FILES),
        "chat_template_hash": None if template is None else hash_text(str(template)),
        "precision": settings.precision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": _plain(quantisation),
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
        "temperature": settings.temperature if drawn else None,
        "top_p": settings.top_p if drawn else None,
    }


def _plain(config: Any) -> dict[str, Any] | None:
    """The settings of a quantised model, without objects."""
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    kinds = (str, int, float, bool)
    return {k: v for k, v in values.items() if isinstance(v, kinds) and not k.startswith("_")}


# -- the forms of one adapter, side by side ------------------------------------------------------


def evaluate_precisions(
    tokenizer: PreTrainedTokenizerBase, dataset: Dataset, settings: EvaluationSettings
) -> dict[str, dict[str, Any]]:
    """Evaluate the adapter in every precision; write and return `eval/precisions.json`.

    Returns:
        By precision what `compare_precisions` says.
    """
    evaluated = {}
    for precision in PRECISIONS:
        now = replace(settings, precision=precision)
        model = add_adapter(load_untrained(now), tokenizer, now)
        label = settings.label_of(precision)
        evaluated[precision] = evaluate(model, tokenizer, dataset, now, label, settings.adapter)
        del model
        release_unused()
    table = compare_precisions(evaluated, settings.trained_precision)
    content = {"trained": settings.trained_precision, "precisions": table}
    write_atomically(
        settings.output_dir / EVALUATIONS / PRECISION_TABLE, json.dumps(content, indent=2)
    )
    return table


def compare_precisions(evaluated: Mapping[str, Evaluated], trained: str) -> dict[str, Any]:
    """Compare each precision with the one that was trained, on the same problems.

    Args:
        evaluated: records and results by precision.
        trained: the precision to compare with.

    Returns:
        By precision its label, accuracy and interval; the paired comparison with the trained one;
        and `differing_rate`, the share of greedy completions whose text differs from its.
    """
    reference = evaluated[trained][0]
    return {
        precision: {
            "label": results["label"],
            "precision": results["precision"],
            "accuracy_ci95": results["accuracy_ci95"],
            "differing_rate": mean(
                a.completion != b.completion for a, b in zip(reference, records, strict=True)
            ),
        }
        | compare(reference, records)
        for precision, (records, results) in evaluated.items()
    }
