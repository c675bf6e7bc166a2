"""The intervals of results are around the numbers that the results say, over the right examples."""

from __future__ import annotations

import numpy as np
import pytest

from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.effective import EffectiveAttention
from fastbert.analysis.geometry import Geometry, words_in
from fastbert.analysis.intervals import mean_interval
from fastbert.tasks.examples import KINDS
from tests.support.analysis import both


def test_of_attention(texts):
    found = attention_statistics(both("bert")[1], texts)
    intervals = found.intervals(seed=4)
    assert intervals["entropy"] == pytest.approx(mean_interval(found.entropy.mean((1, 2)), seed=4))
    for kind, values in zip(KINDS, found.to_kind, strict=True):
        assert intervals[f"to {kind}"].mean == pytest.approx(values.mean())
    for name, values in (
        ("to the previous token", found.previous),
        ("to the same token", found.itself),
        ("to the next token", found.following),
        ("to the own text", found.own_text),
        ("entropy of a uniform head", np.log(found.lengths)),
    ):
        assert intervals[name].mean == pytest.approx(values.mean())


def test_heads_over_half_are_counted_in_the_mean_over_examples(texts):
    found = attention_statistics(both("bert")[1], texts)
    found.previous[:] = 0.0
    found.previous[:, 0, 1] = 0.6
    found.previous[:, 2, 2] = 0.9, 0.9, 0.9, 0.1, 0.1
    found.previous[:, 1, 0] = 1.0, 1.0, 0.0, 0.0, 0.0
    interval = found.intervals()["heads over half on the previous token"]
    assert (interval.mean, interval.low, interval.high) == (2, 1, 3)


def test_of_effective_attention():
    """Heads without a correlation count for nothing, in the mean and in each resample."""
    draw = np.random.default_rng(0)
    correlation = draw.uniform(0.4, 0.6, size=(30, 2, 2))
    correlation[:10] = np.nan
    to_kind = draw.uniform(size=(5, 30, 2, 2))
    found = EffectiveAttention(correlation, np.ones((30, 2, 2), int), to_kind, np.full(30, 9))
    intervals = found.intervals()
    assert intervals["correlation"].mean == pytest.approx(np.nanmean(correlation))
    assert 0.4 < intervals["correlation"].low < intervals["correlation"].high < 0.6
    assert intervals["correlation"] == pytest.approx(mean_interval(correlation[10:].mean((1, 2))))
    # one of two: no resample has none
    pair = EffectiveAttention(correlation[9:11], found.rank[:2], to_kind[:, :2], found.lengths[:2])
    assert pair.intervals()["correlation"].text(".1f") == f"{correlation[10].mean():.1f}"
    assert intervals["known"].mean == pytest.approx(2 / 3)
    assert intervals["to words"].mean == pytest.approx(to_kind[4].mean())
    unknown = EffectiveAttention(correlation[:5], found.rank[:5], to_kind[:, :5], found.lengths[:5])
    assert str(unknown.intervals(seed=4)["correlation"][:]) == "(nan, None, None, 0, 4)"


def test_of_geometry():
    draw = np.random.default_rng(0)
    intra = draw.uniform(size=(7, 3))
    intra[2] = np.nan
    similarity, explained = draw.uniform(size=(2, 9, 3))
    ends = np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.1, 0.0])
    found = Geometry(np.arange(9), np.full(9, 5), similarity, explained, intra, *ends, 0)
    intervals = found.intervals()
    for name, expected in found.adjusted().items():
        assert [each.mean for each in intervals[name]] == pytest.approx(list(expected))
    counts = {name: each[0].n for name, each in intervals.items()}
    assert counts == {"self similarity": 9, "intra-sentence similarity": 6, "explained variance": 9}


def test_words_in_many_contexts(texts):
    """Tokens 5, "the", and 24, "##s"; special tokens and punctuation do not count."""
    assert words_in(texts, 5).tolist() == [5]
    assert words_in(texts, 4).tolist() == [5, 24]
    assert len(words_in(texts, 1)) > 10
    assert len(words_in(texts, 9)) == 0
