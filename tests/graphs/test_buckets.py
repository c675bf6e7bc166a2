"""Which graph a batch takes, and what is recorded for it."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.graphs import model as graphs
from fastbert.graphs.buckets import sequence_rooms, token_buckets
from fastbert.runtime import dispatch
from tests.support.graphed_models import Graphed, lengths_batch, shared


def test_token_buckets():
    assert token_buckets(1) == (1,)
    assert token_buckets(40) == (32, 40)
    assert token_buckets(128) == (32, 40, 48, 56, 64, 80, 96, 112, 128)
    for last in (33, 500, 512, 16384):
        sizes = token_buckets(last)
        assert sizes[-1] == last
        assert list(sizes) == sorted(set(sizes))
        for a, b in itertools.pairwise(sizes):
            assert b <= a * (1.25 if a < 2048 else 1.125 if a < 8192 else 1.0625)
    assert len(sizes) == 24 + 2 * 8 + 16 + 1


def test_sequence_rooms():
    sizes = (10, 40, 64, 72, 800, 1000)
    assert sequence_rooms(sizes, 60) == (8, 8, 8, 9, 60, 60)
    assert sequence_rooms(sizes, 512) == (8, 8, 8, 9, 100, 512)  # the last one turns none away
    assert sequence_rooms(sizes, 3) == (3,) * 6
    assert sequence_rooms((7,), 60) == (60,)


@pytest.mark.parametrize(
    ("lengths", "tokens", "room"),
    [
        ([1], 32, 8),
        ([32], 32, 8),
        ([33], 40, 8),
        ([1] * 8, 32, 8),
        ([1] * 9, 80, 10),  # the smallest that holds 9 sequences
        ([16, *[0] * 9], 80, 10),
        ([1] * 60, 512, 60),  # max_batch
        ([65, 1, 1], 80, 10),
        ([70] * 3, 224, 28),
        ([64] * 8, 512, 60),
    ],
)
@torch.no_grad()
def test_the_bucket_of_a_batch(lengths, tokens, room):
    g = Graphed(shared(), max_batch=60)
    g.check(**lengths_batch(lengths))
    assert [b.tokens for b in g.graphed.graphs] == [tokens]
    assert dict(zip(g.graphed.buckets, g.graphed.rooms, strict=True))[tokens] == room


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
@torch.no_grad()
def test_what_is_recorded(name, monkeypatch):
    """Sequences may be as long as the bucket's tokens and the model's positions allow, not longer."""
    model, seen = shared(name), []
    encode = type(model).encode_inputs

    def spy(self, inputs, *args):
        seen.append((inputs.packing.batch, inputs.packing.seqlen, inputs.packing.max_seqlen))
        return encode(self, inputs, *args)

    monkeypatch.setattr(type(model), "encode_inputs", spy)
    g, longest = Graphed(model), model.config.max_tokens
    assert 64 < longest < 80  # roberta and mpnet: fewer than the positions of the table
    for length, expected in ((5, (8, 32, 32)), (48, (8, 48, 48)), (longest, (10, longest, longest))):
        del seen[:]
        g.graphed(torch.full((1, length), 9))
        assert set(seen) == {expected}


@pytest.mark.parametrize("name", ["bert", "mpnet"])
@torch.no_grad()
def test_one_graph_for_any_mix_of_lengths(name):
    """For all calls in one bucket of tokens, from one sequence to as many as fit."""
    g = Graphed(shared(name))
    for lengths in (
        [64],
        [1] * 8,
        [57],
        [29, 28],
        [40, 20],
        [50, 0, 12],
        [12, 9, 8, 8, 8, 8, 8],
        [62, 1],
        [8] * 8,
    ):
        for seqlen in (None, 64):
            g.check(**lengths_batch(lengths if sum(lengths) > 56 else [50, *lengths[1:]], seqlen))
    assert g.recorded == 1
    assert g.graphed.replays == 18
    assert [b.tokens for b in g.graphed.graphs] == [64]


@torch.no_grad()
def test_no_more_graphs_than_buckets():
    """For any mix of lengths. By default the graphs of all default buckets are kept."""
    g, random = Graphed(shared()), torch.Generator().manual_seed(0)
    for seed in range(60):
        count = int(torch.randint(1, 12, (), generator=random))
        lengths = torch.randint(1, 40, (count,), generator=random).tolist()
        g.graphed(**lengths_batch(lengths, 64, seed), first_token_only=True)
    held = [b.tokens for b in g.graphed.graphs]
    assert len(held) == len(set(held)) == g.recorded <= len(g.graphed.buckets)
    assert g.graphed.replays == 60
    default = graphs.graph(shared())
    assert len(default.buckets) <= default.max_graphs


@torch.no_grad()
def test_what_makes_another_graph():
    g = Graphed(shared())
    inputs = lengths_batch([40, 30])
    calls = [
        lambda: g.graphed(**inputs),
        lambda: g.graphed(**inputs, first_token_only=True),
        lambda: g.graphed(**inputs, packed=True),  # no pooler
        lambda: g.graphed(**lengths_batch([40, 60])),
        lambda: g.graphed(**lengths_batch([6] * 14)),  # 84 tokens, and more sequences than their bucket holds
        lambda: g.graphed(**lengths_batch([6] * 15)),
    ]
    expected = [(1, 80), (2, 80), (3, 80), (4, 112), (4, 112), (5, 128)]
    for (count, tokens), call in zip(expected, calls, strict=True):
        for _ in range(2):
            call()
            assert g.recorded == count
            assert g.graphed.graphs[-1].tokens == tokens
    with dispatch.use_backend("reference"):  # a recording of another backend must not be replayed
        g.check(**inputs)
    assert g.recorded == count + 1
    assert not g.graphed.fallbacks


@torch.no_grad()
def test_the_graph_used_longest_ago_gives_way():
    g = Graphed(shared(), max_graphs=2)
    a, b, c = ({"input_ids": torch.full((1, n), 9)} for n in (30, 40, 60))
    for inputs, recorded, kept in (
        (a, 1, [32]),
        (b, 2, [32, 40]),
        (a, 2, [40, 32]),
        (c, 3, [32, 64]),
        (a, 3, [64, 32]),
        (b, 4, [32, 40]),
    ):
        g.check(**inputs)
        assert g.recorded == recorded
        assert [x.tokens for x in g.graphed.graphs] == kept


def test_own_buckets():
    g = Graphed(shared(), buckets=[10, 100])
    g.check(**lengths_batch([7]))
    g.check(**lengths_batch([7, 4]))
    assert [b.tokens for b in g.graphed.graphs] == [10, 100]
    g.check(**lengths_batch([60, 41]), reason="there are more than 100 tokens")
