"""The contract of a reward: what it may return and log, and what its errors say."""

import asyncio
import math
import pickle
import re
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch

from rewards import RewardError, RewardSpecError, load_rewards
from rewards.contained import RESERVED_COLUMNS, checked

COLUMNS = ["prompt", "question", "answer", "prompt_format"]
METRICS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BATCH = {
    "prompts": [[{"role": "user", "content": f"Question {i}?"}] for i in range(3)],
    "completions": [[{"role": "assistant", "content": text}] for text in ("one", "two", "three")],
    "answer": ["#### 1", "#### 2", "#### 3"],
    "trainer_state": None,
}


def returning(scores):
    def my_reward(completions, **kwargs):
        return scores

    return my_reward


def picky(completions, answer, **kwargs):
    """Raise for the second row only."""
    return [{"#### 1": 1.0, "#### 3": 3.0}[gold] for gold in answer]


async def picky_async(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return picky(completions, answer)


def jealous(completions, **kwargs):
    """Raise for more than one completion."""
    (text,) = completions
    return [len(text)]


def score(reward, **more):
    result = checked(reward)(**BATCH, **more)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, True, None], [1.0, 1.0, None]),
        ((0.5, -2, Fraction(1, 4)), [0.5, -2.0, 0.25]),
        ((i for i in range(3)), [0.0, 1.0, 2.0]),
        (numpy.arange(3, dtype=numpy.int8), [0.0, 1.0, 2.0]),
        ([numpy.float16(0.5), numpy.bool_(True), torch.tensor(2)], [0.5, 1.0, 2.0]),
        (torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16), [0.5, 1.0, 2.0]),
    ],
)
def test_scores_become_floats(scores, expected):
    got = score(returning(scores))
    assert got == expected
    assert all(value is None or type(value) is float for value in got)


class Evil(float):
    def __float__(self):
        raise RuntimeError("no number today")


# Each returns one score for each completion, as far as one can count them.
NOT_LISTS = [
    *(None, 1.0, "abc", b"abc", bytearray(3), memoryview(b"abc"), dict.fromkeys("abc", 1.0)),
    *({"a": 1.0}.keys(), {1.0, 2.0, 3.0}, frozenset((1, 2, 3)), object(), len),
]
NOT_SCORES = [
    *("good", "1.0", b"1", [1.0], (1.0,), {}, 1j, object(), Evil(1)),
    *(math.nan, math.inf, -math.inf, 1e39, 10**400, numpy.float64("nan"), torch.tensor(math.inf)),
    *(numpy.ones(1), torch.ones(1), torch.ones(2, 2)),
]


# Not `ids=repr`: addresses in names differ between the processes of the tests.
def kind(value):
    return type(value).__name__


@pytest.mark.parametrize("scores", NOT_LISTS, ids=kind)
def test_scores_must_be_a_list(scores):
    with pytest.raises(RewardError) as error:
        score(returning(scores))
    assert re.fullmatch(
        r"reward 'my_reward' returned .+ for 3 completions, not a list of scores", str(error.value)
    )


@pytest.mark.parametrize("value", NOT_SCORES, ids=kind)
def test_a_score_must_be_a_finite_number(value):
    with pytest.raises(RewardError) as error:
        score(returning([1.0, value, 2.0]))
    assert re.fullmatch(
        r"reward 'my_reward' returned .+ on completion 1 of the batch of 3, 'two': return .+",
        str(error.value),
    )
    assert "completion: 'two'" in error.value.details


@pytest.mark.parametrize("reward", [picky, picky_async])
def test_an_exception_names_the_row_and_keeps_its_traceback(reward):
    with pytest.raises(RewardError) as error:
        score(reward)
    assert str(error.value) == (
        f"reward '{reward.__name__}' raised KeyError: '#### 2' "
        "on completion 1 of the batch of 3, 'two'"
    )
    shown = error.value.details
    for line in ("in picky", "\nKeyError: '#### 2'\n", "'Question 1?'", "'#### 2'\n", "'two'"):
        assert line in shown
    assert "rewards/contained.py" not in shown


def test_an_exception_of_the_batch():
    with pytest.raises(RewardError, match="on the batch of 3; each completion alone can be scored"):
        score(jealous)


def test_an_exception_is_one_line_without_control_characters():
    def reward(completions, **kwargs):
        raise ValueError("two\nlines, \x1b[31mred\x1b[0m " + "and long " * 1000)

    with pytest.raises(RewardError) as error:
        score(reward)
    assert str(error.value).startswith(r"reward 'reward' raised ValueError: two lines, \x1b[31mred")
    assert len(str(error.value)) < 600
    assert "\x1b" not in error.value.details


