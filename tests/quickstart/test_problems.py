"""The word problems: correct answers, and three splits without overlap."""

import json
import re
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from quickstart import problems
from quickstart.problems import (
    ONE_STEP,
    OPERATIONS,
    TEMPLATES,
    TWO_STEP,
    WORDS,
    Problem,
    Split,
    generate,
)
from quickstart.templates import THINGS

FOLDER = Path(problems.__file__).parent
SPLITS: tuple[Split, ...] = ("train", "test", "test_unseen")
SHIPPED = {split: FOLDER / f"{split}.jsonl" for split in SPLITS}
CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


def read(split: Split) -> list[Problem]:
    return [json.loads(line) for line in SHIPPED[split].read_text().splitlines()]


def numbers(question: str) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in re.findall(r"\d+", question)))


def templates(split: Split) -> list[str]:
    return [template[0] for kind in TEMPLATES[split].values() for template in kind]


def pattern(question: str, split: Split) -> re.Pattern[str]:
    """Return an expression that matches every question from a template."""
    people, things, containers = WORDS[split]
    names = "|".join(person.name for person in people)
    words = {
        "name": names,
        "other": names,
        "she": "she|he",
        "She": "She|He",
        "her": "her|him",
        "possessive": "her|his",
        "thing": "|".join(thing.singular for thing in things),
        "things": "|".join(thing.plural for thing in things),
        "box": "|".join(container.singular for container in containers),
        "boxes": "|".join(container.plural for container in containers),
    } | dict.fromkeys("abc", r"\d+")
    pieces = re.split(r"{(\w+)}", question)
    return re.compile(
        "".join(
            f"(?:{words[piece]})" if index % 2 else re.escape(piece)
            for index, piece in enumerate(pieces)
        )
    )


def test_shipped_files_match_the_generator(tmp_path: Path) -> None:
    problems.main(["--out", str(tmp_path)])
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == SHIPPED[split].read_bytes()


@pytest.mark.parametrize("split", SPLITS)
def test_schema(split: Split) -> None:
    for row in read(split):
        assert list(row) == ["question", "answer", "kind"]
        assert all(type(value) is str for value in row.values())
        assert row["question"].count("?") <= 1
        assert row["question"].endswith("?" if split == "test" else ("?", "."))
        assert not re.search(r"[{}]|  |\b[01] ", row["question"])
        assert len(row["question"].split()) <= (32 if row["kind"] in ONE_STEP else 45)


@pytest.mark.parametrize("split", SPLITS)
def test_arithmetic(split: Split) -> None:
    for row in read(split):
        *lines, last = row["answer"].split("\n")
        operators = OPERATIONS[row["kind"]]
        left_over = list(numbers(row["question"]))
        previous = None
        for line, operator in zip(lines, operators, strict=True):
            (found,) = CALCULATION.findall(line)
            assert found[:3] == found[3:6]
            assert found[1] == operator
            a, b, result = int(found[0]), int(found[2]), int(found[6])
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator] == result > 0
            assert found[7] == found[6]
            if previous is None:
                left_over.remove(a)
            else:
                assert a == previous
            left_over.remove(b)
            previous = result
        assert left_over == [], "every number of the question is used once"
        assert last == f"#### {previous}"


@pytest.mark.parametrize("split", SPLITS)
def test_questions_come_from_the_templates_of_their_split_only(split: Split) -> None:
    others = [other for other in SPLITS if other != split]
    foreign = [pattern(question, other) for other in others for question in templates(other)]
    own = {
        kind: [pattern(template[0], split) for template in of_kind]
        for kind, of_kind in TEMPLATES[split].items()
    }
    used: dict[str, set[int]] = {kind: set() for kind in own}
    for row in read(split):
        question, kind = row["question"], row["kind"]
        matches = [i for i, p in enumerate(own[kind]) if p.fullmatch(question)]
        assert len(matches) == 1, question
        used[kind].update(matches)
        assert not any(p.fullmatch(question) for p in foreign), question
    assert {kind: len(indices) for kind, indices in used.items()} == {
        kind: len(patterns) for kind, patterns in own.items()
    }


def test_no_two_splits_share_a_sentence() -> None:
    def sentences(split: Split) -> set[str]:
        return {s for question in templates(split) for s in re.split(r"(?<=[.?]) ", question)}

    for one, other in combinations(SPLITS, 2):
        assert not sentences(one) & sentences(other)


