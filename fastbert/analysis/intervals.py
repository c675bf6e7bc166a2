"""How sure a mean over examples is: bootstrap intervals and paired tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000


class Interval(NamedTuple):
    """A mean, and between which values it is in 95% of bootstrap resamples; n examples, this seed.

    `low` and `high` are None for one example, of which no resample says anything.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    seed: int

    def text(self, form: str) -> str:
        """Such as "0.512 [0.480, 0.544]", each number in the format `form`; without ends, the mean alone."""
        if self.low is None or self.high is None:
            return format(self.mean, form)
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def resampled_means(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Means over bootstrap resamples of examples: (n, …) -> (resamples, …).

    Raises:
        ValueError: fewer than two examples, of which no resample says anything.
    """
    if len(values) < 2:
        raise ValueError(f"values: an interval needs two examples at least, got {len(values)}")
    n = len(values)
    flat = np.asarray(values, np.float64).reshape(n, -1)
    return (_counts(n, seed, resamples) @ flat / n).reshape(resamples, *values.shape[1:])


@functools.lru_cache(maxsize=2)
def _counts(n: int, seed: int, resamples: int) -> np.ndarray:
    """How often each example is in each resample, (resamples, n): one product makes all means."""
    draw = np.random.default_rng(seed)
    counts = draw.multinomial(n, np.full(n, 1 / n), size=resamples)
    return counts.astype(np.float64)


def mean_interval(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean of (n,) values with its 95% percentile bootstrap interval over examples.

    Raises:
        ValueError: fewer than two examples.
    """
    low, high = np.percentile(resampled_means(values, seed=seed, resamples=resamples), [2.5, 97.5])
    return Interval(float(np.mean(values)), float(low), float(high), len(values), seed)


def estimate(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] | None = None, *, seed: int = 0
) -> Interval:
    """The mean of (n, …) values, or what `statistic` makes of it, with its 95% interval over examples.

    Args:
        values: per example.
        statistic: means (some, …) -> (some,), such as a ratio of two means; None: the mean of all numbers.
        seed: of the resamples.
    """
    n = len(values)
    values = np.asarray(values, np.float64)
    if statistic is None:
        values = values.reshape(n, -1).mean(1)
    of = statistic or (lambda means: means)
    mean = float(of(values.mean(0)[None])[0])
    if n < 2:
        return Interval(mean, None, None, n, seed)
    low, high = np.percentile(of(resampled_means(values, seed=seed)), [2.5, 97.5])
    return Interval(mean, float(low), float(high), n, seed)


def bands(values: np.ndarray, *, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(means, low ends, high ends), each (…), of (n, …) values; of one example the ends are the means."""
    means = np.asarray(values, np.float64).mean(0)
    if len(values) < 2:
        return means, means, means
    return means, *np.percentile(resampled_means(values, seed=seed), [2.5, 97.5], axis=0)


def paired_p(change: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Two-sided p of each column's mean being 0, by a paired bootstrap: (n, columns) -> (columns,).

    Twice the share of resamples whose mean has not the sign of the mean, at least 1 / resamples and at most
    1. Where all differences are 0 it is 1.

    Source: Berg-Kirkpatrick et al. 2012, "An Empirical Investigation of Statistical Significance in NLP".

    Raises:
        ValueError: fewer than two examples.
    """
    means = resampled_means(change, seed=seed, resamples=resamples)
    sign = np.sign(change.mean(0))
    against = (means * sign <= 0).mean(0)
    return np.where(sign == 0, 1.0, np.clip(2 * against, 1 / resamples, 1.0))


def ratio_interval(above: np.ndarray, below: np.ndarray, *, seed: int = 0) -> Interval:
    """Σ above / Σ below over examples, (n,) each, with its 95% interval over them; 0 / 0 is 0.

    Such as right answers over questions, where examples have several.
    """
    return estimate(np.stack([above, below], 1), _ratio, seed=seed)


def _ratio(means: np.ndarray) -> np.ndarray:
    """(some, 2) -> (some,)."""
    above, below = means.T
    return np.divide(above, below, out=np.zeros(len(means)), where=below != 0)
