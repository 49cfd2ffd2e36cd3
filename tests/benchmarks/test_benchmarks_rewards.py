"""The benchmarks of the rewards, and the examples in docs/grading.md."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rewards import is_correct, lenient_is_correct

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import graders  # noqa: E402
import reward_throughput as throughput  # noqa: E402

GUIDE = (ROOT / "docs/grading.md").read_text(encoding="utf-8")


# --- docs/grading.md ------------------------------------------------------------------------------


def rows_under(*columns):
    """The rows of all tables in the guide whose head starts with `columns`, as lists of cells."""
    rows, inside = [], False
    for line in GUIDE.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif tuple(cells[: len(columns)]) == columns:
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append([cell.strip("`") for cell in cells])
    return rows


PLACES = rows_under("Format", "Completion", "Gold", "Verdict")
ANSWERS = rows_under("Answer", "Gold", "Verdict")
BOTH = rows_under("Completion", "Gold", "Strict", "Lenient")
WORDS = {"right": True, "wrong": False}


def test_the_guide_has_examples():
    assert {row[0] for row in PLACES} == {"xml", "r1_zero", "boxed"}
    assert min(len(PLACES), len(ANSWERS)) > 15
    assert len(BOTH) >= 4


@pytest.mark.parametrize("row", PLACES, ids=lambda row: f"{row[0]}: {row[1]}")
def test_guide_on_where_the_answer_stands(row):
    prompt_format, completion, gold, verdict, *_ = row
    assert is_correct(completion, f"#### {gold}", prompt_format) is WORDS[verdict]


@pytest.mark.parametrize("prompt_format", ["xml", "boxed"])
@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row[0])
def test_guide_on_what_the_answer_says(row, prompt_format):
    answer, gold, verdict, *_ = row
    completion = throughput.TEMPLATES[prompt_format].format(reasoning="9 * 2", answer=answer)
    assert is_correct(completion, f"#### {gold}", prompt_format) is WORDS[verdict]


SIGNS = [
    (answer.replace("\\|", "|"), right)
    for _, *columns in rows_under("Kind", "Right", "Wrong")
    for right, cell in zip((True, False), columns, strict=True)
    for answer in cell.split("` `")
    if answer != "none"
]


@pytest.mark.parametrize("prompt_format", ["xml", "boxed"])
@pytest.mark.parametrize(("answer", "right"), SIGNS)
def test_guide_on_signs_and_words_at_the_number(answer, right, prompt_format):
    completion = throughput.TEMPLATES[prompt_format].format(reasoning="9 * 2", answer=answer)
    assert is_correct(completion, "#### 18", prompt_format) is right


def test_the_guide_has_signs_of_both_kinds():
    assert sum(right for _, right in SIGNS) > 25
    assert sum(not right for _, right in SIGNS) > 60


@pytest.mark.parametrize("row", BOTH, ids=lambda row: row[0])
def test_guide_on_strict_and_lenient(row):
    completion, gold, strict, lenient = row
    assert is_correct(completion, f"#### {gold}") is WORDS[strict]
    assert lenient_is_correct(completion, f"#### {gold}") is WORDS[lenient]


def test_guide_shows_what_the_command_prints():
    command, shown = re.search(r"```\n\$ (.*)\n([^`]*)```", GUIDE).groups()
    printed = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert set(shown.splitlines()) <= set(printed.stdout.splitlines())


# --- graders.py -----------------------------------------------------------------------------------


def case(number, **changes):
    row = {
        "completion": f"<answer>{number}</answer>",
        "gold": "#### 18",
        "prompt_format": "xml",
        "correct": number == 18,
        "kind": "clear",
        "note": "",
        "source": "thought",
    }
    return row | changes


def test_counts_right_wrong_none_and_errors():
    def grade(row):
        if "error" in row["completion"]:
            raise KeyError("no such number")
        return {"pass": True, "refuse": False}.get(row["note"])

    cases = [
        case(18, note="pass"),
        case(18, note="refuse"),
        case(17, note="pass", kind="attack"),
        case(17, note="pass", kind="attack"),
        case(17, note="abstain"),
        case("error"),
    ]
    outcomes = graders.run(graders.Grader("any", grade), cases)
    assert outcomes[-1].error == "KeyError: 'no such number'"
    assert graders.count_mistakes(cases, outcomes)[:4] == ["2", "1", "1", "1"]
    assert graders.agreed(cases, outcomes, range(6)) == "16.6 %"
    agreement = graders.tables(cases, {"any": outcomes}).splitlines()
    assert agreement[0].startswith("| Agrees with the table on | all (6) | clear (4) | policy (0)")
    assert agreement[2].startswith("| any | 16.6 % | 25.0 % | - | 0.0 % | 16.6 % | - |")


def test_our_own_graders_are_the_judge():
    strict, lenient = graders.our_graders()
    row = case(17, completion="<answer>18</answer> for 9 eggs")
    assert (strict.grade(row), lenient.grade(row)) == (True, False)


def test_reads_the_case_table_of_the_judge():
    cases = graders.read_cases(graders.parse_args([]).cases)
    groups = graders.groups_of(cases)
    assert len(groups["all"]) == sum(len(groups[kind]) for kind in graders.KINDS) == len(cases)
    assert groups["by a model"]


def test_refuses_a_document_without_marks():
    with pytest.raises(ValueError, match="graders:begin"):
        graders.replace_between_marks(f"{graders.END} {graders.BEGIN}", "table")


def test_names_the_missing_package(monkeypatch):
    monkeypatch.setattr(graders, "NEEDED", {"json": "json", "no_such_grader": "some-package"})
    with pytest.raises(SystemExit, match=r"^error: .*: pip install some-package$"):
        graders.check_packages()


@pytest.mark.parametrize("module", [graders, throughput], ids=lambda module: module.__name__)
def test_docstring_examples(module):
    tested = doctest.testmod(module)
    assert tested.attempted
    assert not tested.failed


# --- reward_throughput.py -------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_format", throughput.TEMPLATES)
def test_completions_are_what_their_kind_says(prompt_format):
    samples = throughput.make_samples(400, prompt_format, seed=1)
    assert {sample.kind for sample in samples} == set(throughput.MIX)
    for sample in samples:
        if sample.kind != "sampled":
            right = is_correct(sample.text, sample.gold, prompt_format)
            assert right is (sample.kind in ("right", "trailing")), sample


def test_completions_follow_the_seed():
    first, second = (throughput.make_samples(50, "xml", seed) for seed in (1, 2))
    assert first == throughput.make_samples(50, "xml", 1) != second


def test_measures_every_completion_once():
    calls = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        return [0.5] * len(completions)

    samples = throughput.make_samples(throughput.STEP + 3, "xml", seed=0)
    row = {}
    throughput.measure([reward], throughput.batches(samples, "xml"), 2, row)
    assert calls == [throughput.STEP, 3] * 3
    assert row["mean_score"] == 0.5
    assert len(row["seconds"]) == 2
