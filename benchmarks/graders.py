"""Compare our judge with four published graders on the same hand-judged completions.

    pip install lm-eval "math-verify[antlr4-13-2]"
    python benchmarks/graders.py

The two packages are not dependencies of the project. Each grader runs unmodified on
`tests/rewards/cases.jsonl`. The tables are written to docs/grading.md, between its two `graders`
comments, and every verdict to a JSON file.

Graders run sequentially in the main thread, because Math-Verify's timeouts use SIGALRM.
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
# Completions on which the graders differ, as (prompt format, completion). The gold answer is 18.
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
SLOW = 0.1  # seconds; the table shows the time of slower examples
VERSIONS = ("lm-eval", "math-verify", "latex2sympy2_extended", "trl")


class Question(TypedDict):
    """The input of a grader."""

    completion: str
    gold: str
    prompt_format: str


class Case(Question):
    """A row of the case table: a completion and the verdict of a careful reader."""

    correct: bool
    kind: str
    note: str
    source: str


class Outcome(NamedTuple):
    """A grader's verdict on one case: right, wrong or None (it abstains); or its error."""

    verdict: bool | None
    error: str
    seconds: float


@dataclass(frozen=True)
class Grader:
    """A named grader. `grade` judges one case."""

    name: str
    grade: Callable[[Question], bool | None]


# --- graders --------------------------------------------------------------------------------------


def our_graders() -> list[Grader]:
    """Return the judge of training and evaluation, and the lenient one of the reports."""
    return [
        Grader("ours", lambda c: is_correct(c["completion"], c["gold"], c["prompt_format"])),
        Grader("ours, lenient", lambda c: lenient_is_correct(c["completion"], c["gold"])),
    ]


def lm_eval_graders() -> list[Grader]:
    """Return the two filters of lm-evaluation-harness's gsm8k task, with its exact match.

    The task is built from the YAML file in the package. Only its data set is replaced, by one row,
    so that nothing is downloaded. It gets the gold answer in GSM8K's format.
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
    """Return `verify(parse(gold), parse(completion))` with default settings, as in its README."""
    from math_verify import parse, verify  # type: ignore[import-not-found]

    return Grader(
        "Math-Verify",
        lambda case: verify(parse(latex_gold(case)), parse(case["completion"])),
    )


def accuracy_reward_grader() -> Grader:
    """Return TRL's reward, called as by its trainer: a chat completion and a `solution` column."""
    from trl.rewards import accuracy_reward

    def grade(case: Question) -> bool | None:
        completion = [{"role": "assistant", "content": case["completion"]}]
        (score,) = accuracy_reward(completions=[completion], solution=[latex_gold(case)])
        return None if score is None else bool(score)

    return Grader("TRL accuracy_reward", grade)


def latex_gold(case: Question) -> str:
    """Format the gold number for Math-Verify.

    >>> latex_gold({"gold": "9 * 2 = 18\\n#### 1,018"})
    '$1018$'
    """
    return f"${parse_gold(case['gold'])}$"


# --- the run --------------------------------------------------------------------------------------


