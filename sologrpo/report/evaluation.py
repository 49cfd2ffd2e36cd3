"""Compare evaluations before and after training: scores, differences, and changed problems."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from sologrpo.base.files import BASELINE
from sologrpo.report.completions import MAX_CHARS
from sologrpo.report.values import Record
from sologrpo.scoring import records
from sologrpo.scoring.comparison import Pair, differences
from sologrpo.scoring.records import Evaluated
from sologrpo.scoring.statistics import wilson_interval
from sologrpo.scoring.table import cost_rows, sampled_rows, score_rows

MAX_PROBLEMS = 600  # with both answers, on one page

VERDICTS = {
    (False, True): "newly right",
    (True, False): "newly wrong",
    (False, False): "still wrong",
    (True, True): "still right",
}


# --- scores ----------------------------------------------------------------------------------


def groups(evaluated: Mapping[str, Evaluated]) -> list[dict[str, Evaluated]]:
    """Group evaluations of which each can be compared with the first of its group."""
    found: list[dict[str, Evaluated]] = []
    for label, one in evaluated.items():
        for group in found:
            if not differences(one, next(iter(group.values()))):
                group[label] = one
                break
        else:
            found.append({label: one})
    return found


def figures(evaluated: Mapping[str, Evaluated]) -> list[list[str]]:
    """List the figures of results.json: a title, and then a cell for each evaluation."""
    columns = [evaluation.results for evaluation in evaluated.values()]
    problems = ["problems", *(f"{results['n']:,}" for results in columns)]
    precision = ["precision", *(results["precision"] for results in columns)]
    scores = [*score_rows(columns), *cost_rows(columns), *sampled_rows(columns)]
    return [problems, precision, *scores]


def kinds(evaluated: Mapping[str, Evaluated]) -> list[Record]:
    """List the accuracy by kind of problem, with a cell for each evaluation that has the kind."""
    tables = [evaluation.results["by_kind"] for evaluation in evaluated.values()]
    rows = []
    for kind in sorted({kind for table in tables for kind in table}):
        cells = [_with_interval(table[kind]) if kind in table else None for table in tables]
        n = max(table[kind]["n"] for table in tables if kind in table)
        rows.append({"kind": kind, "n": n, "cells": cells})
    return rows


def _with_interval(scores: Record) -> Record:
    n, accuracy = scores["n"], scores["accuracy"]
    return {"accuracy": accuracy, "interval": wilson_interval(round(accuracy * n), n)}


def verdict_sentence(comparison: Record) -> str:
    """State a comparison in one sentence."""
    low, high = comparison["delta_ci95"]
    points = abs(100 * comparison["delta"])
    ends = f"{100 * low:+.1f} to {100 * high:+.1f} points"
    if low > 0:
        return f"Accuracy rose by {points:.1f} points (95 % interval {ends})."
    if high < 0:
        return f"Accuracy fell by {points:.1f} points (95 % interval {ends})."
    return f"No clear difference: the 95 % interval, {ends}, contains 0."


# --- problems --------------------------------------------------------------------------------

Problem = tuple[str, dict[str, records.Record]]  # verdict, and answers by label


def list_problems(evaluated: Mapping[str, Evaluated], pairs: Sequence[Pair]) -> Record | None:
    """List the problems that changed from the baseline, or else those of one evaluation."""
    for pair in pairs:
        if pair.numbers is not None:
            return _changed(pair, evaluated)
    later = [label for label in evaluated if not label.startswith(BASELINE)]
    for label in later or evaluated:
        return _answered(label, evaluated[label])
    return None


def _changed(pair: Pair, evaluated: Mapping[str, Evaluated]) -> Record:
    """List the problems that both answered, changed ones first."""
    before, after = evaluated[pair.baseline].records, evaluated[pair.label].records
    problems = [
        (VERDICTS[b.correct, a.correct], {pair.baseline: b, pair.label: a})
        for b, a in zip(before, after, strict=True)
    ]
    title = f"{pair.label} against {pair.baseline}"
    return {"title": title, "paired": True, **_choose(problems, [*VERDICTS.values()])}


def _answered(label: str, alone: Evaluated) -> Record:
    """List the problems that one model answered, wrong ones first."""
    problems = [("right" if r.correct else "wrong", {label: r}) for r in alone.records]
    return {"title": label, "paired": False, **_choose(problems, ["wrong", "right"])}


def _choose(problems: Sequence[Problem], verdicts: Sequence[str]) -> Record:
    """Count the problems of each verdict, and choose equally many of each for the page."""
    chars = fmean(sum(len(r.completion) for r in answers.values()) for _, answers in problems)
    limit = min(MAX_PROBLEMS, int(MAX_CHARS / max(chars, 1)))
    by_verdict = {verdict: [p for p in problems if p[0] == verdict] for verdict in verdicts}
    shown: list[Record] = [
        {
            "verdict": verdict,
            "record": [*answers.values()][-1],
            "answers": [(label, record, _flags(record)) for label, record in answers.items()],
        }
        for same in by_verdict.values()
        for verdict, answers in same[: max(1, limit // len(verdicts))]
    ]
    flags = {flag for problem in shown for *_, flags in problem["answers"] for flag in flags}
    return {
        "counts": [(verdict, len(same)) for verdict, same in by_verdict.items()],
        "total": len(problems),
        "shown": shown,
        "kinds": sorted({problem["record"].kind for problem in shown} - {None}),
        "flags": sorted(flags - {"right", "wrong"}),  # the verdict has a separate filter
    }


def _flags(record: records.Record) -> list[str]:
    flags = {
        "right": record.correct,
        "wrong": not record.correct,
        "right if read leniently": not record.correct and record.lenient_correct,
        "no answer found": record.extracted is None,
        "format broken": not record.format_ok,
        "truncated": record.truncated,
    }
    return [flag for flag, found in flags.items() if found]
