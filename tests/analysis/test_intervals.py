"""Bootstrap intervals cover what they should, and p-values are small where they should be."""

from __future__ import annotations

import numpy as np
import pytest

from fastbert.analysis.intervals import (
    Interval,
    bands,
    estimate,
    mean_interval,
    paired_p,
    ratio_interval,
    resampled_means,
)


def test_an_interval_is_about_two_standard_errors_wide():
    values = np.random.default_rng(0).normal(3.0, 2.0, 2000)
    found = mean_interval(values, resamples=4000)
    error = values.std() / np.sqrt(len(values))
    assert found.mean == values.mean()
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert (found.n, found.seed) == (2000, 0)


def test_it_covers_the_truth_in_about_95_of_100():
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        found = mean_interval(draw.exponential(1.0, 150), resamples=400)
        inside += found.low <= 1.0 <= found.high
    # the 99.9% range of a binomial of 400 draws at 0.93 to 0.95
    assert 355 <= inside <= 395


def test_a_resample_draws_each_example_as_often_as_any_other():
    means = resampled_means(np.eye(5), resamples=20_000)
    np.testing.assert_allclose(means.sum(1), 1)
    np.testing.assert_allclose(means.mean(0), 0.2, atol=0.005)
    np.testing.assert_allclose(means.var(0), 0.2 * 0.8 / 5, rtol=0.05)


def test_p():
    draw = np.random.default_rng(0)
    change = np.stack([draw.normal(0.5, 1, 300), draw.normal(0.0, 1, 300), np.zeros(300)], 1)
    change[:, 1] -= change[:, 1].mean() - 0.01
    found = paired_p(change)
    assert found[0] == 1 / 1000
    assert found[1] > 0.5
    assert found[2] == 1.0
    np.testing.assert_array_equal(paired_p(-change), found)


def test_p_of_nothing_is_uniform():
    draw = np.random.default_rng(0)
    found = paired_p(draw.normal(size=(200, 500)))
    assert 0.02 <= (found < 0.05).mean() <= 0.09
    assert 0.42 <= (found < 0.5).mean() <= 0.58


STATISTICS = (resampled_means, mean_interval, estimate, bands, paired_p, lambda v: ratio_interval(v, v))


@pytest.mark.parametrize("function", STATISTICS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_refused(function, bad):
    with pytest.raises(ValueError, match=rf"values\[2\]: expected finite numbers, got {bad}"):
        function(np.array([1.0, 2.0, bad, 4.0]))


@pytest.mark.parametrize("function", STATISTICS)
def test_nothing_has_no_statistic(function):
    with pytest.raises(ValueError, match=r"values: .* at least, got 0"):
        function(np.zeros((0,)))
    with pytest.raises(ValueError, match=r"values: .* at least, got shape \(3, (2, )?0\)"):
        function(np.zeros((3, 0)))


def test_a_ratio_without_a_denominator():
    assert ratio_interval(np.zeros(3), np.zeros(3))[:3] == (0, 0, 0)
    assert ratio_interval(-np.ones(1), np.zeros(1)).mean == -np.inf


def test_resamples_whose_mean_is_0_are_against_the_sign():
    """Of two examples of 0 and two of 1, one resample in 16 has none of 1."""
    change = np.array([0.0, 0, 1, 1])[:, None]
    assert paired_p(change, resamples=20_000)[0] == pytest.approx(2 / 16, abs=0.02)


def test_an_estimate_is_the_mean_of_all_numbers_of_an_example():
    values = np.random.default_rng(0).normal(size=(40, 3, 2))
    assert estimate(values, seed=3) == pytest.approx(mean_interval(values.mean((1, 2)), seed=3))


def test_a_statistic_of_means():
    """A ratio of two means is resampled as a ratio, with both of an example drawn together."""
    draw = np.random.default_rng(0)
    below = draw.uniform(1, 3, 200)
    found = estimate(np.stack([2 * below, below], 1), lambda means: means[:, 0] / means[:, 1])
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2, 2))
    noisy = np.stack([2 * below + draw.normal(size=200), below], 1)
    found = estimate(noisy, lambda means: means[:, 0] / means[:, 1])
    assert found.low < 2 < found.high
    assert found.mean == pytest.approx(noisy[:, 0].mean() / noisy[:, 1].mean())


def test_an_estimate_of_one_example_has_no_ends():
    assert estimate(np.array([[1.0, 2.0]]), seed=5) == (1.5, None, None, 1, 5)
    for each in bands(np.array([[1.0, 2.0]])):
        np.testing.assert_array_equal(each, [1.0, 2.0])


def test_bands():
    values = np.random.default_rng(0).normal(size=(50, 3))
    means, low, high = bands(values, seed=2)
    for i in range(3):
        found = mean_interval(values[:, i], seed=2)
        assert (means[i], low[i], high[i]) == pytest.approx(found[:3])


def test_as_text():
    assert Interval(0.5, 0.25, 0.75, 10, 0).text(".1%") == "50.0% [25.0%, 75.0%]"
    assert Interval(0.5, None, None, 1, 0).text("+.2f") == "+0.50"
    assert Interval(np.nan, None, None, 0, 0).text("+.2f") == "not known"
    # ends that are shown as the mean say nothing
    assert Interval(0.9999, 0.9997, 1.0, 10, 0).text(".1%") == "100.0%"
