"""Masking rules: what they choose, by definition and by exact binomial intervals."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fastbert.pretraining.masking import IGNORED, SPAN_UNITS, UNITS, Masking, Vocabulary
from fastbert.training.draws import Draws
from tests.support.draw_shares import few_or_many, inside, is_uniform

VOCABULARY = Vocabulary(1000, 4, (0, 2, 3))
CLS, SEP, MASK = 2, 3, 4


def sequence(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """([CLS] … [SEP] … [SEP], where words start); words of one to four tokens."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 1000, length)
    ids[[0, length // 2, -1]] = CLS, SEP, SEP
    starts = rng.random(length) < 0.5
    starts[1] = True
    return ids, starts


def spans_of(ids: np.ndarray, starts: np.ndarray, seed: int = 0) -> np.ndarray:
    """Phrases and entities of one to three words, about every second word in one."""
    rng, found = np.random.default_rng(seed), []
    special = np.isin(ids, [CLS, SEP])
    bounds = [*np.flatnonzero(starts | special | np.roll(special, 1)).tolist(), len(ids)]
    at = 0
    while at < len(bounds) - 1:
        size = min(int(rng.integers(1, 4)), len(bounds) - 1 - at)
        begin, end = bounds[at], bounds[at + size]
        if rng.random() < 0.4 and not special[begin:end].any():
            found.append((begin, end, int(rng.integers(2))))
            at += size
        else:
            at += 1
    return np.array(found, np.int64).reshape(-1, 3)


def spans_for(rule: Masking, ids: np.ndarray, starts: np.ndarray, seed: int = 0) -> dict:
    """The argument `spans` of a rule that takes it."""
    return {"spans": spans_of(ids, starts, seed)} if rule.unit in SPAN_UNITS else {}


def masked(rule: Masking, length: int, count: int, seed: int = 1):
    for i in range(count):
        ids, starts = sequence(length, i)
        yield ids, starts, rule(ids, starts, VOCABULARY, Draws(seed, 0, i), **spans_for(rule, ids, starts, i))


RULES = [
    Masking(),
    Masking(max_predictions=7),
    Masking(choose="bernoulli"),
    Masking("word"),
    Masking("word", "bernoulli"),
    Masking("word", word_budget="words"),
    Masking("ngram"),
    Masking("span"),
    Masking("phrase"),
    Masking("entity"),
    Masking("phrase", "bernoulli"),
]


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda r: f"{r.unit}-{r.choose}-{r.word_budget}-{r.max_predictions}"
)
def test_what_every_rule_promises(rule):
    for ids, starts, found in masked(rule, 60, 200):
        chosen = found.labels != IGNORED
        assert not chosen[np.isin(ids, [0, CLS, SEP, MASK])].any()
        assert np.array_equal(found.labels[chosen], ids[chosen])
        assert np.array_equal(found.ids[~chosen], ids[~chosen])
        assert not np.isin(found.ids[chosen], [0, CLS, SEP]).any()
        covered = np.zeros(60, bool)
        for begin, end in found.spans:
            assert not covered[begin:end].any()  # units do not overlap
            covered[begin:end] = True
        assert np.array_equal(covered, chosen)
        assert (np.diff(found.spans[:, 0]) > 0).all()
        if rule.unit != "token":  # whole words only
            word = np.cumsum(starts | np.isin(ids, [CLS, SEP]) | np.roll(np.isin(ids, [CLS, SEP]), 1))
            for w in np.unique(word[chosen]):
                assert chosen[word == w].all()
        if rule.choose == "exact" and rule.word_budget == "tokens":
            budget = min(max(1, round(0.15 * 60)), rule.max_predictions or 99)
            assert chosen.sum() <= budget
            if rule.unit == "token":
                assert chosen.sum() == budget


@pytest.mark.parametrize(
    ("length", "most", "count"),
    [(128, 20, 19), (512, 77, 77), (600, 77, 77), (4, 20, 1), (10, 20, 2), (3, 20, 1)],
)
def test_the_number_of_predictions(length, most, count):
    """BERT's: 15% of the length with special tokens, at most 20 of 128 and 77 of 512; round(1.5) is 2."""
    ids = np.full(length, 9)
    ids[0] = CLS
    found = Masking(max_predictions=most)(ids, np.ones(length, bool), VOCABULARY, Draws(1, 0, 0))
    assert (found.labels != IGNORED).sum() == count


@pytest.mark.parametrize(
    "rule",
    [Masking(), Masking("word"), Masking("word", "bernoulli"), Masking("phrase")],
    ids=lambda r: r.unit + r.choose,
)
@few_or_many(200, 1600)
def test_shares_of_mask_random_and_kept(rule, size):
    masks = randoms = kept = total = 0
    drawn = []
    for ids, _, found in masked(rule, 512, size):
        chosen = found.labels != IGNORED
        total += chosen.sum()
        is_mask = found.ids[chosen] == MASK
        changed = (found.ids[chosen] != ids[chosen]) & ~is_mask
        masks, randoms = masks + is_mask.sum(), randoms + changed.sum()
        kept += (found.ids[chosen] == ids[chosen]).sum()
        drawn.append(found.ids[chosen][changed])
    assert total > 70 * size
    same = 0.1 / 996  # a random token may be the original one
    assert inside(masks, total, 0.8)
    assert inside(randoms, total, 0.1 - same)
    assert inside(kept, total, 0.1 + same)
    counts = np.bincount(np.concatenate(drawn), minlength=1000)
    assert counts[[0, CLS, SEP, MASK]].sum() == 0
    assert is_uniform(np.delete(counts, [0, CLS, SEP, MASK]))


@few_or_many(750, 6000)
def test_positions_are_chosen_uniformly(size):
    counts = np.zeros(128)
    for _, _, found in masked(Masking(), 128, size):
        counts[found.labels != IGNORED] += 1
    assert counts.sum() > 18 * size
    candidate = ~np.isin(sequence(128)[0], [CLS, SEP])
    assert is_uniform(counts[candidate])


def test_bernoulli_share():
    chosen = total = 0
    for ids, _, found in masked(Masking(choose="bernoulli"), 512, 400):
        chosen += (found.labels != IGNORED).sum()
        total += (~np.isin(ids, [CLS, SEP])).sum()
    assert total > 1e5
    assert inside(chosen, total, 0.15)


@pytest.mark.parametrize("unit", SPAN_UNITS)
@few_or_many(100, 700)
def test_a_unit_is_a_whole_span_or_a_word(unit, size):
    """Each with probability 0.15; the unit entity takes a phrase of the corpus as single words."""
    hits, counts = {}, {}
    cut = mixed = 0
    for i, (ids, starts, found) in enumerate(masked(Masking(unit, "bernoulli"), 512, size)):
        rows = spans_of(ids, starts, i)
        chosen = found.labels != IGNORED
        units = {(b, e): ("phrase", "entity")[k] for b, e, k in rows.tolist() if k in SPAN_UNITS[unit]}
        later = np.zeros(512, bool)  # of a unit, behind its first token
        for begin, end in units:
            later[begin + 1 : end] = True
        special = np.isin(ids, [CLS, SEP])
        begins = np.flatnonzero((starts | special | np.roll(special, 1)) & ~later)
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), 512], strict=True):
            if not special[begin]:
                kind = units.get((begin, end), "word")
                counts[kind] = counts.get(kind, 0) + 1
                hits[kind] = hits.get(kind, 0) + chosen[begin]
                assert chosen[begin:end].all() or not chosen[begin:end].any()
        for begin, end, kind in rows.tolist():
            if kind not in SPAN_UNITS[unit]:
                cut += chosen[begin:end].any() and not chosen[begin:end].all()
        for begin, end in found.spans.tolist():
            masks = found.ids[begin:end] == MASK
            mixed += masks.any() and not masks.all()
    assert counts.keys() == ({"phrase", "entity", "word"} if unit == "phrase" else {"entity", "word"})
    assert sum(counts.values()) > 150 * size
    assert min(counts.values()) > 15 * size
    for kind, count in counts.items():
        assert inside(hits[kind], count, 0.15), kind
    assert (cut > size / 7) == (unit == "entity")
    assert mixed > size / 7  # 80/10/10 token by token


