"""Two models compared: cosines of maps against transformers' maps, of hidden states, and weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fastbert.analysis.change import change
from tests.support.analysis import both, maps_of
from tests.support.hf_models import ANALYSED


def tuned(theirs, ours, share=0.3):
    """Both models with the same noise in their weights."""
    others = copy.deepcopy(theirs), copy.deepcopy(ours)
    draw = torch.Generator().manual_seed(4)
    noise = {
        name: share * torch.randn(p.shape, generator=draw, dtype=p.dtype) * p.std()
        for name, p in ours.named_parameters()
        if p.dim() > 1 and "embeddings" not in name
    }
    with torch.no_grad():
        for other in others:
            for name, parameter in other.named_parameters():
                if name in noise:
                    parameter.add_(noise[name])
    return others


@pytest.mark.parametrize("family", ANALYSED)
def test_cosines_of_maps(pairs, family):
    theirs, ours = both(family)
    other_theirs, other_ours = tuned(theirs, ours)
    found = change(ours, other_ours, pairs, batch_tokens=40)
    for number in range(len(pairs)):
        each = zip(maps_of(theirs, pairs, number), maps_of(other_theirs, pairs, number), strict=True)
        for layer, (a, b) in enumerate(each):
            a, b = (m.reshape(len(m), -1) for m in (a, b))
            cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            np.testing.assert_allclose(found.attention[number, layer], cosine, rtol=1e-5)
    assert found.attention.min() < 0.99


def test_hidden_states_and_weights(texts):
    theirs, ours = both("bert")
    other_theirs, other_ours = tuned(theirs, ours)
    found = change(ours, other_ours, texts)
    for number in range(len(texts)):
        start, end = texts.starts[number : number + 2]
        ids = torch.from_numpy(texts.ids[start:end])[None]
        with torch.no_grad():
            states = [m.bert(ids, output_hidden_states=True).hidden_states for m in (theirs, other_theirs)]
        for i, (one, other) in enumerate(zip(*states, strict=True)):
            expected = torch.cosine_similarity(one[0], other[0], dim=-1).mean().item()
            assert found.hidden[number, i] == pytest.approx(expected, rel=1e-5)
    assert found.hidden[:, 0] == pytest.approx(1.0)
    layers = zip(theirs.bert.encoder.layer, other_theirs.bert.encoder.layer, strict=True)
    for i, (one, other) in enumerate(layers):
        a, b = (torch.cat([p.flatten() for p in m.parameters()]) for m in (one, other))
        assert found.weights[i] == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-9)


def test_no_change_is_relative_to_nothing(texts):
    one = copy.deepcopy(both("bert")[1])
    with torch.no_grad():
        for parameter in one.base_model.layer_list()[2].parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="model: all weights of layer 2 are 0"):
        change(one, both("bert")[1], texts)


def test_models_of_other_shapes(texts):
    ours = both("bert")[1]
    other = both("bert", num_hidden_layers=2)[1]
    with pytest.raises(ValueError, match="against: its num_hidden_layers is 2, expected the model's, 3"):
        change(ours, other, texts)
