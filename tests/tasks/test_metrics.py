"""Metrics against scikit-learn and SciPy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from fastbert.tasks import metrics

CLASSES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=40)
# few values, so that ties are common
NUMBERS = st.sampled_from((-3.5, 0.0, 0.1, 0.3, 2.0, 5.0))
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=40)
CLOSE = dict(rel=1e-9, abs=1e-9)


@given(CLASSES)
def test_metrics_of_classes_are_those_of_scikit_learn(pairs):
    predicted, true = zip(*pairs, strict=True)
    assert metrics.accuracy(predicted, true) == pytest.approx(sklearn.metrics.accuracy_score(true, predicted))
    expected = sklearn.metrics.f1_score(
        [c == "a" for c in true], [c == "a" for c in predicted], zero_division=0
    )
    assert metrics.f1(predicted, true, "a") == pytest.approx(expected)
    with warnings.catch_warnings(action="ignore"):
        expected = sklearn.metrics.matthews_corrcoef(true, predicted)
    assert metrics.matthews(predicted, true) == pytest.approx(expected, **CLOSE)


@given(PAIRS)
def test_correlations_are_those_of_scipy(pairs):
    predicted, true = zip(*pairs, strict=True)
    with warnings.catch_warnings(action="ignore"):
        expected = [f(predicted, true).statistic for f in (scipy.stats.pearsonr, scipy.stats.spearmanr)]
    found = [metrics.pearson(predicted, true), metrics.spearman(predicted, true)]
    # SciPy has no number for a constant
    assert found == pytest.approx(np.nan_to_num(expected).tolist(), **CLOSE)


def test_a_constant_has_a_correlation_of_zero():
    constant, labels = [0.1] * 7, [1, 2, 3, 4, 5, 6, 8]
    for metric in (metrics.pearson, metrics.spearman, metrics.matthews):
        assert metric(constant, labels) == metric(labels, constant) == 0.0
    assert metrics.f1(["no"] * 3, ["no"] * 3, "yes") == 0.0
    # The products of rounded numbers add up to more than 1
    numbers = [0.3 * i for i in range(7)]
    assert metrics.pearson(numbers, numbers) == 1.0
    for size in (1e-200, 1e200):
        assert metrics.pearson([size * x for x in (1, 2, 4)], [1, 2, 4]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    (
        ([], [], "labels: expected one label at least"),
        ([1], [1, 2], r"predictions: expected shape \(2,\)"),
        (["1"], [1], "predictions: expected int64 as in labels"),
    ),
)
def test_wrong_arguments_are_named(predictions, labels, message):
    with pytest.raises(ValueError, match=message):
        metrics.accuracy(predictions, labels)
    with pytest.raises(ValueError, match="labels: expected finite numbers, got nan"):
        metrics.spearman([1.0, 2.0], [1.0, np.nan])
