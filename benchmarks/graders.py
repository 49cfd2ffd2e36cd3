"""Our judge and four published graders on the same hand-judged completions.

    pip install lm-eval "math-verify[antlr4-13-2]"
    python benchmarks/graders.py

The two packages are no dependency of the project. Each grader runs as its own package ships it, on
`tests/rewards/cases.jsonl`, text unchanged. The tables go into docs/grading.md between its two
`graders` comments, every verdict into a JSON file.

Graders run one after another in the main thread, because Math-Verify's time-outs use SIGALRM.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `rewards`, whether or not the project is installed

from rewards import PROMPT_FORMATS, is_correct, lenient_is_correct, parse_gold  # noqa: E402

BEGIN, END = "<!-- graders:begin -->", "<!-- graders:end -->"
KINDS = ("clear", "policy", "attack")
# Module to import -> what to install.
NEEDED = {"lm_eval": "lm-eval", "math_verify": '"math-verify[antlr4-13-2]"', "trl": "trl"}
# Texts that tell the graders apart, as (prompt format, completion); the gold answer is 18.
EXAMPLES = [
    ("xml", "<answer>18</answer>"),
    ("xml", "<answer>$18</answer>"),
    ("xml", "<answer>17</answer> is close to 18"),
    ("xml", "<answer>20 or 18</answer>"),
    ("boxed", r"\boxed{18}"),
    ("boxed", r"\boxed{eighteen}"),
    ("boxed", r"\boxed{36/2}"),
    ("boxed", r"\boxed{1800\%}"),
    ("boxed", r"\boxed{18}. Wait, no: it is 20."),
    ("boxed", r"<think>\boxed{18}</think>"),
    ("boxed", r"\boxed{9^{9^{9}}}"),
]
SLOW = 0.1  # seconds; an example that takes longer says so
VERSIONS = ("lm-eval", "math-verify", "latex2sympy2_extended", "trl")


class Question(TypedDict):
    """What a grader gets to see."""

    completion: str
    gold: str
    prompt_format: str


class Case(Question):
    """One row of the case table: a completion and what a careful person says of it."""

    correct: bool
    kind: str
    note: str
    source: str


class Outcome(NamedTuple):
    """What a grader said of one case: right, wrong or None (it abstains); or its error."""

    verdict: bool | None
    error: str
    seconds: float


@dataclass(frozen=True)
class Grader:
    """A grader by name; `grade` judges one case."""

    name: str
    grade: Callable[[Question], bool | None]


# --- graders --------------------------------------------------------------------------------------


def our_graders() -> list[Grader]:
    """The judge of training and evaluation, and the last number that evaluation reports beside."""
    return [
        Grader("ours", lambda c: is_correct(c["completion"], c["gold"], c["prompt_format"])),
        Grader("ours, lenient", lambda c: lenient_is_correct(c["completion"], c["gold"])),
    ]


def lm_eval_graders() -> list[Grader]:
    """The filters of lm-evaluation-harness's own gsm8k task, then its own exact match.

    The task is built from the YAML file in the package; only its data set is replaced, by one row,
    so that nothing is downloaded. It gets the gold answer as GSM8K has it.
    """
    import lm_eval  # type: ignore[import-not-found]
    from datasets import Dataset, DatasetDict
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
    from lm_eval.api.task import ConfigurableTask  # type: ignore[import-not-found]
    from lm_eval.tasks._yaml_loader import load_yaml  # type: ignore[import-not-found]

    rows = Dataset.from_list([{"question": "9 * 2?", "answer": "#### 18"}])
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml")
    config["custom_dataset"] = lambda **_: DatasetDict(train=rows, test=rows)
    task = ConfigurableTask(config=config)

    def grade(case: Question, filter_name: str) -> bool:
        row = {"question": "", "answer": case["gold"]}
        instance = Instance("generate_until", row, (), 0, resps=[case["completion"]])
        task._instances = [instance]
        task.apply_filters()
        answer = instance.filtered_resps[filter_name]
        return bool(task.process_results(row, [answer])["exact_match"])

    return [
        Grader("lm-eval strict-match", lambda case: grade(case, "strict-match")),
        Grader("lm-eval flexible-extract", lambda case: grade(case, "flexible-extract")),
    ]


def math_verify_grader() -> Grader:
    """`verify(parse(gold), parse(completion))` with the default settings, as its README shows."""
    from math_verify import parse, verify  # type: ignore[import-not-found]

    return Grader(
        "Math-Verify",
        lambda case: verify(parse(latex_gold(case)), parse(case["completion"])),
    )


def accuracy_reward_grader() -> Grader:
    """TRL's reward, called as its trainer does: a chat completion and a column `solution`."""
    from trl.rewards import accuracy_reward

    def grade(case: Question) -> bool | None:
        completion = [{"role": "assistant", "content": case["completion"]}]
        (score,) = accuracy_reward(completions=[completion], solution=[latex_gold(case)])
        return None if score is None else bool(score)

    return Grader("TRL accuracy_reward", grade)


