"""Attention by label and heads as parsers: against loops over transformers' maps in float64, and planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastbert.analysis.intervals import mean_interval
from fastbert.analysis.syntax import ALL, LABELS, Parsing, attention_by_label, labels_of, merged, parse
from fastbert.analysis.treebank import Sentence, as_examples
from tests.support.analysis import both, maps_of
from tests.support.hf_models import ANALYSED


@pytest.fixture
def examples(tokenizer, sentences):
    return as_examples(tokenizer, sentences)


# -- labels --------------------------------------------------------------------------------------------------


def labelled(sentences, label):
    """(number of the sentence, word) of the words that have a label."""
    words = [(i, word) for i, sentence in enumerate(sentences) for word in sentence.words]
    return [words[i] for i in np.flatnonzero(labels_of(sentences)[:, LABELS.index(label)])]


def test_labels(sentences):
    assert labelled(sentences, "nouns") == [
        *((0, "cat"), (0, "mat"), (1, "dog"), (1, "tree"), (3, "rain"), (4, "dogs"), (4, "cats")),
        *((5, "cat"), (5, "house"), (6, "cats"), (7, "dog")),
    ]
    assert labelled(sentences, "pronouns") == [(1, "it"), (2, "it"), (5, "it"), (5, "it"), (7, "it")]
    assert labelled(sentences, "verbs") == [
        *((0, "sat"), (1, "ran"), (1, "rained"), (2, "rained"), (4, "sat"), (5, "ran"), (6, "sat")),
        (6, "rained"),
    ]
    assert labelled(sentences, "subjects") == [
        *((0, "cat"), (1, "dog"), (1, "it"), (2, "it"), (4, "dogs"), (5, "it"))
    ]
    assert labelled(sentences, "objects") == [(4, "cats"), (5, "it"), (5, "house"), (6, "big"), (7, "dog")]
    # the interjection "no" negates no word
    assert labelled(sentences, "negations") == [(5, "not"), (6, "never"), (7, "no")]


@pytest.mark.parametrize(
    ("word", "upos", "relation", "lemma", "features", "expected"),
    [
        ("n't", "PART", "advmod", "_", "_", True),
        ("n’t", "PART", "advmod", "not", "_", True),
        ("Never", "ADV", "advmod", "_", "_", True),
        ("nimmer", "ADV", "advmod:emph", "never", "_", True),
        ("kein", "DET", "det", "kein", "Case=Nom|Polarity=Neg|PronType=Neg", True),
        ("ne", "PART", "neg", "ne", "_", True),
        ("not", "PART", "cc", "not", "_", False),
        ("un", "X", "dep", "un", "Polarity=Neg2", False),
        ("sí", "ADV", "advmod", "sí", "Polarity=Pos", False),
    ],
)
def test_negations(word, upos, relation, lemma, features, expected):
    sentence = Sentence((word,), (upos,), np.zeros(1, np.int64), (relation,), (lemma,), (features,))
    assert labels_of([sentence])[0, LABELS.index("negations")] == expected


def by_maps(maps, examples, sentences):
    """(to_label, share, score) by loops over words and tokens."""
    to_label, share, score = [], [], []
    masks = labels_of(sentences)
    first = 0
    for number, sentence in enumerate(sentences):
        a = np.stack(maps(number))  # (layers, nheads, length, length)
        start, end = examples.starts[number : number + 2]
        length = end - start
        of_label, of_share, of_score = [], [], []
        for label in range(len(LABELS)):
            tokens = [
                i for i in range(length) if (w := examples.words[start + i]) >= 0 and masks[first + w, label]
            ]
            of_share.append(len(tokens) / length)
            of_label.append(a[..., tokens].sum(-1).mean(-1))
            got = [a[:, :, [i for i in range(length) if i != j], j].sum(-1) / length for j in tokens]
            of_score.append(np.max(got, 0) if got else np.full(a.shape[:2], np.nan))
        first += len(sentence)
        to_label.append(of_label)
        share.append(of_share)
        score.append(of_score)
    return [np.array(each).swapaxes(0, 1) for each in (to_label, share, score)]


@pytest.mark.parametrize("family", ANALYSED)
def test_labels_as_the_maps_of_transformers_say(family, examples, sentences):
    theirs, ours = both(family)
    found = attention_by_label(ours, examples, sentences, batch_tokens=30)
    to_label, share, score = by_maps(lambda i: maps_of(theirs, examples, i), examples, sentences)
    np.testing.assert_allclose(found.to_label, to_label, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.share, share, rtol=1e-6)
    np.testing.assert_allclose(found.score, score, rtol=1e-6, atol=1e-7)
    assert found.counts().tolist() == [7, 4, 6, 5, 4, 3]
    np.testing.assert_allclose(found.scores(), np.nanmean(score, 1), rtol=1e-6, atol=1e-7)


def test_a_label_that_no_sentence_has(tokenizer, sentences):
    found = attention_by_label(both("bert")[1], as_examples(tokenizer, sentences[2:3]), sentences[2:3])
    objects = LABELS.index("objects")
    assert found.counts()[objects] == 0
    assert np.isnan(found.scores()[objects]).all()
    assert not np.isnan(found.scores()[LABELS.index("pronouns")]).any()
    assert (found.to_label[objects] == 0).all()


# -- parsers -------------------------------------------------------------------------------------------------


def test_merged():
    """To the tokens of a word is summed, from them averaged; special tokens are left out."""
    draw = torch.Generator().manual_seed(0)
    maps = torch.rand(2, 3, 6, 6, generator=draw, dtype=torch.float64)
    words = [[-1, 0, 1, 1, 2, -1], [-1, 0, 0, 0, -1, -1]]
    pieces = torch.zeros(2, 6, 3)
    for i, each in enumerate(words):
        for row, word in enumerate(each):
            if word >= 0:
                pieces[i, row, word] = 1
    found = merged(maps, pieces).numpy()
    for i, each in enumerate(words):
        np.testing.assert_allclose(found[i], np.stack([by_words(m, each, 3) for m in maps[i].numpy()]))


def by_words(a, words, count):
    found = np.zeros((count, count))
    for one in range(count):
        for other in range(count):
            rows = [row for row, word in enumerate(words) if word == one]
            columns = [column for column, word in enumerate(words) if word == other]
            sums = [sum(a[row, column] for column in columns) for row in rows]
            found[one, other] = sum(sums) / max(len(sums), 1)
    return found


def arcs_by_maps(maps, examples, sentences):
    """[(sentence, relation, offset, right (layers, nheads, 2))] by loops over words."""
    found = []
    for number, sentence in enumerate(sentences):
        start, end = examples.starts[number : number + 2]
        words, count = examples.words[start:end].tolist(), len(sentence)
        layers = [[by_words(a, words, count) for a in layer] for layer in maps(number)]
        for word in range(count):
            head = sentence.heads[word] - 1
            if head < 0:
                continue
            others = [other for other in range(count) if other != word]
            right = np.array(
                [
                    [
                        (
                            max(others, key=lambda other: a[word, other]) == head,
                            max(others, key=lambda other: a[other, word]) == head,
                        )
                        for a in layer
                    ]
                    for layer in layers
                ]
            )
            found.append((number, sentence.relations[word], head - word, right))
    return found


def check_arcs(found, expected):
    assert found.sentence.tolist() == [sentence for sentence, *_ in expected]
    assert [found.relations[i] for i in found.relation] == [relation for _, relation, *_ in expected]
    assert found.offset.tolist() == [offset for _, _, offset, _ in expected]
    np.testing.assert_array_equal(found.right, np.stack([right for *_, right in expected]))


@pytest.mark.parametrize("family", ANALYSED)
def test_parsers_as_the_maps_of_transformers_say(family, examples, sentences):
    theirs, ours = both(family)
    expected = arcs_by_maps(lambda i: maps_of(theirs, examples, i), examples, sentences)
    check_arcs(parse(ours, examples, sentences, batch_tokens=1), expected)
    found = parse(ours, examples, sentences, max_bytes=8 * 4 * 17**2)
    check_arcs(found, expected)
    assert found.sentences == len(sentences)
    assert 0.05 < found.right.mean() < 0.6
    assert (found.right[..., 0] != found.right[..., 1]).any()
    # most frequent first, and by name where equal
    assert found.relations[:4] == ("det", "nsubj", "obj", "punct")
    rights = np.stack([right for _, relation, _, right in expected if relation == "det"])
    np.testing.assert_allclose(found.accuracy("det"), rights.mean(0))
    np.testing.assert_allclose(found.accuracy(), found.right.mean(0))


@pytest.mark.parametrize("function", [attention_by_label, parse])
def test_bad_arguments(examples, sentences, function, tokenizer):
    ours = both("bert")[1]
    with pytest.raises(ValueError, match="sentences: expected 8, one per example, got 7"):
        function(ours, examples, sentences[:7])
    turned = [sentences[i] for i in (0, 2, 1, 3, 4, 5, 6, 7)]
    with pytest.raises(ValueError, match=r"sentences\[1\]: 2 words, but its example has 12"):
        function(ours, examples, turned)
    with pytest.raises(ValueError, match="batch_tokens: expected an integer >= 1"):
        function(ours, examples, sentences, batch_tokens=0)


def test_too_little(examples, sentences, tokenizer):
    ours = both("bert")[1]
    with pytest.raises(ValueError, match="max_bytes: 1,000 are too few for the attention maps of 15 tokens"):
        parse(ours, examples, sentences, max_bytes=1000)
    with pytest.raises(ValueError, match="sentences: expected one at least, got none"):
        parse(ours, as_examples(tokenizer, []), [])
    with pytest.raises(ValueError, match="sentences: expected one with two words at least"):
        parse(ours, as_examples(tokenizer, sentences[3:4]), sentences[3:4])
    found = parse(ours, examples.chosen([0, 1, 2]), sentences[:3])
    with pytest.raises(ValueError, match=r"sentences: expected 4 at least, two to choose heads on .*, got 3"):
        found.best()
    with pytest.raises(ValueError, match=r"relation: expected 'all' or one of .*, got 'dobj'"):
        found.accuracy("dobj")


# -- the best heads, of made-up findings ---------------------------------------------------------------------


def made(sentence, right, offset=None, relation=None, relations=("x",)) -> Parsing:
    """Findings of arcs in these sentences; right: (arcs, heads) for one layer and both directions."""
    count = len(sentence)
    right = np.asarray(right, bool)[:, None, :, None]
    return Parsing(
        sentence=np.asarray(sentence),
        offset=np.ones(count, np.int64) if offset is None else np.asarray(offset),
        relation=np.zeros(count, np.int64) if relation is None else np.asarray(relation),
        right=np.concatenate([right, np.zeros_like(right)], -1),
        relations=relations,
        sentences=int(max(sentence)) + 1,
    )


def test_heads_are_chosen_on_one_half_and_scored_on_the_other():
    sentence = np.repeat(np.arange(60), 3)
    found = made(sentence, np.zeros((180, 3)))
    for seed in (0, 5):
        half = found.chooses(seed)
        assert half.sum() == 30
        chooses = half[sentence]
        # head 0 is perfect where heads are chosen, head 1 where they are scored, head 2 everywhere by 2 in 3
        right = np.stack([chooses, ~chooses, np.arange(180) % 3 > 0], 1)
        each = replace(found, right=made(sentence, right).right)
        (of_all, of_x) = each.best(seed=seed)
        assert (of_all.head, of_all.accuracy.mean, of_all.arcs) == (0, 0.0, 90)
        assert of_x[1:] == of_all[1:]
    assert (found.chooses(0) != found.chooses(5)).any()
    odd = made(np.arange(7), np.zeros((7, 1)))
    assert odd.chooses(3).sum() == 4


def test_the_offset_is_chosen_likewise():
    """It is a distance in words with its sign, of the head from the dependant."""
    sentence = np.repeat(np.arange(50), 4)
    found = made(sentence, np.zeros((200, 1)))
    chooses = found.chooses(0)[sentence]
    offset = np.where(np.arange(200) % 4 == 0, 3, np.where(chooses, -2, 1))
    best = replace(found, offset=offset).best()[0]
    assert (best.offset, best.baseline) == (-2, 0.0)
    offset = np.where(np.arange(200) % 4 == 0, 3, -2)
    best = replace(found, offset=offset).best()[0]
    assert (best.offset, best.baseline) == (-2, 0.75)


def test_relations_and_the_fewest_arcs():
    sentence = np.repeat(np.arange(40), 5)
    relation = np.tile([0, 0, 0, 1, 1], 40)
    relation[-1] = 2
    right = np.stack([relation == 0, relation == 1], 1)
    found = made(sentence, right, relation=relation, relations=("a", "b", "c"))
    best = found.best()
    assert [(b.relation, b.head, b.accuracy.mean) for b in best[1:]] == [("a", 0, 1.0), ("b", 1, 1.0)]
    assert (best[0].relation, best[0].head) == (ALL, 0)
    assert best[0].accuracy.mean == pytest.approx(0.6)
    assert [b.arcs for b in best] == [100, 60, best[2].arcs]
    assert [b.relation for b in found.best(least=50)] == [ALL, "a"]
    assert found.best(least=101) == []
    # a relation of one half alone is never scored
    assert "c" not in {b.relation for b in found.best(least=0)}


def test_the_interval_is_over_sentences():
    """Arcs of a sentence are all right or all wrong: the interval is that of as many sentences."""
    draw = np.random.default_rng(0)
    right = draw.random(200) < 0.7
    found = made(np.repeat(np.arange(200), 6), np.repeat(right, 6)[:, None])
    (best, _) = found.best(seed=2, resamples=2000)
    held = right[~found.chooses(2)].astype(float)
    expected = mean_interval(held, seed=2, resamples=2000)
    assert best.accuracy == pytest.approx(expected)
    assert best.accuracy.high - best.accuracy.low > 0.15
    # sentences without an arc of the relation count in the resamples, and change no accuracy
    relation = np.repeat(np.arange(200) % 2, 6)
    some = replace(found, relation=relation, relations=("x", "y")).best(seed=2)
    assert {b.relation: b.accuracy.n for b in some} == {ALL: 100, "x": 100, "y": 100}
    half = found.chooses(2)
    for number, name in enumerate("xy"):
        expected = right[~half & (np.arange(200) % 2 == number)].mean()
        (mean,) = (b.accuracy.mean for b in some if b.relation == name)
        assert mean == pytest.approx(expected)
