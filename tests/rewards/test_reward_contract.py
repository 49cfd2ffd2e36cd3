"""The contract of every built-in reward, and its scores."""

import pickle

import pytest

from rewards import OUTCOME_REWARDS, REWARDS
from rewards.completions import text_of
from rewards.correctness import answer_correctness, gsm8k_weighted

GOOD = "<thinking>\n9 * 2 = 18\n</thinking>\n<answer>\n18\n</answer>"
TEXTS = [GOOD, "18", "<answer>18</answer> Bye.", r"\boxed{18}", "", "\ud800"]


def call(reward, completions, **columns):
    """Call a reward as TRL's GRPOTrainer does."""
    count = len(completions)
    return reward(
        prompts=["question"] * count,
        completions=completions,
        completion_ids=[[7] * 60] * count,
        trainer_state=None,
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
        **{"answer": ["#### 18"] * count, "prompt_format": ["xml"] * count, **columns},
    )


def as_chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_keeps_the_contract(name):
    reward = REWARDS[name]
    scores = call(reward, TEXTS)
    assert len(scores) == len(TEXTS)
    assert all(isinstance(score, float) for score in scores)
    parts = [[{"role": "assistant", "content": [{"type": "text", "text": t}]}] for t in TEXTS]
    for chat in ([as_chat(text) for text in TEXTS], parts):
        assert call(reward, chat) == scores
    for prompt_format in ("xml", "r1_zero", "boxed"):  # one name for all, or a column
        column = call(reward, TEXTS, prompt_format=[prompt_format] * len(TEXTS))
        assert call(reward, TEXTS, prompt_format=prompt_format) == column
    assert call(reward, []) == []
    assert pickle.loads(pickle.dumps(reward)) is reward


@pytest.mark.parametrize("reward", [answer_correctness, gsm8k_weighted])
def test_no_score_without_a_valid_gold(reward):
    assert reward(["<answer>18</answer>", "18"], ["18", "#### x"]) == [None, None]
    assert reward([GOOD, r"\boxed{18}"], ["nothing", "#### 18"])[0] is None


@pytest.mark.parametrize(
    ("reward", "columns"),
    [
        (answer_correctness, {"answer": ["#### 18"]}),
        (gsm8k_weighted, {"answer": ["#### 18"]}),
        (answer_correctness, {"answer": ["#### 18"] * 2, "prompt_format": ["xml"]}),
    ],
)
def test_columns_of_another_length_are_an_error(reward, columns):
    with pytest.raises(ValueError, match="zip"):
        reward([GOOD, GOOD], **columns)


def test_an_unknown_prompt_format_is_not_taken_for_a_missing_gold():
    with pytest.raises(ValueError, match="prompt_format"):
        answer_correctness([GOOD], ["#### 18"], prompt_format="json")


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ([], ""),
        ([{"role": "assistant", "content": "17"}, {"role": "assistant", "content": "18"}], "18"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"role": "assistant"}], ""),
        ([{"content": [{"type": "text", "text": "1"}, {"type": "text", "text": "8"}]}], "18"),
        ([{"content": [{"type": "image"}, {"type": "text", "text": "18"}]}], "18"),
    ],
)
def test_text_of(completion, text):
    assert text_of(completion) == text


# --- scores -------------------------------------------------------------------------------------


def test_answer_correctness_follows_the_column_of_formats():
    completions = ["<answer>18</answer>", "a </think> <answer>18</answer>", r"\boxed{18}"]
    formats = ["xml", "r1_zero", "boxed"]
    golds = ["#### 18"] * 3
    assert answer_correctness(completions, golds, prompt_format=formats) == [1.0, 1.0, 1.0]
    assert answer_correctness(completions, golds, prompt_format="boxed") == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "prompt_format", "score"),
    [
        ("so </think> <answer>18</answer>", "r1_zero", 1.0),
        ("so </think> <answer>17</answer>", "r1_zero", 0.2),
        ("so </think> \\boxed{18}", "r1_zero", 1.0),
        ("so </think> \\boxed{17}", "r1_zero", 0.2),
        ("so </think> 18", "r1_zero", 0.1),
        ("so \\boxed{18}", "r1_zero", 0.1),
        ("so <answer>18</answer>", "r1_zero", 0.1),
        ("so <answer>18</answer>", "xml", 1.0),
        ("so <answer>18</answer>", "boxed", 0.1),
        ("so \\boxed{18}", "xml", 1.0),
        ("<answer>18</answer> \\boxed{17}", "xml", 1.0),
        ("<answer>18</answer><answer>17</answer>", "xml", 0.2),
        ("no idea", "r1_zero", 0.0),
        ("", "xml", 0.0),
    ],
)
def test_gsm8k_weighted(completion, prompt_format, score):
    scores = gsm8k_weighted([completion], ["#### 18"], prompt_format=prompt_format)
    assert scores == pytest.approx([score])


def test_gsm8k_weighted_reports_its_parts():
    logged = {}
    completions = ["<answer>18</answer>", "<answer>17</answer>", "18", "x", "18"]
    golds = ["#### 18"] * 4 + ["no gold"]
    gsm8k_weighted(completions, golds, log_metric=logged.__setitem__)
    assert logged == {"gsm8k_weighted/format": 0.625, "gsm8k_weighted/answer": 0.25}
    logged.clear()
    gsm8k_weighted(["18"], ["no gold"], log_metric=logged.__setitem__)
    assert not logged


@pytest.mark.parametrize(
    ("prompt_format", "reason"),
    [("xml", "no answer element and no box"), ("lm_eval", "no answer line and no box")],
)
def test_gsm8k_weighted_names_what_is_missing(prompt_format, reason):
    logged = {}
    gsm8k_weighted(["18"], ["#### 18"], prompt_format, log_extra=logged.__setitem__)
    assert logged["gsm8k_weighted/reason"] == [reason]


@pytest.mark.parametrize("name", OUTCOME_REWARDS)
def test_the_reason_of_each_verdict_is_logged(name):
    logged = {}
    box = "\\boxed{{{}}}"
    completions = [box.format(18), box.format(17), "18", box.format(18)]
    golds = ["#### 18"] * 3 + ["no gold"]
    REWARDS[name](completions, golds, prompt_format="boxed", log_extra=logged.__setitem__)
    right, wrong, none, no_gold = logged[f"{name}/reason"]
    assert right == "18 is the gold answer"
    assert wrong == "17 is not the gold answer 18"
    assert none.startswith("no ")
    assert "gold answer" in no_gold
