"""Compare evaluations before and after training: scores, differences, and changed problems."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from sologrpo.report.completions import MAX_CHARS
from sologrpo.report.reading import Evaluation, is_baseline
from sologrpo.report.values import (
    Record,
    as_text,
    fair_shares,
    finite,
    interval,
    lookup,
    mapping,
    number,
    percent,
)
from sologrpo.scoring.statistics import compare_paired, wilson_interval

MAX_PROBLEMS = 600  # with both answers, on one page

# Fields of results.json and their names in the table; a field missing everywhere is left out.
RATES = (
    ("accuracy_lenient", "read leniently"),
    ("format_rate", "format as asked"),
    ("integer_rate", "integer answer"),
    ("no_answer_rate", "no answer found"),
    ("trailing_text_rate", "trailing text"),
    ("truncated_rate", "truncated"),
)
LENGTHS = (
    ("all", "tokens, median / 95th percentile"),
    ("right", "of right answers"),
    ("wrong", "of wrong answers"),
)
VERDICTS = {
    (False, True): "newly right",
    (True, False): "newly wrong",
    (False, False): "still wrong",
    (True, True): "still right",
}


# --- scores ----------------------------------------------------------------------------------


def score(evaluation: Evaluation) -> Record:
    """Return the headline of one evaluation."""
    return {
        "label": evaluation.label,
        "precision": evaluation.results.get("precision"),
        "baseline": is_baseline(evaluation),
        **_numbers(evaluation.results),
    }


def _numbers(entry: Any) -> Record:
    """Read the numbers of an evaluation, a kind or a precision, with None for missing ones.

    The interval of the accuracy is worked out where it is not stated.
    """
    accuracy, n = finite(lookup(entry, "accuracy")), finite(lookup(entry, "n"))
    ends = interval(lookup(entry, "accuracy_ci95"))
    if ends is None and accuracy is not None and n and n >= 1 and 0 <= accuracy <= 1:
        ends = wilson_interval(round(accuracy * n), int(n))
    return {
        "n": n,
        "accuracy": accuracy,
        "interval": ends,
        "before": finite(lookup(entry, "baseline_accuracy")),
        "delta": finite(lookup(entry, "delta")),
        "delta_interval": interval(lookup(entry, "delta_ci95")),
        "p": finite(lookup(entry, "mcnemar_p")),
        "differing": finite(lookup(entry, "differing_rate")),
    }


def rates(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[str]]]:
    """List the rates and lengths, with a cell for each evaluation; empty rows are left out."""
    tables = [_rates(evaluation.results) for evaluation in evaluations]
    titles = dict.fromkeys(title for table in tables for title in table)
    rows = [(title, [table.get(title, "") for table in tables]) for title in titles]
    return [(title, cells) for title, cells in rows if any(cells)]


def _rates(results: Record) -> dict[str, str]:
    """Format the rates and lengths of one evaluation by title; empty where one is missing."""
    one_decimal = partial(number, digits=1)
    cells = {title: _cell(results.get(key), percent) for key, title in RATES}
    for name, value in mapping(lookup(results, "sampled", "scores")).items():
        cells[f"{name}, sampled"] = _cell(value, percent)
    cells["tokens, mean"] = _cell(results.get("mean_completion_tokens"), one_decimal)
    for key, title in LENGTHS:
        spread = lookup(results, "completion_tokens", key)
        ends = [_cell(lookup(spread, name), number) for name in ("p50", "p95")]
        cells[title] = " / ".join(ends) if all(ends) else ""
    cells["tokens per second"] = _cell(results.get("tokens_per_second"), one_decimal)
    return cells


def _cell(value: Any, form: Callable[[float], str]) -> str:
    found = finite(value)
    return "" if found is None else form(found)


def precisions(table: Record) -> list[Record]:
    """List the adapter in each numeric form, against the trained one.

    Args:
        table: content of `precisions.json`.
    """
    entries = mapping(table.get("precisions")).items()
    trained = table.get("trained")
    return [{"name": name, "trained": name == trained, **_numbers(e)} for name, e in entries]


def kinds(evaluations: Sequence[Evaluation]) -> list[Record]:
    """List the accuracy by kind of problem, with a cell for each evaluation."""
    tables = [mapping(evaluation.results.get("by_kind")) for evaluation in evaluations]
    rows = []
    for name in sorted({kind for table in tables for kind in table}):
        cells = [_numbers(table.get(name)) for table in tables]
        n = next((cell["n"] for cell in cells if cell["n"]), None)
        rows.append({"kind": name, "n": n, "cells": cells})
    return rows


# --- paired comparison -----------------------------------------------------------------------


def before_and_after(evaluations: Sequence[Evaluation]) -> Record:
    """Compare each later evaluation with the baseline, and list the problems of the first.

    Args:
        evaluations: of one run, the baseline first.
    """
    before = next(filter(is_baseline, evaluations), None)
    later = [evaluation for evaluation in evaluations if not is_baseline(evaluation)]
    comparisons = [
        found
        for after in later
        if (found := _stated_comparison(after) or (compare(before, after) if before else None))
    ]
    paired = next((after for after in later if before and _pairs(before, after)), None)
    problems = None
    if before and paired:
        problems = _changed(before, paired)
    elif alone := next((e for e in (*later, before) if e and e.records), None):
        problems = _answered(alone)
    return {
        "comparisons": comparisons,
        "verdict": verdict_sentence(comparisons[0]) if comparisons else None,
        "problems": problems,
    }


def _pairs(before: Evaluation, after: Evaluation) -> list[tuple[Record, Record]]:
    """Pair the records of the same index and question."""
    earlier = {str(record.get("index")): record for record in before.records}
    found = [(earlier.get(str(record.get("index"))), record) for record in after.records]
    return [(b, a) for b, a in found if b and b.get("question") == a.get("question")]


def _stated_comparison(after: Evaluation) -> Record | None:
    """Read the comparison that `results.json` states."""
    numbers = _numbers(after.results)
    stated = numbers["delta"] is not None and numbers["delta_interval"]
    return {"label": after.label, **numbers} if stated else None


def compare(before: Evaluation, after: Evaluation) -> Record | None:
    """Compare two evaluations problem by problem.

    Args:
        before: the one to compare with.
        after: the one whose gain is returned.

    Returns:
        Accuracies, difference, its interval and p-value; None unless all problems are the same.
    """
    pairs = _pairs(before, after)
    if not pairs or {len(before.records), len(after.records)} != {len(pairs)}:
        return None
    paired = compare_paired([_right(b) for b, _ in pairs], [_right(a) for _, a in pairs])
    return {
        "label": after.label,
        "before": paired.baseline_accuracy,
        "accuracy": paired.accuracy,
        "delta": paired.delta,
        "delta_interval": paired.delta_ci95,
        "p": paired.mcnemar_p,
    }


def verdict_sentence(comparison: Record) -> str:
    """State a comparison in one sentence."""
    low, high = comparison["delta_interval"]
    points = abs(100 * comparison["delta"])
    ends = f"{100 * low:+.1f} to {100 * high:+.1f} points"
    if low > 0:
        return f"Accuracy rose by {points:.1f} points (95 % interval {ends})."
    if high < 0:
        return f"Accuracy fell by {points:.1f} points (95 % interval {ends})."
    return f"No clear difference: the 95 % interval, {ends}, contains 0."


# --- problems --------------------------------------------------------------------------------

Answered = tuple[str, list[tuple[str, Record]]]  # verdict, then label and record of each answer


def _changed(before: Evaluation, after: Evaluation) -> Record:
    """List the problems that both answered, changed ones first."""
    answered = [
        (VERDICTS[_right(b), _right(a)], [(before.label, b), (after.label, a)])
        for b, a in _pairs(before, after)
    ]
    title = f"{after.label} against {before.label}"
    return {"title": title, "paired": True, **_problems(answered, [*VERDICTS.values()])}


def _answered(alone: Evaluation) -> Record:
    """List the problems that one model answered, wrong ones first."""
    answered = [
        ("right" if _right(record) else "wrong", [(alone.label, record)])
        for record in alone.records
    ]
    return {"title": alone.label, "paired": False, **_problems(answered, ["wrong", "right"])}


def _problems(answered: list[Answered], verdicts: list[str]) -> Record:
    """Count the problems of each verdict, and choose a fair share of each."""
    by_verdict = [[entry for entry in answered if entry[0] == verdict] for verdict in verdicts]
    counts = [len(entries) for entries in by_verdict]
    chars = fmean(
        sum(len(as_text(record.get("completion"))) for _, record in records)
        for _, records in answered
    )
    limit = min(MAX_PROBLEMS, int(MAX_CHARS / max(chars, 1)))
    shown = [
        _problem(*entry)
        for entries, share in zip(by_verdict, fair_shares(counts, limit), strict=True)
        for entry in entries[:share]
    ]
    flags = {flag for p in shown for answer in p["answers"] for flag in answer["flags"]}
    return {
        "counts": list(zip(verdicts, counts, strict=True)),
        "total": len(answered),
        "shown": shown,
        "kinds": sorted({problem["kind"] for problem in shown if problem["kind"]}),
        "flags": sorted(flags - {"right", "wrong"}),  # the verdict has a separate filter
    }


def _problem(verdict: str, records: list[tuple[str, Record]]) -> Record:
    latest = records[-1][1]
    return {
        "verdict": verdict,
        "kind": as_text(latest.get("kind")),
        "question": as_text(latest.get("question")),
        "gold": as_text(latest.get("gold")),
        "answers": [{"label": label, **_answer(record)} for label, record in records],
    }


def _answer(record: Record) -> Record:
    """Describe one model's answer to a problem, with flags for what the judge found."""
    right = _right(record)
    flags = {
        "right": right,
        "wrong": not right,
        "right if read leniently": not right and record.get("lenient_correct") is True,
        "no answer found": "extracted" in record and record["extracted"] is None,
        "format broken": record.get("format_ok") is False,
        "truncated": record.get("truncated") is True,
    }
    return {
        "flags": [flag for flag, found in flags.items() if found],
        "extracted": record.get("extracted"),
        "tokens": finite(record.get("completion_tokens")),
        "stop_reason": as_text(record.get("stop_reason")),
        "completion": as_text(record.get("completion")),
    }


def _right(record: Record) -> bool:
    return record.get("correct") is True
