"""Self-similarity, intra-sentence similarity and explained variance, against pairs and in closed form."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from fastbert.analysis import geometry as module
from fastbert.analysis.geometry import geometry
from fastbert.tasks.examples import WORD, tokenized
from tests.support.analysis import both, inputs_of


def states_of(theirs, examples):
    """(total, layers + 1, hidden) by transformers, one example at a time."""
    found = []
    for number in range(len(examples)):
        inputs = inputs_of(theirs, examples, number)
        with torch.no_grad():
            states = theirs.base_model(**inputs, output_hidden_states=True).hidden_states
        found.append(torch.stack(states)[:, 0].transpose(0, 1))
    return torch.cat(found).numpy()


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("family", ["bert", "albert", "distilbert", "roberta"])
def test_as_all_pairs_say(texts, family):
    theirs, ours = both(family)
    found = geometry(ours, texts, least=2, batch_tokens=20)
    states = states_of(theirs, texts)
    words = np.flatnonzero(texts.kinds == WORD)
    assert len(found.token_ids) >= 4
    for i, token in enumerate(found.token_ids):
        rows = [row for row in words if texts.ids[row] == token]
        assert found.counts[i] == len(rows) >= 2
        for layer in range(states.shape[1]):
            pairs = [cosine(states[a, layer], states[b, layer]) for a, b in itertools.combinations(rows, 2)]
            assert found.self_similarity[i, layer] == pytest.approx(np.mean(pairs), abs=1e-5)
            sigma = np.linalg.svd(states[rows, layer], compute_uv=False)
            assert found.explained[i, layer] == pytest.approx(sigma[0] ** 2 / (sigma**2).sum(), abs=1e-5)
    for layer in range(states.shape[1]):
        pairs = [cosine(states[a, layer], states[b, layer]) for a, b in itertools.combinations(words, 2)]
        assert found.anisotropy[layer] == pytest.approx(np.mean(pairs), abs=1e-5)
        for number in range(len(texts)):
            own = [r for r in words if texts.starts[number] <= r < texts.starts[number + 1]]
            mean = states[own, layer].mean(0)
            expected = np.mean([cosine(states[r, layer], mean) for r in own])
            assert found.intra_similarity[number, layer] == pytest.approx(expected, abs=1e-5)


def test_closed_forms():
    unit = np.eye(6)[:, None] * 3.0
    assert module._self_similarity(unit) == pytest.approx([0.0])
    assert module._explained(unit) == pytest.approx([1 / 6])
    # a vector of 0 is like none
    assert module._self_similarity(np.stack([unit[0], unit[0], unit[0] * 0])) == pytest.approx([1 / 3])
    same = np.repeat(np.arange(1.0, 7.0)[None, None], 4, 0)
    assert module._self_similarity(same) == pytest.approx([1.0])
    assert module._explained(same) == pytest.approx([1.0])


def test_the_embedding_of_a_word_without_position_is_itself(texts):
    """With one embedding everywhere all of it is 1, and adjusted 0."""
    ours = copy.deepcopy(both("bert")[1])
    with torch.no_grad():
        ours.bert.embeddings.word_embeddings.weight[:] = ours.bert.embeddings.word_embeddings.weight[7]
        ours.bert.embeddings.position_embeddings.weight.zero_()
    found = geometry(ours, texts, least=2)
    np.testing.assert_allclose(found.self_similarity, 1, rtol=1e-5)
    np.testing.assert_allclose(found.intra_similarity, 1, rtol=1e-5)
    for values in found.adjusted().values():
        np.testing.assert_allclose(values, 0, atol=1e-5)


def test_draws(texts):
    ours = both("bert")[1]
    options = {"least": 2, "max_types": 3, "max_contexts": 2, "random_tokens": 8}
    found, again = (geometry(ours, texts, **options, seed=1) for _ in range(2))
    assert len(found.token_ids) == 3
    assert (found.counts == 2).all()
    np.testing.assert_array_equal(found.self_similarity, again.self_similarity)
    other = geometry(ours, texts, **options, seed=2)
    assert not np.array_equal(found.anisotropy, other.anisotropy)


def test_an_example_without_words(tokenizer):
    found = geometry(both("bert")[1], tokenized(tokenizer, ["", "cat cat the the"]), least=2)
    assert np.isnan(found.intra_similarity[0]).all()
    assert np.isfinite(found.intra_similarity[1]).all()
    assert all(np.isfinite(values).all() for values in found.adjusted().values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"least": 1}, "least: expected an integer >= 2, got 1"),
        ({"least": 50}, "least: no word is in 50 contexts"),
    ],
)
def test_bad_arguments(texts, options, expected):
    with pytest.raises(ValueError, match=expected):
        geometry(both("bert")[1], texts, **options)
