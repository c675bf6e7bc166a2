"""Statistics against transformers' maps in float64; the five patterns on synthetic maps."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fastbert.analysis.attention import (
    BLOCK,
    BOTH,
    DIAGONAL,
    HETEROGENEOUS,
    PATTERNS,
    VERTICAL,
    AttentionStatistics,
    attention_statistics,
)
from fastbert.analysis.change import change
from fastbert.analysis.effective import effective_attention
from fastbert.analysis.geometry import geometry
from fastbert.tasks.examples import KINDS, tokenized
from tests.support.analysis import both, maps_of
from tests.support.hf_models import ANALYSED


def like_itself(model, examples):
    return change(model, model, examples)


# results are kept in float32: the tolerances below are its rounding
NAMES = ("entropy", "previous", "itself", "following", "own_text", "most_received", "spread")


def by_maps(maps, examples, numbers):
    """The same statistics as arrays (n, layers, nheads), from attention maps."""
    found = {name: [] for name in (*NAMES, "to_kind")}
    for number in numbers:
        start, end = examples.starts[number : number + 2]
        kinds, segments = examples.kinds[start:end], examples.segments[start:end]
        own = segments[:, None] == segments
        a = np.stack(maps(number))  # (layers, nheads, length, length)
        entropy = -(a * np.log(np.where(a > 0, a, 1))).sum(-1)
        found["entropy"].append(entropy.mean(-1))
        length = end - start
        for name, offset in (("previous", -1), ("itself", 0), ("following", 1)):
            found[name].append(np.trace(a, offset, 2, 3) / length)
        found["own_text"].append((a * own).sum(-1).mean(-1))
        found["most_received"].append(a.mean(-2).max(-1))
        found["spread"].append((np.exp(entropy) / own.sum(-1)).mean(-1))
        found["to_kind"].append([(a[..., kinds == k].sum(-1)).mean(-1) for k in range(len(KINDS))])
    arrays = {name: np.stack(values) for name, values in found.items()}
    arrays["to_kind"] = arrays["to_kind"].swapaxes(0, 1)
    return arrays


@pytest.mark.parametrize("which", ["texts", "pairs"])
@pytest.mark.parametrize("family", ANALYSED)
def test_as_the_maps_of_transformers_say(request, family, which):
    """Of examples in another order, in several batches."""
    examples = request.getfixturevalue(which).chosen([4, 2, 0, 3, 1])
    theirs, ours = both(family)
    found = attention_statistics(ours, examples, batch_tokens=30)
    numbers = range(len(examples))
    for name, expected in by_maps(lambda i: maps_of(theirs, examples, i), examples, numbers).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=2e-5, atol=2e-6, err_msg=name)
    segments = np.split(examples.segments, examples.starts[1:-1])
    np.testing.assert_allclose(found.share_of_text, [(s[:, None] == s).mean() for s in segments], rtol=1e-6)


@pytest.mark.parametrize("function", [attention_statistics, effective_attention, geometry, like_itself])
def test_a_model_in_training_is_measured_without_dropout(texts, function):
    """And is in training again afterwards."""
    ours = both("bert")[1]
    expected = function(ours, texts)
    ours.train()
    try:
        found = function(ours, texts)
        assert ours.training
        assert all(p.requires_grad for p in ours.parameters())
        assert ours.base_model.taps is None
    finally:
        ours.eval()
    for name, values in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


# -- patterns ------------------------------------------------------------------------------------------------

LENGTH, SPLIT = 24, 11


def statistics_of(maps, texts):
    """AttentionStatistics of maps (n, length, length), each an example with one layer and one head."""
    n, tokens = len(maps), np.arange(LENGTH)
    segments = (tokens >= SPLIT).astype(int) * (texts - 1)
    special = np.isin(tokens, [0, SPLIT - 1, LENGTH - 1])
    kinds = np.where(tokens == 0, 0, np.where(special, 1, 4))
    # as layers of one example, which are measured at once
    one = SimpleNamespace(starts=np.array([0, LENGTH]), kinds=kinds, segments=segments)
    found = by_maps(lambda _: maps[:, None], one, [0])
    return AttentionStatistics(
        **{name: values.swapaxes(-3, -2).astype(np.float32) for name, values in found.items()},
        lengths=np.full(n, LENGTH),
        share_of_kind=np.stack([np.full(n, (kinds == k).mean(), np.float32) for k in range(len(KINDS))]),
        share_of_text=np.full(n, (segments[:, None] == segments).mean(), np.float32),
        texts=np.full(n, texts),
    )


def noisy(pattern, texts, draw):
    """A map of a pattern, with noise in all its scores."""
    scores = draw.normal(0, 0.7, (LENGTH, LENGTH))
    i = np.arange(LENGTH)
    offset = draw.choice([-1, 1])
    target = np.clip(i + offset, 0, LENGTH - 1)
    token = draw.choice([0, SPLIT - 1, LENGTH - 1])
    if pattern == VERTICAL:
        scores[:, token] += 6
    elif pattern == DIAGONAL:
        scores[i, target] += 6
    elif pattern == BOTH:
        scores[:, token] += 5.2
        scores[i, target] += 5.2
    elif pattern == BLOCK:
        segments = (i >= SPLIT).astype(int) * (texts - 1)
        scores = 0.5 * scores - 8.0 * (segments[:, None] != segments)
    else:
        # each row looks at a few tokens of its own, which are no neighbours
        for row in i:
            far = [j for j in i if abs(j - row) > 1 and j not in (0, SPLIT - 1, LENGTH - 1)]
            scores[row, draw.choice(far, 3, replace=False)] += 5
    weights = np.exp(scores)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("pattern", range(len(PATTERNS)), ids=PATTERNS)
def test_five_hundred_noisy_maps_of_a_pattern(pattern, texts):
    draw = np.random.default_rng(pattern)
    found = statistics_of(np.stack([noisy(pattern, texts, draw) for _ in range(500)]), texts).patterns()
    assert (found == pattern).mean() >= 0.95, np.bincount(found.ravel(), minlength=5)


def test_a_uniform_head_has_no_excess():
    maps = np.full((2, LENGTH, LENGTH), 1 / LENGTH)
    features = statistics_of(maps, 2).features()
    for name in ("v", "d", "b"):
        np.testing.assert_allclose(features[name], 0, atol=1e-6, err_msg=name)
    assert statistics_of(maps, 2).patterns().tolist() == [[[HETEROGENEOUS]]] * 2
    assert statistics_of(maps, 1).patterns().tolist() == [[[BLOCK]]] * 2


def test_no_pattern_of_what_is_no_number():
    maps = np.full((2, LENGTH, LENGTH), 1 / LENGTH)
    maps[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"statistics\[1\]: expected finite numbers, got nan"):
        statistics_of(maps, 2).patterns()


def test_shares_and_the_commonest():
    draw = np.random.default_rng(0)
    found = statistics_of(np.stack([noisy(p, 2, draw) for p in (VERTICAL, VERTICAL, DIAGONAL, BLOCK)]), 2)
    assert found.shares() == {
        "vertical": 0.5,
        "diagonal": 0.25,
        "vertical+diagonal": 0.0,
        "block": 0.25,
        "heterogeneous": 0.0,
    }
    assert PATTERNS[found.commonest()[0, 0]] == "vertical"


def test_special_tokens_alone(tokenizer):
    """An example of no word: every share of a uniform head is 1."""
    found = attention_statistics(both("bert")[1], tokenized(tokenizer, ["", "the cat"]))
    assert all(np.isfinite(values).all() for values in found.features().values())
    assert math.isclose(found.to_special()[0].min(), 1, rel_tol=1e-6)


def test_half_precision(texts):
    model = copy.deepcopy(both("bert", "")[1])
    exact = attention_statistics(model.double(), texts)
    found = attention_statistics(model.bfloat16(), texts)
    np.testing.assert_allclose(found.entropy, exact.entropy, rtol=0.02)
