"""Generate short math word problems in GSM8K's schema, reproducibly from a seed.

    python -m quickstart.problems

writes `train.jsonl`, `test.jsonl` and `test_unseen.jsonl` into `quickstart/`. Each row has a
`question`, an `answer` (one calculation per line, then `#### ` and the result) and the `kind` of
problem.

A score on a test split cannot come from memory: training uses neither its sentence patterns nor
its numbers for a problem of the same kind. `test` shares people and things with training;
`test_unseen` shares nothing, and its problems are worded differently. The assignment of numbers to
training and testing is fixed, so splits generated with different seeds, sizes or ranges do not
overlap either.

Uses only the standard library.
"""

import argparse
import hashlib
import json
import random
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from quickstart.templates import CONTAINERS, PEOPLE, TEST, THINGS, TRAIN, Noun, Person, Template
from quickstart.unseen_templates import (
    TEST_UNSEEN,
    UNSEEN_CONTAINERS,
    UNSEEN_PEOPLE,
    UNSEEN_THINGS,
)

Split = Literal["train", "test", "test_unseen"]

# Calculations run from left to right: "add_divide" is (a + b) / c.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "add": ("+",),
    "subtract": ("-",),
    "multiply": ("*",),
    "divide": ("/",),
    "add_subtract": ("+", "-"),
    "multiply_add": ("*", "+"),
    "multiply_subtract": ("*", "-"),
    "add_divide": ("+", "/"),
}
ONE_STEP = tuple(kind for kind, operators in OPERATIONS.items() if len(operators) == 1)
TWO_STEP = tuple(kind for kind, operators in OPERATIONS.items() if len(operators) == 2)
TEMPLATES: dict[Split, dict[str, tuple[Template, ...]]] = {
    "train": TRAIN,
    "test": TEST,
    "test_unseen": TEST_UNSEEN,
}

# Numbers and results are at least 2, which avoids "1 apples".
MIN_NUMBER = 2
MAX_FACTOR = 12
MAX_PRODUCT = 100
# One key in four is a test key: 16 of the 60 possible products.
TEST_ONE_IN = 4
# The rarest draw, a test problem that ends in an exact division, succeeds about one time in 20.
MAX_DRAWS = 2000


class Words(NamedTuple):
    """The people, things and containers of a split."""

    people: tuple[Person, ...]
    things: tuple[Noun, ...]
    containers: tuple[Noun, ...]


SEEN = Words(PEOPLE, THINGS, CONTAINERS)
UNSEEN = Words(UNSEEN_PEOPLE, UNSEEN_THINGS, UNSEEN_CONTAINERS)
WORDS: dict[Split, Words] = {"train": SEEN, "test": SEEN, "test_unseen": UNSEEN}


class Problem(TypedDict):
    """A row of the data set."""

    question: str
    answer: str
    kind: str


