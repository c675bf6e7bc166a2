"""Random numbers that depend on their key alone: golden words, uniformity, permutations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fastbert.training.draws import Draws, Order, key_of


def test_the_stream_is_philox_and_stays_so():
    """Philox4x64-10 in Python's integers, from the paper; and the words of today, for ever."""

    def block(counter: list[int], key: list[int]) -> list[int]:
        mask = (1 << 64) - 1
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [(b >> 64) ^ counter[1] ^ key[0], b & mask, (a >> 64) ^ counter[3] ^ key[1], a & mask]
            key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
        return counter

    key = key_of("corpus", 7, "mask")
    halves = [key & ((1 << 64) - 1), key >> 64]
    # NumPy counts before it computes a block
    expected = block([1, 3, 11, 0], halves) + block([2, 3, 11, 0], halves)
    assert Draws(key, 3, 11).words(8).tolist() == expected


def test_a_stream_does_not_depend_on_how_it_is_asked():
    a, b = Draws(5, 0, 0), Draws(5, 0, 0)
    assert np.array_equal(np.concatenate([a.words(3), a.words(0), a.words(9)]), b.words(12))
    others = [Draws(5, 0, 1), Draws(5, 1, 0), Draws(6, 0, 0)]
    assert not any(np.array_equal(other.words(4), Draws(5, 0, 0).words(4)) for other in others)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 30_528, 2**32 - 1])
def test_numbers_below_a_limit(limit):
    draws, words = Draws(1, 2, 3), Draws(1, 2, 3)
    found = draws.below(limit, 2000)
    assert found.tolist() == [int(w) * limit >> 64 for w in words.words(2000)]  # multiply-high, exactly


def test_uniform():
    draws = Draws(9, 0, 0)
    assert stats.chisquare(np.bincount(draws.below(97, 200_000), minlength=97)).pvalue > 0.001
    hits = int(draws.chance(0.15, 200_000).sum())
    assert stats.binomtest(hits, 200_000, 0.15).pvalue > 0.001
    assert draws.chance(1.0, 1000).all()
    assert not draws.chance(0.0, 1000).any()
    first = [int(draws.shuffled(6)[0]) for _ in range(12_000)]
    assert stats.chisquare(np.bincount(first, minlength=6)).pvalue > 0.001
    assert (draws.below(np.array([1, 2, 3, 4]), 4) < [1, 2, 3, 4]).all()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 15, 16, 17, 1000, 65_537])
def test_an_order_has_every_number_once(size):
    order = Order(size, 42)
    found = order[np.arange(size)]
    assert sorted(found.tolist()) == list(range(size))
    assert len(order) == size
    if size > 15:
        assert found.tolist() != list(range(size))
        assert order[np.array([3])] == found[3]


@pytest.mark.sweep
def test_orders_are_random_and_differ_by_key():
    size, count = 12, 6000
    firsts = np.array([Order(size, key_of("k", i))[np.arange(size)] for i in range(count)])
    for place in range(size):  # each number equally often at each place
        assert stats.chisquare(np.bincount(firsts[:, place], minlength=size)).pvalue > 1e-4
    ascents = int((firsts[:, 1:] > firsts[:, :-1]).sum())
    assert abs(ascents / (count * (size - 1)) - 0.5) < 0.01
    a, b = Order(100_000, 1), Order(100_000, 2)
    places = np.arange(100_000)
    assert (a[places] == b[places]).sum() < 30
    assert abs(np.corrcoef(places, a[places])[0, 1]) < 0.02


def test_a_huge_order_needs_no_memory():
    order = Order(2**62, 3)
    found = order[np.array([0, 1, 2**62 - 1])]
    assert len(set(found.tolist())) == 3
    assert found.max() < 2**62


def test_bad_arguments_are_named():
    for call, match in (
        (lambda: Draws(1, -1, 0), "epoch: expected an integer in"),
        (lambda: Draws(1, 0, 2**64), "index: expected an integer in"),
        (lambda: Draws(1, 0, 0).below(0, 3), r"limit: expected integers in \[1, 2\*\*32\), got 0"),
        (lambda: Draws(1, 0, 0).below(2**32, 3), r"limit: .*, got 4294967296 to 4294967296"),
        (lambda: Order(-1, 0), "size: expected an integer in"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match=r"parts: expected texts and integers, got 1\.0"):
        key_of("a", 1.0)
    for place in (-1, 5):
        with pytest.raises(IndexError, match=r"places: expected integers in \[0, 5\)"):
            Order(5, 0)[np.array([place])]
