"""Which heads and neurons are chosen, and the sizes of what is left."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import fastbert
from fastbert.analysis.heads import importance
from fastbert.compression import scores, shrink, size
from fastbert.compression.pruning import chosen
from fastbert.layers.modules import part
from tests.support.analysis import both, losses

CLOSE = dict(rtol=1e-9, atol=1e-12)


def units(*layers):
    return [torch.tensor(layer, dtype=torch.float64) for layer in layers]


def test_the_smallest_of_all_layers_go():
    found = units([0.3, 0.1, 0.9], [0.2, 0.8, 0.05])
    assert chosen(found, 0.5) == {0: [1], 1: [0, 2]}
    assert chosen(found, 0) == {0: [], 1: []}
    assert chosen(found, 5 / 6) == {0: [0, 1], 1: [0, 1, 2]}
    # Ties: the first layer's first
    assert chosen(units([1, 1], [1, 1]), 0.25) == {0: [0], 1: []}


def test_layers_keep_a_multiple():
    draw = np.random.default_rng(0)
    for case in range(50):
        sizes, multiple = draw.integers(0, 200, 4), int(draw.integers(1, 70))
        own, share = units(*(draw.random(n) for n in sizes)), draw.random()
        gone = chosen(own, share, multiple)
        left = [n - len(gone[i]) for i, n in enumerate(sizes)]
        assert all(n % multiple == 0 or n == sizes[i] for i, n in enumerate(left)), case
        removed, wanted = sum(map(len, gone.values())), round(share * sizes.sum())
        assert wanted - multiple < removed <= wanted or removed == sum(n - n % multiple for n in sizes), case
        for i, n in enumerate(sizes):
            # Within a layer the smallest go
            stay = sorted(set(range(n)) - set(gone[i]))
            assert not gone[i] or not stay or own[i][gone[i]].max() < own[i][stay].min(), case


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "deberta-v2"])
def test_taylor_is_the_derivative_of_each_example(labelled, family):
    ours = both(family)[1]
    found = scores.taylor(ours, labelled, batch_tokens=40)
    heads = importance(ours, labelled).values(normalized=True)
    np.testing.assert_allclose(torch.stack(found.heads).numpy(), heads, **CLOSE)
    # A neuron's factor is that of its column of the output layer
    layer = ours.base_model.layer_list()[1]
    weight, expected = part(layer, layer.form.names.output).weight, []
    for neuron in (0, 7, 79):
        kept, changes = weight.data[:, neuron].clone(), []
        for factor in (1 + 1e-5, 1 - 1e-5):
            weight.data[:, neuron] = kept * factor
            changes.append(losses(ours, labelled))
        weight.data[:, neuron] = kept
        expected.append(np.abs(changes[0] - changes[1]).mean() / 2e-5)
    ratios = found.neurons[1][[0, 7, 79]].numpy() / np.array(expected)
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)
    assert all(abs(each.norm() - 1) < 1e-12 for each in (*found.heads, *found.neurons))
    assert all(p.grad is None and p.requires_grad for p in ours.parameters())


def test_magnitude_is_the_size_of_all_weights_of_a_unit():
    ours = both("bert")[1]
    found = scores.magnitude(ours)
    layer = ours.base_model.layer_list()[2]
    own = slice(16, 32)
    attention = layer.attention.self
    rows = [getattr(attention, name).weight[own] for name in ("query", "key", "value")]
    rows.append(layer.attention.output.dense.weight[:, own])
    assert torch.isclose(found.heads[2][1], sum(t.square().sum() for t in rows).sqrt())
    both_sides = layer.intermediate.dense.weight[5].norm(), layer.output.dense.weight[:, 5].norm()
    assert torch.isclose(found.neurons[2][5], torch.hypot(*both_sides))


def test_prune_removes_what_scores_say(labelled):
    ours = both("bert")[1]
    found = fastbert.prune(ours, heads=1 / 3, neurons=0.5, examples=labelled, multiple=16)
    expected = scores.taylor(ours, labelled)
    assert found.heads == {i: own for i, own in chosen(expected.heads, 1 / 3).items() if own}
    assert found.neurons == {i: own for i, own in chosen(expected.neurons, 0.5, 16).items() if own}
    assert sum(map(len, found.heads.values())) == 3
    assert sum(map(len, found.neurons.values())) == 112
    assert found.layers == [0, 1, 2]
    # Of layers that are kept, and as given
    given = fastbert.prune(ours, layers=[0, 2], heads={1: [2]}, neurons={0: range(8)})
    assert given.layers == [0, 2]
    assert given.model.config.pruned_heads == {1: [2]}
    assert given.model.config.intermediate_sizes == [72, 80]
    assert (given.heads, given.neurons) == ({1: [2]}, {0: list(range(8))})
    drawn = [fastbert.prune(ours, heads=0.5, score="random", seed=seed).heads for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert fastbert.prune(ours, heads=0.5, score="magnitude").heads != drawn[0]
    assert torch.equal(
        given.dense().state_dict()["classifier.weight"], ours.state_dict()["classifier.weight"]
    )


@pytest.mark.parametrize("family", ["bert", "modernbert", "eurobert"])
def test_the_smallest_weights_of_all_layers_become_zeros(family):
    ours = copy.deepcopy(both(family)[1])
    before = {key: t.clone() for key, t in ours.state_dict().items()}
    found = fastbert.prune(ours, weights=0.7)
    own = [f"{path}.weight" for layer in ours.base_model.layer_list() for path in shrink.paths(layer.form)]
    after, of_layers = found.model.state_dict(), {}
    for key, t in after.items():
        if ".layer" in key and any(key.endswith(path) for path in own):
            of_layers[key] = t
        else:
            assert torch.equal(t, before[key]), key
    assert len(of_layers) == len(own)
    sizes = torch.cat([before[key].abs().flatten() for key in of_layers])
    kept = torch.cat([(t != 0).flatten() for t in of_layers.values()])
    assert int((~kept).sum()) == round(0.7 * len(sizes))
    assert sizes[kept].min() >= sizes[~kept].max()
    assert all(torch.equal(t[t != 0], before[key][t != 0]) for key, t in of_layers.items())
    assert found.zeros == pytest.approx(0.7, abs=1e-4)
    assert found.after == found.before
    assert all(torch.equal(t, before[key]) for key, t in ours.state_dict().items())
    # After the heads, whose weights are no longer among them
    both_ways = fastbert.prune(ours, heads={0: [0]} if family != "eurobert" else {}, weights=0.7)
    assert both_ways.zeros == pytest.approx(0.7, abs=1e-4)
    assert fastbert.prune(ours, weights=0).zeros == 0
    with torch.no_grad():
        for key in of_layers:
            ours.get_parameter(key).clamp_(-1e-3, 1e-3)
    equal = fastbert.prune(ours, weights=0.4).zeros
    assert equal == pytest.approx(0.4, abs=1e-4)
    assert fastbert.prune(ours, heads={}).zeros is None


def test_pruned_models_are_pruned_again(labelled):
    ours = both("bert")[1]
    once = fastbert.prune(ours, heads={0: [0, 1, 2], 1: [0]}, neurons={1: range(80)})
    again = fastbert.prune(once.model, heads=0.5, neurons=0.5, examples=labelled, multiple=1)
    assert sum(map(len, again.heads.values())) == 2
    assert sum(map(len, again.neurons.values())) == 80
    assert again.before == once.after


def test_sizes_are_counted():
    ours = both("bert")[1]
    found = fastbert.prune(ours, heads={0: [0, 1]}, neurons={2: range(16)})
    gone = 2 * (4 * 16 * 48 + 3 * 16), 16 * (2 * 48 + 1)
    assert found.before.parameters - found.after.parameters == sum(gone)
    assert found.before.bytes - found.after.bytes == 8 * sum(gone)
    # A product is two operations, and a head attends to 128 tokens twice
    flops = 2 * (2 * 4 * 16 * 48 + 16 * 2 * 48) + 4 * 128 * 2 * 16
    assert found.before.flops - found.after.flops == flops
    layer = 2 * (4 * 48 * 48 + 2 * 48 * 80) + 4 * 128 * 48
    assert found.before.flops == 3 * layer
    speeds = size.tokens_per_second([ours, found.model], sequences=1, seconds=0.01)
    assert min(speeds) > 0
    assert len(speeds) == 2
    choices = both("bert", "ForMultipleChoice")[1]
    assert size.tokens_per_second([choices], sequences=2, seconds=0.01)[0] > 0


def test_numbers_may_be_arrays():
    ours = both("bert")[1]
    found = fastbert.prune(
        ours,
        heads={0: np.array([2, 1, 1])},
        neurons={1: torch.tensor([5, 4])},
        layers=np.arange(2),
        vocabulary=torch.arange(50),
    )
    assert (found.heads, found.neurons, found.layers) == ({0: [1, 2]}, {1: [4, 5]}, [0, 1])
    assert found.model.config.vocab_size == 50


def test_scores_that_are_not_finite_choose_nothing(labelled):
    ours = copy.deepcopy(both("bert")[1])
    torch.nn.init.constant_(ours.classifier.weight, float("nan"))
    with pytest.raises(ValueError, match="heads: the scores of layer 0 are not finite"):
        fastbert.prune(ours, heads=0.5, examples=labelled)


def test_a_model_without_layers_has_no_scores(labelled):
    found = fastbert.prune(both("bert")[1], layers=[], heads=0.5, neurons=0.5, examples=labelled)
    assert (found.layers, found.heads, found.neurons, found.after.flops) == ([], {}, {}, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": 1.0}, r"heads: expected a share in \[0, 1\), got 1.0"),
        ({"neurons": -0.1}, r"neurons: expected a share in \[0, 1\), got -0.1"),
        ({"heads": "half"}, "heads: expected a share, or numbers per layer, got 'half'"),
        ({"heads": True}, "heads: expected a share, or numbers per layer, got True"),
        ({"heads": 0.5}, "examples: expected labelled examples for score 'taylor', got None"),
        ({"heads": 0.5, "score": "l1"}, "score: expected one of taylor, magnitude, random, got 'l1'"),
        ({"neurons": 0.5, "multiple": 0}, "multiple: expected an integer >= 1, got 0"),
        ({"heads": {0: 1}}, r"heads\[0\]: expected a list of integers, got 1"),
        ({"neurons": {0: "12"}}, r"neurons\[0\]: expected a list of integers, got '12'"),
        ({"heads": {9: []}}, "heads: expected numbers of 3 layers as keys, got 9"),
        ({"heads": {0: [True]}}, r"heads\[0\]: expected numbers below 3, got True"),
        ({"weights": 1.0}, r"weights: expected a share in \[0, 1\), got 1.0"),
        ({"weights": {0: [1]}}, "weights: expected a share, got"),
        ({"layers": 2}, "layers: expected a list of integers, got 2"),
        ({"vocabulary": [0, 1.0]}, r"vocabulary: expected a list of integers, got \[0, 1.0\]"),
        ({"heads": 0.5, "score": "random", "seed": "a"}, "seed: expected an integer, got 'a'"),
        ({"heads": 0.5, "examples": ["a"]}, "examples: expected Examples .*, got list"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fastbert.prune(both("bert")[1], **given)
