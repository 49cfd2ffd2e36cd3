"""Evaluation: what is counted, out of what, and what is written."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

from sologrpo.config import RunArguments, parse_evaluation
from sologrpo.data import build_prompts, prompt_token_ids
from sologrpo.evaluation import (
    Record,
    accuracy_by_kind,
    evaluate_greedily,
    generate_records,
    grade,
    save_evaluation,
    summarise,
)
from sologrpo.generation import Completion, generate_greedily
from sologrpo.model import load_tokenizer
from tiny import rows

RIGHT = "<thinking>\n5 + 7 = 12\n</thinking>\n<answer>\n12\n</answer>"
WRONG = "<thinking>\n5 + 7 = 13\n</thinking>\n<answer>\n13\n</answer>"
LOOSE = "5 + 7 = 12"  # no tags: right for the lenient judge only
CHATTY = "<answer>12</answer> I hope this helps!"
ROW = {"question": "5 + 7?", "answer": "#### 12", "prompt_format": "xml", "kind": "add"}


def record(text: str, tokens: int = 9, truncated: bool = False, kind: str | None = "add") -> Record:
    return grade(0, ROW | {"kind": kind}, Completion(text, tokens, truncated))


def test_grade_keeps_what_was_asked_and_judged() -> None:
    graded = grade(3, ROW, Completion(WRONG, 17, truncated=True))
    assert graded == Record(
        index=3,
        question="5 + 7?",
        gold="#### 12",
        completion=WRONG,
        extracted="13",
        correct=False,
        lenient_correct=False,
        format_ok=True,
        trailing_text=False,
        truncated=True,
        completion_tokens=17,
        kind="add",
    )


def test_summary_counts_shares_of_all_records() -> None:
    records = [
        record(RIGHT, 10), record(RIGHT, 20), record(WRONG, 30), record(LOOSE, 5),
        record(CHATTY, 15, truncated=True),
    ]  # fmt: skip
    summary = summarise(records)
    by_kind = summary.pop("by_kind")
    low, high = summary.pop("accuracy_ci95")
    assert summary == {
        "n": 5,
        "accuracy": 3 / 5,
        "accuracy_lenient": 4 / 5,
        "format_rate": 3 / 5,
        "truncated_rate": 1 / 5,
        "trailing_text_rate": 1 / 5,
        "mean_completion_tokens": 16,
    }
    # Wilson's interval of 3 in 5.
    assert (low, high) == pytest.approx((0.2307, 0.8824), abs=1e-4)
    assert by_kind == {"add": {"n": 5, "accuracy": 3 / 5}}


def test_kinds_are_counted_apart() -> None:
    records = [
        record(RIGHT, kind="add"), record(WRONG, kind="add"), record(RIGHT, kind="divide"),
        record(RIGHT, kind=None),
    ]  # fmt: skip
    assert accuracy_by_kind(records) == {
        "add": {"n": 2, "accuracy": 0.5},
        "divide": {"n": 1, "accuracy": 1.0},
    }
    assert accuracy_by_kind([record(RIGHT, kind=None)]) == {}


def prompts(count: int) -> Dataset:
    return build_prompts(Dataset.from_list(rows(count)), RunArguments())


def test_records_follow_the_rows_and_the_completions(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    tokenizer = load_tokenizer(str(tiny_llama))
    problems = prompts(6)
    records = generate_records(model, tokenizer, problems, max_new_tokens=20)
    ids = prompt_token_ids(problems["prompt"], tokenizer)
    completions = generate_greedily(model, tokenizer, ids, 20)
    assert [r.question for r in records] == problems["question"][:]
    assert [r.gold for r in records] == problems["answer"][:]
    assert [r.index for r in records] == list(range(6))
    assert [(r.completion, r.completion_tokens, r.truncated) for r in records] == [
        (c.text, c.token_count, c.truncated) for c in completions
    ]
    assert len({r.completion for r in records}) > 3


def test_validation_scores_are_the_numbers_of_the_summary(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    tokenizer = load_tokenizer(str(tiny_llama))
    problems = prompts(6)
    summary = summarise(generate_records(model, tokenizer, problems, 20))
    scores = evaluate_greedily(model, tokenizer, problems, 20)
    kinds = {name: scores.pop(f"accuracy/{name}") for name in ("add", "subtract")}
    assert kinds == {name: group["accuracy"] for name, group in summary["by_kind"].items()}
    del summary["by_kind"], summary["accuracy_ci95"]
    assert scores == summary


def test_written_results_compare_pairs(tmp_path: Path, tiny_llama: Path) -> None:
    settings = parse_evaluation(
        ["--model", str(tiny_llama), "--dataset_name", "some/where", "--output_dir", str(tmp_path),
         "--seed", "7"]
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama))
    before = [record(text) for text in (RIGHT, WRONG, WRONG, WRONG)]
    after = [record(text) for text in (WRONG, RIGHT, RIGHT, RIGHT)]
    returned = save_evaluation(after, "trained", settings, model, Path("a/dapter"), before)
    folder = tmp_path / "eval" / "trained"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results == json.loads(json.dumps(returned))
    assert results["accuracy"] == 0.75
    assert results["baseline_accuracy"] == 0.25
    assert results["delta"] == 0.5
    assert (results["newly_right"], results["newly_wrong"]) == (3, 1)
    assert results["mcnemar_p"] == pytest.approx(0.625)
    assert results["model"] == str(tiny_llama)
    assert results["adapter"] == "a/dapter"
    assert results["seed"] == 7
    assert results["precision"] == "unquantised, float32, adapter merged"
    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert [Record(**json.loads(line)) for line in lines] == after
