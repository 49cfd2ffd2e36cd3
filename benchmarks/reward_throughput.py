"""Measure how many completions per second each reward scores on one core.

    python benchmarks/reward_throughput.py --out reward_throughput.json

The completions come from this repository: chains of the quickstart's problems with their solutions,
as long as a worked GSM8K solution (100 to 250 tokens). They are right, wrong, without tags, with
trailing text, truncated or looping. SmolLM2-135M's completions in the judge's case table are added.
No GPU, no model, one thread.
"""

import argparse
import json
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from _measure import Report, Row, print_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `rewards`, whether or not the project is installed

from rewards import REWARDS, Reward, load_rewards  # noqa: E402

STEP = 256  # completions of one training step, and of one call of a reward
# A mix typical of early training, in percent. Hostile texts belong to the tests of the judge.
MIX = {
    "right": 40,
    "wrong": 20,
    "no_answer": 8,
    "trailing": 10,
    "cut_off": 8,
    "loop": 4,
    "sampled": 10,
}
# These texts have 2.8 characters per SmolLM2 token: 100 to 250 tokens of reasoning.
CHARACTERS_PER_TOKEN = 2.8
MIN_CHARACTERS, MAX_CHARACTERS = 280, 700
TEMPLATES = {
    "xml": "<thinking>\n{reasoning}\n</thinking>\n<answer>\n{answer}\n</answer>",
    "boxed": "{reasoning}\n\nThe answer is $\\boxed{{{answer}}}$.",
}
XML_REWARDS = ("strict_format", "trailing_text", "integer_answer", "answer_correctness")
_CALCULATOR = re.compile("<<[^>]*>>")

Batch = dict[str, Any]  # the keyword arguments that TRL passes to a reward


class Solution(NamedTuple):
    """A chain of worked problems, and the gold answer of the last one, as GSM8K writes it."""

    reasoning: str
    gold: str

    @property
    def answer(self) -> int:
        """The gold number."""
        return int(self.gold.rpartition("#### ")[2])


class Sample(NamedTuple):
    """A completion to score: its kind in `MIX`, its text and its gold answer."""

    kind: str
    text: str
    gold: str


# --- completions ----------------------------------------------------------------------------------


def make_samples(count: int, prompt_format: str, seed: int) -> list[Sample]:
    """Generate `count` completions in the proportions of `MIX`, reproducibly from a seed.

    >>> make_samples(2, "xml", seed=0) == make_samples(2, "xml", seed=0)
    True
    """
    rng = random.Random(f"{prompt_format} {seed}")
    problems = _read_lines(ROOT / "quickstart/train.jsonl")
    cases = _read_lines(ROOT / "tests/rewards/cases.jsonl")
    sampled = [case for case in cases if case["source"] != "thought"]
    samples = []
    for kind in rng.choices([*MIX], [*MIX.values()], k=count):
        if kind == "sampled":
            case = rng.choice(sampled)
            samples.append(Sample(kind, case["completion"], case["gold"]))
        else:
            solution = _solve(problems, rng)
            text = _render(kind, solution, TEMPLATES[prompt_format], rng)
            samples.append(Sample(kind, text, solution.gold))
    return samples


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _solve(problems: Sequence[dict[str, Any]], rng: random.Random) -> Solution:
    """Chain problems with their solutions until the reasoning is long enough."""
    wanted = rng.randint(MIN_CHARACTERS, MAX_CHARACTERS)
    parts: list[str] = []
    gold = ""
    while sum(map(len, parts)) < wanted:
        problem = rng.choice(problems)
        gold = problem["answer"]
        told, _, _ = problem["question"].rpartition(". ")
        worked = _CALCULATOR.sub("", gold.partition("\n#### ")[0])
        parts.append(f"{told}. {worked}" if told else worked)
    return Solution("\n".join(parts), gold)


