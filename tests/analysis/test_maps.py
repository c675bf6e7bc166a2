"""Maps to look at are those of transformers, of a head that has the pattern, within the limit of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastbert.analysis import maps
from fastbert.analysis.attention import HETEROGENEOUS, VERTICAL, attention_statistics
from fastbert.analysis.maps import attention_maps, example_maps
from tests.support.analysis import both, maps_of
from tests.support.hf_models import ANALYSED


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_they_are_those_of_transformers(pairs, family):
    theirs, ours = both(family)
    found = attention_statistics(ours, pairs)
    made = example_maps(ours, pairs, found)
    patterns = found.patterns()
    # a pattern that any example has is shown, once
    assert {m.pattern for m in made} <= set(np.unique(patterns))
    assert len({m.pattern for m in made}) == len(made) > 0
    for m in made:
        assert patterns[m.example, m.layer, m.head] == m.pattern
        assert m.share == (patterns[:, m.layer, m.head] == m.pattern).mean()
        expected = maps_of(theirs, pairs, m.example)[m.layer][m.head]
        np.testing.assert_allclose(m.probabilities, expected, rtol=1e-6, atol=1e-7)


def test_the_clearest_of_a_common_pattern(texts):
    """The head that looks at the first token alone on every example beats one that does so once."""
    ours = both("bert")[1]
    found = attention_statistics(ours, texts)
    shape = found.entropy.shape
    to_kind = np.zeros_like(found.to_kind)
    to_kind[4] = 1.0
    to_kind[:, 0, 0, 1] = 1, 0, 0, 0, 0
    to_kind[0, :, 1, 2] = 0.9
    to_kind[4, :, 1, 2] = 0.1
    quiet = {
        name: np.zeros(shape, np.float32)
        for name in ("previous", "itself", "following", "most_received", "spread")
    }
    found = replace(found, to_kind=to_kind, own_text=np.ones(shape, np.float32), **quiet)
    by_pattern = {m.pattern: m for m in example_maps(ours, texts, found)}
    assert set(by_pattern) == {VERTICAL, HETEROGENEOUS}
    assert (by_pattern[VERTICAL].layer, by_pattern[VERTICAL].head) == (1, 2)
    assert by_pattern[VERTICAL].share == 1.0


@pytest.mark.parametrize(
    ("short", "expected"), [((8, 24), {9, 11, 15}), ((30, 40), {15}), ((1, 2), {5}), ((9, 9), {9})]
)
def test_short_examples_are_shown(texts, monkeypatch, short, expected):
    """Those of a length that is read at a glance; else the longest below it; else the shortest of all."""
    monkeypatch.setattr(maps, "SHORT", short)
    ours = both("bert")[1]
    assert texts.lengths.tolist() == [9, 15, 5, 15, 11]
    made = example_maps(ours, texts, attention_statistics(ours, texts))
    assert {len(m.probabilities) for m in made} <= expected
    assert all(len(m.probabilities) == texts.lengths[m.example] for m in made)


@pytest.mark.parametrize("family", ANALYSED)
def test_all_maps_of_an_example(pairs, family):
    theirs, ours = both(family)
    expected = maps_of(theirs, pairs, 3)
    found = attention_maps(ours, pairs, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    some = attention_maps(ours, pairs, 3, layers=[2, 0])
    np.testing.assert_array_equal(some, found[[2, 0]])


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (5, {}, "number: expected 0 to 4, an example's, got 5"),
        (0, {"layers": [3]}, r"layers: expected each of 0 to 2 at most once, got \[3\]"),
        (0, {"layers": [1, 1]}, r"layers: expected each of 0 to 2 at most once, got \[1, 1\]"),
        (0, {"max_bytes": 2915}, "attention maps of 3 layers and 9 tokens, 2,916 bytes; expected fewer"),
    ],
)
def test_maps_that_are_none(texts, number, options, message):
    with pytest.raises(ValueError, match=message):
        attention_maps(both("bert")[1], texts, number, **options)
