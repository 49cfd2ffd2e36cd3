"""A reward that breaks its contract stops the run. The error names reward, row and problem."""

import asyncio
import math
import pickle
import threading
from fractions import Fraction

import pytest

from rewards import REWARDS, RewardError, RewardSpecError, checked, load_rewards

COLUMNS = ["prompt", "question", "answer", "prompt_format"]
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


def score(reward, timeout=0.0):
    result = checked(reward, timeout)(**BATCH)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, True, None], [1.0, 1.0, None]),
        ((0.5, -2, Fraction(1, 4)), [0.5, -2.0, 0.25]),
        ((i for i in range(3)), [0.0, 1.0, 2.0]),
    ],
)
def test_scores_become_floats(scores, expected):
    got = score(returning(scores))
    assert got == expected
    assert all(value is None or type(value) is float for value in got)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 completions"),
        ([1.0] * 4, "returned 4 scores for 3 completions"),
        (None, "returned None, not a list of scores"),
        (1.0, "returned 1.0, not a list of scores"),
        ("abc", "returned 'abc', not a list of scores"),
        ([1.0, "good", 2.0], "returned 'good'; return a number or None"),
        ([1.0, math.nan, 2.0], "returned nan; return None where it cannot judge"),
        ([1.0, math.inf, 2.0], "returned inf"),
        ([1.0, [1.0], 2.0], "returned [1.0]; return a number or None"),
    ],
)
def test_invalid_scores(scores, says):
    with pytest.raises(RewardError) as error:
        score(returning(scores))
    assert "reward 'my_reward'" in str(error.value)
    assert says in str(error.value)
    if isinstance(scores, list) and len(scores) == 3:
        assert "on completion 1 of the batch of 3" in str(error.value)
        assert "completion: 'two'" in str(error.value)


@pytest.mark.parametrize("reward", [picky, picky_async])
def test_an_exception_names_the_row_and_keeps_its_traceback(reward):
    with pytest.raises(RewardError) as error:
        score(reward)
    message = str(error.value)
    assert f"reward '{reward.__name__}' raised KeyError: '#### 2'" in message
    for line in ("on completion 1 of", "'Question 1?'", "'#### 2'", "'two'"):
        assert line in message
    shown = error.value.own_traceback()
    assert "in picky" in shown
    assert "rewards/checking.py" not in shown
    assert shown.endswith("KeyError: '#### 2'\n")


def test_an_exception_of_the_batch():
    with pytest.raises(RewardError, match="on the batch; each completion"):
        score(jealous)


def test_keyboard_interrupt_passes():
    def slow(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(slow)


def test_checked_twice_is_checked_once_and_can_be_pickled():
    wrapped = checked(picky)
    assert checked(wrapped) is wrapped
    again = pickle.loads(pickle.dumps(wrapped))
    assert again.__name__ == "picky"
    assert again(completions=[""], answer=["#### 1"]) == [1.0]


def test_every_built_in_reward_accepts_trls_arguments():
    load_rewards(list(REWARDS), COLUMNS)


OWN = """
def no_kwargs(completions): return [0.0 for _ in completions]
def needs_more(completions, difficulty, **kwargs): return [0.0 for _ in completions]
def fine(prompts, completions, answer, **kwargs): return [0.0 for _ in completions]
"""


def test_signatures(tmp_path, monkeypatch):
    (tmp_path / "signature_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    load_rewards(["signature_rewards:fine"], COLUMNS)
    load_rewards(["signature_rewards:needs_more"], [*COLUMNS, "difficulty"])
    with pytest.raises(RewardSpecError, match=r"'no_kwargs'.*end its parameters with \*\*kwargs"):
        load_rewards(["signature_rewards:no_kwargs"], COLUMNS)
    with pytest.raises(RewardSpecError, match=r"'needs_more'.*'difficulty'.*no such column"):
        load_rewards(["signature_rewards:needs_more"], COLUMNS)


# -- time ----------------------------------------------------------------------------------------


def hangs(completions, **kwargs):
    threading.Event().wait()


async def hangs_async(completions, **kwargs):
    threading.Event().wait()


async def sleeps_async(completions, **kwargs):
    await asyncio.sleep(3600)


@pytest.mark.parametrize("reward", [hangs, hangs_async, sleeps_async])
def test_a_reward_that_hangs_is_located(reward):
    with pytest.raises(RewardError) as error:
        score(reward, timeout=0.2)
    assert str(error.value) == (
        f"reward '{reward.__name__}' did not score 3 completions within 0.2 s: "
        "make it faster, or raise reward_timeout"
    )
    shown = error.value.own_traceback()
    assert "rewards/checking.py" not in shown
    if reward is not sleeps_async:  # which is nowhere: it awaits
        assert f"in {reward.__name__}" in shown
        assert "threading.Event().wait()" in shown


def test_an_async_reward_keeps_its_event_loop():
    # A client that is opened in the first call needs it.
    loops = []

    async def ask(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    reward = checked(ask, timeout=10)
    for _ in range(2):
        assert asyncio.run(reward(completions=["18"])) == [1.0]
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()


def test_a_limit_changes_nothing_for_a_fast_reward():
    def length(completions, **kwargs):
        return [len(text) for text in completions]

    def broken(completions, **kwargs):
        raise TimeoutError("the judge did not answer")

    assert checked(length, timeout=10)(completions=["18", "1"]) == [2.0, 1.0]
    with pytest.raises(RewardError, match="raised TimeoutError: the judge did not answer"):
        checked(broken, timeout=10)(completions=["18"])