def read_cases(path: Path) -> list[Case]:
    """Read the case table, one JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(grader: Grader, cases: Sequence[Case]) -> list[Outcome]:
    """Grade every case, after a first pass that compiles the patterns."""
    for case in cases:
        attempt(grader, case)
    return [attempt(grader, case) for case in cases]


def attempt(grader: Grader, case: Question) -> Outcome:
    """Grade one case and measure its CPU time. An exception is an outcome too."""
    start = time.process_time()
    try:
        verdict, error = grader.grade(case), ""
    except Exception as problem:  # the comparison includes graders that raise on odd text
        verdict, error = None, f"{type(problem).__name__}: {problem}"[:200]
    return Outcome(verdict, error, time.process_time() - start)


# --- tables ---------------------------------------------------------------------------------------


def tables(cases: Sequence[Case], outcomes: dict[str, list[Outcome]]) -> str:
    """Render two Markdown tables: agreement with the case table, and mistakes by type."""
    groups = groups_of(cases)
    sizes = [f"{name} ({len(rows)})" for name, rows in groups.items()]
    agreement = [["Agrees with the table on", *sizes]]
    mistakes = [["How it errs", "wrong passed", "right refused", "None", "errors", "slowest case"]]
    for name, found in outcomes.items():
        agreement.append([name, *(agreed(cases, found, rows) for rows in groups.values())])
        mistakes.append([name, *count_mistakes(cases, found)])
    return f"{markdown(agreement)}\n\n{markdown(mistakes)}"


def groups_of(cases: Sequence[Case]) -> dict[str, list[int]]:
    """Return the row numbers of all cases, each kind, each format, and those a model wrote."""
    groups = {"all": [*range(len(cases))]}
    for kind in KINDS:
        groups[kind] = [i for i, case in enumerate(cases) if case["kind"] == kind]
    for name in PROMPT_FORMATS:
        groups[name] = [i for i, case in enumerate(cases) if case["prompt_format"] == name]
    groups["by a model"] = [i for i, case in enumerate(cases) if case["source"] != "thought"]
    return groups


def example_table(graders: Sequence[Grader]) -> str:
    """Render a Markdown table of each grader's verdicts on the `EXAMPLES`."""
    rows = [["Completion", *(grader.name for grader in graders)]]
    for prompt_format, completion in EXAMPLES:
        case = Question(completion=completion, gold="#### 18", prompt_format=prompt_format)
        rows.append([f"`{completion}`", *(in_words(attempt(grader, case)) for grader in graders)])
    return markdown(rows)


def in_words(outcome: Outcome) -> str:
    """Describe an outcome in words.

    >>> in_words(Outcome(False, "", 5.02))
    'wrong, 5.0 s'
    """
    words = {True: "right", False: "wrong", None: outcome.error or "None"}[outcome.verdict]
    return f"{words}, {outcome.seconds:.1f} s" if outcome.seconds > SLOW else words


def agreed(cases: Sequence[Case], outcomes: Sequence[Outcome], rows: Sequence[int]) -> str:
    """Format the share of `rows` on which grader and case table agree; "-" for no rows."""
    if not rows:
        return "-"
    count = sum(outcomes[i].verdict == cases[i]["correct"] for i in rows)
    # Rounded down, so that only full agreement gives 100 %.
    return f"{int(1000 * count / len(rows)) / 10:.1f} %"


def count_mistakes(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """Count false rights, false wrongs, abstentions and errors; add the slowest case in ms."""
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
    """Format rows as a Markdown table with a header row and right-aligned numbers.

    >>> print(markdown([["a", "b"], ["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


def replace_between_marks(document: str, text: str) -> str:
    """Put `text` between the two `graders` comments of a document.

    Raises:
        ValueError: the document lacks a comment.

    >>> replace_between_marks(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new").split()
    ['a', '<!--', 'graders:begin', '-->', 'new', '<!--', 'graders:end', '-->', 'b']
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document needs {BEGIN} and {END}: add both comments")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


# --- command line ---------------------------------------------------------------------------------


def check_packages() -> None:
    """Exit with the command to install, if a grader's package is missing."""
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        sys.exit(f"error: a grader is not installed: pip install {' '.join(missing)}")


def write_json(
    path: Path,
    versions: dict[str, str],
    cases: Sequence[Case],
    outcomes: dict[str, list[Outcome]],
) -> None:
    """Write every case with all verdicts, to inspect disagreements."""
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
    add("--doc", type=Path, default=ROOT / "docs/grading.md", help="the document to update")
    add("--out", type=Path, default=Path("graders.json"), help="the file for all verdicts")
    return parser.parse_args(arguments)


def main() -> None:
    """Run every grader on every case, update the document and print the tables."""
    args = parse_args()
    check_packages()
    cases = read_cases(args.cases)
    graders = [*our_graders(), *lm_eval_graders(), math_verify_grader(), accuracy_reward_grader()]
    gc.freeze()  # collecting all objects of the packages takes longer than any verdict
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
