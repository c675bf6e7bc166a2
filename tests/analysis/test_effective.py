"""Effective attention against the projection written out; correlation against NumPy's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fastbert.analysis.effective import effective_attention, row_space
from fastbert.layers.taps import Taps
from fastbert.models.encoder import tapped
from fastbert.tasks.examples import KINDS, tokenized
from tests.support.analysis import both, inputs_of, maps_of
from tests.support.hf_models import ANALYSED

HEADS, WIDTH = 3, 16


class Values(Taps):
    def __init__(self):
        self.found = []

    def qkv(self, layer, q, k, v, sequences):
        self.found.append(v)
        return q, k, v, sequences.bias


def values_of(model, examples, number):
    """[(n, nheads, d)] of each layer."""
    inputs = inputs_of(model, examples, number)
    with torch.no_grad(), tapped(model.base_model, taps := Values()):
        model(**inputs)
    return [v.numpy() for v in taps.found]


def projected(a, t):
    """A without its part in the left null space of T, by the definition."""
    u, sigma, _ = np.linalg.svd(t, full_matrices=True)
    rank = int((sigma > max(t.shape) * np.finfo(float).eps * sigma[0]).sum())
    null = u[:, rank:]
    return a - a @ null @ null.T, rank


@pytest.fixture
def long(tokenizer):
    """More tokens than a head is wide, and fewer."""
    texts = [
        "the cat sat on a big red mat while it rained . " * 3,
        "it",
        "the dog ran to the house , a cat !",
    ]
    return tokenized(tokenizer, texts)


@pytest.mark.parametrize("family", ANALYSED)
def test_as_the_projection_says(long, family):
    theirs, ours = both(family)
    found = effective_attention(ours, long, batch_tokens=20)
    for number in range(len(long)):
        kinds = long.kinds[long.starts[number] : long.starts[number + 1]]
        layers = zip(maps_of(theirs, long, number), values_of(ours, long, number), strict=True)
        for layer, (maps, values) in enumerate(layers):
            for head in range(HEADS):
                a = maps[head]
                expected, rank = projected(a, values[:, head])
                assert found.rank[number, layer, head] == rank
                np.testing.assert_allclose(expected @ values[:, head], a @ values[:, head], atol=1e-9)
                r = np.corrcoef(a.ravel(), expected.ravel())[0, 1]
                assert found.correlation[number, layer, head] == pytest.approx(r, abs=1e-5)
                masses = [expected[:, kinds == k].sum(1).mean() for k in range(len(KINDS))]
                np.testing.assert_allclose(found.to_kind[:, number, layer, head], masses, atol=2e-6)
    assert found.rank.max() == WIDTH
    longest = found.correlation[0]
    assert (longest < 0.9999).all()
    # without position embeddings the values of equal tokens are equal
    whole = found.rank[1:] == long.lengths[1:, None, None]
    assert whole.any()
    np.testing.assert_allclose(found.correlation[1:][whole], 1, atol=1e-5)


def test_an_output_layer_without_full_rank(long):
    """Then the null space is that of V W_O, which is larger."""
    ours = copy.deepcopy(both("bert")[1])
    dense = ours.bert.encoder.layer[1].attention.output.dense
    with torch.no_grad():
        dense.weight[:, 2] = dense.weight[:, 5]
        dense.weight[:, 7] = 0
    found = effective_attention(ours, long)
    assert found.rank[0].tolist() == [[WIDTH] * 3, [WIDTH - 2, WIDTH, WIDTH], [WIDTH] * 3]


def test_a_basis():
    v = torch.randn(40, HEADS, WIDTH, dtype=torch.float64)
    v[:, 1, 3] = v[:, 1, 4]
    basis = row_space(v)
    for head, rank in ((0, WIDTH), (1, WIDTH - 1)):
        u = basis[:, head]
        gram = u.T @ u
        expected = torch.diag((torch.arange(WIDTH) < rank).double())
        torch.testing.assert_close(gram, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(u @ u.T @ v[:, head], v[:, head], rtol=1e-10, atol=1e-10)
    # the rank is that of values of any size
    for scale in (1e-9, 1e9):
        assert row_space(scale * v).square().sum((0, 2)).round().tolist() == [WIDTH, WIDTH - 1, WIDTH]
    short = row_space(v[:5])
    torch.testing.assert_close(
        short[:, 0] @ short[:, 0].T, torch.eye(5, dtype=torch.float64), rtol=1e-10, atol=1e-10
    )


def test_one_token_has_no_correlation(tokenizer):
    ours = both("bert")[1]
    examples = tokenized(tokenizer, ["", "the cat"])
    one = examples.chosen([0]).__class__(
        **{
            **vars(examples.chosen([0])),
            **{name: getattr(examples, name)[:1] for name in ("ids", "types", "segments", "kinds", "words")},
            "starts": np.array([0, 1]),
        }
    )
    found = effective_attention(ours, one)
    assert np.isnan(found.correlation).all()
    assert (found.rank == 1).all()
    assert np.isnan(found.intervals()["correlation"].mean)
