"""Sampling compared with stock TRL, and evaluation with a widely copied loop, on a CPU."""

from collections.abc import Callable
from functools import partial

import torch
from _measure import Row, alternate, compare, timed
from _sizes import Bench
from _trainers import build, quickstart_workload, settings_for
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rewards.grading import is_correct
from sologrpo.data.dataset import load_test_prompts, prompt_token_ids
from sologrpo.evaluation.answer import generate_records
from sologrpo.model.loading import load_base_model, load_tokenizer

GENERATIONS = 8
EVALUATION_TOKENS = 48  # as in the quickstart


def measure_sampling(bench: Bench, row: Row, limit: int) -> None:
    """Compare useful completion tokens per second, at the quickstart's prompts and width.

    Args:
        bench: names the policy, and how much to sample.
        row: gets tokens per second, tokens and seconds.
        limit: of the tokens of a completion.
    """
    limit //= bench.sizes.shrink
    settings = settings_for(bench.model, bench.scratch, max_completion_length=limit)
    workload = quickstart_workload(settings)
    contenders = build(["stock", "solo"], workload)
    dataset = workload.dataset.select(range(bench.sizes.sampling_prompts))
    distinct = prompt_token_ids(dataset["prompt"], workload.tokenizer)
    prompts = [ids for ids in distinct for _ in range(GENERATIONS)]
    for contender in contenders.values():  # warm-up: one group
        contender.sample(prompts[:GENERATIONS])
    runs = {name: partial(contender.sample, prompts) for name, contender in contenders.items()}
    measured = alternate(runs, bench.sizes.rounds, bench.sizes.seconds, at_least=2)
    row |= compare(measured, "tokens_per_s", rate=True)
    row["rows"] = len(prompts)
    row["seconds"] = {name: [round(run["seconds"], 4) for run in measured[name]] for name in runs}
    row["tokens"] = {name: [run["tokens"] for run in measured[name]] for name in runs}


def measure_evaluation(bench: Bench, row: Row, dtype: str) -> None:
    """Compare greedy answers to test problems: the notebook's loop, and ours.

    Args:
        bench: names the policy, and how many problems.
        row: gets the seconds, the equal completions and the right answers.
        dtype: of the weights.
    """
    run, _, model_args = settings_for(bench.model, bench.scratch, dtype=dtype)
    tokenizer = load_tokenizer(str(bench.model))
    problems = load_test_prompts(run, bench.sizes.problems, 0, tokenizer)
    model = load_base_model(model_args)
    limit = EVALUATION_TOKENS // bench.sizes.shrink
    ways: dict[str, Callable[[Dataset], list[str]]] = {
        "notebook": lambda rows: notebook_completions(model, tokenizer, rows, limit),
        "solo": lambda rows: [
            record.completion for record in generate_records(model, tokenizer, rows, limit)
        ],
    }

    def answer(name: str, _: int) -> Row:
        spent, completions = timed(lambda: ways[name](problems))
        return {"seconds": spent, "completions": completions}

    for way in ways.values():
        way(problems.select(range(min(8, len(problems)))))
    runs = {name: partial(answer, name) for name in ways}
    measured = alternate(runs, bench.sizes.rounds, bench.sizes.seconds, at_least=2)
    row |= compare(measured, "seconds")
    theirs, ours = (measured[name][0]["completions"] for name in ways)
    row["problems"] = len(problems)
    row["equal_completions"] = sum(a == b for a, b in zip(theirs, ours, strict=True))
    row["right"] = {
        name: sum(map(is_correct, completions, problems["answer"], problems["prompt_format"]))
        for name, completions in (("notebook", theirs), ("solo", ours))
    }


@torch.no_grad()
def notebook_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Dataset,
    max_new_tokens: int,
    batch_size: int = 8,
) -> list[str]:
    """Run the evaluation loop of a widely copied notebook: batches of 8 in the order of the file.

    Changed only where the answers would be wrong: the tokenizer pads on the left, the chat
    template's text gets no second start token, and only what follows the prompt is decoded.
    """
    model.eval()
    decoded = []
    for start in range(0, len(problems), batch_size):
        rows = problems.select(range(start, min(start + batch_size, len(problems)))).to_list()
        texts = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            for row in rows
        ]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(model.device)
        outputs = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        answers = outputs[:, inputs["input_ids"].size(1) :]
        decoded += tokenizer.batch_decode(answers, skip_special_tokens=True)
    return decoded
