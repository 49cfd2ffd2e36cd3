"""The check before a run: sound rewards pass it, and each way a reward can fail is found."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rewards import is_correct
from rewards.check import RewardResult, Trial, check_hostile, hostile_completions, render
from sologrpo.base.files import recipes
from sologrpo.plan.reward_check import check_run, main
from sologrpo.prompts import PROMPT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
# What the check depends on; recipes that agree in it are checked once.
SETTINGS = (
    "prompt_format", "rewards", "reward_weights", "system_prompt", "max_completion_length",
)  # fmt: skip
CONFIGS = {
    str([yaml.safe_load(path.read_text(encoding="utf-8")).get(key) for key in SETTINGS]): name
    for name, path in recipes().items()
}.values()
TINY_CONFIG = """
model_name_or_path: no-such-model
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 120
"""
PROBLEMS = [
    ("She sells 9 * 2 = <<9*2=18>>18 eggs.", "18"),
    ("That is 40 * 30 = <<40*30=1200>>1200 dollars.", "1,200"),
    ("He loses 2 - 7 = <<2-7=-5>>-5 points.", "-5"),
    ("Nothing is left: 6 - 6 = <<6-6=0>>0.", "0"),
    ("", "61"),
    ("Of 6 rows each has 10, so 6 * 10 = <<6*10=60>>60 seats.", "60"),
]
REWARDS = """
import asyncio
import re

from rewards import is_correct

calls = []


def gold_of(answer):
    return answer.rpartition("####")[2].strip().replace(",", "")


def texts(completions):
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def numbers(completions):
    return [re.findall("-?[0-9]+", text) or [""] for text in texts(completions)]


def recorded(completions, **kwargs):
    calls.append(kwargs | {"completions": completions})
    return [float(len(text)) for text in texts(completions)]


def substring(completions, answer, **kwargs):
    return [float(gold_of(a) in text) for text, a in zip(texts(completions), answer)]


def last_number(completions, answer, **kwargs):
    return [float(n[-1] == gold_of(a)) for n, a in zip(numbers(completions), answer)]


def first_number(completions, answer, **kwargs):
    return [float(n[0] == gold_of(a)) for n, a in zip(numbers(completions), answer)]


def with_commas(completions, answer, **kwargs):
    golds = [a.rpartition("####")[2].strip() for a in answer]
    return [float(f"\\n{g}\\n</answer>" in text) for text, g in zip(texts(completions), golds)]


async def judged_async(completions, answer, prompt_format, **kwargs):
    await asyncio.sleep(0)
    rows = zip(texts(completions), answer, prompt_format)
    return [is_correct(*row) for row in rows]


def judged_where_positive(completions, answer, **kwargs):
    rows = zip(texts(completions), answer)
    return [None if "-" in gold_of(a) else is_correct(text, a) for text, a in rows]


def short(completions, **kwargs):
    return [1.0 if len(text) <= 75 else 0.0 for text in texts(completions)]


def characters(completions, **kwargs):
    return [len(text) / 1000 for text in texts(completions)]


def boxed(completions, answer, **kwargs):
    return [is_correct(text, a, "boxed") for text, a in zip(texts(completions), answer)]


def constant(completions, **kwargs):
    return [0.5] * len(completions)


def limited(completions, completion_ids, max_tokens=100, **kwargs):
    return [0.0 if len(ids) <= max_tokens else -0.5 for ids in completion_ids]


def silent(completions, **kwargs):
    return [None] * len(completions)


def too_few(completions, **kwargs):
    return [1.0]


def crashing(completions, **kwargs):
    return [1 / len(text) for text in texts(completions)]


def undeclared_ids(completions, **kwargs):
    return [float(len(ids)) for ids in kwargs["completion_ids"]]


