"""Permutation language modelling: targets, orders, what a row sees, and transformers' layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fastbert.pretraining.formats import DocSentences, Example, FullSentences, SegmentPairs
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives.permutation import Permutation, Rows
from fastbert.training.draws import Draws
from tests.support.draw_shares import few_or_many, inside, is_uniform
from tests.support.objectives import (
    CLS,
    MASK,
    SEP,
    assert_as_stock,
    assert_work,
    batch_of,
    built,
    logits_of,
    numbered,
    pieces,
    tensors,
    tiny,
)


def objective(form=FullSentences, length: int = 50, **values) -> Permutation:
    return Permutation(form(numbered(), length, 0), **values)


def sees(rows: Rows) -> np.ndarray:
    return rows.ranks[None, :] <= rows.limits[:, None]


# --- examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [DocSentences, FullSentences, SegmentPairs])
def test_rows_of_the_numbered_text(form):
    ours = objective(form)
    plan, total = ours.plan(0), 0
    for index in range(len(plan)):
        found, original = ours.example(plan, 0, index), ours.format.build(plan, index)
        n, rows = len(original.ids), found.more
        k = len(found.masked.ids) - n
        content, query = found.masked.ids[:n], found.masked.ids[n:]
        assert np.array_equal(content, original.ids)
        assert (query == MASK).all()
        assert (found.masked.labels[:n] == IGNORED).all()
        assert np.array_equal(rows.places[:n], np.arange(n))
        assert (np.diff(rows.places[n:]) > 0).all()
        # the label of a query is the number at its place
        assert np.array_equal(found.masked.labels[n:], original.ids[rows.places[n:]])
        assert not np.isin(found.masked.labels[n:], [CLS, SEP]).any()
        assert np.array_equal(found.token_types, original.token_types[rows.places])
        assert found.label == original.label
        candidates = int((original.ids > SEP).sum())
        assert k == max(1, (2 * candidates + 6) // 12)
        total += k
    assert total > 100


def test_a_sixth_of_the_tokens_in_spans_of_at_most_five():
    ours = objective()
    for count in (*range(1, 80), 510):
        for number in range(5):
            spans = ours.spans(count, Draws(1, count, number))
            sizes = [end - begin for begin, end in spans]
            assert sum(sizes) == max(1, (2 * count + 6) // 12)
            assert 1 <= min(sizes) <= max(sizes) <= 5
            assert spans[0][0] >= 0
            assert spans[-1][1] <= count
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert ours.spans(0, Draws(1, 0, 0)).shape == (0, 2)
    assert sum(b - a for a, b in objective(k=3).spans(510, Draws(1, 0, 0))) == 170
    assert sum(b - a for a, b in objective(k=1).spans(9, Draws(1, 0, 0))) == 9
    assert max(b - a for a, b in objective(max_span=2).spans(510, Draws(1, 0, 0))) == 2


@few_or_many(400, 3800)
def test_lengths_places_and_orders_have_equal_chance(size):
    spans = objective().spans(500 * size, Draws(2, 0, 0))[:-1]
    assert len(spans) > 26 * size
    sizes = spans[:, 1] - spans[:, 0]
    offsets = spans[:, 0] - 6 * (np.cumsum(sizes) - sizes)
    for length in range(1, 6):
        assert inside((sizes == length).sum(), len(sizes), 0.2), length
        counts = np.bincount(offsets[sizes == length], minlength=5 * length + 1)
        assert len(counts) == 5 * length + 1
        assert is_uniform(counts)
    ids = np.full(512, 900)
    ids[[0, -1]] = CLS, SEP
    example = Example(ids, np.ones(512, bool), np.zeros(512, np.int64), IGNORED)
    orders: dict[tuple[int, ...], int] = {}
    ours = objective()
    for number in range(size):
        ranks = ours.mask(example, Draws(3, 0, number)).more.limits[512:]
        assert len(ranks) == 85
        assert sorted(ranks.tolist()) == list(range(85))
        for order in np.argsort(ranks[:84].reshape(-1, 3), 1).tolist():
            orders[tuple(order)] = orders.get(tuple(order), 0) + 1
    total = sum(orders.values())
    assert total > 27 * size
    assert len(orders) == 6
    for order, count in orders.items():
        assert inside(count, total, 1 / 6), order


# --- what a row sees ----------------------------------------------------------------------------------------


def test_sees_by_definition():
    rows = Rows.of(7, np.array([1, 3, 4]), np.array([2, 0, 1]))
    rank = {1: 2, 3: 0, 4: 1}
    found = sees(rows)
    assert found.shape == (10, 10)
    for i, j in itertools.product(range(10), range(10)):
        target = int(rows.places[i]) if i >= 7 else i if i in rank else None
        if j >= 7:
            expected = False
        elif j not in rank:
            expected = True
        elif target is None:
            expected = False
        else:
            expected = rank[j] < rank[target] or (i < 7 and rank[j] == rank[target])
        assert found[i, j] == expected, (i, j)
    assert found.sum() == 7**2  # as many pairs as attention in both directions has


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", [FullSentences, SegmentPairs])
def test_no_leak_from_a_target_to_what_predicts_it(form, dtype):
    ours = objective(form)
    batch, losses = batch_of(ours, 3), built(ours, dtype)
    inputs = tensors(batch)
    before = logits_of(losses, inputs)
    for number, rows in enumerate(pieces(batch)):
        limits = inputs["limits"][number, : rows.stop - rows.start]
        ranks = inputs["ranks"][number, : rows.stop - rows.start]
        is_query = inputs["labels"][rows] != IGNORED
        n = int((~is_query).sum())
        targets = torch.nonzero(ranks[:n] > 0)[:, 0]
        assert len(targets) == len(limits) - n > 2
        for at in [0, *targets.tolist(), n]:  # [CLS], each target, a query row
            changed = inputs["input_ids"].clone()
            changed[rows.start + at] = 50
            same = (logits_of(losses, {**inputs, "input_ids": changed}) == before).all(1)
            assert same[: rows.start].all()
            assert same[rows.stop :].all()
            expected = torch.ones(rows.stop - rows.start, dtype=torch.bool)
            if at == 0:
                expected[:] = False
            elif at == n:
                expected[n] = False
            else:  # itself, later targets and their queries change; no context, no earlier target
                expected[limits >= ranks[at]] = False
                assert expected[n:][inputs["labels"][rows][n:] == inputs["input_ids"][rows][at]].all()
            assert torch.equal(same[rows], expected), at


# --- losses -------------------------------------------------------------------------------------------------


def stock_logits(hf, ids, types, targets, order) -> torch.Tensor:
    """(k, vocab_size): a pass of n tokens for each target, in which [MASK] has the target's place."""
    n, found = len(ids), []
    rank = torch.full((n,), -1)
    rank[targets] = order
    for target, mine in zip(targets.tolist(), order.tolist(), strict=True):
        seen = ids.clone()
        seen[target] = MASK
        allowed = rank[None, :] <= rank[:, None]  # targets up to itself, and the context
        allowed[target] = rank < mine
        allowed[:, target] = False  # nothing sees [MASK]
        mask = torch.zeros(1, 1, n, n, dtype=hf.dtype).masked_fill(~allowed, torch.finfo(hf.dtype).min)
        found.append(hf(seen[None], attention_mask=mask, token_type_ids=types[None]).logits[0, target])
    return torch.stack(found)


