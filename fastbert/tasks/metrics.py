"""Metrics of predictions, by NumPy alone. Each result is a fraction: 1 is perfect.

    accuracy            share of equal labels
    f1                  2 TP / (2 TP + FP + FN) of the positive class
    matthews            correlation of two classifications, of any number of classes
    pearson, spearman   correlation of numbers, and of their ranks; equal numbers share their mean rank

Where a quotient is 0 / 0, the result is 0: F1 if no label is positive, a correlation if one side is constant.

Source: Wang et al. 2018, "GLUE", sec. 3; Gorodkin 2004, "Comparing two K-category assignments by a K-category
correlation coefficient", eq. 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def accuracy(predictions: Sequence[Any], labels: Sequence[Any]) -> float:
    """The share of predictions that equal their label.

    Args:
        predictions: (n,) class names or numbers.
        labels: (n,) of the same kind.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    predicted, true = _pair(predictions, labels)
    return float(np.mean(predicted == true))


def f1(predictions: Sequence[Any], labels: Sequence[Any], positive: str | int) -> float:
    """The harmonic mean of precision and recall of the class `positive`; see `accuracy`."""
    predicted, true = (classes == positive for classes in _pair(predictions, labels))
    marked = np.sum(predicted) + np.sum(true)
    return float(2 * np.sum(predicted & true) / marked) if marked else 0.0


def matthews(predictions: Sequence[Any], labels: Sequence[Any]) -> float:
    """Matthews' correlation, for more than two classes as Gorodkin defines it; see `accuracy`."""
    predicted, true = _pair(predictions, labels)
    classes = np.unique(np.concatenate([predicted, true]))
    # (classes, n) 0 or 1, as integers: their products are exact
    p, t = ((classes[:, None] == side).astype(np.int64) for side in (predicted, true))
    n, p_counts, t_counts = len(true), p.sum(1), t.sum(1)
    covariance = n * np.sum(p * t) - p_counts @ t_counts
    variances = [float(n * n - counts @ counts) for counts in (p_counts, t_counts)]
    return float(covariance / np.sqrt(variances[0]) / np.sqrt(variances[1])) if all(variances) else 0.0


def pearson(predictions: Sequence[float], labels: Sequence[float]) -> float:
    """The linear correlation of two lists of finite numbers; see `accuracy`."""
    return _correlation(*_numbers(predictions, labels))


def spearman(predictions: Sequence[float], labels: Sequence[float]) -> float:
    """The linear correlation of the ranks of two lists of finite numbers; see `accuracy`."""
    predicted, true = _numbers(predictions, labels)
    return _correlation(_ranks(predicted), _ranks(true))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    # Compared before the mean is taken: rounding makes a constant differ from its mean
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    x, y = (side - side.mean() for side in (x, y))
    # Their squares may overflow, or be 0
    x, y = (side / abs(side).max() for side in (x, y))
    return float(np.clip(x / np.linalg.norm(x) @ (y / np.linalg.norm(y)), -1, 1))


def _ranks(numbers: np.ndarray) -> np.ndarray:
    """(n,) float64, ranks from 1; equal numbers share their mean rank."""
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _numbers(predictions: Sequence[Any], labels: Sequence[Any]) -> list[np.ndarray]:
    """Both as arrays of finite float64."""
    sides = [side.astype(np.float64) for side in _pair(predictions, labels)]
    for name, side in zip(("predictions", "labels"), sides, strict=True):
        if not np.isfinite(side).all():
            raise ValueError(f"{name}: expected finite numbers, got {side[~np.isfinite(side)][0]}")
    return sides


def _pair(predictions: Sequence[Any], labels: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays of one length."""
    predicted, true = np.asarray(predictions), np.asarray(labels)
    if true.ndim != 1 or not len(true):
        raise ValueError(f"labels: expected one label at least, in one dimension, got shape {true.shape}")
    if predicted.shape != true.shape:
        raise ValueError(f"predictions: expected shape {true.shape}, one per label, got {predicted.shape}")
    if (predicted.dtype.kind == "U") != (true.dtype.kind == "U"):
        raise ValueError(f"predictions: expected {true.dtype} as in labels, got {predicted.dtype}")
    return predicted, true
