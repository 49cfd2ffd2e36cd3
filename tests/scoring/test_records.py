"""Verdicts, summaries and tables of records, and their files. Needs no model."""

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sologrpo.base.errors import InputError
from sologrpo.scoring.formats import compare_formats, verdict
from sologrpo.scoring.records import (
    Answer,
    Evaluated,
    Problem,
    Record,
    hash_text,
    judge_answer,
    make_record,
    read_evaluated,
    read_records,
    read_results,
    write_evaluated,
)
from sologrpo.scoring.statistics import wilson_interval
from sologrpo.scoring.summary import summarise
from sologrpo.scoring.table import print_ending, print_formats, print_results

RIGHT = "<thinking>\n5 + 7 = 12\n</thinking>\n<answer>\n12\n</answer>"
WRONG = "<thinking>\n5 + 7 = 13\n</thinking>\n<answer>\n13\n</answer>"
LOOSE = "5 + 7 = 12"  # no tags: right for the lenient judge only
CHATTY = "<answer>12</answer> I hope this helps!"
WORDY = "<answer>twelve shells</answer>"
PROBLEM = Problem(
    index=0, question_hash=hash_text("5 + 7?"), question="5 + 7?", gold="#### 12",
    prompt_format="xml", prompt="<user>5 + 7?", kind="add",
)  # fmt: skip


def answer(text: str, tokens: int = 9, stop: str = "end_token", asked: str = "xml") -> Answer:
    return judge_answer(text, tokens, stop, "#### 12", asked)


def record(text: str, tokens: int = 9, stop: str = "end_token", kind: str | None = "add") -> Record:
    return make_record(PROBLEM.model_copy(update={"kind": kind}), answer(text, tokens, stop))


# -- verdicts ------------------------------------------------------------------------------------


def test_an_answer_keeps_what_was_judged() -> None:
    assert answer(WRONG, 17, "length") == Answer(
        completion=WRONG,
        completion_tokens=17,
        stop_reason="length",
        truncated=True,
        extracted="13",
        correct=False,
        lenient_correct=False,
        format_ok=True,
        trailing_text=False,
        integer_answer=True,
    )


@pytest.mark.parametrize(
    ("text", "asked", "integer"),
    [
        (RIGHT, "xml", True),
        (WORDY, "xml", False),
        (LOOSE, "xml", False),
        (r"so \boxed{12}", "boxed", True),
        (r"so \boxed{3} and \boxed{1,200}", "boxed", True),
        (r"so \boxed{12.5}", "boxed", False),
        ("so 12", "boxed", False),
        ("5 + 7 </think> <answer> 12 </answer>", "r1_zero", True),
        ("5 + 7 </think> <answer> 12 shells </answer>", "r1_zero", False),
    ],
)
def test_integer_answer_of_every_format(text: str, asked: str, integer: bool) -> None:
    assert answer(text, asked=asked).integer_answer is integer


# -- summaries -----------------------------------------------------------------------------------


def test_summary_counts_shares_of_all_records() -> None:
    records = [
        record(RIGHT, 10), record(RIGHT, 20, kind="divide"), record(WRONG, 30), record(LOOSE, 5),
        record(CHATTY, 15, "length", kind=None),
    ]  # fmt: skip
    summary = summarise(records)
    # Wilson's intervals of 3 and of 4 in 5.
    assert summary.pop("accuracy_ci95") == pytest.approx((0.2307, 0.8824), abs=1e-4)
    assert summary.pop("accuracy_lenient_ci95") == pytest.approx((0.3755, 0.9638), abs=1e-4)
    assert summary == {
        "n": 5,
        "accuracy": 3 / 5,
        "accuracy_lenient": 4 / 5,
        "format_rate": 3 / 5,
        "truncated_rate": 1 / 5,
        "trailing_text_rate": 1 / 5,
        "integer_rate": 4 / 5,
        "no_answer_rate": 1 / 5,
        "mean_completion_tokens": 16,
        "completion_tokens": {
            "all": {"mean": 16, "p50": 15, "p95": 28},
            "right": {"mean": 15, "p50": 15, "p95": 19.5},
            "wrong": {"mean": 17.5, "p50": 17.5, "p95": 28.75},
        },
        "by_kind": {"add": {"n": 3, "accuracy": 1 / 3}, "divide": {"n": 1, "accuracy": 1.0}},
    }
    one = summarise([record(RIGHT, kind=None)])
    assert (one["completion_tokens"]["wrong"], one["by_kind"]) == (None, {})
    assert "sampled" not in one