def stock_loss(hf, ours, count: int) -> torch.Tensor:
    """The mean over all targets of the first examples of epoch 0."""
    plan, logits, labels = ours.plan(0), [], []
    for index in range(count):
        example = ours.format.build(plan, index)
        rows = ours.example(plan, 0, index).more
        n = len(example.ids)
        targets, order = torch.from_numpy(rows.places[n:]), torch.from_numpy(rows.limits[n:])
        ids, types = torch.from_numpy(example.ids), torch.from_numpy(example.token_types)
        logits.append(stock_logits(hf, ids, types, targets, order))
        labels.append(ids[targets])
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))


def test_losses_and_gradients_are_those_of_a_pass_per_target():
    ours = objective()
    assert_as_stock(ours, batch_of(ours, 3), "permutation", lambda hf: stock_loss(hf, ours, 3))


def test_the_class_of_a_pair_is_read_from_the_context():
    ours = objective(SegmentPairs)
    batch, losses = batch_of(ours, 3), built(ours)
    assert batch.counts["sentence"] == 3
    inputs = tensors(batch)
    before = losses(inputs)[0]["sentence"]
    ranks = inputs["ranks"][0]
    target, context = torch.nonzero((ranks > 0) & (ranks < 1 << 20))[0], torch.nonzero(ranks == 0)[1]
    for at, same in ((target, True), (context, False)):
        changed = inputs["input_ids"].clone()
        changed[at] = 50
        assert (losses({**inputs, "input_ids": changed})[0]["sentence"] == before) == same


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_content_without_targets_is_the_plain_model(family):
    """Query rows change nothing else, and positions are the family's own."""
    ours = objective(DocSentences)
    losses = built(ours, family=family, type_vocab_size=2 if family != "roberta" else 1)
    batch = batch_of(ours, 1)
    inputs = tensors(batch)
    n = int(batch.lengths[0])
    real = slice(0, n)
    with torch.no_grad():
        hidden = losses.encode(inputs).hidden[real]
        mask = (inputs["ranks"][:, None, None, real] <= inputs["limits"][:, None, real, None]).double()
        mask = torch.zeros_like(mask).masked_fill(mask == 0, float("-inf"))
        plain = losses.model.base_model(inputs["input_ids"][None, real], attention_mask=mask)
    torch.testing.assert_close(hidden, plain.last_hidden_state[0], rtol=1e-10, atol=1e-12)


def test_work_counts_all_rows_and_the_pairs_that_see_each_other():
    ours, batch = objective(), batch_of(objective(), 3)
    plan = ours.plan(0)
    all_rows = [ours.example(plan, 0, i).more for i in range(3)]
    rows, pairs = sum(len(r.places) for r in all_rows), sum(int(sees(r).sum()) for r in all_rows)
    assert rows == len(batch.inputs["input_ids"]) > batch.lengths.sum() == plan.lengths[:3].sum()
    assert_work(ours, batch, "permutation", rows, pairs)


def test_bad_arguments_are_named():
    for values, match in (
        ({"k": 0}, "k: expected an integer >= 1, got 0"),
        ({"max_span": 2.5}, "max_span: expected an integer >= 1, got 2.5"),
        ({"masking": Masking("word")}, "masking: k and max_span choose the targets; expected the default"),
    ):
        with pytest.raises(ValueError, match=match):
            objective(**values)
    ours = objective()
    with pytest.raises(ValueError, match="model: mpnet has relative positions"):
        ours.losses(ours.model(tiny(numbered().vocab_size, "mpnet")))
    hashes = {objective(**v).hash for v in ({}, {"k": 5}, {"max_span": 4}, {"seed": 1})}
    assert len(hashes) == 4
