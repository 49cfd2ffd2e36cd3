"""The table of hand-judged completions: the judge must agree with every row of it.

Each line of ``cases.jsonl`` holds a completion, the gold answer, the prompt format, a verdict
given by hand from the rules, and why. Most were written before the judge's code was read;
disagreements were settled by the rules, a few against the first verdict. ``kind`` is ``clear``
where any careful reader would say the same, ``policy`` where the rules in `rewards.grading` had to
decide, and ``attack`` where the text tries to win without an answer. ``source`` is ``thought`` for
an invented completion, or the model that wrote it.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from rewards.grading import PROMPT_FORMATS, judge

LINES = (Path(__file__).parent / "cases.jsonl").read_text(encoding="ascii").splitlines()
CASES = [json.loads(line) for line in LINES]
FIELDS = {
    "completion": str,
    "gold": str,
    "prompt_format": str,
    "correct": bool,
    "kind": str,
    "source": str,
    "note": str,
}


def name(number, case):
    """A test id with the line in the file, where the case belongs, and why it is in the table."""
    return f"{number}-{case['prompt_format']}-{case['kind']}: {case['note']}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name(number, case)) for number, case in enumerate(CASES, 1)]
)
def test_the_judge_agrees(case):
    verdict = judge(case["completion"], case["gold"], case["prompt_format"])
    assert verdict.correct is case["correct"], f"{case['note']}; the judge: {verdict.reason}"


def test_every_field_is_there_and_known():
    for number, case in enumerate(CASES, 1):
        assert {field: type(value) for field, value in case.items()} == FIELDS, number
        assert case["prompt_format"] in PROMPT_FORMATS, number
        assert case["kind"] in {"clear", "policy", "attack"}, number
        assert case["source"] in {"thought", "SmolLM2-135M"}, number
        assert "####" in case["gold"], number
        assert case["note"].strip(), number


def test_no_case_stands_twice():
    keys = Counter((case["completion"], case["gold"], case["prompt_format"]) for case in CASES)
    assert [key for key, count in keys.items() if count > 1] == []


def test_the_table_is_large_and_not_one_sided():
    assert len(CASES) >= 150
    for field in ("kind", "prompt_format", "source", "correct"):
        counts = Counter(case[field] for case in CASES)
        assert min(counts.values()) >= 20, counts