def test_samples_are_counted_by_problem() -> None:
    texts = [[RIGHT, RIGHT, WRONG, LOOSE], [WRONG, RIGHT, LOOSE, LOOSE], [WRONG] * 4]
    records = [make_record(PROBLEM, answer(LOOSE), map(answer, four)) for four in texts]
    summary = summarise(records)
    assert summary["accuracy"] == 0  # of the greedy answers, whatever was sampled
    sampled = summary["sampled"]
    assert sampled["num_samples"] == 4
    assert sampled["scores"] == pytest.approx(
        {
            "pass@1": (2 + 1 + 0) / 12,
            "pass@2": (5 / 6 + 3 / 6 + 0) / 3,
            "pass@4": 2 / 3,
        }
    )
    assert sampled["scores_ci95"]["pass@4"] == list(wilson_interval(2, 3))  # not of 12 samples
    for name, (low, high) in sampled["scores_ci95"].items():
        assert 0 <= low < sampled["scores"][name] < high <= 1


def evaluated(texts: list[str], asked: str = "xml", **settings: Any) -> Evaluated:
    records = [
        make_record(PROBLEM.model_copy(update={"prompt_format": asked}), answer(t, asked=asked))
        for t in texts
    ]
    results = summarise(records) | {
        "prompt_format": asked, "split": "test", "max_completion_length": 48,
        "settings": {"prompt_format": asked} | settings,
    }  # fmt: skip
    return Evaluated(records, results)


BOXED = r"so \boxed{12}"


def test_formats_are_compared_with_their_own_baselines() -> None:
    comparison = compare_formats(
        {
            "baseline-boxed": evaluated([BOXED, LOOSE, LOOSE], "boxed"),
            "baseline": evaluated([WRONG, WRONG, WRONG]),
            "trained-boxed": evaluated([LOOSE, BOXED, BOXED], "boxed"),
            "trained": evaluated([RIGHT, RIGHT, LOOSE]),
        },
        ["xml"],
    )
    assert (comparison["n"], comparison["split"]) == (3, "test")
    rows = comparison["prompt_formats"]
    assert list(rows) == ["xml", "boxed"]  # the trained prompt first
    assert [row["role"] for row in rows.values()] == ["trained", "unseen"]
    assert [row["label"] for row in rows.values()] == ["trained", "trained-boxed"]
    assert [row["baseline"] for row in rows.values()] == ["baseline", "baseline-boxed"]
    xml, other = rows.values()
    assert (xml["newly_right"], xml["newly_wrong"], xml["delta"]) == (2, 0, 2 / 3)
    assert (xml["baseline_accuracy_lenient"], xml["accuracy_lenient"]) == (0, 1)
    assert (other["newly_right"], other["newly_wrong"], other["baseline_accuracy"]) == (2, 1, 1 / 3)
    assert comparison["verdict"].startswith("No gain under the trained prompt, xml, nor under")


def test_formats_that_cannot_be_compared_have_no_verdict() -> None:
    other = {"baseline": evaluated([WRONG], limit=3), "trained": evaluated([RIGHT], limit=4)}
    with pytest.raises(InputError, match="baseline: limit 4 here, 3 there"):
        compare_formats(other, ["xml"])
    mixed = {
        "baseline": evaluated([WRONG]), "baseline-boxed": evaluated([LOOSE], "boxed"),
        "trained": evaluated([RIGHT], adapter_hash="9f86"),
        "trained-boxed": evaluated([BOXED], "boxed", adapter_hash="d7a8"),  # before more training
    }  # fmt: skip
    with pytest.raises(InputError, match="trained and trained-boxed have another adapter_hash"):
        compare_formats(mixed, ["xml"])


