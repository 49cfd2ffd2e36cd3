"""Intervals and tests for accuracy: one model, and two models on the same problems.

Proportions are fractions from 0 to 1; intervals are `(low, high)` pairs of them, of 95 %.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Annotated

from pydantic import Field

from sologrpo.base.schema import Schema

Interval = Annotated[tuple[float, float], Field(strict=False)]  # JSON has lists alone
_Z = NormalDist().inv_cdf(0.975)  # leaves out 2.5 % on either side


def wilson_interval(successes: float, n: float) -> Interval:
    """Compute the score interval of a proportion (Wilson 1927), without continuity correction.

    Unlike the textbook interval it stays between 0 and 1, and has a width even if none or all of
    the problems are right. `successes` may be a sum of shares.

    >>> low, high = wilson_interval(81, 263)
    >>> round(low, 4), round(high, 4)
    (0.2553, 0.3662)
    """
    centre = successes + _Z * _Z / 2
    spread = _Z * math.sqrt(successes * (n - successes) / n + _Z * _Z / 4)
    # The ends are exactly 0 and 1 when none or all are right; rounding may miss them by 1e-17.
    low = 0.0 if successes == 0 else (centre - spread) / (n + _Z * _Z)
    high = 1.0 if successes == n else (centre + spread) / (n + _Z * _Z)
    return low, high


def mcnemar_exact(newly_right: int, newly_wrong: int) -> float:
    """Compute the two-sided p-value of the exact McNemar test.

    It is the chance that a fair coin splits the changed problems at least as unevenly.

    >>> mcnemar_exact(1, 7)
    0.0703125
    """
    changed = newly_right + newly_wrong
    term = tail = 1  # exact integers: floats underflow beyond about 1,000 changed problems
    for k in range(min(newly_right, newly_wrong)):
        term = term * (changed - k) // (k + 1)
        tail += term
    return float(min(Fraction(1), Fraction(2 * tail, 2**changed)))


def paired_difference_interval(
    both_right: int, newly_right: int, newly_wrong: int, both_wrong: int
) -> Interval:
    """Compute the interval of `trained - baseline` accuracy on the same problems.

    Method 10 of Newcombe, "Improved confidence intervals for the difference between binomial
    proportions based on paired data", Statistics in Medicine 17 (1998) 2635-2650: the Wilson
    intervals of the two accuracies, combined with the correlation of the two verdicts.
    """
    table = (both_right, newly_right, newly_wrong, both_wrong)
    n = sum(table)
    trained, baseline = (both_right + newly_right) / n, (both_right + newly_wrong) / n
    trained_low, trained_high = wilson_interval(both_right + newly_right, n)
    baseline_low, baseline_high = wilson_interval(both_right + newly_wrong, n)
    phi = _corrected_phi(*table)
    delta = trained - baseline
    below = _combine(trained - trained_low, baseline_high - baseline, phi)
    above = _combine(trained_high - trained, baseline - baseline_low, phi)
    return max(-1.0, delta - below), min(1.0, delta + above)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate the chance that at least one of `k` samples of a problem is right.

    1 - C(n - c, k) / C(n, k) is unbiased, unlike 1 - (1 - c / n)^k (Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", section 2.1).

    >>> pass_at_k(samples=4, right=1, k=2)
    0.5
    """
    return float(1 - Fraction(math.comb(samples - right, k), math.comb(samples, k)))


class Comparison(Schema):
    """Two models on the same problems: accuracies and `delta` as fractions, and counts."""

    n: int
    baseline_accuracy: float
    accuracy: float
    delta: float
    delta_ci95: Interval
    mcnemar_p: float
    both_right: int
    newly_right: int
    newly_wrong: int
    both_wrong: int


def compare_paired(baseline: Sequence[bool], trained: Sequence[bool]) -> Comparison:
    """Compare the verdicts on the answers of two models to the same problems.

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
    return Comparison(
        n=n,
        baseline_accuracy=(both_right + newly_wrong) / n,
        accuracy=(both_right + newly_right) / n,
        delta=(newly_right - newly_wrong) / n,
        delta_ci95=interval,
        mcnemar_p=mcnemar_exact(newly_right, newly_wrong),
        both_right=both_right,
        newly_right=newly_right,
        newly_wrong=newly_wrong,
        both_wrong=both_wrong,
    )


def _corrected_phi(both_right: int, newly_right: int, newly_wrong: int, both_wrong: int) -> float:
    """Correlate the two verdicts, from -1 to 1, with Newcombe's continuity correction."""
    n = both_right + newly_right + newly_wrong + both_wrong
    margins = (
        (both_right + newly_right)
        * (newly_wrong + both_wrong)
        * (both_right + newly_wrong)
        * (newly_right + both_wrong)
    )
    if margins == 0:  # one model is right on all or on none, so there is no correlation
        return 0.0
    agreement = both_right * both_wrong - newly_right * newly_wrong
    if agreement > 0:
        return max(agreement - n / 2, 0.0) / math.sqrt(margins)
    return agreement / math.sqrt(margins)


def _combine(first: float, second: float, phi: float) -> float:
    """Combine two distances, correlated by `phi`, like two sides of a triangle."""
    return math.sqrt(max(0.0, first * first - 2 * phi * first * second + second * second))
