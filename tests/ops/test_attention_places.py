"""The table of places by its reference, and what `attention` accepts as one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from fastbert.kernels import attention_slots as slots
from fastbert.layers.batch import PackedBatch
from fastbert.ops import attention_places as op
from fastbert.ops.attention import attention
from fastbert.ops.attention_places import Places, attention_places, places_ref
from fastbert.runtime import dispatch
from tests.support.attention_places import in_order, layouts, ranked
from tests.support.inputs import ends_of
from tests.support.triton_fixtures import fuzz

LENGTHS, TOTAL, LONGEST = [3, 0, 20, 5], 30, 20


def rows(table: torch.Tensor) -> list[tuple[int, ...]]:
    assert (table.dtype, table.is_contiguous(), table.shape[1]) == (torch.int32, True, slots.FIELDS)
    return [tuple(row) for row in table.tolist()]


def arguments(total=TOTAL):
    q, k, v = torch.randn(3, total, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    return q, k, v, ends_of(LENGTHS), LONGEST


def places_of(cu_seqlens, total=TOTAL, longest=LONGEST) -> Places:
    return Places(places_ref(cu_seqlens, total, longest), cu_seqlens, longest)


@fuzz(150)
@given(layouts())
def test_the_reference_is_the_definition(layout):
    lengths, total, longest = layout
    assert rows(places_ref(ends_of(lengths), total, longest)) == ranked(*layout)


@fuzz(100)
@given(layouts())
def test_the_reference_of_more_sequences_than_are_ranked(layout):
    lengths, total, longest = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "RANKED", -1)
        assert rows(places_ref(ends_of(lengths), total, longest)) == in_order(*layout)


@fuzz(100)
@given(layouts())
def test_sections_follow_each_other(layout):
    lengths, total, longest = layout
    sizes = [slots.slots(height, total, len(lengths), longest) for height in slots.HEIGHTS]
    firsts = slots.sections(total, len(lengths), longest)
    assert firsts == tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
    for n_slots in sizes:
        _, on_axis, planes = slots.grid(n_slots, 3)
        assert on_axis * planes == n_slots


def test_no_more_slots_than_tiles_and_one():
    assert slots.slots(128, 16384, 32, 512) == 128 + 1
    assert slots.slots(16, 0, 0, 0) == 1
    # more than an axis of the grid holds: two planes, and one slot to make them equal
    found = slots.slots(16, 16 * 65536, 1, 16 * 65536)
    assert (found, slots.grid(found, 7)) == (65538, (7, 32769, 2))


@pytest.mark.parametrize("backend", ["cpu", "aten", "reference"])
def test_backends_that_read_no_table_make_none(backend):
    q, k, v, ends, longest = arguments()
    if dispatch.unsupported_reason(backend, "attention", "cpu", q.dtype) is not None:
        pytest.skip("the backend is not here")
    with dispatch.use_backend(backend):
        assert attention_places(ends, longest, TOTAL, q.dtype) is None
        leaves = [t.requires_grad_() for t in (q, k, v)]
        expected = attention(*leaves, ends, longest)
        out = attention(*leaves, ends, longest, places=places_of(ends))
        assert torch.equal(out, expected)
        dout = torch.ones_like(out)
        for a, e in zip(
            torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
        ):
            assert torch.equal(a, e)


def test_a_table_of_something_else_is_refused_by_name():
    q, k, v, ends, longest = arguments()
    good = places_of(ends)
    wrong = [
        (TypeError, "Tensor", good.table),
        (ValueError, "another tensor", good._replace(cu_seqlens=ends.clone())),
        (ValueError, "of max_seqlen 20, got of 21", places_of(ends, longest=21)),
        (ValueError, "shape", places_of(ends, total=TOTAL + 200)),
        (ValueError, "shape", good._replace(table=good.table[:-1])),
        (ValueError, "shape", good._replace(table=good.table[:, :3])),
        (TypeError, "int32", good._replace(table=good.table.long())),
        (ValueError, "contiguous", good._replace(table=good.table.t().contiguous().t())),
        (ValueError, "of these lengths, got other values", good._replace(table=good.table.flip(0))),
        (ValueError, "on cpu, got one on meta", good._replace(table=good.table.to("meta"))),
    ]
    for kind, words, places in wrong:
        with pytest.raises(kind, match=rf"^places: expected .*{words}"):
            attention(q, k, v, ends, longest, places=places)
    padded = q.reshape(1, TOTAL, 2, 8)
    with pytest.raises(ValueError, match=r"^places: expected"):
        attention(padded, padded, padded, places=good)


def test_the_lengths_of_a_table_are_checked():
    table = torch.ops.fastbert.attention_places
    with pytest.raises(TypeError, match=r"^cu_seqlens: expected int32"):
        table(ends_of(LENGTHS).long(), TOTAL, LONGEST, torch.float32)
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected to end within the 27 rows"):
        table(ends_of(LENGTHS), 27, LONGEST, torch.float32)
    with pytest.raises(ValueError, match=r"^max_seqlen: expected at least the longest length 20, got 19"):
        table(ends_of(LENGTHS), TOTAL, 19, torch.float32)
    with pytest.raises(ValueError, match=r"^total: expected a number in"):
        table(ends_of(LENGTHS), 2**31, LONGEST, torch.float32)


@pytest.mark.sweep
@pytest.mark.parametrize("grad", [False, True])
def test_in_a_compiled_graph_the_table_is_an_operand(grad):
    """As it is on CUDA, where the op that makes the table is in the graph too."""
    q, k, v, ends, longest = arguments()
    q.requires_grad_(grad)

    def call(q, ends):
        places = Places(op.places_table(ends, q.shape[0], longest, q.dtype), ends, longest)
        return attention(q, k, v, ends, longest, places=places) * 2

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for lengths in (LENGTHS, [20, 1, 1, 1]):
        ends = ends_of(lengths)
        out, expected = compiled(q, ends), attention(q, k, v, ends, longest) * 2
        torch.testing.assert_close(out, expected)
        if grad:
            a, e = (torch.autograd.grad(y.square().sum(), q)[0] for y in (out, expected))
            torch.testing.assert_close(a, e)


def test_no_table_is_compiled_on_the_cpu():
    ends = ends_of(LENGTHS)
    compiled = torch.compile(
        lambda x: attention_places(x, LONGEST, TOTAL, torch.float32), backend="eager", fullgraph=True
    )
    assert compiled(ends) is None


def test_places_do_not_outlive_their_lengths():
    ends = ends_of(LENGTHS)
    sequences = PackedBatch(ends, LONGEST, places=places_of(ends))
    assert sequences.fitting_places() is sequences.places
    assert dataclasses.replace(sequences, seed=None).fitting_places() is sequences.places
    assert dataclasses.replace(sequences, cu_seqlens=ends.clone()).fitting_places() is None
    assert PackedBatch(ends, LONGEST).fitting_places() is None
