"""Intervals and tests against published examples, brute force and properties."""

import math
from fractions import Fraction
from itertools import combinations, product
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sologrpo.scoring.statistics import (
    compare_paired,
    mcnemar_exact,
    paired_difference_interval,
    pass_at_k,
    wilson_interval,
)

counts = st.integers(0, 300)
tables = st.tuples(counts, counts, counts, counts).filter(any)
Z95 = NormalDist().inv_cdf(0.975)


# Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 17
# (1998) 857-872, table I, method 3.
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 3000), st.data())
def test_wilson_ends_solve_the_score_equation(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    for end in (low, high):
        distance = abs(successes / n - end)
        expected = Z95 * math.sqrt(end * (1 - end) / n)
        # At 0 and 1 both sides vanish, and the square root magnifies rounding.
        assert distance == pytest.approx(expected, abs=1e-7)


def mcnemar_by_counting(newly_right: int, newly_wrong: int) -> float:
    """Share of all sequences of coin flips at least as lopsided as the observed one."""
    n = newly_right + newly_wrong
    lopsided = abs(newly_right - newly_wrong)
    flips = [abs(2 * sum(sequence) - n) >= lopsided for sequence in product((0, 1), repeat=n)]
    return sum(flips) / len(flips)


@pytest.mark.parametrize(("right", "wrong"), [(r, w) for r in range(7) for w in range(7)])
def test_mcnemar_brute_force(right: int, wrong: int) -> None:
    assert mcnemar_exact(right, wrong) == pytest.approx(mcnemar_by_counting(right, wrong))


def test_mcnemar_thousands_agree_with_the_normal_curve() -> None:
    right, wrong = 2_600, 2_400
    z = (abs(right - wrong) - 1) / math.sqrt(right + wrong)  # Edwards's continuity correction
    expected = 2 * (1 - NormalDist().cdf(z))
    assert mcnemar_exact(right, wrong) == pytest.approx(expected, rel=0.01)
    assert mcnemar_exact(0, 1_000) == pytest.approx(2.0**-999, rel=1e-12)


# (1, 1, 7, 12): airway hyper-responsiveness (Bentur et al. 2009) in Fagerland, Lydersen and Laake,
# "Recommended tests and confidence intervals for paired binomial proportions", Statistics in
# Medicine 33 (2014) 2850-2875. (59, 6, 16, 80): complete response (Cavo et al. 2012), from the
# tests of the R package contingencytables by the same authors.
@pytest.mark.parametrize(
    ("table", "low", "high"),
    [((1, 1, 7, 12), -0.507, -0.026), ((59, 6, 16, 80), -0.1186, -0.0046)],
)
def test_newcombe_published(table: tuple[int, int, int, int], low: float, high: float) -> None:
    digits = 5e-4 if low == -0.507 else 5e-5
    assert paired_difference_interval(*table) == pytest.approx((low, high), abs=digits)


@given(tables)
def test_newcombe_holds_the_difference(table: tuple[int, int, int, int]) -> None:
    low, high = paired_difference_interval(*table)
    delta = (table[1] - table[2]) / sum(table)
    assert -1 <= low <= delta + 1e-12
    assert delta - 1e-12 <= high <= 1
    assert low < high


@given(tables)
def test_newcombe_mirrors_when_models_swap(table: tuple[int, int, int, int]) -> None:
    both, right, wrong, neither = table
    low, high = paired_difference_interval(both, right, wrong, neither)
    mirrored = paired_difference_interval(both, wrong, right, neither)
    assert mirrored == pytest.approx((-high, -low), abs=1e-12)


def coverage(probabilities: tuple[float, float, float, float], n: int) -> float:
    """Exact chance that the interval of n paired answers holds the true difference."""
    p_both, p_right, p_wrong, p_neither = probabilities
    covered = 0.0
    for a, b, c in product(range(n + 1), repeat=3):
        d = n - a - b - c
        if d < 0:
            continue
        low, high = paired_difference_interval(a, b, c, d)
        ways = math.comb(n, a) * math.comb(n - a, b) * math.comb(n - a - b, c)
        chance = ways * p_both**a * p_right**b * p_wrong**c * p_neither**d
        covered += chance * (low <= p_right - p_wrong <= high)
    return covered


@pytest.mark.parametrize(
    "probabilities",
    [(0.4, 0.2, 0.1, 0.3), (0.1, 0.4, 0.05, 0.45), (0.7, 0.1, 0.1, 0.1), (0.25,) * 4],
)
def test_newcombe_covers_about_95_percent(probabilities: tuple[float, ...]) -> None:
    a, b, c, d = probabilities
    assert 0.93 <= coverage((a, b, c, d), 24) <= 0.99


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_compare_paired(pairs: list[tuple[bool, bool]]) -> None:
    baseline, trained = [before for before, _ in pairs], [after for _, after in pairs]
    comparison = compare_paired(baseline, trained)
    assert comparison.n == len(pairs)
    assert comparison.baseline_accuracy == pytest.approx(sum(baseline) / len(pairs))
    assert comparison.accuracy == pytest.approx(sum(trained) / len(pairs))
    difference = comparison.accuracy - comparison.baseline_accuracy
    assert comparison.delta == pytest.approx(difference)
    assert comparison.newly_right == pairs.count((False, True))
    assert comparison.newly_wrong == pairs.count((True, False))
    assert comparison.both_right == pairs.count((True, True))
    assert comparison.both_wrong == pairs.count((False, False))
    assert comparison.mcnemar_p == mcnemar_exact(comparison.newly_right, comparison.newly_wrong)
    assert comparison.delta_ci95[0] <= comparison.delta <= comparison.delta_ci95[1]


# -- several samples per problem -----------------------------------------------------------------


def pass_by_enumeration(verdicts: list[bool], k: int) -> Fraction:
    """Share of all choices of k samples that hold a right one."""
    choices = list(combinations(verdicts, k))
    return Fraction(sum(any(choice) for choice in choices), len(choices))


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_by_enumeration(samples: int) -> None:
    for right, k in product(range(samples + 1), range(1, samples + 1)):
        verdicts = [True] * right + [False] * (samples - right)
        assert pass_at_k(samples, right, k) == float(pass_by_enumeration(verdicts, k))


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(10_000, 1, 5_000) == 0.5  # binomial coefficients of 3,000 digits
    assert pass_at_k(3, 2, 2) == 1.0  # two wrong ones cannot be chosen


def test_verdicts_come_in_pairs() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        compare_paired([True], [True, False])