@pytest.mark.parametrize(
    ("trained", "says"),
    [
        (evaluated([RIGHT, LOOSE]), "trained against baseline, same problems: +50.0 points"),
        (evaluated([RIGHT] * 2, max_completion_length=16),
         "trained is not compared with baseline: max_completion_length 16 here, None there"),
        (evaluated([RIGHT]), "trained is not compared with baseline: questions '"),
    ],
)  # fmt: skip
def test_the_table_of_results_compares_what_can_be_compared(trained: Evaluated, says: str) -> None:
    both = {"baseline": evaluated([WRONG, LOOSE]), "trained": trained}
    for _, results in both.values():
        results |= {"seconds": 2.0, "tokens_per_second": 9.0}
    console = Console(file=io.StringIO(), width=200)
    print_results(console, both)
    assert says in console.file.getvalue()  # type: ignore[attr-defined]


GAIN, NONE, LOSS = (0.01, 0.3, 0.04), (-0.1, 0.1, 0.9), (-0.3, -0.01, 0.04)
UNSURE = (0.001, 0.089, 0.057)  # seen in a run: the interval and the test disagree


@pytest.mark.parametrize(
    ("xml", "boxed", "lm_eval", "says"),
    [
        (GAIN, NONE, NONE, "The gain is in the trained prompt alone: it shows under xml, not under "
         "boxed, lm_eval. A gain shows where"),
        (GAIN, GAIN, NONE, "The gain travels in part: it shows under xml, boxed, not under lm_eval."
         " A gain"),
        (GAIN, GAIN, GAIN, "The gain travels: it shows under xml, boxed, lm_eval. A gain"),
        (GAIN, NONE, LOSS, "The gain is in the trained prompt alone: it shows under xml, not under "
         "boxed, lm_eval. Accuracy fell under lm_eval. A gain"),
        (NONE, NONE, NONE, "No gain under the trained prompt, xml, nor under any other. A gain"),
        (LOSS, NONE, GAIN, "No gain under the trained prompt, xml; one shows under lm_eval. "
         "Accuracy fell under xml. A gain"),
        (GAIN, NONE, UNSURE, "The gain is in the trained prompt alone: it shows under xml, not"),
        ((0.0, 0.3, 0.04), GAIN, NONE,
         "No gain under the trained prompt, xml; one shows under boxed."),
    ],
)  # fmt: skip
def test_the_verdict_on_prompts_follows_intervals_and_tests(
    xml: Any, boxed: Any, lm_eval: Any, says: str
) -> None:
    differences = {"xml": xml, "boxed": boxed, "lm_eval": lm_eval}
    roles = {"xml": "trained", "boxed": "unseen", "lm_eval": "harness's"}
    rates = {"truncated_rate": 0.1, "baseline_truncated_rate": 0.1}
    rows = {
        name: {"role": roles[name], "delta_ci95": (low, high), "mcnemar_p": p, **rates}
        for name, (low, high, p) in differences.items()
    }
    assert verdict(rows).startswith(says)
    assert "cut off" not in verdict(rows)
    for rate in rates:
        cut = rows | {"boxed": rows["boxed"] | {rate: 0.11}}
        assert " Over 10% of the answers were cut off under boxed: raise --max" in verdict(cut)


def test_the_table_of_formats_fits_80_columns() -> None:
    row = {
        "role": "harness's", "accuracy": 0.495, "baseline_accuracy": 0.192, "delta": 0.303,
        "delta_ci95": [0.238, 0.354], "mcnemar_p": 1.1e-20, "accuracy_lenient": 0.495,
        "baseline_accuracy_lenient": 0.215, "truncated_rate": 0.0, "baseline_truncated_rate": 0.18,
    }  # fmt: skip
    names = ("xml", "boxed", "r1_zero", "lm_eval")
    text = io.StringIO()
    formats = dict.fromkeys(names, row)
    comparison = {"n": 400, "verdict": "The gain travels.", "prompt_formats": formats}
    print_formats(Console(file=text, width=80), comparison)
    assert "…" not in text.getvalue()
    for part in (*names, "harness's", "19.2% ->", "+23.8 to +35.4", "1.1e-20", "gain travels."):
        assert part in text.getvalue()


