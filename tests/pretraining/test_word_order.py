"""Masked words, shuffled trigrams and the order of segments: labels, shares and losses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers

from fastbert.pretraining.formats import DocSentences, Example, SegmentPairs
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives.masked import Objective
from fastbert.pretraining.objectives.word_order import SIZE, WordOrder
from fastbert.training.draws import Draws
from tests.support.draw_shares import few_or_many, inside, is_uniform
from tests.support.objectives import (
    CLS,
    MASK,
    SEP,
    assert_exact,
    assert_work,
    batch_of,
    built,
    gradients,
    logits_of,
    numbered,
    pieces,
    stock,
    tensors,
)


def objective(share: float = 0.05, length: int = 60, masking: Masking | None = None) -> WordOrder:
    pairs = SegmentPairs(numbered(), length, 0, relation="three")
    return WordOrder(pairs, masking or Masking(), shuffled_share=share)


def runs_of(flags: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of the runs of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.mark.parametrize("masking", [Masking(), Masking("ngram", share=0.3)], ids=["token", "ngram"])
@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_labels_are_the_text(share, masking):
    """The text is numbered, so the truth is in the ids."""
    ours = objective(share, masking=masking)
    plan, shuffled, kept = ours.plan(0), 0, 0
    plain = Objective(ours.format, masking)
    for index in range(len(plan)):
        found = ours.example(plan, 0, index)
        seen, mlm, order = found.masked.ids, found.masked.labels, found.more
        assert ((mlm == IGNORED) | (order == IGNORED)).all()  # a token has one label at most
        text = np.where(mlm != IGNORED, mlm, np.where(order != IGNORED, order, seen))
        assert np.array_equal(text, ours.format.build(plan, index).ids)
        inner = (text[1:] > SEP) & (text[:-1] > SEP)
        assert (np.diff(text)[inner] == 1).all()
        assert not np.isin(text[order != IGNORED], [CLS, SEP]).any()
        # masks are those of the plain objective; elsewhere nothing has changed
        masked = plain.example(plan, 0, index).masked
        assert np.array_equal(masked.labels, mlm)
        assert np.array_equal(masked.ids[order == IGNORED], seen[order == IGNORED])
        for first, end in runs_of(order != IGNORED):
            assert (end - first) % SIZE == 0  # whole trigrams; they may touch, and do not overlap
            for at in range(first, end, SIZE):
                here = slice(at, at + SIZE)
                assert sorted(seen[here].tolist()) == text[here].tolist()
                assert MASK not in seen[here]
                shuffled += 1
                kept += bool((seen[here] == text[here]).all())
    assert shuffled > 30
    assert 0 < kept < shuffled / 2


def test_a_twentieth_of_the_trigrams():
    ours = objective()
    rng = np.random.default_rng(0)
    for length, expected in ((512, None), (128, None), (23, 1), (6, 1), (5, 1)):
        ids = rng.integers(200, 900, length)
        ids[[0, -1]] = CLS, SEP
        example = Example(ids, np.ones(length, bool), np.zeros(length, np.int64), 0)
        for number in range(20):
            found = ours.mask(example, Draws(1, 0, number))
            free = (found.masked.labels == IGNORED) & (ids > SEP)
            windows = int((free[2:] & free[1:-1] & free[:-2]).sum())
            chosen = int((found.more != IGNORED).sum())
            wanted = (expected or round(windows * 0.05)) if windows else 0
            assert chosen == SIZE * wanted
    assert (objective(0.0).mask(example, Draws(1, 0, 0)).more == IGNORED).all()


@few_or_many(125, 1000)
def test_orders_and_places_have_equal_chance(size):
    ids = np.arange(500, 1012)
    ids[[0, -1]] = CLS, SEP
    example = Example(ids, np.ones(512, bool), np.zeros(512, np.int64), 0)
    ours = objective(1.0, masking=Masking(share=0.01))
    orders = dict.fromkeys(itertools.permutations(range(SIZE)), 0)
    for number in range(size):
        found = ours.mask(example, Draws(3, 0, number))
        places = np.flatnonzero(found.more != IGNORED)
        # from the first token on, three by three
        for triple in places.reshape(-1, SIZE):
            orders[tuple((found.masked.ids[triple] - found.more[triple[0]]).tolist())] += 1
    total = sum(orders.values())
    assert total > 100 * size
    for order, count in orders.items():
        assert inside(count, total, 1 / 6), order
    # one trigram of twenty: each of the places where it can begin
    short = Example(ids[:22].copy(), np.ones(22, bool), np.zeros(22, np.int64), 0)
    ours = objective(0.05, masking=Masking(choose="bernoulli", share=1e-9))
    begins = np.zeros(22)
    for number in range(8 * size):
        begins[np.flatnonzero(ours.mask(short, Draws(5, 0, number)).more != IGNORED)[0]] += 1
    assert begins[0] == begins[20:].sum() == 0
    assert begins[19] == 8 * size - begins[:19].sum()
    assert is_uniform(begins[1:20])


def test_pairs_have_three_classes():
    ours, corpus = objective(), numbered()
    ends = corpus.sentence_starts[corpus.document_starts[1:]]
    found = set()
    plan = ours.plan(0)
    for index in range(len(plan)):
        example = ours.example(plan, 0, index)
        ids = ours.format.build(plan, index).ids
        a, b = (part[part > SEP] for part in (ids[example.token_types == 0], ids[example.token_types == 1]))
        first, second = (np.searchsorted(ends, part - 100, "right") for part in (a, b))
        kind = 2 if first[0] != second[0] else int(a[0] > b[0])
        assert example.label == kind
        found.add(kind)
    assert found == {0, 1, 2}
    batch = batch_of(ours, 8)
    assert batch.counts == {
        "mlm": (batch.inputs["labels"] != IGNORED).sum(),
        "order": (batch.inputs["order_labels"] != IGNORED).sum(),
        "sentence": 8,
    }


def expected_losses(hf, losses, batch) -> dict[str, torch.Tensor]:
    """By transformers' encoder and head, sequence by sequence."""
    inputs = tensors(batch)
    cross_entropy = torch.nn.functional.cross_entropy
    sums = dict.fromkeys(("mlm", "order", "sentence"), 0.0)
    for number, rows in enumerate(pieces(batch)):
        output = hf.bert(inputs["input_ids"][rows][None], token_type_ids=inputs["token_type_ids"][rows][None])
        logits = hf.cls.predictions(output.last_hidden_state)[0]
        for name, key in (("mlm", "labels"), ("order", "order_labels")):
            sums[name] = sums[name] + cross_entropy(logits, inputs[key][rows], reduction="sum")
        classes = losses.sentence_out(output.pooler_output)
        label = inputs["sentence_labels"][number : number + 1]
        sums["sentence"] = sums["sentence"] + cross_entropy(classes, label, reduction="sum")
    return {name: value / batch.counts[name] for name, value in sums.items()}