@few_or_many(1000, 10_000)
def test_spans_and_words_of_one_length_are_chosen_alike(size):
    """Five phrases of two words and five words of two tokens, and room for one of them."""
    ids = np.arange(5, 25)
    starts = np.append(np.ones(10, bool), np.arange(10) % 2 == 0)
    spans = np.array([(i, i + 2, i // 2 % 2) for i in range(0, 10, 2)])
    rule, counts = Masking("phrase", share=0.1), np.zeros(20)
    for i in range(size):
        counts += rule(ids, starts, VOCABULARY, Draws(4, 0, i), spans).labels != IGNORED
    assert counts.sum() == 2 * size
    assert (counts[::2] == counts[1::2]).all()
    assert is_uniform(counts[::2])


def test_a_span_longer_than_the_budget_is_passed_over():
    ids, starts = np.full(40, 9), np.ones(40, bool)
    for i in range(50):
        rows = np.array([(3, 10, 0), (12, 18, 1)])  # the budget is six tokens
        found = Masking("phrase")(ids, starts, VOCABULARY, Draws(1, 0, i), rows)
        assert (found.labels != IGNORED).sum() == 6
        assert (found.labels[3:10] == IGNORED).all()


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        (None, "spans: unit = phrase needs the phrases and entities of the sequence"),
        ([[1, 3]], r"spans: expected \(n, 3\) integers, got int64 of the shape \(1, 2\)"),
        ([[1, 3, 2]], "spans: expected first tokens, ends and kinds"),
        ([[3, 3, 0]], "spans: expected first tokens, ends and kinds"),
        ([[1, 4, 0], [3, 4, 0]], "spans: expected first tokens, ends and kinds"),
        ([[6, 9, 0]], r"ascending and not overlapping, within 8 tokens and 2 kinds, got \[\[6, 9, 0\]\]"),
        ([[1, 2, 0]], "spans: one begins or ends within a word"),
        ([[3, 5, 0]], "spans: one begins or ends within a word, or has a special token"),
    ],
)
def test_bad_spans_are_named(spans, match):
    ids = np.array([CLS, 9, 9, 9, SEP, 9, 9, SEP])
    starts = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    rows = None if spans is None else np.array(spans)
    with pytest.raises(ValueError, match=match):
        Masking("phrase")(ids, starts, VOCABULARY, Draws(1, 0, 0), rows)
    fine = np.array([[1, 4, 0], [5, 7, 1]])
    for length in (8, 7):  # the last span ends before the last token, or with it
        Masking("phrase")(ids[:length], starts[:length], VOCABULARY, Draws(1, 0, 0), fine)
    with pytest.raises(ValueError, match="spans: unit = word takes none"):
        Masking("word")(ids, starts, VOCABULARY, Draws(1, 0, 0), fine)


@pytest.mark.parametrize(
    ("values", "digest"),
    [
        ({}, "a949a20885e11053"),
        ({"max_predictions": 7}, "88b9f1dd51214d8b"),
        ({"choose": "bernoulli"}, "10867b80e8e75042"),
        ({"unit": "word"}, "fe15647063698059"),
        ({"unit": "word", "choose": "bernoulli"}, "416adf3b74ea611f"),
        ({"unit": "word", "word_budget": "words"}, "0aa16907b95688dd"),
        ({"unit": "ngram"}, "c1686c68046ee1ac"),
        ({"unit": "span"}, "149a5267977d2b38"),
        ({"unit": "phrase"}, "285bdfea2c5ca33d"),
        ({"unit": "entity", "choose": "bernoulli"}, "4186269073d9a575"),
    ],
)
def test_masks_are_the_ones_of_before(values, digest):
    """A run that resumes after an update sees the same masks."""
    rule, seen = Masking(**values), hashlib.sha256()
    for i in range(50):
        words = np.random.Philox(key=7, counter=i).random_raw(240)
        ids = (words[:120] % 995 + 5).astype(np.int64)
        ids[[0, 60, -1]] = CLS, SEP, SEP
        starts = words[120:] % 2 == 0
        begins = [b for b in np.flatnonzero(starts[:60]) if b > 0][:-2]  # pairs of words
        pairs = np.array([(begins[j], begins[j + 2], j // 4 % 2) for j in range(0, len(begins) - 2, 4)])
        found = rule(ids, starts, VOCABULARY, Draws(1, 2, i), *([pairs] if rule.unit in SPAN_UNITS else []))
        for array in (found.ids, found.labels, found.spans):
            seen.update(array.astype("<i8").tobytes())
    assert seen.hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("unit", "shares"),
    [
        ("ngram", np.array([6, 3, 2]) / 11),  # 1, 1/2, 1/3
        ("span", 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)),
    ],
)
def test_lengths_in_words(unit, shares):
    """Of the first unit of each sequence, which nothing makes shorter; spans have 3.8 words on average."""
    sizes = Masking(unit)._sizes(Draws(3, 0, 0), 120_000)
    for words, share in enumerate(shares, 1):
        assert inside((sizes == words).sum(), len(sizes), share), words
    assert sizes.max() == len(shares)
    if unit == "span":
        assert round(float(np.dot(shares, np.arange(1, 11))), 1) == 3.8
    # each word one token: the first unit is as long as it wants, if the budget and the sequence allow
    ids, starts = np.full(2000, 9), np.ones(2000, bool)
    found = [Masking(unit)(ids, starts, VOCABULARY, Draws(5, 0, i)) for i in range(20)]
    lengths = np.concatenate([f.spans[:, 1] - f.spans[:, 0] for f in found])
    assert lengths.max() == len(shares)
    assert abs(lengths.mean() - np.dot(shares, np.arange(1, len(shares) + 1))) < 0.35
    assert all((f.labels != IGNORED).sum() == 300 for f in found)


def test_a_spans_tokens_share_their_fate():
    for rule in (Masking("span"), Masking("word", word_budget="words")):
        kinds = set()
        for ids, _, found in masked(rule, 200, 60):
            for begin, end in found.spans:
                masks = found.ids[begin:end] == MASK
                assert masks.all() or not masks.any()
                kinds.add((bool(masks.all()), bool((found.ids[begin:end] == ids[begin:end]).all())))
        assert kinds == {(True, False), (False, True), (False, False)}
    mixed = [
        f.ids[b:e] == MASK for _, _, f in masked(Masking("ngram"), 200, 60) for b, e in f.spans if e - b > 1
    ]
    assert any(m.any() and not m.all() for m in mixed)  # token by token elsewhere


def test_words_of_the_word_budget():
    ids, starts = np.full(200, 9), np.arange(200) % 4 == 0
    found = Masking("word", word_budget="words")(ids, starts, VOCABULARY, Draws(1, 0, 0))
    assert len(found.spans) == round(0.15 * 50)
    assert (found.spans[:, 1] - found.spans[:, 0] == 4).all()
    found = Masking("word")(ids, starts, VOCABULARY, Draws(1, 0, 0))
    assert len(found.spans) == 30 // 4  # 30 tokens


def test_random_specials_are_drawn_if_asked():
    rule = Masking(share=1.0, mask_share=0.0, random_share=1.0, random_specials=True)
    ids = np.full(20_000, 9)
    found = rule(ids, np.ones(len(ids), bool), VOCABULARY, Draws(1, 0, 0))
    assert (np.bincount(found.ids, minlength=1000)[[0, CLS, SEP, MASK]] > 0).all()
    plain = Masking(share=1.0, mask_share=0.0, random_share=1.0)(
        ids, np.ones(len(ids), bool), VOCABULARY, Draws(1, 0, 0)
    )
    assert not np.isin(plain.ids, [0, CLS, SEP, MASK]).any()


def test_a_special_token_ends_a_word():
    ids, starts = np.array([7, 9, SEP, 8, 8, SEP]), np.zeros(6, bool)  # no word starts anywhere
    found = Masking("word", share=1.0)(ids, starts, VOCABULARY, Draws(1, 0, 0))
    assert found.spans.tolist() == [[0, 2], [3, 5]]


@pytest.mark.parametrize("unit", UNITS)
def test_a_mask_depends_on_its_key_alone(unit):
    ids, starts = sequence(100)
    rule = Masking(unit)
    more = spans_for(rule, ids, starts)
    first = rule(ids, starts, VOCABULARY, Draws(1, 2, 3), **more)
    list(masked(rule, 50, 3))
    again = rule(ids, starts, VOCABULARY, Draws(1, 2, 3), **more)
    assert np.array_equal(first.ids, again.ids)
    assert np.array_equal(first.labels, again.labels)
    other = rule(ids, starts, VOCABULARY, Draws(1, 3, 3), **more)  # another epoch
    assert not np.array_equal(first.labels, other.labels)


def test_nothing_to_choose():
    for rule in RULES:
        for ids in (np.array([CLS, SEP]), np.empty(0, np.int64)):
            starts = np.ones(len(ids), bool)
            more = {"spans": np.empty((0, 3), np.int64)} if rule.unit in SPAN_UNITS else {}
            found = rule(ids, starts, VOCABULARY, Draws(1, 0, 0), **more)
            assert np.array_equal(found.ids, ids)
            assert found.spans.shape == (0, 2)
            assert (found.labels == IGNORED).all()
    whole = Masking("word")(
        np.array([CLS, 7, 8, 9, SEP]), np.array([1, 1, 0, 0, 1], bool), VOCABULARY, Draws(1, 0, 0)
    )
    assert (whole.labels == IGNORED).all()  # the only word is longer than the budget of one token


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"unit": "letter"}, "unit: expected one of token, word, ngram, span, phrase, entity, got 'letter'"),
        ({"share": 0}, r"share: expected a number in \(0, 1\], got 0"),
        ({"mask_share": 0.95}, r"random_share: 0\.1 and mask_share 0\.95 are more than 1"),
        ({"max_predictions": 0}, "max_predictions: expected an integer >= 1, got 0"),
        ({"unit": "span", "choose": "bernoulli"}, "choose: bernoulli is for the units token, word, phrase"),
        ({"choose": "bernoulli", "max_predictions": 3}, "max_predictions: expected None with choose ="),
        ({"word_budget": "words"}, "word_budget: words needs unit = word"),
    ],
)
def test_bad_rules_are_named(values, match):
    with pytest.raises(ValueError, match=match):
        Masking(**values)


def test_a_vocabulary_of_special_tokens_alone():
    for size, mask, special in ((3, 2, (0, 1)), (5, 9, ()), (5, 1, (-1,))):
        with pytest.raises(ValueError, match=f"special: expected ids of a vocabulary of {size}"):
            Vocabulary(size, mask, special)
