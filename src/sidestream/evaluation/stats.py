"""Intervals and paired tests for the numbers of a report: thin on scipy, plain floats in and out."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike


class MeanSem(NamedTuple):
    """Mean over seeds and its standard error."""

    mean: float
    sem: float


class McNemar(NamedTuple):
    """Discordant counts of a paired comparison and the exact two-sided p-value."""

    only_a: int
    only_b: int
    p_value: float


class MeanDifference(NamedTuple):
    """Mean of a - b and its interval."""

    difference: float
    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion, without continuity correction, as fractions in [0, 1].

    Source: Wilson (1927), J. Am. Stat. Assoc. 22. It keeps its width at 0 and n successes, where a report of
    recall spends most of its cells and where the normal interval shrinks to a point.

    Raises ValueError for n < 1, for successes outside 0..n and for counts that are not whole.
    """
    successes, n = _count(successes, "successes"), _count(n, "n")
    _check_confidence(confidence)
    if n < 1:
        raise ValueError(f"n is {n}: a proportion needs at least one trial")
    if not 0 <= successes <= n:
        raise ValueError(f"successes is {successes}: must lie between 0 and n = {n}")
    interval = scipy.stats.binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    # In exact arithmetic the interval always contains successes / n; rounding must not push it off an end.
    low, high = (0.0 if successes == 0 else interval.low), (1.0 if successes == n else interval.high)
    return float(low), float(high)


def sem(values: ArrayLike) -> float:
    """Standard error of the mean over seeds: sample standard deviation (n - 1) over sqrt(n), unit of the values.

    Raises ValueError for fewer than two values: one seed has no spread, and 0 would claim one.
    """
    sample = _sample(values, "values")
    if sample.size < 2:
        raise ValueError(f"{sample.size} value given: the standard error of the mean needs at least two seeds")
    return float(scipy.stats.sem(sample))


def mean_sem(values: ArrayLike) -> MeanSem:
    """Mean and standard error over seeds (the papers' "mean +- SEM"). Errors as in `sem`."""
    return MeanSem(float(np.mean(_sample(values, "values"))), sem(values))


def mean_and_band(values: ArrayLike) -> tuple[float, float, float]:
    """Mean and its 95% interval over problems, by the normal approximation; a single value has no width."""
    sample = _sample(values, "values")
    mean = float(sample.mean())
    half = 1.96 * float(sample.std(ddof=1)) / len(sample) ** 0.5 if len(sample) > 1 else 0.0
    return mean, mean - half, mean + half


def retrained(
    values: ArrayLike, intervals: Sequence[Sequence[float]] = (), *, share: bool, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a mean over seeds that covers retraining: of the mean over all trainings, on all problems.

    Student's t over the seeds' values, and never narrower than the seeds' own intervals over problems are on average:
    all seeds are asked the same problems, so more seeds do not sharpen that, and seeds that agree to the last problem
    claim no certainty.

    Args:
        values: one a seed, two or more.
        intervals: each seed's own (low, high), where there are any.
        share: clip to [0, 1].
    """
    sample = _sample(values, "values")
    mean, half = float(sample.mean()), sem(sample) * float(scipy.stats.t.ppf((1 + confidence) / 2, sample.size - 1))
    below = [float(np.mean([interval[0] for interval in intervals]))] if len(intervals) else []
    above = [float(np.mean([interval[1] for interval in intervals]))] if len(intervals) else []
    low, high = min([mean - half, *below]), max([mean + half, *above])
    return (max(low, 0.0), min(high, 1.0)) if share else (low, high)


def mcnemar_exact(a: ArrayLike, b: ArrayLike) -> McNemar:
    """Exact McNemar test of two arms on the same problems: do they succeed equally often?

    `a[i]` and `b[i]` say whether each arm solved problem i. Only problems that one arm alone solved carry
    information; under the null hypothesis each of them is a fair coin. Source: McNemar (1947), Psychometrika 12.

    Raises ValueError for different lengths, no problems, or entries other than True/False (0/1).
    """
    left, right = _paired(a, b)
    for name, sample in (("a", left), ("b", right)):
        if not np.isin(sample, (0.0, 1.0)).all():
            raise ValueError(f"{name} holds values other than True and False: McNemar's test compares successes")
    only_a = int(np.sum((left == 1) & (right == 0)))
    only_b = int(np.sum((left == 0) & (right == 1)))
    if only_a + only_b == 0:
        return McNemar(0, 0, 1.0)
    return McNemar(only_a, only_b, float(scipy.stats.binomtest(only_a, only_a + only_b, 0.5).pvalue))


def paired_bootstrap(
    a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> MeanDifference:
    """Percentile bootstrap interval of mean(a - b), resampling problems so that pairs stay together.

    `a[i]` and `b[i]` are the two arms' scores on problem i; the result has their unit. Source: Efron and
    Tibshirani (1993), ch. 13. Percentile and not BCa: scores of two good arms are often equal on every problem, where
    BCa is undefined. Equal seeds give equal intervals.

    Raises ValueError for different lengths or fewer than two problems.
    """
    _check_confidence(confidence)
    left, right = _paired(a, b)
    delta = left - right
    mean = float(delta.mean())
    if delta.size < 2:
        raise ValueError("one problem given: a bootstrap interval needs at least two")
    if not np.ptp(delta):
        return MeanDifference(mean, mean, mean)
    interval = scipy.stats.bootstrap(
        (delta,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        batch=max(1, 4_000_000 // delta.size),  # 32 MB of resampled scores at a time
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return MeanDifference(mean, float(interval.low), float(interval.high))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: must lie between 0 and 1 (0.95, not 95)")


def _count(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}: must be a whole number (a count, not a rate)") from None


def _sample(values: ArrayLike, name: str) -> np.ndarray:
    sample = np.asarray(values, dtype=float)
    if sample.ndim != 1 or sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError(f"{name} must be a non-empty flat list of finite numbers, got shape {sample.shape}")
    return sample


def _paired(a: ArrayLike, b: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    left, right = _sample(a, "a"), _sample(b, "b")
    if left.size != right.size:
        raise ValueError(f"a has {left.size} problems and b has {right.size}: paired samples need the same problems")
    return left, right
