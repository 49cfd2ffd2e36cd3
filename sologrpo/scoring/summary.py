"""Summarise and compare records: the numbers of `results.json`."""

from collections.abc import Sequence
from statistics import mean, median, quantiles
from typing import Any

from sologrpo.scoring.records import Answer, Record
from sologrpo.scoring.statistics import pass_at_k, wilson_interval


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Summarise at least one record: the numbers of `results.json`, see docs/evaluation.md."""
    n = len(records)
    correct, lenient = sum(r.correct for r in records), sum(r.lenient_correct for r in records)
    summary = {
        "n": n,
        "accuracy": correct / n,
        "accuracy_ci95": list(wilson_interval(correct, n)),
        "accuracy_lenient": lenient / n,
        "accuracy_lenient_ci95": list(wilson_interval(lenient, n)),
        "format_rate": mean(record.format_ok for record in records),
        "trailing_text_rate": mean(record.trailing_text for record in records),
        "integer_rate": mean(record.integer_answer for record in records),
        "truncated_rate": mean(record.truncated for record in records),
        "no_answer_rate": mean(record.extracted is None for record in records),
        "mean_completion_tokens": mean(record.completion_tokens for record in records),
        "completion_tokens": {
            "all": _lengths(records),
            "right": _lengths([record for record in records if record.correct]),
            "wrong": _lengths([record for record in records if not record.correct]),
        },
        "by_kind": _accuracy_by_kind(records),
    }
    if records[0].samples:
        summary["sampled"] = _summarise_samples(records)
    return summary


def _lengths(answers: Sequence[Answer]) -> dict[str, float] | None:
    tokens = [answer.completion_tokens for answer in answers]
    if not tokens:
        return None
    at_least_two = tokens if len(tokens) > 1 else tokens * 2  # Python 3.12 refuses a single one
    *_, p95 = quantiles(at_least_two, n=20, method="inclusive")
    return {"mean": mean(tokens), "p50": median(tokens), "p95": p95}


def _accuracy_by_kind(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    kinds = sorted({record.kind for record in records if record.kind is not None})
    groups = {kind: [r.correct for r in records if r.kind == kind] for kind in kinds}
    return {kind: {"n": len(group), "accuracy": mean(group)} for kind, group in groups.items()}


def _summarise_samples(records: Sequence[Record]) -> dict[str, Any]:
    """Return pass@k for k = 1, 2, 4, ...; intervals count problems, as samples share difficulty."""
    K = len(records[0].samples)
    right = [sum(sample.correct for sample in record.samples) for record in records]
    powers_of_two = [2**i for i in range(K.bit_length())]  # up to K
    scores = {f"pass@{k}": [pass_at_k(K, count, k) for count in right] for k in powers_of_two}
    return {
        "num_samples": K,
        "scores": {name: mean(values) for name, values in scores.items()},
        "scores_ci95": {
            name: list(wilson_interval(sum(values), len(values))) for name, values in scores.items()
        },
        "truncated_rate": mean(s.truncated for record in records for s in record.samples),
        "completion_tokens": _lengths([s for record in records for s in record.samples]),
    }
