"""Answer problems with a model, in validation and in evaluation, and judge them as in training."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sologrpo.data.dataset import prompt_token_ids, render_prompt, stop_strings
from sologrpo.sampling.generation import (
    Completion,
    default_token_budget,
    generate_in_batches,
    greedy_config,
    sampling_config,
)
from sologrpo.sampling.stopping import StopStrings
from sologrpo.scoring.records import Problem, Record, hash_text, judge_answer, make_record
from sologrpo.scoring.summary import summarise

# The metrics of validation; docs/metrics.md explains each.
VALIDATION_SCORES = (
    "n", "accuracy", "accuracy_lenient", "format_rate", "truncated_rate", "trailing_text_rate",
    "mean_completion_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Questions:
    """Problems as a model reads them: prompts of token ids, and text that ends an answer."""

    problems: list[Problem]
    prompts: list[list[int]]
    stop_strings: list[str]

    @classmethod
    def of(cls, dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> "Questions":
        """Render and tokenize the prompt of every row that `build_prompts` made."""
        problems = [
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
        return cls(problems, prompt_token_ids(dataset["prompt"], tokenizer), stop_strings(dataset))


@dataclass(frozen=True)
class Samples:
    """Completions to sample of each problem, besides the greedy one."""

    number: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


NO_SAMPLES = Samples()


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    max_new_tokens: int,
    samples: Samples = NO_SAMPLES,
    answered: Collection[int] = (),
) -> Iterator[list[Record]]:
    """Answer problems greedily, and yield the judged records of each batch once it is complete.

    Indices in `answered` are left out. Samples depend on the seed and on which problems are left,
    so that those of a resumed evaluation are the same.
    """
    left = [p.index for p in questions.problems if p.index not in answered]
    prompts = [questions.prompts[index] for index in left]
    stops = StopStrings(tokenizer, questions.stop_strings)
    generate = partial(generate_in_batches, model, tokenizer, stops=stops)
    greedy = greedy_config(model, tokenizer, max_new_tokens)
    drawing = sampling_config(model, tokenizer, max_new_tokens, samples.temperature, samples.top_p)
    unseen = len(left) * samples.number
    # The samples of a batch fit into about one other, so that little is lost where this ends early.
    budget = default_token_budget(model) // max(1, samples.number)
    for batch in generate(prompts, config=greedy, token_budget=budget):
        repeated = [prompts[row] for row, _ in batch for _ in range(samples.number)]
        unseen -= len(repeated)
        batches = generate(repeated, config=drawing, seed=samples.seed + unseen)
        drawn = dict(chain.from_iterable(batches))
        records = []
        for i, (row, completion) in enumerate(batch):
            sampled = [drawn[i * samples.number + k] for k in range(samples.number)]
            records.append(judge_all(questions.problems[left[row]], [completion, *sampled]))
        yield records


def judge_all(problem: Problem, completions: Sequence[Completion]) -> Record:
    """Judge the greedy completion of a problem, and then its samples."""
    greedy, *sampled = (
        judge_answer(c.text, c.token_count, c.stop_reason, problem.gold, problem.prompt_format)
        for c in completions
    )
    return make_record(problem, greedy, sampled)


def judge_again(problems: Sequence[Problem], records: Sequence[Record]) -> list[Record]:
    """Judge recorded completions, which another version of the judge may have seen."""
    found = {record.index: (record, *record.samples) for record in records}
    return [
        judge_all(
            problem,
            [
                Completion(a.completion, a.completion_tokens, a.stop_reason)
                for a in found[problem.index]
            ],
        )
        for problem in problems
        if problem.index in found
    ]


def generate_records(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> list[Record]:
    """Answer every row of `build_prompts` greedily; return the judged records in their order."""
    batches = answer(model, tokenizer, Questions.of(dataset, tokenizer), max_new_tokens)
    return sorted(chain.from_iterable(batches), key=lambda record: record.index)


def evaluate_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
) -> dict[str, float]:
    """Validate a model: `VALIDATION_SCORES`, and `accuracy/<kind>` for each kind of problem."""
    summary = summarise(generate_records(model, tokenizer, dataset, max_new_tokens))
    scores = {name: summary[name] for name in VALIDATION_SCORES}
    by_kind = summary["by_kind"].items()
    return scores | {f"accuracy/{kind}": group["accuracy"] for kind, group in by_kind}