def latex_gold(case: Question) -> str:
    """The gold number as Math-Verify wants it.

    >>> latex_gold({"gold": "9 * 2 = 18\\n#### 1,018"})
    '$1018$'
    """
    return f"${parse_gold(case['gold'])}$"


# --- the run --------------------------------------------------------------------------------------


def read_cases(path: Path) -> list[Case]:
    """The case table, one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(grader: Grader, cases: Sequence[Case]) -> list[Outcome]:
    """Grade every case; a first pass warms up, as patterns are compiled when first needed."""
    for case in cases:
        attempt(grader, case)
    return [attempt(grader, case) for case in cases]


def attempt(grader: Grader, case: Question) -> Outcome:
    """Grade one case in CPU seconds of this process; an exception is an outcome too."""
    start = time.process_time()
    try:
        verdict, error = grader.grade(case), ""
    except Exception as problem:  # what graders raise on odd text is part of the comparison
        verdict, error = None, f"{type(problem).__name__}: {problem}"[:200]
    return Outcome(verdict, error, time.process_time() - start)


# --- tables ---------------------------------------------------------------------------------------


def tables(cases: Sequence[Case], outcomes: dict[str, list[Outcome]]) -> str:
    """Two Markdown tables: where the graders agree with the case table, and how they err."""
    groups = groups_of(cases)
    sizes = [f"{name} ({len(rows)})" for name, rows in groups.items()]
    agreement = [["Agrees with the table on", *sizes]]
    mistakes = [["How it errs", "wrong passed", "right refused", "None", "errors", "slowest case"]]
    for name, found in outcomes.items():
        agreement.append([name, *(agreed(cases, found, rows) for rows in groups.values())])
        mistakes.append([name, *count_mistakes(cases, found)])
    return f"{markdown(agreement)}\n\n{markdown(mistakes)}"


def groups_of(cases: Sequence[Case]) -> dict[str, list[int]]:
    """The row numbers of all cases, of each kind, of each format, and of what a model wrote."""
    groups = {"all": [*range(len(cases))]}
    for kind in KINDS:
        groups[kind] = [i for i, case in enumerate(cases) if case["kind"] == kind]
    for name in PROMPT_FORMATS:
        groups[name] = [i for i, case in enumerate(cases) if case["prompt_format"] == name]
    groups["by a model"] = [i for i, case in enumerate(cases) if case["source"] != "thought"]
    return groups


def example_table(graders: Sequence[Grader]) -> str:
    """What each grader says of the `EXAMPLES`, as a Markdown table."""
    rows = [["Completion", *(grader.name for grader in graders)]]
    for prompt_format, completion in EXAMPLES:
        case = Question(completion=completion, gold="#### 18", prompt_format=prompt_format)
        rows.append([f"`{completion}`", *(in_words(attempt(grader, case)) for grader in graders)])
    return markdown(rows)


def in_words(outcome: Outcome) -> str:
    """An outcome for people.

    >>> in_words(Outcome(False, "", 5.02))
    'wrong, 5.0 s'
    """
    words = {True: "right", False: "wrong", None: outcome.error or "None"}[outcome.verdict]
    return f"{words}, {outcome.seconds:.1f} s" if outcome.seconds > SLOW else words


def agreed(cases: Sequence[Case], outcomes: Sequence[Outcome], rows: Sequence[int]) -> str:
    """The share of `rows` on which grader and case table agree; a dash if there are none."""
    if not rows:
        return "-"
    count = sum(outcomes[i].verdict == cases[i]["correct"] for i in rows)
    # 100 % is said of all and of nothing less.
    return f"{int(1000 * count / len(rows)) / 10:.1f} %"


def count_mistakes(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """False rights, false wrongs, abstentions, errors, and the slowest case in milliseconds."""
    pairs = list(zip(cases, outcomes, strict=True))
    counts = [
        sum(found.verdict is True and not case["correct"] for case, found in pairs),
        sum(found.verdict is False and case["correct"] for case, found in pairs),
        sum(found.verdict is None and not found.error for _, found in pairs),
        sum(bool(found.error) for _, found in pairs),
    ]
    slowest = max(found.seconds for found in outcomes)
    return [*map(str, counts), f"{slowest * 1e3:,.1f} ms"]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first one as its head, numbers to the right.

    >>> print(markdown([["a", "b"], ["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


def replace_between_marks(document: str, text: str) -> str:
    """`document` with `text` between its two `graders` comments; ValueError if it lacks them.

    >>> replace_between_marks(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new").split()
    ['a', '<!--', 'graders:begin', '-->', 'new', '<!--', 'graders:end', '-->', 'b']
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN} ... {END} to write between")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


