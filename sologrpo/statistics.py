"""Intervals and tests for accuracy: one model, and two models on the same problems.

Proportions are fractions from 0 to 1; intervals are `(low, high)` pairs of them. Standard library
only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

Interval = tuple[float, float]


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion (Wilson 1927), without continuity correction.

    Unlike the textbook interval it stays inside 0 to 1, and it has a width when all or none of
    the problems are right.

    Example:
        >>> low, high = wilson_interval(81, 263)
        >>> round(low, 4), round(high, 4)
        (0.2553, 0.3662)
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"need 0 <= successes <= n and n > 0, got {successes} of {n}")
    z = _normal_quantile(confidence)
    centre = successes + z * z / 2
    spread = z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    # The ends are exactly 0 and 1 when none or all are right; rounding may miss them by 1e-17.
    low = 0.0 if successes == 0 else (centre - spread) / (n + z * z)
    high = 1.0 if successes == n else (centre + spread) / (n + z * z)
    return low, high


def mcnemar_exact(newly_right: int, newly_wrong: int) -> float:
    """Two-sided exact McNemar p-value: could a fair coin have split the changed problems so?

    Problems on which both models agree say nothing about which is better, so only those whose
    verdict changed are counted. Returns 1.0 when none did.

    Example:
        >>> mcnemar_exact(1, 7)
        0.0703125
    """
    if newly_right < 0 or newly_wrong < 0:
        raise ValueError(f"counts cannot be negative, got {newly_right} and {newly_wrong}")
    changed = newly_right + newly_wrong
    term = tail = 1  # exact integers: floats underflow beyond about 1,000 changed problems
    for k in range(min(newly_right, newly_wrong)):
        term = term * (changed - k) // (k + 1)
        tail += term
    return float(min(Fraction(1), Fraction(2 * tail, 2**changed)))


def paired_difference_interval(
    both_right: int,
    newly_right: int,
    newly_wrong: int,
    both_wrong: int,
    confidence: float = 0.95,
) -> Interval:
    """Interval of `trained - baseline` accuracy when both answered the same problems.

    Method 10 of Newcombe, "Improved confidence intervals for the difference between binomial
    proportions based on paired data", Statistics in Medicine 17 (1998) 2635-2650: the Wilson
    intervals of the two accuracies, combined with the correlation of the two verdicts.
    """
    table = (both_right, newly_right, newly_wrong, both_wrong)
    n = sum(table)
    if min(table) < 0 or n == 0:
        raise ValueError(f"need counts of at least 0 with a sum over 0, got {table}")
    trained, baseline = (both_right + newly_right) / n, (both_right + newly_wrong) / n
    trained_low, trained_high = wilson_interval(both_right + newly_right, n, confidence)
    baseline_low, baseline_high = wilson_interval(both_right + newly_wrong, n, confidence)
    phi = _corrected_phi(*table)
    delta = trained - baseline
    below = _combine(trained - trained_low, baseline_high - baseline, phi)
    above = _combine(trained_high - trained, baseline - baseline_low, phi)
    return max(-1.0, delta - below), min(1.0, delta + above)


def percentile(values: Sequence[float], percent: float) -> float:
    """Value below which `percent` (0 to 100) of the values lie, interpolated linearly.

    `statistics.quantiles` refuses a single value before Python 3.13, and knows no 0 and 100.

    Example:
        >>> percentile([10, 20, 30], 75)
        25.0
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"need values and 0 <= percent <= 100, got {len(values)} and {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = math.ceil(position)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (position - low))


@dataclass(frozen=True)
class PairedComparison:
    """Two models on the same problems. Accuracies and `delta` are fractions, the rest counts."""

    n: int
    baseline_accuracy: float
    accuracy: float
    delta: float
    delta_ci95: Interval
    mcnemar_p: float
    newly_right: int
    newly_wrong: int


def compare_paired(baseline: Sequence[bool], trained: Sequence[bool]) -> PairedComparison:
    """Compare verdicts on the same problems, given in the same order.

    Example:
        >>> compare_paired([True, False, False], [True, True, False]).newly_right
        1
    """
    pairs = list(zip(baseline, trained, strict=True))
    n = len(pairs)
    both_right = sum(before and after for before, after in pairs)
    newly_right = sum(after and not before for before, after in pairs)
    newly_wrong = sum(before and not after for before, after in pairs)
    both_wrong = n - both_right - newly_right - newly_wrong
    interval = paired_difference_interval(both_right, newly_right, newly_wrong, both_wrong)
    return PairedComparison(
        n=n,
        baseline_accuracy=(both_right + newly_wrong) / n,
        accuracy=(both_right + newly_right) / n,
        delta=(newly_right - newly_wrong) / n,
        delta_ci95=interval,
        mcnemar_p=mcnemar_exact(newly_right, newly_wrong),
        newly_right=newly_right,
        newly_wrong=newly_wrong,
    )


def _normal_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _corrected_phi(both_right: int, newly_right: int, newly_wrong: int, both_wrong: int) -> float:
    """Correlation of the two verdicts, -1 to 1, with Newcombe's continuity correction."""
    n = both_right + newly_right + newly_wrong + both_wrong
    margins = (
        (both_right + newly_right)
        * (newly_wrong + both_wrong)
        * (both_right + newly_wrong)
        * (newly_right + both_wrong)
    )
    if margins == 0:  # one model is right on all or on none: no correlation to speak of
        return 0.0
    agreement = both_right * both_wrong - newly_right * newly_wrong
    if agreement > 0:
        return max(agreement - n / 2, 0.0) / math.sqrt(margins)
    return agreement / math.sqrt(margins)


def _combine(first: float, second: float, phi: float) -> float:
    """Length of the third side: distances `first` and `second`, correlated by `phi`."""
    return math.sqrt(max(0.0, first * first - 2 * phi * first * second + second * second))