def test_keyboard_interrupt_passes():
    def slow(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(slow)


def test_a_reward_gets_copies():
    def vandal(prompts, completions, answer, tags, trainer_state, **kwargs):
        count = len(completions)
        trainer_state.global_step = 99
        tags[0].clear()
        completions[0][0]["content"] = prompts[0][0]["content"] = "changed"
        completions.clear()
        answer[:] = "xyz"
        return [1.0] * count

    class State:
        def __init__(self):
            self.global_step = 7

    before = pickle.dumps(BATCH)
    tags, state = [["a"], ["b"], ["c"]], State()
    arguments = BATCH | {"tags": tags, "trainer_state": state}
    assert checked(vandal)(**arguments) == [1.0] * 3
    assert pickle.dumps(BATCH) == before
    assert (tags[0], state.global_step) == (["a"], 7)


# -- logs ----------------------------------------------------------------------------------------


def logging(function, *arguments):
    def my_reward(completions, **kwargs):
        kwargs[function](*arguments)
        return [0.0] * len(completions)

    return my_reward


def logged_by(reward):
    logged = []
    functions = {name: lambda *a, n=name: logged.append((n, *a)) for name in LOGGERS}
    score(reward, **functions)
    return logged


LOGGERS = ("log_metric", "log_extra")


@pytest.mark.parametrize("value", [1, 0.5, True, numpy.float32(0.5), torch.tensor(2)])
def test_numbers_are_logged(value):
    ((_, name, number),) = logged_by(logging("log_metric", "judge/seconds", value))
    assert (name, number) == ("judge/seconds", float(value))
    assert type(number) is float


@pytest.mark.parametrize("value", ["abc", "1", None, math.nan, math.inf, [1], 1j, torch.ones(2)])
def test_a_logged_metric_must_be_a_finite_number(value):
    with pytest.raises(RewardError, match=r"^reward 'my_reward' raised .* number|converted"):
        logged_by(logging("log_metric", "x", value))


def documented_metrics():
    names = re.findall(r"^\| `([^`]+)`", METRICS.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for name in names if not name.startswith("gsm8k_weighted/")]


def test_names_of_the_trainer_are_reserved():
    names = documented_metrics()
    assert len(names) > 50
    for name in [*names, "eval_reward"]:
        with pytest.raises(RewardError, match=r"the trainer logs .* itself: choose another name"):
            logged_by(logging("log_metric", name, 1.0))
    for name in ("", 3, None, "two\nlines"):
        for function, value in (("log_metric", 1.0), ("log_extra", ["x"] * 3)):
            with pytest.raises(RewardError, match="the name must be a printable string"):
                logged_by(logging(function, name, value))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a", None, "b\ud800"], ["a", None, "b?"]),
        ((1, 2.5, None), [1, 2.5, None]),
        ([True, False, None], [True, False, None]),
        ([numpy.int64(1), numpy.float32(0.5), 2], [1, 0.5, 2]),
    ],
)
def test_columns_are_logged(values, expected):
    assert logged_by(logging("log_extra", "note", values)) == [("log_extra", "note", expected)]


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("note", ["x"] * 2, "expected a list of 3 values, one per completion"),
        ("note", "abc", "expected a list of 3 values"),
        ("note", dict.fromkeys("abc"), "expected a list of 3 values"),
        ("note", [1, "2", 3], "log only strings, only numbers or only booleans, and None"),
        ("note", [1, True, 3], "log only"),
        ("note", [{}, [], ()], "log only"),
        ("note", [2**63, 1, 1], "log only"),
        *((column, ["x"] * 3, "choose another name") for column in sorted(RESERVED_COLUMNS)),
    ],
)
def test_a_logged_column_must_fit_the_file(column, values, says):
    with pytest.raises(RewardError, match=r"^reward 'my_reward' raised ValueError") as error:
        logged_by(logging("log_extra", column, values))
    assert "rewards/contained.py" not in error.value.details
    assert says in str(error.value)


# -- signatures ----------------------------------------------------------------------------------


OWN = """
def no_kwargs(completions): return [0.0 for _ in completions]
def needs_more(completions, difficulty, **kwargs): return [0.0 for _ in completions]
def fine(prompts, completions, answer, **kwargs): return [0.0 for _ in completions]
def scaled(completions, scale, **kwargs): return [scale for _ in completions]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_signatures(tmp_path, monkeypatch, workers):
    (tmp_path / "signature_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def load(name, *more, **parameters):
        spec = {f"signature_rewards:{name}": parameters}
        (reward,) = load_rewards([spec], [*COLUMNS, *more], 60, workers)
        return reward

    load("fine")
    load("needs_more", "difficulty")
    # A parameter without a default, which the config gives.
    assert load("scaled", scale=2)(completions=["18"]) == [2.0]
    with pytest.raises(RewardSpecError, match=r"'scaled'.*'scale'.*no such column"):
        load("scaled")
    with pytest.raises(RewardSpecError, match=r"'no_kwargs'.*end its parameters with \*\*kwargs"):
        load("no_kwargs")
    with pytest.raises(RewardSpecError, match=r"'needs_more'.*'difficulty'.*no such column"):
        load("needs_more")