def test_unseen_problems_have_words_of_their_own() -> None:
    people, things, containers = WORDS["train"]
    seen = {word.lower() for noun in (*things, *containers) for word in noun}
    seen |= {person.name.lower() for person in people}
    for row in read("test_unseen"):
        text = f"{row['question']} {row['answer']}".lower()
        assert not seen & set(re.findall(r"[a-z]+", text)), text
    unseen = {word for noun in (*WORDS["test_unseen"].things,) for word in noun}
    unseen |= {person.name.lower() for person in WORDS["test_unseen"].people}
    assert not unseen & set(re.findall(r"[a-z]+", " ".join(map(str, read("train"))).lower()))


def test_unseen_problems_vary() -> None:
    of_kinds = TEMPLATES["test_unseen"]
    assert {kind: len(of_kinds[kind]) for kind in ONE_STEP} == dict.fromkeys(ONE_STEP, 10)
    assert {kind: len(of_kinds[kind]) for kind in TWO_STEP} == dict.fromkeys(TWO_STEP, 5)
    for kind in OPERATIONS:
        assert any(template[0].startswith("How many") for template in of_kinds[kind]), kind


def test_training_shares_no_numbers_and_no_question_with_the_test_splits() -> None:
    train, test = read("train"), read("test") + read("test_unseen")
    questions = [row["question"] for row in train + test]
    assert len(set(questions)) == len(questions)
    for seed in range(3):  # other seeds and ranges too
        train += generate("train", 300, seed, max_number=20 + 10 * seed)
        test += generate("test", 200, seed + 3, max_number=50)
        test += generate("test_unseen", 200, seed + 3, max_number=50)
    keys = {(row["kind"], numbers(row["question"])) for row in train}
    assert not [row for row in test if (row["kind"], numbers(row["question"])) in keys]
    for a in range(2, 21):
        for b in range(2, 21):  # in any order
            assert problems.split_of("add", (a, b)) == problems.split_of("add", (b, a))


def test_balance() -> None:
    train = Counter(row["kind"] for row in read("train"))
    assert train == dict.fromkeys(ONE_STEP, 450) | dict.fromkeys(TWO_STEP, 50)
    for split in ("test", "test_unseen"):
        test = Counter(row["kind"] for row in read(split))
        assert test == dict.fromkeys(ONE_STEP, 90) | dict.fromkeys(TWO_STEP, 10)
    uneven = Counter(row["kind"] for row in generate("train", 42, two_step_share=0))
    assert sorted(uneven.values()) == [10, 10, 11, 11]
    assert {row["kind"] for row in generate("test", 40, two_step_share=1)} == set(TWO_STEP)


def test_nouns_do_not_hint_at_the_operation() -> None:
    seen: dict[str, set[str]] = {kind: set() for kind in OPERATIONS}
    nouns = {thing.plural for thing in THINGS}
    for row in generate("train", 4000, two_step_share=0.5):
        seen[row["kind"]] |= nouns & set(re.findall(r"\w+", row["question"]))
    assert all(words == nouns for words in seen.values())


def test_seeds_sizes_and_order() -> None:
    assert generate("train", 50, 1) == generate("train", 50, 1)
    assert generate("train", 50, 1) != generate("train", 50, 2)
    assert generate("train", 0) == []
    kinds = [row["kind"] for row in generate("test", 400)]
    assert sum(a != b for a, b in pairwise(kinds)) > 300, "kinds are mixed"
    for row in generate("train", 200, max_number=7):
        if "/" not in row["answer"]:
            assert max(numbers(row["question"])) <= 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": -1}, "number of problems"),
        ({"max_number": 1}, "max_number must be at least 2"),
        ({"two_step_share": 1.5}, "two_step_share must be from 0 to 1"),
        (
            {"n": 1_000, "max_number": 2},
            r"only \d+ of 225 different train problems of kind '\w+'",
        ),
        ({"split": "valid"}, "one of train, test, test_unseen, not 'valid'"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(**{"split": "train", "n": 10, **settings})


def test_command_reports_impossible_settings_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        problems.main(["--out", str(tmp_path), "--max_number", "1"])
    assert "max_number must be at least 2" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
