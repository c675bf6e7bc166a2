"""Fixed patterns against maps that are written cell by cell."""

from __future__ import annotations

import pytest
import torch

from fastbert.layers import patterns
from fastbert.layers.patterns import Rows
from tests.support.inputs import ends_of
from tests.support.pattern_maps import ALL, dense

LENGTHS = [[1], [2], [3], [1, 2, 3], [7, 1, 0, 33, 2, 64], [0, 5], [200, 3]]


def attend(pattern, values, ends, separators=None, room=0):
    """`patterns.attend`; the longest sequence may be said to be longer by `room`."""
    rows = Rows.of(ends, len(values), int(ends.diff().max()) + room)
    return patterns.attend(pattern, values, rows, separators)


def packed(lengths, seed=0):
    """(values, cu_seqlens, separators): some sequences have separators, some have none."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), 2, 3, generator=draw, dtype=torch.float64)
    separators = torch.rand(sum(lengths), generator=draw) < 0.15
    return values, ends_of(lengths), separators


def by_maps(pattern, values, lengths, separators):
    found = []
    for v, at in zip(values.split(lengths), separators.split(lengths), strict=True):
        weights = torch.from_numpy(dense(pattern, len(v), at.numpy()))
        found.append(torch.einsum("ij,jhd->ihd", weights, v))
    return torch.cat(found)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pattern", ALL, ids=lambda i: patterns.NAMES[i])
def test_as_its_map(pattern, lengths):
    values, ends, separators = packed(lengths)
    found = attend(pattern, values, ends, separators)
    expected = by_maps(pattern, values, lengths, separators)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_the_patterns_say_of_four_tokens():
    """The weights, spelled out: (j + 1)³ before i - 1, mirrored, and rows without a key."""
    values = torch.eye(4, dtype=torch.float64)[:, None]
    ends = ends_of([4])
    left = attend(patterns.LEFT_CONTEXT, values, ends)[:, 0]
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [1 / 9, 8 / 9, 0, 0]]
    torch.testing.assert_close(left, torch.tensor(expected, dtype=torch.float64))
    right = attend(patterns.RIGHT_CONTEXT, values, ends)[:, 0]
    torch.testing.assert_close(right, left.flip(0).flip(1))
    end = attend(patterns.END, values, ends)[:, 0]
    torch.testing.assert_close(end, torch.tensor([[1, 8, 27, 64]], dtype=torch.float64).expand(4, 4) / 100)
    torch.testing.assert_close(attend(patterns.START, values, ends)[:, 0], end.flip(1))
    assert attend(patterns.PREVIOUS, values, ends)[:, 0].argmax(1).tolist() == [0, 0, 1, 2]
    assert attend(patterns.NEXT, values, ends)[:, 0].argmax(1).tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize("pattern", ALL, ids=lambda i: patterns.NAMES[i])
def test_no_sequence_sees_another(pattern):
    """To the bit, and also if the other one is not a number."""
    lengths = [5, 1, 40, 2]
    values, ends, separators = packed(lengths)
    whole = attend(pattern, values, ends, separators).split(lengths)
    for i, (v, at) in enumerate(zip(values.split(lengths), separators.split(lengths), strict=True)):
        assert torch.equal(attend(pattern, v, ends_of([len(v)]), at), whole[i])
        others = values.clone()
        others[: ends[i]] = others[ends[i + 1] :] = torch.nan
        assert torch.equal(attend(pattern, others, ends, separators).split(lengths)[i], whole[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", ALL, ids=lambda i: patterns.NAMES[i])
def test_one_rounding(pattern, dtype):
    """Also of long sequences, whose weights are large."""
    values, ends, separators = packed([3000, 5])
    values = values.to(dtype)
    exact = attend(pattern, values.double(), ends, separators)
    assert torch.equal(attend(pattern, values, ends, separators), exact.to(dtype))
    ones = attend(pattern, torch.ones_like(values), ends, separators)
    assert torch.equal(ones, torch.ones_like(values)), "weights do not add up to 1"


@pytest.mark.parametrize("pattern", ALL, ids=lambda i: patterns.NAMES[i])
def test_gradients(pattern):
    values, ends, separators = packed([1, 2, 6])
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: attend(pattern, v, ends, separators), values)


@pytest.mark.parametrize("pattern", ALL, ids=lambda i: patterns.NAMES[i])
def test_rows_after_the_last_sequence(pattern):
    """They, and room for longer sequences, change nothing, and no gradient goes there."""
    lengths = [5, 0, 1, 40]
    values, ends, separators = packed(lengths)
    whole = attend(pattern, values, ends, separators)
    after = torch.cat([values, torch.full_like(values[:7], torch.nan)]).requires_grad_()
    found = attend(pattern, after, ends, torch.nn.functional.pad(separators, (0, 7)), room=9)
    assert torch.equal(found[: len(values)], whole)
    found[: len(values)].square().sum().backward()
    assert not after.grad[: len(values)].isnan().any()
    assert (after.grad[len(values) :] == 0).all()