# --- command line ---------------------------------------------------------------------------------


def check_packages() -> None:
    """Leave with one line that says what to install, if a grader's package is missing."""
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        sys.exit(f"error: a grader is not installed: pip install {' '.join(missing)}")


def write_json(
    path: Path,
    versions: dict[str, str],
    cases: Sequence[Case],
    outcomes: dict[str, list[Outcome]],
) -> None:
    """Every case with what each grader said of it, for looking into disagreements."""
    rows: list[dict[str, Any]] = [
        {**case, "graders": {name: found[i]._asdict() for name, found in outcomes.items()}}
        for i, case in enumerate(cases)
    ]
    data = {"python": platform.python_version(), "versions": versions, "rows": rows}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=Path, default=ROOT / "tests/rewards/cases.jsonl")
    add("--doc", type=Path, default=ROOT / "docs/grading.md", help="where the tables go")
    add("--out", type=Path, default=Path("graders.json"), help="every verdict")
    return parser.parse_args(arguments)


def main() -> None:
    """Run every grader on every case, write the tables into the document, print them."""
    args = parse_args()
    check_packages()
    cases = read_cases(args.cases)
    graders = [*our_graders(), *lm_eval_graders(), math_verify_grader(), accuracy_reward_grader()]
    gc.freeze()  # a collection of all that the packages have loaded outlasts any verdict
    outcomes = {grader.name: run(grader, cases) for grader in graders}
    versions = {name: version(name) for name in VERSIONS}
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    wrong = sum(not case["correct"] for case in cases)
    text = "\n\n".join(
        [
            tables(cases, outcomes),
            f"{len(cases)} cases, {wrong} of them wrong; {used}.",
            "Examples, all with the gold answer 18:",
            example_table(graders),
        ]
    )
    write_json(args.out, versions, cases, outcomes)
    document = args.doc.read_text(encoding="utf-8")
    args.doc.write_text(replace_between_marks(document, text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