def test_losses_and_gradients_are_transformers():
    ours = objective()
    batch = batch_of(ours, 5)
    exact, found = {}, {}
    for dtype in (torch.float64, torch.float32):
        losses = built(ours, torch.float32).to(dtype)
        assert not losses.weights  # equal ones
        hf = stock(losses, transformers.BertForPreTraining)
        expected = expected_losses(hf, losses, batch)
        losses.zero_grad()
        sum(expected.values()).backward()
        head = gradients(losses.sentence_out)
        losses.zero_grad()
        means, correct = losses(tensors(batch), True)
        assert set(means) == set(correct) == {"mlm", "order", "sentence"}
        sum(means.values()).backward()
        exact[dtype] = (*(expected[n].detach() for n in sorted(means)), gradients(hf), head)
        found[dtype] = (
            *(means[n].detach() for n in sorted(means)),
            gradients(losses.model),
            gradients(losses.sentence_out),
        )
        logits, inputs = logits_of(losses, tensors(batch)), tensors(batch)
        for name, key in (("mlm", "labels"), ("order", "order_labels")):
            assert correct[name] == (logits.argmax(-1) == inputs[key]).sum()
    assert_exact(found, exact)


def test_nothing_to_shuffle():
    """Sequences in which no trigram is left have no label, and a loss of 0 with gradients of 0."""
    ours = WordOrder(DocSentences(numbered(), 4, 0))
    batch = batch_of(ours, 3)
    assert batch.counts == {"mlm": 3, "order": 0}
    losses = built(ours)
    means, correct = losses(tensors(batch), True)
    assert means["order"].item() == correct["order"].item() == 0
    means["order"].backward()
    assert not gradients(losses).any()
    means["mlm"].item()


def test_the_share_is_in_the_hash_and_is_checked():
    assert objective(0.05).hash == objective(0.05).hash != objective(0.1).hash
    for bad in (-0.1, 1.5, True):
        with pytest.raises(ValueError, match=r"shuffled_share: expected a number in \[0, 1\], got"):
            objective(bad)


def test_work_has_both_predictions():
    ours, batch = objective(), batch_of(objective(), 3)
    n = batch.lengths.astype(int)
    assert_work(ours, batch, "mlm order", n.sum(), (n**2).sum())