# -- files ---------------------------------------------------------------------------------------


def test_records_and_results_are_read_back(tmp_path: Path) -> None:
    written = [
        make_record(PROBLEM, answer(RIGHT), [answer(WRONG), answer("line\u2028break \ud83d")]),
        record(LOOSE, kind=None),
    ]
    write_evaluated(tmp_path, Evaluated(written, RESULTS))
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8")
    assert lines.count(PROBLEM.prompt) == 2  # once per problem, however many samples
    read = read_records(tmp_path / "records.jsonl")
    assert read[1:] == written[1:]
    assert read[0].samples[0] == written[0].samples[0]
    assert read[0].samples[1].completion == "line\u2028break ?"  # half of a surrogate pair
    assert read_results(tmp_path / "results.json") == RESULTS
    assert read_evaluated(tmp_path) == Evaluated(read, RESULTS)
    assert read_results(tmp_path / "nowhere.json") == {}


RESULTS = summarise([record(RIGHT), record(LOOSE)]) | {
    "seconds": 2.0, "tokens_per_second": 9.0, "settings": {}, "adapter": None,
    "precision": "merged", "prompt_format": "xml", "split": "test", "max_completion_length": 48,
}  # fmt: skip
OLD: dict[str, Any] = record(RIGHT).model_dump() | {
    "extracted": "99", "correct": False, "integer_answer": False
}  # fmt: skip


def changed(**values: object) -> str:
    return json.dumps(OLD | values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"question": "5 + 7?"}', "line 1: index: missing"),
        (changed(gold="12"), "line 1: gold: .*####"),
        (changed(index=-1), "line 1: index: -1; expected greater than or equal to 0"),
        (changed(samples=[{}]), "line 1: samples.0.completion: missing"),
        (json.dumps(OLD) + "\n" + json.dumps(OLD)[:50], "line 2 is not valid JSON"),
    ],
)
def test_files_without_records_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON: .*: delete it, and evaluate again"),
        ('{"n": 2}', "accuracy: missing"),
        (json.dumps(RESULTS | {"sampled": {"scores": {}}}), "sampled.num_samples: missing"),
        (json.dumps(RESULTS | {"n": 0}), "n: 0; expected greater than"),
        (json.dumps(RESULTS | {"by_kind": {"add": 3}}), "by_kind.add: 3; expected key"),
    ],
)
def test_damaged_results_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_results(path)


def test_scoring_imports_no_library_of_models() -> None:
    command = [sys.executable, "-c", "import sys, sologrpo.scoring; print(*sys.modules)"]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert not {"torch", "transformers", "trl", "numpy", "datasets"} & set(printed.split())


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("baseline", "trained"),
         "accuracy  0.0% -> 50.0%: +50.0 points (95 % interval -27.3 to +90.5)"),
        (("trained",), "accuracy  50.0% (95 % interval 9.5% to 90.5%)"),
    ],
)  # fmt: skip
def test_the_end_of_an_evaluation_can_be_copied(labels: Sequence[str], expected: str) -> None:
    console = Console(file=io.StringIO(), width=40)
    run = Path("runs/my run")
    both = {"baseline": evaluated([WRONG, LOOSE]), "trained": evaluated([RIGHT, LOOSE])}
    shown = {label: both[label] for label in labels}
    print_ending(console, shown, run, {"adapter": run / "adapter"})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == [
        expected,
        "adapter   runs/my run/adapter",
        "next      sologrpo chat --run 'runs/my run'",
        "          sologrpo export --run 'runs/my run' --save_merged 'out/my run'",
    ]