def _render(kind: str, solution: Solution, template: str, rng: random.Random) -> str:
    """Render a completion of the given kind."""
    right = template.format(reasoning=solution.reasoning, answer=solution.answer)
    if kind == "wrong":
        wrong = solution.answer + rng.randint(1, 9)
        return template.format(reasoning=solution.reasoning, answer=wrong)
    if kind == "no_answer":
        return f"{solution.reasoning}\n\nSo the answer is {solution.answer}."
    if kind == "trailing":
        return f"{right}\n\nI added up every step and checked it again. Let me know if it helps!"
    if kind == "cut_off":
        return right[: rng.randrange(len(right) // 3, right.rindex(str(solution.answer)))]
    if kind == "loop":
        line = solution.reasoning.splitlines()[-1] + "\n"
        return template.partition("{reasoning}")[0] + line * (MAX_CHARACTERS // len(line))
    return right


def batches(samples: Sequence[Sample], prompt_format: str) -> list[Batch]:
    """Return TRL's keyword arguments, for `STEP` chat completions at a time."""
    return [
        {
            "prompts": [[{"role": "user", "content": "?"}] for _ in rows],
            "completions": [[{"role": "assistant", "content": row.text}] for row in rows],
            "completion_ids": [[0] * round(len(row.text) / CHARACTERS_PER_TOKEN) for row in rows],
            "answer": [row.gold for row in rows],
            "prompt_format": [prompt_format] * len(rows),
        }
        for rows in (samples[start : start + STEP] for start in range(0, len(samples), STEP))
    ]


# --- measurement ----------------------------------------------------------------------------------


def measure(rewards: Sequence[Reward], data: Sequence[Batch], repeats: int, row: Row) -> None:
    """Add the throughput of `rewards` to a row, called in sequence on every batch.

    Measures CPU time of this process, so other jobs on the machine do not count.
    """
    count = sum(len(batch["completions"]) for batch in data)
    scores = _score(rewards, data)  # also compiles the patterns
    seconds = [_cpu_seconds(lambda: _score(rewards, data)) for _ in range(repeats)]
    median = statistics.median(seconds)
    row |= {
        "completions_per_s": round(count / median),
        f"ms_per_{STEP}": round(median / count * STEP * 1e3, 3),
        "mean_score": round(statistics.mean(scores), 4),
        "seconds": [round(value, 4) for value in seconds],
    }


def _score(rewards: Sequence[Reward], data: Sequence[Batch]) -> list[float]:
    return [score for batch in data for reward in rewards for score in reward(**batch)]


def _cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def variants() -> list[tuple[str, str, list[str]]]:
    """List the variants to measure: name, prompt format of the completions, rewards."""
    alone = [(name, "xml", [name]) for name in REWARDS]
    boxed = ("answer_correctness", "boxed", ["answer_correctness"])
    return [*alone, boxed, ("the four of xml", "xml", [*XML_REWARDS])]


# --- the run --------------------------------------------------------------------------------------


def cpu_name() -> str:
    """Return the name of the processor, from /proc/cpuinfo if available."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def describe(samples: Sequence[Sample]) -> dict[str, Any]:
    """Describe the completions: count per kind, mean and maximum length."""
    lengths = [len(sample.text) for sample in samples]
    kinds = [sample.kind for sample in samples]
    return {
        "mean_characters": round(statistics.mean(lengths), 1),
        "longest": max(lengths),
        "kinds": {kind: kinds.count(kind) for kind in MIX},
    }


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--completions", type=int, default=10_000)
    add("--repeats", type=int, default=7, help="timed passes; the result is their median")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("reward_throughput.json"))
    add("--time_budget", type=float, default=540.0, help="seconds; later variants are skipped")
    return parser.parse_args()


def main() -> None:
    """Generate the completions, time every variant, print the table."""
    args = parse_args()
    report = Report(args.out, vars(args) | {"mix": MIX, "step": STEP}, args.time_budget)
    report.set("cpu", cpu_name())
    samples = {name: make_samples(args.completions, name, args.seed) for name in TEMPLATES}
    report.set("completions", {name: describe(rows) for name, rows in samples.items()})
    data = {name: batches(rows, name) for name, rows in samples.items()}
    for label, prompt_format, names in variants():
        run = partial(measure, load_rewards(names), data[prompt_format], args.repeats)
        report.variant("rewards", run, rewards=label, prompt_format=prompt_format)
    for name, facts in report.data["completions"].items():
        print(f"{name}: {args.completions} completions, {facts['mean_characters']} characters each")
    columns = ["rewards", "prompt_format", "completions_per_s", f"ms_per_{STEP}", "mean_score"]
    print_table(report.data["rows"], [*columns, "skipped", "error"])


if __name__ == "__main__":
    main()
