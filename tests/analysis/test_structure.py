"""Structural probes: trees that vectors hold exactly, spanning trees and correlations in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fastbert.analysis import structure as module
from fastbert.analysis.structure import Structure, spanning_trees, spearman, structural_probe, tree_distances
from fastbert.tasks.examples import Examples
from tests.support.analysis import sentence

SCHOOL = dict(lr=0.02, batch=10, epochs=60, patience=10, rank=40)


def random_tree(draw, n):
    """Heads of n words, from 1; every word but the root hangs on one that came before in a random order."""
    order = draw.permutation(n)
    heads = np.zeros(n, np.int64)
    for place in range(1, n):
        heads[order[place]] = order[draw.integers(0, place)] + 1
    return heads


def by_paths(heads):
    """Distances in a tree, by the words on both paths to the root."""

    def path(word):
        found = [word]
        while heads[found[-1]]:
            found.append(heads[found[-1]] - 1)
        return found

    paths = [path(word) for word in range(len(heads))]
    apart = [[len(set(one) ^ set(other)) for other in paths] for one in paths]
    return np.array(apart)


@pytest.mark.parametrize("seed", range(5))
def test_distances_in_a_tree(seed):
    draw = np.random.default_rng(seed)
    for n in (1, 2, 3, 8, 15):
        heads = random_tree(draw, n)
        np.testing.assert_array_equal(tree_distances(heads), by_paths(heads))


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_spanning_trees_are_the_least(n):
    draw = np.random.default_rng(n)
    distances = draw.random((4, n, n))
    distances = distances + distances.swapaxes(1, 2)
    distances[:2, 0, -1] = distances[:2, -1, 0] = 0
    found = spanning_trees(distances)
    assert found.shape == (4, n - 1, 2)
    for matrix, edges in zip(distances, found, strict=True):
        least = np.inf
        for some in itertools.combinations(itertools.combinations(range(n), 2), n - 1):
            reached = {0}
            for _ in some:
                reached |= {w for edge in some if reached & set(edge) for w in edge}
            if len(reached) == n:
                least = min(least, sum(matrix[edge] for edge in some))
        assert sum(matrix[tuple(edge)] for edge in edges) == pytest.approx(least)


def test_a_spanning_tree_of_a_trees_distances_is_the_tree():
    heads = random_tree(np.random.default_rng(0), 12)
    (edges,) = spanning_trees(tree_distances(heads)[None])
    expected = {frozenset((i, h - 1)) for i, h in enumerate(heads) if h}
    assert {frozenset(edge) for edge in edges.tolist()} == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_has_no_tree(bad):
    with pytest.raises(ValueError, match=rf"distances\[0\]: expected finite numbers, got {bad}"):
        spanning_trees(np.array([[[0, bad], [bad, 0]]]))


@pytest.mark.filterwarnings("error")
def test_spearman_of_a_nan_is_nan():
    one = np.array([[1.0, 2, 3], [1, np.nan, 3]])
    np.testing.assert_array_equal(spearman(one, np.array([[1.0, 2, 3]] * 2)), [1, np.nan])
    np.testing.assert_array_equal(spearman(one[::-1] * 0 + [1.0, 2, 3], one), [np.nan, np.nan])


@pytest.mark.filterwarnings("error")
def test_spearman_in_closed_form():
    assert spearman(np.array([1.0, 5, 7]), np.array([2.0, 3, 90])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 5, 7]), np.array([9.0, 3, 1])) == pytest.approx(-1.0)
    # ties share their mean rank: (0, 1.5, 1.5, 3) against (0, 1, 2, 3)
    assert spearman(np.array([1, 4, 4, 9]), np.arange(4)) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert np.isnan(spearman(np.array([2, 2, 2]), np.arange(3)))


def treebank(seed, count=60):
    """(sentences, examples, states): layer 1 holds the trees exactly, layer 0 says nothing.

    A word is the sum of unit vectors of the edges on its path to the root, so two words' distance,
    squared, is the number of edges between them. A word of the first sentence is the mean of two pieces.
    """
    draw = np.random.default_rng(seed)
    sentences, vectors, words = [], [], []
    for number in range(count):
        n = int(draw.integers(4, 12))
        heads = random_tree(draw, n)
        upos = ["NOUN"] * n
        leaves = [i for i in range(n) if i + 1 not in heads]
        upos[leaves[-1]] = "PUNCT"
        sentences.append(sentence(" ".join("w" * n), " ".join(upos), heads, " ".join("x" * n)))
        own = np.zeros((n, 40), np.float32)
        basis = np.eye(40)[:, :n]
        for word in range(n):
            at = word
            while heads[at]:
                own[word] += basis[:, at]
                at = heads[at] - 1
        for word in range(n):
            if number == 0 and word == 0:
                shift = draw.normal(size=40).astype(np.float32)
                vectors += [own[0] + shift, own[0] - shift]
                words += [0, 0]
            else:
                vectors.append(own[word])
                words.append(word)
    lengths = [len(s) + (i == 0) for i, s in enumerate(sentences)]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    blank = np.zeros(len(words), np.int64)
    examples = Examples(blank, starts, blank, blank, blank.astype(np.int8), np.array(words))
    states = np.stack([draw.normal(size=(len(words), 40)), np.stack(vectors)]).astype(np.float32)
    return sentences, examples, torch.from_numpy(states)


def trees_of(sentences):
    """All words have one piece but the first, which has two."""
    counts = np.array([len(s) for s in sentences])
    sizes = np.ones(counts.sum(), np.int64)
    sizes[0] = 2
    ends = np.cumsum(sizes)
    return module._Trees(sentences, ends - sizes, ends, np.cumsum(counts) - counts)


@pytest.mark.sweep
def test_a_tree_that_is_there_is_found():
    sentences, examples, states = treebank(0)
    found = structural_probe(states, sentences, examples, **SCHOOL)
    assert found.uuas()[1] > 0.97
    assert found.uuas()[0] < 0.6
    assert found.root_accuracy()[1] > 0.8
    assert found.distance_spearman()[1] > 0.95 > 0.6 > found.distance_spearman()[0]
    assert found.depth_spearman()[1] > 0.9
    assert found.sentences == (48, 6, 6)
    interval = found.interval(1)
    assert interval.mean == pytest.approx(found.uuas()[1])
    assert interval.n == 6


def test_the_map_itself_scores_one():
    """B = 1: distances and depths are exact, so every number is 1."""
    sentences, _, states = treebank(1)
    trees = trees_of(sentences)
    probes = module.StructuralProbes(2, 40, 40, 0)
    with torch.no_grad():
        probes.distance.copy_(torch.eye(40).expand(2, -1, -1))
        probes.depth.copy_(torch.eye(40).expand(2, -1, -1))
    numbers = np.arange(len(sentences))
    of_distance, of_depth = trees.losses(probes, states, numbers).chunk(2)
    torch.testing.assert_close(of_distance[1], torch.zeros(60), rtol=0, atol=1e-4)
    torch.testing.assert_close(of_depth[1], torch.zeros(60), rtol=0, atol=1e-4)
    assert (of_distance[0] > 1).all()
    found = module._scored(probes, states, trees, numbers, (0, 0, 60), 40, 0)
    assert found.uuas()[1] == 1
    assert found.root[1].all()
    assert found.distance_spearman()[1] == pytest.approx(1)
    assert found.depth_spearman()[1] == pytest.approx(1)
    # punctuation, a leaf here, is in no counted edge
    assert found.edges.sum() == sum(map(len, sentences)) - 2 * 60


def test_losses_by_hand():
    sentences, examples, states = treebank(2, count=12)
    trees = trees_of(sentences)
    probes = module.StructuralProbes(2, 40, 7, 3)
    with torch.no_grad():
        probes.depth.mul_(-2.0)
    of_distance, of_depth = trees.losses(probes, states, np.array([3, 0, 5])).chunk(2)
    for at, number in enumerate([3, 0, 5]):
        rows = states[:, examples.starts[number] : examples.starts[number + 1]].double().numpy()
        if number == 0:
            rows = np.concatenate([rows[:, :2].mean(1, keepdims=True), rows[:, 2:]], 1)
        gold = by_paths(sentences[number].heads)
        n, root = len(gold), int(np.flatnonzero(sentences[number].heads == 0)[0])
        for layer in range(2):
            b, c = (p[layer].detach().double().numpy() for p in (probes.distance, probes.depth))
            apart = ((rows[layer][:, None] @ b - rows[layer][None] @ b) ** 2).sum(-1)
            depth = ((rows[layer] @ c) ** 2).sum(-1)
            assert of_distance[layer, at].item() == pytest.approx(abs(gold - apart).sum() / n**2, rel=1e-4)
            assert of_depth[layer, at].item() == pytest.approx(abs(gold[root] - depth).sum() / n, rel=1e-4)


def test_a_chain_is_the_baseline():
    heads = np.array([0, 1, 2, 3, 4, 5])
    many = [sentence("a b c d e f", "X X X X X X", heads, "x x x x x x")] * 10
    examples = Examples(*_blank(60, 10))
    states = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(0))
    found = structural_probe(states, many, examples, rank=4, epochs=1)
    assert found.linear_uuas() == 1
    assert found.linear_spearman() == pytest.approx(1)
    assert found.edges.tolist() == [5]


def test_an_arc_to_punctuation_is_none():
    many = [sentence("a , b c", "X PUNCT X X", np.array([2, 0, 2, 3]), "x x x x")] * 10
    found = structural_probe(torch.randn(1, 40, 8), many, Examples(*_blank(40, 10)), rank=4, epochs=1)
    assert (found.edges.tolist(), found.linear_found.tolist()) == ([1], [1])


def test_correlations_are_of_lengths_5_to_50():
    """Of each length a mean, and then of all."""
    lengths, values = np.array([4, 5, 5, 50, 51]), np.array([[9.0, 1, 3, 5, 9]])
    rest = [np.zeros((1, 5))] * 3
    found = Structure(*rest, values, 2 * values, lengths, *rest[:2], (8, 1, 1), 4, 0)
    assert (found.distance_spearman(), found.depth_spearman()) == ([3.5], [7.0])


def test_what_cannot_be_learned():
    many = [sentence("a b c", "X X X", np.array([0, 1, 2]), "x x x")] * 10
    states, examples = torch.randn(2, 30, 8), Examples(*_blank(30, 10))
    with pytest.raises(ValueError, match=r"lr: probes have no finite loss with 1e\+30"):
        structural_probe(states, many, examples, rank=4, lr=1e30)
    states[1, 7] = torch.inf
    with pytest.raises(ValueError, match=r"states\[1\]: expected finite numbers"):
        structural_probe(states, many, examples, rank=4)


def _blank(total, count):
    blank = np.zeros(total, np.int64)
    starts = np.arange(count + 1) * (total // count)
    words = np.tile(np.arange(total // count), count)
    return blank, starts, blank, blank, blank.astype(np.int8), words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 9}, "rank: expected an integer from 1 to 8, got 9"),
        ({"states": torch.zeros(2, 59, 8)}, "states: expected 60 rows, the words' pieces, got 59"),
        ({"count": 9}, "sentences: a split needs 10 of two words at least, got 9"),
    ],
)
def test_what_no_probe_can_read(options, message):
    count = options.pop("count", 10)
    total = 6 * count
    many = [sentence("a b c d e f", "X X X X X X", np.arange(6), "x x x x x x")] * count
    states = options.pop("states", torch.zeros(2, total, 8))
    with pytest.raises(ValueError, match=message):
        structural_probe(states, many, Examples(*_blank(total, count)), **{"rank": 4, **options})
