"""How certain a mean over examples is: bootstrap intervals and paired tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000


class Interval(NamedTuple):
    """A mean over n examples, and the values between which it is in 95% of bootstrap resamples by `seed`.

    `low` and `high` are None for one example, since resamples of one example do not vary.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    seed: int

    @property
    def ends(self) -> tuple[float, float]:
        """(low, high); without ends, the mean twice."""
        return self.mean if self.low is None else self.low, self.mean if self.high is None else self.high

    def text(self, form: str) -> str:
        """Such as "0.512 [0.480, 0.544]", each number in the format `form`.

        It is the mean alone if there are no ends, or if both look like the mean; "not known" for NaN.
        """
        if math.isnan(self.mean):
            return "not known"
        mean, *ends = (format(each, form) for each in self[:3] if each is not None)
        return mean if {*ends} <= {mean} else f"{mean} [{', '.join(ends)}]"


def finite(name: str, values: np.ndarray) -> np.ndarray:
    """The values, after a check that all are finite.

    Raises:
        ValueError: naming the first row of `values` with a number that is not finite.
    """
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        at = tuple(wrong[0])
        raise ValueError(f"{name}[{at[0]}]: expected finite numbers, got {values[at]}")
    return values


def _checked(values: np.ndarray, least: int = 1) -> np.ndarray:
    """The values in float64, after a check that there are `least` examples and all numbers are finite."""
    values = np.asarray(values, np.float64)
    if len(values) < least:
        wanted = "an interval needs two examples" if least > 1 else "expected one example"
        raise ValueError(f"values: {wanted} at least, got {len(values)}")
    if not values.size:
        raise ValueError(f"values: expected a number per example at least, got shape {values.shape}")
    return finite("values", values)


def resampled_means(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Means over bootstrap resamples of examples: (n, …) -> (resamples, …).

    Raises:
        ValueError: fewer than two examples, or a value is not finite.
    """
    values = _checked(values, 2)
    n = len(values)
    flat = values.reshape(n, -1)
    return (_counts(n, seed, resamples) @ flat / n).reshape(resamples, *values.shape[1:])


@functools.lru_cache(maxsize=2)
def _counts(n: int, seed: int, resamples: int) -> np.ndarray:
    """How often each example is in each resample, (resamples, n); one product with it makes all means."""
    draw = np.random.default_rng(seed)
    counts = draw.multinomial(n, np.full(n, 1 / n), size=resamples)
    return counts.astype(np.float64)


def mean_interval(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean of (n,) values with its 95% percentile bootstrap interval over examples.

    Raises:
        ValueError: fewer than two examples, or a value is not finite.
    """
    low, high = np.percentile(resampled_means(values, seed=seed, resamples=resamples), [2.5, 97.5])
    return Interval(float(np.mean(values)), float(low), float(high), len(values), seed)


def estimate(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] | None = None, *, seed: int = 0
) -> Interval:
    """The mean of (n, …) values, or a statistic of it, with its 95% interval over examples.

    Args:
        values: one row per example.
        statistic: means (some, …) -> (some,), such as a ratio of two means; None: the mean of all numbers.
        seed: seed of the resamples.

    Raises:
        ValueError: no example, or a value is not finite.
    """
    values = _checked(values)
    n = len(values)
    if statistic is None:
        values = values.reshape(n, -1).mean(1)
    of = statistic or (lambda means: means)
    mean = float(of(values.mean(0)[None])[0])
    if n < 2:
        return Interval(mean, None, None, n, seed)
    low, high = np.percentile(of(resampled_means(values, seed=seed)), [2.5, 97.5])
    return Interval(mean, float(low), float(high), n, seed)


def bands(values: np.ndarray, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(means, low ends, high ends), each (…), of (n, …) values; with one example the ends are the means.

    Raises:
        ValueError: no example, or a value is not finite.
    """
    means = _checked(values).mean(0)
    if len(values) < 2:
        return means, means, means
    low, high = np.percentile(resampled_means(values, seed=seed), [2.5, 97.5], axis=0)
    return means, low, high


def paired_p(change: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Two-sided p of each column's mean being 0, by a paired bootstrap: (n, columns) -> (columns,).

    It is twice the share of resamples whose mean has another sign than the mean, at least 1 / resamples and
    at most 1. It is 1 if all differences are 0.

    Source: Berg-Kirkpatrick et al. 2012, "An Empirical Investigation of Statistical Significance in NLP".

    Raises:
        ValueError: fewer than two examples, or a value is not finite.
    """
    means = resampled_means(change, seed=seed, resamples=resamples)
    sign = np.sign(change.mean(0))
    against = (means * sign <= 0).mean(0)
    return np.where(sign == 0, 1.0, np.clip(2 * against, 1 / resamples, 1.0))


def ratio_interval(above: np.ndarray, below: np.ndarray, *, seed: int = 0) -> Interval:
    """Σ above / Σ below over examples, (n,) each, with its 95% interval over examples.

    For instance right answers over questions, if an example has several. 0 / 0 is 0, x / 0 is infinite.
    """
    return estimate(np.stack([above, below], 1), _ratio, seed=seed)


def _ratio(means: np.ndarray) -> np.ndarray:
    """(some, 2) -> (some,)."""
    above, below = means.T
    return np.divide(above, below, out=np.where(above == 0, 0, np.copysign(np.inf, above)), where=below != 0)
