"""The table of hand-judged completions. The judge must agree with every row.

Each line of ``cases.jsonl`` has a completion, the gold answer, the prompt format, a verdict made by
hand from the rules, and its reason. Most verdicts were made before reading the judge's code.
Disagreements were settled by the rules, a few against the first verdict. ``kind`` is ``clear`` if
any careful reader would agree, ``policy`` if the rules in `rewards.grading` decide, and ``attack``
if the text tries to win without an answer. ``source`` is ``thought`` for an invented completion, or
the model that wrote it.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from rewards.grading import judge

LINES = (Path(__file__).parent / "cases.jsonl").read_text(encoding="ascii").splitlines()
CASES = [json.loads(line) for line in LINES]


def name(number, case):
    """Make a test id of the line number, the prompt format, the kind and the note."""
    return f"{number}-{case['prompt_format']}-{case['kind']}: {case['note']}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name(number, case)) for number, case in enumerate(CASES, 1)]
)
def test_the_judge_agrees(case):
    verdict = judge(case["completion"], case["gold"], case["prompt_format"])
    assert verdict.correct is case["correct"], f"{case['note']}; the judge: {verdict.reason}"


def test_the_table_is_large_and_not_one_sided():
    assert len(CASES) >= 150
    for field in ("kind", "prompt_format", "source", "correct"):
        counts = Counter(case[field] for case in CASES)
        assert min(counts.values()) >= 20, counts
