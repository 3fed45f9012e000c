import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats

from sidestream.evaluation.stats import mcnemar_exact, mean_sem, paired_bootstrap, retrained, sem, wilson


def wilson_by_hand(k: int, n: int, confidence: float) -> tuple[float, float]:
    """The textbook formula, as statsmodels' proportion_confint(method="wilson") writes it."""
    z, p = float(scipy_stats.norm.isf((1 - confidence) / 2)), k / n
    centre = (k + z**2 / 2) / (n + z**2)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return centre - half, centre + half


@pytest.mark.parametrize(("k", "n"), [(0, 500), (1, 500), (42, 500), (491, 500), (500, 500), (1, 1), (3, 7)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_the_textbook_formula_and_holds_the_proportion(k, n, confidence):
    low, high = wilson(k, n, confidence)
    assert (low, high) == pytest.approx(wilson_by_hand(k, n, confidence), abs=1e-12)
    assert 0 <= low <= k / n <= high <= 1
    assert low < high


def test_wilson_known_value_and_not_the_normal_interval():
    # 81 of 263: Newcombe (1998), Stat. Med. 17, table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    half = 1.96 * math.sqrt(81 / 263 * 182 / 263 / 263)
    assert wilson(81, 263) != pytest.approx((81 / 263 - half, 81 / 263 + half), abs=5e-4)


def test_wilson_covers_about_as_often_as_it_says():
    n, p = 60, 0.07
    pmf = scipy_stats.binom.pmf(np.arange(n + 1), n, p)
    covered = np.array([low <= p <= high for low, high in (wilson(k, n) for k in range(n + 1))])
    assert 0.93 < pmf[covered].sum() < 0.99
    narrow = np.array([low <= p <= high for low, high in (wilson(k, n, 0.5) for k in range(n + 1))])
    assert pmf[narrow].sum() < 0.75


@pytest.mark.parametrize(
    ("k", "n", "said"),
    [(1, 0, "at least one trial"), (6, 5, "between 0 and n"), (-1, 5, "between 0 and n"), (0.98, 500, "whole number")],
)
def test_wilson_refuses(k, n, said):
    with pytest.raises(ValueError, match=said):
        wilson(k, n)


def test_percent_is_no_confidence():
    with pytest.raises(ValueError, match="0.95, not 95"):
        wilson(1, 2, confidence=95)


def test_sem_divides_by_n_minus_one():
    values = [0.90, 0.96, 0.84, 0.93, 0.87]
    mean = sum(values) / 5
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
    assert mean_sem(values) == pytest.approx((mean, spread / math.sqrt(5)))
    assert sem(values) == pytest.approx(scipy_stats.sem(values))
    assert sem(values) != pytest.approx(np.std(values) / math.sqrt(5), rel=1e-3)


@pytest.mark.parametrize(("values", "said"), [([0.5], "two seeds"), ([], "non-empty"), ([0.5, math.nan], "finite")])
def test_sem_refuses(values, said):
    with pytest.raises(ValueError, match=said):
        sem(values)


def mcnemar_by_hand(only_a: int, only_b: int) -> float:
    """All ways to flip only_a + only_b fair coins, counted: at least as lopsided as what was seen."""
    n, seen = only_a + only_b, abs(only_a - only_b)
    flips = [abs(2 * sum(coins) - n) >= seen for coins in product((0, 1), repeat=n)]
    return sum(flips) / len(flips)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 1), (5, 0), (1, 9), (4, 6), (5, 5)])
@pytest.mark.parametrize("agree", [0, 40])
def test_mcnemar_counts_discordant_pairs_only(only_a, only_b, agree):
    a = [True] * only_a + [False] * only_b + [True, False] * agree
    b = [False] * only_a + [True] * only_b + [True, False] * agree
    test = mcnemar_exact(a, b)
    assert (test.only_a, test.only_b) == (only_a, only_b)
    assert test.p_value == pytest.approx(mcnemar_by_hand(only_a, only_b))
    assert mcnemar_exact(b, a).p_value == pytest.approx(test.p_value)


