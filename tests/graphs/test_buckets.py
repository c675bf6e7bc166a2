"""Which graph a batch takes, and what is recorded for it."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.graphs import model as graphs
from fastbert.graphs.buckets import long_room, sequence_rooms, token_buckets
from fastbert.runtime import dispatch
from tests.support.graphed_models import Graphed, lengths_batch, shared


def test_sizes():
    assert token_buckets(1) == (1,)
    assert token_buckets(128) == (32, 40, 48, 56, 64, 80, 96, 112, 128)
    for last in (33, 500, 512, 16384):
        sizes = token_buckets(last)
        assert sizes[-1] == last
        assert list(sizes) == sorted(set(sizes))
        for a, b in itertools.pairwise(sizes):
            assert b <= a * (1.25 if a < 2048 else 1.125 if a < 8192 else 1.0625)
    assert len(sizes) == 24 + 2 * 8 + 16 + 1
    sizes = (10, 40, 64, 72, 800, 1000)
    assert sequence_rooms(sizes, 60) == (8, 8, 8, 9, 60, 60)
    assert sequence_rooms(sizes, 512) == (8, 8, 8, 9, 100, 512)  # the last one turns none away
    assert sequence_rooms((7,), 3) == (3,)
    # one per 128 tokens; where a bucket holds fewer anyway, it has one kind of graph
    assert [long_room(size, 512) for size in (32, 1024, 1152, 16384, 131072)] == [8, 8, 9, 128, 512]
    assert long_room(16384, 60) == 60
    assert long_room(32, 3) == 3


@pytest.mark.parametrize(
    ("lengths", "tokens", "room", "sequences"),
    [
        ([1], 32, 8, 8),
        ([32], 32, 8, 8),
        ([33], 40, 8, 8),
        ([1] * 8, 32, 8, 8),
        ([1] * 9, 80, 10, 10),  # the smallest that holds 9 sequences
        ([16, *[0] * 9], 80, 10, 10),
        ([1] * 60, 512, 60, 60),  # max_batch
        ([65, 1, 1], 80, 10, 8),
        ([70] * 3, 224, 28, 8),
        ([64] * 8, 512, 60, 8),
        ([63] * 9, 640, 60, 60),
    ],
)
@torch.no_grad()
def test_the_sizes_for_a_batch(lengths, tokens, room, sequences):
    g = Graphed(shared(), max_batch=60, max_tokens=1024)
    g.check(**lengths_batch(lengths))
    assert [(b.tokens, b.sequences) for b in g.graphed.graphs] == [(tokens, sequences)]
    assert dict(zip(g.graphed.buckets, g.graphed.rooms, strict=True))[tokens] == room


@torch.no_grad()
def test_a_bucket_has_a_graph_for_long_and_one_for_short_sequences():
    """By turns, each after the other has written other numbers of sequences."""
    g = Graphed(shared(), buckets=[192, 2048])
    for _ in range(2):
        for lengths in ([63] * 3, [15] * 12, [60] * 3, [17] * 11, [70] * 16, [65] * 17):
            g.check(**lengths_batch(lengths))
    sizes = sorted((b.tokens, b.sequences) for b in g.graphed.graphs)
    assert sizes == [(192, 8), (192, 24), (2048, 16), (2048, 64)]
    assert g.graphed.replays == 12


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
@torch.no_grad()
def test_what_is_recorded(name, noted):
    """Sequences may be as long as the bucket's tokens and the model's positions allow, not longer."""

    def sizes(self, inputs, *args):
        return inputs.packing.batch, inputs.packing.seqlen, inputs.packing.max_seqlen

    model = shared(name)
    seen = noted(type(model), "encode_inputs", sizes)
    g, longest = Graphed(model), model.config.max_tokens
    assert 64 < longest < 80  # roberta and mpnet: fewer than the positions of the table
    for length, expected in ((5, (8, 32, 32)), (48, (8, 48, 48)), (longest, (8, longest, longest))):
        seen.clear()
        g.graphed(torch.full((1, length), 9))
        assert set(seen) == {expected}


@pytest.mark.parametrize("name", ["bert", "mpnet"])
@torch.no_grad()
def test_one_graph_for_any_mix_of_lengths(name):
    """For all calls in one bucket of tokens, from one sequence to as many as fit."""
    g = Graphed(shared(name))
    for lengths in ([64], [57], [29, 28], [50, 0, 12], [12, 9, 8, 8, 8, 8, 8], [62, 1], [8] * 8):
        for seqlen in (None, 64):
            g.check(**lengths_batch(lengths, seqlen))
    assert g.recorded == 1
    assert g.graphed.replays == 14
    assert [b.tokens for b in g.graphed.graphs] == [64]


@torch.no_grad()
def test_no_more_graphs_than_buckets():
    """For any mix of lengths, though buckets hold data of earlier calls. By default all graphs are kept."""
    g, random = Graphed(shared()), torch.Generator().manual_seed(0)
    for seed in range(60):
        count = int(torch.randint(1, 12, (), generator=random))
        lengths = torch.randint(0, 65, (count,), generator=random).tolist()
        if sum(lengths) > 512 or sum(lengths) == 0:
            lengths = [64] * 8  # the bucket filled to its last row
        g.check(**lengths_batch(lengths, 64, seed), first_token_only=True)
    held = [(b.tokens, b.sequences) for b in g.graphed.graphs]
    assert len(held) == len(set(held)) == g.recorded
    assert len({tokens for tokens, _ in held}) <= len(g.graphed.buckets)
    assert g.graphed.replays == 60
    default = graphs.graph(shared())
    rooms = zip(default.buckets, default.rooms, strict=True)
    of_bucket = [len({room, long_room(tokens, room)}) for tokens, room in rooms]
    assert set(of_bucket) == {1, 2}
    assert sum(of_bucket) <= default.max_graphs < 1.25 * sum(of_bucket)


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
    expected = [(1, 80), (2, 80), (3, 80), (4, 112), (5, 112), (6, 128)]
    for (count, tokens), call in zip(expected, calls, strict=True):
        for _ in range(2):
            call()
            assert g.recorded == count
            assert g.graphed.graphs[-1].tokens == tokens
    with dispatch.use_backend("reference"):  # a recording of another backend must not be replayed
        g.check(**inputs)
    assert g.recorded == count + 1
    assert not g.graphed.fallbacks
