"""Before and after training, for the report: scores, paired comparison, and what changed."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sologrpo.report.reading import (
    MAX_CHARS,
    Evaluation,
    Record,
    as_text,
    fair_shares,
    finite,
    is_baseline,
)
from sologrpo.scoring.statistics import compare_paired, wilson_interval

MAX_PROBLEMS = 600  # with both answers, on one page

# Fields of results.json as the table names them; what is missing everywhere is left out.
SHARES = (
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
    """The headline of one evaluation; numbers as fractions, nothing where they are missing."""
    results = evaluation.results
    accuracy, n = finite(results.get("accuracy")), finite(results.get("n"))
    return {
        "label": evaluation.label,
        "n": n,
        "accuracy": accuracy,
        "interval": _interval(results.get("accuracy_ci95")) or _wilson(accuracy, n),
        "precision": results.get("precision"),
        "baseline": is_baseline(evaluation),
    }


def rates(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[str]]]:
    """Rows of the table of scores: a name, and a cell for each evaluation.

    Rows of which no evaluation has the number are left out.
    """
    tables = [evaluation.results for evaluation in evaluations]
    samples = [_mapping(_mapping(table.get("sampled")).get("scores")) for table in tables]
    lengths = [_mapping(table.get("completion_tokens")) for table in tables]
    drawn = dict.fromkeys(name for table in samples for name in table)
    rows = [(title, [_percent(table.get(key)) for table in tables]) for key, title in SHARES]
    rows += [
        (f"{name}, sampled", [_percent(table.get(name)) for table in samples]) for name in drawn
    ]
    rows.append(("tokens, mean", [_decimal(t.get("mean_completion_tokens")) for t in tables]))
    rows += [(title, [_spread(table.get(key)) for table in lengths]) for key, title in LENGTHS]
    rows.append(("tokens a second", [_decimal(table.get("tokens_per_second")) for table in tables]))
    return [(title, cells) for title, cells in rows if any(cells)]


def _percent(value: Any) -> str:
    found = finite(value)
    return "" if found is None else f"{100 * found:.1f} %"


def _decimal(value: Any) -> str:
    found = finite(value)
    return "" if found is None else f"{found:,.1f}"


def _spread(lengths: Any) -> str:
    """Median and 95th percentile of a number of tokens."""
    found = [finite(_mapping(lengths).get(name)) for name in ("p50", "p95")]
    return "" if None in found else " / ".join(f"{value:,.0f}" for value in found)


def precisions(table: Record) -> list[Record]:
    """Rows of `precisions.json`: the adapter in each numeric form, against the trained one."""
    trained = table.get("trained")
    rows = []
    for name, entry in _mapping(table.get("precisions")).items():
        entry = _mapping(entry)
        rows.append(
            {
                "name": name,
                "trained": name == trained,
                "accuracy": finite(entry.get("accuracy")),
                "interval": _interval(entry.get("accuracy_ci95")),
                "delta": finite(entry.get("delta")),
                "delta_interval": _interval(entry.get("delta_ci95")),
                "differing": finite(entry.get("differing_rate")),
            }
        )
    return rows


def _interval(value: Any) -> tuple[float, float] | None:
    ends = [finite(end) for end in value] if isinstance(value, list) and len(value) == 2 else []
    low, high = ends or (None, None)
    return None if low is None or high is None else (low, high)


def _wilson(accuracy: float | None, n: float | None) -> tuple[float, float] | None:
    if accuracy is None or n is None or n < 1 or not 0 <= accuracy <= 1:
        return None
    return wilson_interval(round(accuracy * n), int(n))


def kinds(evaluations: Sequence[Evaluation]) -> list[Record]:
    """Rows of the table by kind: one cell an evaluation, empty where it lacks the kind."""
    tables = [_mapping(evaluation.results.get("by_kind")) for evaluation in evaluations]
    names = sorted({kind for table in tables for kind in table})
    rows = []
    for name in names:
        cells = [_kind_cell(_mapping(table.get(name))) for table in tables]
        n = next((cell["n"] for cell in cells if cell["n"]), None)
        rows.append({"kind": name, "n": n, "cells": cells})
    return rows


def _kind_cell(entry: Record) -> Record:
    accuracy, n = finite(entry.get("accuracy")), finite(entry.get("n"))
    return {"accuracy": accuracy, "n": n, "interval": _wilson(accuracy, n)}


def _mapping(value: Any) -> Record:
    return value if isinstance(value, dict) else {}


# --- paired comparison -----------------------------------------------------------------------


def before_and_after(evaluations: Sequence[Evaluation]) -> Record:
    """Every later evaluation against the baseline; what changed for the first with records."""
    before = next(filter(is_baseline, evaluations), None)
    later = [evaluation for evaluation in evaluations if not is_baseline(evaluation)]
    comparisons = [found for after in later if (found := _comparison(before, after))]
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
    """Records of the same problem, by index; a different question there is another problem."""
    earlier = {record.get("index"): record for record in before.records}
    found = [(earlier.get(record.get("index")), record) for record in after.records]
    return [(b, a) for b, a in found if b and b.get("question") == a.get("question")]


def _comparison(before: Evaluation | None, after: Evaluation) -> Record | None:
    """Paired comparison from `results.json`, else from the records if they pair up wholly."""
    return _stated_comparison(after) or (compare(before, after) if before else None)


def _stated_comparison(after: Evaluation) -> Record | None:
    results = after.results
    delta, interval = finite(results.get("delta")), _interval(results.get("delta_ci95"))
    if delta is None or interval is None:
        return None
    return {
        "label": after.label,
        "n": finite(results.get("n")),
        "before": finite(results.get("baseline_accuracy")),
        "after": finite(results.get("accuracy")),
        "delta": delta,
        "low": interval[0],
        "high": interval[1],
        "p": finite(results.get("mcnemar_p")),
    }


def compare(before: Evaluation, after: Evaluation) -> Record | None:
    """Paired comparison of two evaluations of the very same problems; else nothing."""
    pairs = _pairs(before, after)
    if not pairs or {len(before.records), len(after.records)} != {len(pairs)}:
        return None
    paired = compare_paired([_right(b) for b, _ in pairs], [_right(a) for _, a in pairs])
    return {
        "label": after.label,
        "n": paired.n,
        "before": paired.baseline_accuracy,
        "after": paired.accuracy,
        "delta": paired.delta,
        "low": paired.delta_ci95[0],
        "high": paired.delta_ci95[1],
        "p": paired.mcnemar_p,
    }


def verdict_sentence(comparison: Record) -> str:
    """The comparison in plain words."""
    points = abs(100 * comparison["delta"])
    interval = f"{100 * comparison['low']:+.1f} to {100 * comparison['high']:+.1f} points"
    if comparison["low"] > 0:
        return f"Accuracy rose by {points:.1f} points (95 % interval {interval})."
    if comparison["high"] < 0:
        return f"Accuracy fell by {points:.1f} points (95 % interval {interval})."
    return f"No clear difference: the 95 % interval, {interval}, contains 0."


# --- problems --------------------------------------------------------------------------------


def _changed(before: Evaluation, after: Evaluation) -> Record:
    """Problems that both answered, changed ones first."""
    answered = [
        (VERDICTS[_right(b), _right(a)], [(before.label, b), (after.label, a)])
        for b, a in _pairs(before, after)
    ]
    title = f"{after.label} against {before.label}"
    return {"title": title, "paired": True, **_problems(answered, list(VERDICTS.values()))}


def _answered(alone: Evaluation) -> Record:
    """Problems that one model answered."""
    answered = [
        ("right" if _right(record) else "wrong", [(alone.label, record)])
        for record in alone.records
    ]
    return {"title": alone.label, "paired": False, **_problems(answered, ["wrong", "right"])}


def _problems(answered: list[tuple[str, list[tuple[str, Record]]]], verdicts: list[str]) -> Record:
    """Count of every verdict, and a fair share of the problems of each."""
    by_verdict = [[entry for entry in answered if entry[0] == verdict] for verdict in verdicts]
    chars = fmean(
        sum(len(as_text(record.get("completion"))) for _, record in records)
        for _, records in answered
    )
    limit = min(MAX_PROBLEMS, int(MAX_CHARS / max(chars, 1)))
    shares = fair_shares([len(entries) for entries in by_verdict], limit)
    shown = [
        _problem(verdict, records)
        for entries, share in zip(by_verdict, shares, strict=True)
        for verdict, records in entries[:share]
    ]
    return {
        "counts": [(v, len(entries)) for v, entries in zip(verdicts, by_verdict, strict=True)],
        "total": len(answered),
        "shown": shown,
        "kinds": sorted({problem["kind"] for problem in shown if problem["kind"]}),
        "flags": _distinct(
            flag for p in shown for answer in p["answers"] for flag in answer["flags"]
        ),
    }


def _distinct(flags: Any) -> list[str]:
    """Flags worth a filter: the verdict has one of its own."""
    return sorted(set(flags) - {"right", "wrong"})


def _problem(verdict: str, records: list[tuple[str, Record]]) -> Record:
    latest = records[-1][1]
    return {
        "verdict": verdict,
        "index": latest.get("index"),
        "kind": as_text(latest.get("kind")),
        "question": as_text(latest.get("question")),
        "gold": as_text(latest.get("gold")),
        "answers": [{"label": label, **_answer(record)} for label, record in records],
    }


def _answer(record: Record) -> Record:
    """One model's answer to a problem, with what the judge said of it in words."""
    flags = ["right" if _right(record) else "wrong"]
    if not _right(record) and record.get("lenient_correct") is True:
        flags.append("right if read leniently")
    if "extracted" in record and record["extracted"] is None:
        flags.append("no answer found")
    if record.get("format_ok") is False:
        flags.append("format broken")
    if record.get("truncated") is True:
        flags.append("truncated")
    return {
        "flags": flags,
        "extracted": record.get("extracted"),
        "tokens": finite(record.get("completion_tokens")),
        "stop_reason": as_text(record.get("stop_reason")),
        "completion": as_text(record.get("completion")),
    }


def _right(record: Record) -> bool:
    return record.get("correct") is True