def test_mcnemar_is_paired():
    # Equal totals, 10 of 20 each: same problems or opposite problems are the same table to an unpaired test.
    half = np.arange(20) < 10
    assert mcnemar_exact(half, half) == (0, 0, 1.0)
    assert mcnemar_exact(half, ~half)[:2] == (10, 10)
    assert mcnemar_exact(np.ones(20, bool), half).p_value == pytest.approx(2 / 2**10)


def test_mcnemar_refuses_scores_and_different_problems():
    with pytest.raises(ValueError, match="same problems"):
        mcnemar_exact([True], [True, False])
    with pytest.raises(ValueError, match="True and False"):
        mcnemar_exact([0.5, 1.0], [0.0, 1.0])


def test_bootstrap_agrees_with_the_normal_interval_where_that_holds():
    rng = np.random.default_rng(3)
    problem = rng.normal(size=400)
    a, b = problem + 0.2 + 0.1 * rng.normal(size=400), problem + 0.1 * rng.normal(size=400)
    got = paired_bootstrap(a, b)
    half = 1.96 * float(np.std(a - b, ddof=1)) / math.sqrt(400)
    assert got.difference == pytest.approx(np.mean(a) - np.mean(b))
    assert (got.low, got.high) == pytest.approx((got.difference - half, got.difference + half), abs=0.1 * half)
    # Unpaired, the problems' own spread would drown the difference: break the pairs and it does.
    broken = paired_bootstrap(a, rng.permutation(b))
    assert got.high - got.low < 0.2 * (broken.high - broken.low)


def test_bootstrap_repeats_by_seed_and_narrows_with_confidence():
    a, b = np.arange(50) % 3 == 0, np.arange(50) % 4 == 0
    assert paired_bootstrap(a, b) == paired_bootstrap(a, b, seed=0)
    assert paired_bootstrap(a, b) != paired_bootstrap(a, b, seed=1, resamples=99)
    wide, narrow = paired_bootstrap(a, b, confidence=0.99), paired_bootstrap(a, b, confidence=0.5)
    assert wide.low < narrow.low <= narrow.difference <= narrow.high < wide.high


def test_bootstrap_of_equal_arms_is_a_point_and_of_one_problem_an_error():
    assert paired_bootstrap([1, 0, 1], [1, 0, 1]) == (0, 0, 0)
    assert paired_bootstrap([1, 1, 1], [0, 0, 0]) == (1, 1, 1)
    with pytest.raises(ValueError, match="at least two"):
        paired_bootstrap([1], [0])


def test_an_interval_over_seeds_is_students_and_no_narrower_than_over_problems():
    values = [0.90, 0.94, 0.98]
    half = 4.302653 * 0.04 / math.sqrt(3)  # t of two degrees of freedom at 97.5%
    assert retrained(values, share=False) == pytest.approx((0.94 - half, 0.94 + half), abs=1e-6)
    assert retrained(values, share=True) == pytest.approx((0.94 - half, 1.0), abs=1e-6)
    agreed = [wilson(50, 50)] * 5
    # Seeds that agree say nothing of other problems.
    assert retrained([1.0] * 5, agreed, share=True) == pytest.approx(agreed[0])
    assert retrained([0.5, 0.5], [(0.4, 0.6), (0.3, 0.7)], share=True) == pytest.approx((0.35, 0.65))
    with pytest.raises(ValueError, match="at least two seeds"):
        retrained([0.5], share=True)


def test_an_interval_over_seeds_covers_the_mean_of_all_trainings_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    drawn = rng.normal(0.7, 0.05, size=(2000, 3))
    covered = np.mean([low <= 0.7 <= high for low, high in (retrained(row, share=False) for row in drawn)])
    assert 0.93 < covered < 0.97
    normal = [abs(row.mean() - 0.7) <= 1.96 * sem(row) for row in drawn]
    assert np.mean(normal) < 0.9, "with three seeds the normal interval is too narrow"
