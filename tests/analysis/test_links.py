"""Attention between linked words: against transformers' maps in float64, and planted heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastbert.analysis.intervals import mean_interval
from fastbert.analysis.links import Links, links
from fastbert.analysis.targets import LabelledText, of_texts
from fastbert.analysis.treebank import as_examples
from tests.support.analysis import both, maps_of
from tests.support.hf_models import ANALYSED

# words, and the spans that are linked: of several words, of several pieces, overlapping, two in one text
TEXTS = [
    ("the cats sat on a mat .", [((1, 2), (2, 3)), ((0, 2), (4, 6))]),
    ("it rained", [((0, 1), (1, 2))]),
    ("a big dog ran to a tree , and it rained !", [((2, 3), (9, 10))]),
    ("the dogs sat in the red house while the cat ran .", [((1, 2), (0, 3))]),
    ("cats , dogs and trees .", []),
    ("it sat on a tree .", [((4, 5), (1, 2))]),
]


# results are float32, of probabilities that may be small
CLOSE = dict(rtol=1e-5, atol=1e-8)


def labelled(texts=TEXTS):
    return [
        LabelledText(tuple(words.split()), tuple(spans), tuple(("link",) for _ in spans))
        for words, spans in texts
    ]


@pytest.fixture
def examples(tokenizer):
    return as_examples(tokenizer, labelled())


def pieces(examples, number, span):
    """The tokens of the words of a span, counted in the example."""
    start, end = examples.starts[number : number + 2]
    words = examples.words[start:end]
    return np.flatnonzero((words >= span[0]) & (words < span[1]))


def by_maps(theirs, examples, number, spans, shift=0):
    """(layers, nheads), by loops."""
    maps = np.stack(maps_of(theirs, examples, number))
    found = np.zeros(maps.shape[:2])
    for one, other in spans:
        for i in pieces(examples, number, one):
            for j in pieces(examples, number, other):
                if i != j:
                    for a, b in ((i + shift, j + shift), (j + shift, i + shift)):
                        found = np.maximum(found, maps[:, :, a, b])
    return found


@pytest.mark.parametrize("family", ANALYSED)
def test_as_in_the_maps(examples, family):
    theirs, ours = both(family)
    found = links(ours, examples, of_texts(labelled(), examples), batch_tokens=40)
    assert found.example.tolist() == [0, 1, 2, 3, 5]
    assert found.links.tolist() == [2, 1, 1, 1, 1]
    for row, number in enumerate(found.example):
        spans = TEXTS[number][1]
        np.testing.assert_allclose(found.score[row], by_maps(theirs, examples, number, spans), **CLOSE)
        # the moved links are those of one of the other places
        length = examples.lengths[number]
        own = np.concatenate([pieces(examples, number, span) for pair in spans for span in pair])
        places = [s for s in range(1 - own.min(), length - 1 - own.max()) if s]
        if not places:
            assert np.isnan(found.moved[row]).all()
            continue
        alike = [
            np.allclose(found.moved[row], by_maps(theirs, examples, number, spans, s), **CLOSE)
            for s in places
        ]
        assert sum(alike) == 1, number
    assert found.has_room.sum() >= 3


def test_batches_change_nothing_and_seeds_move_elsewhere(examples):
    ours = both("bert")[1]
    targets = of_texts(labelled(), examples)
    whole, other = links(ours, examples, targets), links(ours, examples, targets, seed=1)
    single = links(ours, examples, targets, batch_tokens=1)
    np.testing.assert_allclose(single.score, whole.score, rtol=1e-6)
    np.testing.assert_allclose(single.moved, whole.moved, rtol=1e-6)
    np.testing.assert_array_equal(other.score, whole.score)
    assert not np.allclose(other.moved[whole.has_room], whole.moved[whole.has_room])


def test_a_causal_model_has_one_direction(examples):
    theirs, ours = both("bert", is_decoder=True)
    found = links(ours, examples, of_texts(labelled(), examples))
    for row, number in enumerate(found.example):
        expected = by_maps(theirs, examples, number, TEXTS[number][1])
        np.testing.assert_allclose(found.score[row], expected, **CLOSE)


def planted(n=40, seed=0):
    """Scores in which head 1 of layer 1 links, and head 0 of layer 0 likes any place."""
    draw = np.random.default_rng(seed)
    score, moved = draw.uniform(0, 0.1, (2, n, 2, 2)).astype(np.float32)
    score[:, 1, 1] += 0.5
    score[:, 0, 0] += 0.3
    moved[:, 0, 0] += 0.3
    moved[::4] = np.nan
    return Links(np.arange(n), score, moved, np.ones(n, np.int64), seed)


def test_the_best_head_is_scored_on_the_other_half():
    found = planted()
    best = found.best()
    assert (best.layer, best.head) == (1, 1)
    order = np.random.default_rng(0).permutation(40)
    second = np.sort(order[20:])
    assert best.score == mean_interval(found.score[second, 1, 1], seed=0)
    with_room = second[second % 4 != 0]
    assert best.moved == mean_interval(found.moved[with_room, 1, 1], seed=0)
    assert best.score.low > best.moved.high
    np.testing.assert_allclose(found.scores(), found.score.mean(0), rtol=1e-6)
    rooms = np.arange(40) % 4 != 0
    np.testing.assert_allclose(found.scores(moved=True), found.moved[rooms].mean(0), rtol=1e-6)
    nowhere = replace(found, moved=np.full_like(found.moved, np.nan))
    assert nowhere.best().moved is None
    assert np.isnan(nowhere.scores(moved=True)).all()
    # the best head of the first half is not scored on that half
    lucky = planted()
    lucky.score[order[:20], 0, 1] = 1.0
    assert lucky.best()[:2] == (0, 1)
    assert lucky.best().score.mean < 0.1


def test_bad_input(tokenizer, examples):
    ours = both("bert")[1]
    targets = of_texts(labelled(), examples)
    one_span = replace(targets, tokens=targets.tokens[:, :1])
    with pytest.raises(ValueError, match="targets: a link has two spans, got targets of 1"):
        links(ours, examples, one_span)
    with pytest.raises(ValueError, match="targets: expected targets of these 2 examples, got others"):
        links(ours, examples.chosen([0, 1]), targets)
    itself = labelled([("it rained", [((0, 1), (0, 1))])])
    few = as_examples(tokenizer, itself)
    with pytest.raises(ValueError, match=r"targets\[0\]: a link needs two tokens"):
        links(ours, few, of_texts(itself, few))
    words = "examples: expected 4 with links at least, two for each half, got 3"
    with pytest.raises(ValueError, match=words):
        replace(planted(), example=np.arange(3)).best()
    assert torch.is_grad_enabled()
