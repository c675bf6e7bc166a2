"""How sure a mean over examples is: bootstrap intervals and paired tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RESAMPLES = 1000


class Interval(NamedTuple):
    """A mean, and between which values it is in 95% of bootstrap resamples; n examples, this seed."""

    mean: float
    low: float
    high: float
    n: int
    seed: int


def resampled_means(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Means over bootstrap resamples of examples: (n, …) -> (resamples, …).

    Raises:
        ValueError: fewer than two examples, of which no resample says anything.
    """
    if len(values) < 2:
        raise ValueError(f"values: an interval needs two examples at least, got {len(values)}")
    n = len(values)
    draw = np.random.default_rng(seed)
    # how often each example is in each resample: one product makes all means
    counts = draw.multinomial(n, np.full(n, 1 / n), size=resamples)
    flat = np.asarray(values, np.float64).reshape(n, -1)
    return (counts @ flat / n).reshape(resamples, *values.shape[1:])


def mean_interval(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean of (n,) values with its 95% percentile bootstrap interval over examples.

    Raises:
        ValueError: fewer than two examples.
    """
    low, high = np.percentile(resampled_means(values, seed=seed, resamples=resamples), [2.5, 97.5])
    return Interval(float(np.mean(values)), float(low), float(high), len(values), seed)


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


def ratio_interval(
    above: np.ndarray, below: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Σ above / Σ below over examples, (n,) each, with its 95% percentile bootstrap interval over them.

    Such as right answers over questions, where examples have several. 0 / 0 is 0.

    Raises:
        ValueError: fewer than two examples.
    """
    means = resampled_means(np.stack([above, below], 1), seed=seed, resamples=resamples)

    def ratio(pair: np.ndarray) -> np.ndarray:
        some = pair[..., 1] != 0
        return np.divide(pair[..., 0], pair[..., 1], out=np.zeros(pair.shape[:-1]), where=some)

    low, high = np.percentile(ratio(means), [2.5, 97.5])
    whole = ratio(np.array([np.sum(above), np.sum(below)], np.float64))
    return Interval(float(whole), float(low), float(high), len(above), seed)
