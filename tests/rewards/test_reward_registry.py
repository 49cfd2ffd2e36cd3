"""Rewards named in a config: built in, with parameters, or a user's own."""

import asyncio
import hashlib
import inspect

import pytest

from rewards import REWARDS, load_reward, load_rewards

OWN = """
GREETING = "hello"

def my_reward(completions, bonus=1.0, **kwargs):
    return [bonus * len(text) for text in completions]

async def my_async_reward(completions, bonus=1.0, **kwargs):
    return [bonus for _ in completions]

class Judge:
    def __call__(self, completions, **kwargs):
        return [0.5 for _ in completions]

my_judge = Judge()
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "broken_rewards.py").write_text("def x(:\n")
    (tmp_path / "missing_rewards.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_names_and_order():
    names = ["integer_answer", "strict_format"]
    loaded = load_rewards(names)
    assert [reward.__name__ for reward in loaded] == names
    assert [reward(completions=["<answer>18</answer>"]) for reward in loaded] == [[1.0], [-1.0]]
    assert load_rewards([]) == []


def test_parameters():
    (reward,) = load_rewards([{"own_rewards:my_reward": {"bonus": 3}}])
    assert reward.__name__ == "my_reward"
    assert reward(completions=["", "ab"]) == [0.0, 6.0]


@pytest.mark.parametrize("spec", [{"strict_format": None}, {"strict_format": {}}])
def test_no_parameters(spec):
    assert load_reward(spec) is REWARDS["strict_format"]


def test_a_users_own_reward():
    plain, judge = load_rewards(["own_rewards:my_reward", "own_rewards:my_judge"])
    assert plain(completions=["abc"]) == [3.0]
    assert judge(completions=["abc"]) == [0.5]
    assert (plain.__name__, judge.__name__) == ("my_reward", "my_judge")


def test_an_async_reward_stays_async():
    for spec in ("own_rewards:my_async_reward", {"own_rewards:my_async_reward": {"bonus": 2}}):
        (reward,) = load_rewards([spec])
        assert inspect.iscoroutinefunction(reward.__call__)
        assert asyncio.run(reward(completions=["abc"])) in ([1.0], [2])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("strict_fromat", "sologrpo rewards"),
        ("", "unknown reward"),
        ("no_such_module:reward", "cannot import 'no_such_module'"),
        ("broken_rewards:x", "SyntaxError"),
        ("missing_rewards:x", "no_such_package_anywhere"),
        (":x", "cannot import ''"),
        ("own_rewards:my_rewrad", "did you mean 'my_reward'"),
        ("own_rewards:GREETING", "has no function 'GREETING'"),
        ({"own_rewards:my_reward": {"bnous": 2}}, "no parameter 'bnous'; it takes: bonus"),
        ({"own_rewards:my_reward": {"completions": []}}, "no parameter 'completions'"),
        ({"own_rewards:my_reward": {"bonus": "many"}}, "bonus must be a number"),
        ({"own_rewards:my_reward": {"bonus": True}}, "bonus must be a number"),
        ({"trailing_text": {"weight": 2}}, "it takes: none"),
        ({"strict_format": 3}, "write a reward as a name or"),
        ({"a": {}, "b": {}}, "write a reward as a name or"),
    ],
)
def test_mistakes_are_one_line(spec, message):
    with pytest.raises(ValueError, match="reward") as error:
        load_rewards([spec])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_listed_twice():
    with pytest.raises(ValueError, match="listed twice"):
        load_rewards(["strict_format", {"strict_format": {}}])


@pytest.mark.parametrize("name", ["my_reward", "my_async_reward", "my_judge"])
def test_the_source_hash_is_that_of_the_file(name):
    for spec in (f"own_rewards:{name}", {f"own_rewards:{name}": {}}):
        (reward,) = load_rewards([spec])
        assert reward.source_hash == hashlib.sha256(OWN.encode()).hexdigest()


def test_rewards_of_other_files_have_other_source_hashes():
    specs = ["strict_format", "trailing_text", "answer_correctness", "math:fsum", "math:prod"]
    same, again, *others = [reward.source_hash for reward in load_rewards(specs)]
    assert same == again
    assert len({same, *others}) == 4
