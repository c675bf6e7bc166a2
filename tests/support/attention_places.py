"""The table of places in plain Python, and lengths to try it with."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from fastbert.kernels.attention_slots import HEIGHTS, slots


def tail(batch: int, end: int, height: int, n_slots: int) -> list[tuple[int, ...]]:
    """The places of `n_slots` slots that share the rows after the last sequence."""
    return [(batch, end, n_slots * height, i * height) for i in range(n_slots)]


def ranked(lengths: list[int], total: int, max_seqlen: int) -> list[tuple[int, ...]]:
    """The table with the longest sequence first."""
    starts = [0, *itertools.accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda b: (-lengths[b], -b))
    table = []
    for height in HEIGHTS:
        section = [
            (b, starts[b], lengths[b], first_row)
            for b in order
            for first_row in reversed(range(0, lengths[b], height))
        ]
        left = slots(height, total, len(lengths), max_seqlen) - len(section)
        assert left > 0
        table += section + tail(len(lengths), starts[-1], height, left)
    return table


def in_order(lengths: list[int], total: int, max_seqlen: int) -> list[tuple[int, ...]]:
    """The table with the sequences in order; some have a place beyond their last row."""
    starts = [0, *itertools.accumulate(lengths)]
    table = []
    for height in HEIGHTS:
        firsts = [start // height + b for b, start in enumerate(starts)]
        section = []
        for b, (first, end) in enumerate(itertools.pairwise(firsts)):
            assert (end - first) * height >= lengths[b]
            assert (end - first - 2) * height < lengths[b]
            section += [(b, starts[b], lengths[b], i * height) for i in reversed(range(end - first))]
        left = slots(height, total, len(lengths), max_seqlen) - len(section)
        assert left > 0
        table += section + tail(len(lengths), starts[-1], height, left)
    return table


@st.composite
def layouts(draw):
    """(lengths, total, max_seqlen)."""
    length = st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 150))
    lengths = draw(st.lists(length, max_size=draw(st.sampled_from([1, 5, 40]))))
    total = sum(lengths) + draw(st.sampled_from([0, 0, 1, 15, 16, 17, 500]))
    return lengths, total, max(lengths, default=0) + draw(st.sampled_from([0, 0, 1, 200]))