def needs_a_column(completions, hint, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Command lines for the tiny config and data, with the rewards above under `tried:`."""
    config, data = tmp_path / "tiny.yaml", tmp_path / "problems.jsonl"
    config.write_text(TINY_CONFIG)
    rows = [
        {"question": f"Question {i}?", "answer": f"{solution}\n#### {gold}", "kind": f"kind {i}"}
        for i, (solution, gold) in enumerate(PROBLEMS)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tried.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "tried", raising=False)

    def build(*rewards, weights=(), **keys):
        pairs = [x for key, value in keys.items() for x in (f"--{key}", str(value))]
        weighted = ["--reward_weights", *map(str, weights)] if weights else []
        named = ["--rewards", *rewards] if rewards else []
        return ["--config", str(config), "--dataset_name", str(data), *named, *weighted, *pairs]

    return build


@pytest.fixture
def check(arguments):
    return lambda *rewards, **keys: check_run(arguments(*rewards, **keys))


def failed_cases(report):
    return {result.case for result in report.hostile if result.problem}


# --- what is shipped passes ---------------------------------------------------------------------


GSM8K = Path(os.environ.get("SOLOGRPO_GSM8K") or ROOT.parent / "shared" / "gsm8k")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("data", "rows"), [("quickstart", 2_000), (str(GSM8K), 7_473)])
def test_shipped_configs_pass(name, data, rows, monkeypatch):
    if rows == 7_473 and not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not at {GSM8K}; name its folder in SOLOGRPO_GSM8K")
    monkeypatch.chdir(ROOT)
    report = check_run(["--config", name, "--dataset_name", data])
    assert report.failures == 0, report.text()
    assert {reward.golds_at_best for reward in report.rewards} == {rows}
    assert report.text().endswith("all checks passed")


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_the_rewards_of_a_prompt_format_pass(check, prompt_format):
    report = check(prompt_format=prompt_format)
    assert report.failures == 0, report.text()
    assert [reward.name for reward in report.rewards] == [*PROMPT_FORMATS[prompt_format].rewards]
    assert {reward.golds_at_best for reward in report.rewards} == {len(PROBLEMS)}


# --- the hostile completions --------------------------------------------------------------------


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("gold", [18, 1200, -5, 0, 1, 60, 61, -1])
def test_tricks_are_wrong_by_the_judge_and_the_answer_is_right(prompt_format, gold):
    tricks = hostile_completions(prompt_format, f"It is {gold}.", gold)
    right = render(prompt_format, f"It is {gold}.", str(gold))
    assert is_correct(right, f"#### {gold}", prompt_format.name)
    fooled = [
        case
        for case, text in tricks.items()
        if is_correct(text, f"#### {gold}", prompt_format.name)
    ]
    assert fooled == []
    assert len(set(tricks.values())) == len(tricks)


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS.values(), ids=lambda f: f.name)
def test_most_tricks_hold_the_right_number(prompt_format):
    tricks = hostile_completions(prompt_format, "...", 12345)
    without = {case for case, text in tricks.items() if "12345" not in text}
    assert without == {
        *("empty text", "echo of the instruction", "wrong number, perfect format"),
        *("unevaluated arithmetic", "instruction to the grader"),
    }


def test_the_runs_own_system_prompt_is_echoed():
    xml = PROMPT_FORMATS["xml"]
    own = replace(xml, system_prompt="Say it.")
    assert hostile_completions(own, "...", 1)["echo of the instruction"] == "Say it."
    assert hostile_completions(xml, "...", 1)["echo of the instruction"] == xml.system_prompt


# --- what is found ------------------------------------------------------------------------------

PERFECT_FORMAT = "wrong number, perfect format"
# Rewards and their weights, and the result of the check for the last one.
FINDINGS = {
    "a substring match": (
        ["strict_format", "tried:substring"], [0.2, 1],
        # strict_format keeps an answer that is not closed from paying.
        {"pays": {PERFECT_FORMAT, "answer 'not N'"}, "safe": {"answer not closed"}},
    ),
    "the last number": (
        ["strict_format", "tried:last_number"], [0.2, 1],
        {"pays": {"list of numbers as the answer", "answer 'not N'"},
         "safe": {"answer 'N or N+1'"}},
    ),
    "format alone": (["strict_format"], [1], {"pays": {PERFECT_FORMAT}}),
    "a judge without weight": (
        ["strict_format", "answer_correctness"], [1, 0], {"pays": {PERFECT_FORMAT}},
    ),
    "a gold with a comma": (
        ["strict_format", "tried:with_commas"], [1, 1],
        {"problems": ["1 of 6 golds miss the best score 1; the first is row 2, gold 1200: 0"],
         "at_best": 5},
    ),
    "the reasoning read for the answer": (  # at best: the row without a solution
        ["strict_format", "tried:first_number"], [1, 1], {"problems": ["golds"], "at_best": 1},
    ),
    "a limit of length": (
        ["answer_correctness", "tried:short"], [10, 1],
        {"remarks": [", for its length"], "at_best": 4, "failures": 0},
    ),
    "length": (
        ["answer_correctness", "tried:characters"], [10, 1],
        {"remarks": [", for its length"], "at_best": 0, "failures": 0},
    ),
    "a negative weight: the lowest score is best": (
        ["answer_correctness", "tried:short"], [10, -1],
        {"remarks": [", for its length"], "at_best": 2, "failures": 0},
    ),
    "None": (  # where the answer is not judged, the wrong one earns as much as the right one
        ["strict_format", "tried:judged_where_positive"], [1, 1],
        {"remarks": ["cannot judge 1 of 6 golds (None)"], "at_best": 5, "pays": {PERFECT_FORMAT}},
    ),
    "a constant": (
        ["answer_correctness", "tried:constant"], [1, 0.1],
        {"problems": ["gives 0.5 to every completion: a constant teaches nothing"], "failures": 1},
    ),
    "a constant without weight": (
        ["answer_correctness", "tried:constant"], [1, 0], {"remarks": ["constant"], "failures": 0},
    ),
    "another prompt format": (
        ["answer_correctness", "tried:boxed"], [1, 1], {"problems": ["constant"]},
    ),
    "only None": (
        ["answer_correctness", "tried:silent"], [1, 1],
        {"problems": ["returned None for every completion: it teaches nothing"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FINDINGS)
def test_findings(check, case):
    rewards, weights, expected = FINDINGS[case]
    report = check(*rewards, weights=weights)
    result = report.rewards[-1]
    for found, parts in (
        (result.problems, expected.get("problems", [])),
        (result.remarks, expected.get("remarks", [])),
    ):
        assert len(found) == len(parts), found
        assert all(part in text for part, text in zip(parts, found, strict=True)), found
    assert expected.get("pays", set()) <= failed_cases(report)
    assert not expected.get("safe", set()) & failed_cases(report)
    assert result.golds_at_best == expected.get("at_best", result.golds_at_best)
    assert report.failures == expected.get("failures", report.failures)
    problems = sum(len(reward.problems) for reward in report.rewards)
    assert report.failures == problems + len(failed_cases(report))
    count = report.failures
    verdict = f"{count} check{'s' * (count > 1)} failed" if count else "all checks passed"
    assert report.text().endswith(verdict)


def test_what_fails_is_shown_with_its_scores(check):
    report = check("tried:substring")
    (line,) = [x for x in report.text().splitlines() if x.startswith("FAIL right number, no")]
    assert "pays 1, the right answer 1" in line
    assert "substring 1.0" in line
    assert "'The answer is 18.'" in line


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        # The row where the trick pays best: half a point less than the right answer.
        ([1.0, 5.0, None, 0.5, 4.75, -3.0], (9.5, 10.0, "")),
        # A row that fails: as little as the right answer, which could not be judged.
        ([1.0, 5.0, None, 0.5, 4.75, 0.0],
         (0.0, 0.0, "pays 0, the right answer 0; gold 3, reward 0.0")),
    ],
)  # fmt: skip
def test_the_worst_row_of_a_trick_is_shown(scores, expected):
    trials = [Trial(row, "right answer", "", right=True) for row in range(3)]
    trials += [Trial(row, "trick", "") for row in range(3)]
    (trick,) = check_hostile([RewardResult("reward", 2.0, scores=scores)], trials, ["1", "2", "3"])
    assert (trick.weighted_sum, trick.right_sum) == expected[:2]
    assert trick.problem.startswith(expected[2])
    assert bool(trick.problem) == bool(expected[2])


# --- token ids ----------------------------------------------------------------------------------


def test_token_ids_are_passed_where_there_is_a_tokenizer(check, tiny_llama):
    report = check("answer_correctness", "tried:limited")
    assert report.failures == 0
    assert "remark limited: not checked: needs the model's tokenizer" in report.text()

    def with_tokenizer(reward, *weights, **keys):
        return check(
            "answer_correctness", reward, weights=weights, model_name_or_path=tiny_llama, **keys
        )

    # Completions end at max_completion_length, here 120 tokens; the reward's limit is 100.
    assert with_tokenizer("tried:limited", 1, 1).failures == 0
    report = with_tokenizer("tried:limited", 1, 1, max_completion_length=100)
    assert "constant" in report.rewards[1].problems[0]

    undeclared = with_tokenizer("tried:undeclared_ids", 1, 0.0001).rewards[1]
    assert max(undeclared.judged) == 120  # max_completion_length
    assert undeclared.fault == ""


# --- the calling convention ---------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_format", "chat"), [("xml", True), ("r1_zero", False)])
def test_rewards_are_called_as_trl_calls_them(check, prompt_format, chat):
    check("tried:recorded", prompt_format=prompt_format, reward_workers=0)
    import tried

    assert max(len(call["completions"]) for call in tried.calls) == 8  # generation_batch_size
    call = tried.calls[0]
    assert call["kind"][:6] == [f"kind {i}" for i in range(6)]
    assert call["answer"][1].endswith("#### 1,200")
    assert call["prompt_format"][0] == prompt_format
    assert "prompt" not in call
    assert call["trainer_state"] is None
    call["log_extra"]("column", ["x"] * 8)
    call["log_metric"]("metric", 1.0)
    if chat:
        assert call["prompts"][0][-1] == {"role": "user", "content": "Question 0?"}
        (message,) = call["completions"][0]
        assert message["role"] == "assistant"
        assert message["content"].startswith("<thinking>\nShe sells 9 * 2 = 18 eggs.\n</thinking>")
    else:
        assert call["prompts"][0].endswith("User: Question 0?\nAssistant: <think>")
        assert call["completions"][0].startswith("She sells 9 * 2 = 18 eggs. </think>")


def test_an_async_reward_scores_like_a_plain_one(check):
    report = check("answer_correctness", "tried:judged_async")
    assert report.failures == 0
    assert report.rewards[1].scores == report.rewards[0].scores


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("too_few", "returned 1 scores for"),
        ("crashing", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_reward_is_named_and_the_others_are_checked(check, reward, problem):
    report = check(f"tried:{reward}", "answer_correctness")
    broken, sound = report.rewards
    assert broken.problems[0].startswith(problem)
    assert report.failures == 1
    assert sound.golds_at_best == len(PROBLEMS)
    assert f"FAIL {reward}: {problem}" in report.text()
    assert "not checked: the hostile completions" in report.text()


def test_a_crash_shows_the_completion_and_the_traceback(check):
    text = check("tried:crashing", "answer_correctness").text()
    assert "completion: ''" in text
    assert "return [1 / len(text) for text in texts(completions)]" in text
    assert "reward_check.py" not in text


# --- the command line ---------------------------------------------------------------------------


def exit_code(*arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code


def test_exit_codes_and_output(arguments, capsys):
    assert exit_code(*arguments("strict_format", "answer_correctness")) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("2 rewards, prompt format xml, 6 rows of")
    assert output[2].split() == ["reward", "weight", "min", "max", "golds", "at", "best"]
    assert output[3].split() == ["strict_format", "1", "-1", "1", "6", "of", "6", "ok"]
    assert output[-1] == "all checks passed"

    assert exit_code(*arguments("tried:substring", "tried:crashing")) == 1
    assert capsys.readouterr().out.endswith("\n1 check failed\n")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (["--reward", "strict_format"], "unknown key 'reward'"),
        (["--rewards", "tried:needs_a_column"], "hint"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, mistake, message, capsys):
    assert exit_code(*arguments(), *mistake) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert message in output.err