class Step(NamedTuple):
    """A calculation, `left operator right = result`."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        formula = f"{self.left}{self.operator}{self.right}={self.result}"
        return f"{self.left} {self.operator} {self.right} = <<{formula}>>{self.result}"


def generate(
    split: Split,
    n: int,
    seed: int = 0,
    *,
    max_number: int = 9,
    two_step_share: float = 0.1,
) -> list[Problem]:
    """Generate `n` different problems of `split`, shuffled and balanced over the kinds.

    Args:
        split: "train", "test" or "test_unseen". No two share a sentence pattern, and training
            shares no numbers with the others.
        n: number of problems.
        seed: a seed gives the same problems on every machine.
        max_number: largest number that is added or subtracted. Factors and divisors are limited to
            12 and products to 100, or to `max_number` if that is less.
        two_step_share: share of problems that take two calculations, from 0 to 1.

    Raises:
        ValueError: a setting is out of range, or fewer than `n` different problems exist.

    Example:
        >>> generate("test", 1, seed=1, two_step_share=0.0)[0]["kind"]
        'add'
    """
    if split not in TEMPLATES:
        raise ValueError(f"split must be one of {', '.join(TEMPLATES)}, not {split!r}")
    if max_number < MIN_NUMBER:
        raise ValueError(f"max_number must be at least {MIN_NUMBER}, not {max_number}")
    if not 0 <= two_step_share <= 1:
        raise ValueError(f"two_step_share must be from 0 to 1, not {two_step_share}")
    if n < 0:
        raise ValueError(f"the number of problems must not be negative, not {n}")
    rng = random.Random(f"{split} {seed}")
    two_step = round(n * two_step_share)
    counts = _share_out(n - two_step, ONE_STEP) | _share_out(two_step, TWO_STEP)
    problems: list[Problem] = []
    for kind, count in counts.items():
        problems += _generate_kind(split, kind, count, rng, max_number)
    rng.shuffle(problems)
    return problems


def split_of(kind: str, numbers: tuple[int, ...]) -> Literal["train", "test"]:
    """Decide whether these numbers, in any order, are for training or testing with this kind.

    Args:
        kind: a key of `OPERATIONS`.
        numbers: the numbers of the problem.
    """
    key = f"{kind} {sorted(numbers)}"
    digest = hashlib.sha256(key.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % TEST_ONE_IN == 0 else "train"


def _share_out(n: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """Distribute `n` problems over the kinds. The counts differ by at most one."""
    each, rest = divmod(n, len(kinds))
    return {kind: each + (index < rest) for index, kind in enumerate(kinds)}


def _generate_kind(
    split: Split, kind: str, count: int, rng: random.Random, max_number: int
) -> list[Problem]:
    templates = list(TEMPLATES[split][kind])
    rng.shuffle(templates)
    problems: dict[str, Problem] = {}
    for index in range(count):
        template = templates[index % len(templates)]
        for _ in range(MAX_DRAWS):
            numbers = _draw_numbers(kind, rng, max_number)
            steps = _calculate(kind, numbers)
            if steps is None or (split_of(kind, numbers) == "train") != (split == "train"):
                continue
            problem = _render(kind, template, numbers, steps, WORDS[split], rng)
            if problem["question"] not in problems:
                problems[problem["question"]] = problem
                break
        else:
            raise ValueError(
                f"only {len(problems)} of {count} different {split} problems of kind {kind!r} "
                f"exist: ask for fewer, or raise max_number (now {max_number})"
            )
    return list(problems.values())


def _draw_numbers(kind: str, rng: random.Random, max_number: int) -> tuple[int, ...]:
    """Draw numbers. `_calculate` decides whether they fit together."""
    max_factor = min(MAX_FACTOR, max_number)
    numbers = []
    operators = OPERATIONS[kind]
    for operator in (operators[0], *operators):
        largest = max_factor if operator in "*/" else max_number
        numbers.append(rng.randint(MIN_NUMBER, largest))
    if operators[0] == "/":
        # numbers[0] is the quotient. Multiplying makes every division exact.
        numbers[0] *= numbers[1]
    return tuple(numbers)


def _calculate(kind: str, numbers: tuple[int, ...]) -> list[Step] | None:
    """Calculate step by step. Return None if a result is out of range."""
    steps: list[Step] = []
    value = numbers[0]
    for operator, number in zip(OPERATIONS[kind], numbers[1:], strict=True):
        if operator == "/" and value % number != 0:
            return None
        result = {
            "+": value + number,
            "-": value - number,
            "*": value * number,
            "/": value // number,
        }[operator]
        if result < MIN_NUMBER or (operator in "*/" and max(value, result) > MAX_PRODUCT):
            return None
        steps.append(Step(value, operator, number, result))
        value = result
    return steps


def _render(
    kind: str,
    template: Template,
    numbers: tuple[int, ...],
    steps: list[Step],
    vocabulary: Words,
    rng: random.Random,
) -> Problem:
    person, other = rng.sample(vocabulary.people, 2)
    thing = rng.choice(vocabulary.things)
    container = rng.choice(vocabulary.containers)
    words: dict[str, object] = {
        "name": person.name,
        "she": person.subject,
        "She": person.subject.capitalize(),
        "her": person.object,
        "possessive": person.possessive,
        "other": other.name,
        "thing": thing.singular,
        "things": thing.plural,
        "box": container.singular,
        "boxes": container.plural,
    }
    question, *lines = template
    words |= dict(zip("abc", numbers, strict=False))
    answer = [line.format(step=step, **words) for line, step in zip(lines, steps, strict=True)]
    answer.append(f"#### {steps[-1].result}")
    return {"question": question.format(**words), "answer": "\n".join(answer), "kind": kind}


def write_jsonl(problems: list[Problem], path: Path) -> None:
    """Write one JSON object per line, with the same bytes on every system.

    Args:
        problems: the rows.
        path: the file; missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(problem) + "\n" for problem in problems)
    path.write_text(text, encoding="utf-8", newline="\n")


def main(argv: list[str] | None = None) -> None:
    """Write all splits."""
    parser = argparse.ArgumentParser(
        prog="python -m quickstart.problems",
        description="Generate short math word problems for training and testing.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=2000)
    parser.add_argument("--num_test", type=int, default=400, help="of each test split")
    parser.add_argument("--max_number", type=int, default=9, help="largest summand")
    parser.add_argument("--two_step_share", type=float, default=0.1, help="from 0 to 1")
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder")
    args = parser.parse_args(argv)
    sizes: dict[Split, int] = {
        "train": args.num_train,
        "test": args.num_test,
        "test_unseen": args.num_test,
    }
    try:
        splits = {
            split: generate(
                split,
                size,
                args.seed,
                max_number=args.max_number,
                two_step_share=args.two_step_share,
            )
            for split, size in sizes.items()
        }
    except ValueError as error:
        parser.error(str(error))
    for split, problems in splits.items():
        path = args.out / f"{split}.jsonl"
        write_jsonl(problems, path)
        print(f"{path}: {len(problems)} problems")


if __name__ == "__main__":
    main()
