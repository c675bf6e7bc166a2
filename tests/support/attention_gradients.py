"""Tests of attention's gradients that Triton's and CUDA's kernels share.

A file of tests imports them all. Its fixtures are `kernels`, each of its `Kernels`, and `call`, a function
that makes a `Call` of those that have every option.
"""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.backends import reference
from fastbert.ops.attention_places import places_ref
from tests.support.attention_calls import HALF, NAMES, Call, assert_bit_equal, sequences
from tests.support.cpu_truth import randn

DTYPES = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


@DTYPES
def test_a_query_that_sees_one_key_has_no_gradient(kernels, dtype):
    """Sequences of one token and first rows of a causal mask: delta from the rounded `out` is inexact.

    1 / (1 - p) is no power of 2.
    """
    extras = kernels.extras(causal=True, gate=randn(2))
    for saved in (False, True):
        dq, dk, *_ = kernels.call((1, 40, 1, 1), saved=saved, dtype=dtype, p=0.3, **extras).check()
        assert (dq[[0, 1, 41, 42]].abs() < 1e-6).all()
        assert (dk[[0, 41, 42]].abs() < 1e-6).all()
        assert dq[2:41].abs().max() > 0.1


# --- masks, scales, extremes --------------------------------------------------------------------------------


def test_rows_without_an_allowed_key(call):
    bias = randn(2, 2, 70, 70)
    bias[0, 0, 3] = -math.inf
    bias[:, 1, :, :64] = -math.inf  # a whole tile of keys before the first allowed one
    bias[1, 0, :, 17:] = -math.inf
    bias[1, 1] = -math.inf
    dq, dk, dv, dbias, _ = call((70, 23), bias=bias).check()
    for gradient in (dq[3, 0], dq[70:, 1], dk[70:, 1], dv[70:, 1], dbias[0, 0, 3], dbias[1, 1]):
        assert (gradient == 0).all()


def test_a_mask_of_the_lowest_number_is_not_minus_infinity(call):
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(1, 1, 40, 40)
    bias[..., 4, :] = lowest  # uniform; log 40 is lost in its lse
    bias[..., 5, 1:] = lowest  # one key
    bias[..., 6, :30] = lowest
    own = call((40, 17), bias=bias)
    close = {"rtol": 0.02, "atol": 0.02} if is_half(own) else {"rtol": 1e-4, "atol": 1e-5}
    found, expected = own.run(), own.run(reference)  # float64 loses none of them
    for name, a, e in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(a, e, **close, msg=lambda m, n=name: f"{n}: {m}")
    assert found[0][4].abs().max() > 0.01


def is_half(own: Call) -> bool:
    return own.inputs.q.dtype in HALF.values()


def test_softmax_scale(kernels):
    longest = kernels.tile + 6
    for scale in (0.01, 1.0) if kernels.hopper else (-0.7, 0.0, 0.01, 3.0):
        for bias in (None, randn(1, 2, longest, longest)):
            own = kernels.call((19, longest), softmax_scale=scale, **kernels.extras(bias=bias))
            own.check(0.03 if is_half(own) else None)


def test_an_lse_that_is_slightly_wrong_cancels(kernels):
    """As if large scores had been rounded differently: P is divided by its own sum."""
    longest = 2 * kernels.tile + 2
    for bias in (None, randn(2, 2, longest, longest)):
        own = kernels.call((kernels.tile + 6, longest), **kernels.extras(gate=randn(2), bias=bias))
        own.lse = own.lse + 0.25 * randn(*own.lse.shape).to(own.lse)
        own.check()


@pytest.mark.parametrize("scale", [1.0, -1.0])  # which Triton folds into the factor of exp2, and does not
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_scores_do_not_overflow(call, scale, with_bias):
    """lse is near 900: exp without it would be infinite or 0."""
    own = call((33,), nheads=1, softmax_scale=scale, bias=torch.zeros(1, 1, 33, 33) if with_bias else None)
    q, k = own.inputs[:2]
    keys = scale * (896 / q.shape[-1] + 0.1 * k.float())
    own = own.on(q=torch.ones_like(q), k=keys.to(k.dtype))
    assert own.lse.min() > 800
    own.check(0.25 if is_half(own) else 0.01)  # dS sums to 0, and is rounded before it meets such keys


def test_a_gate_of_0_has_a_gradient(call):
    grads = call((40, 9), gate=torch.tensor([0.0, 2.0]), capacity=70, p=0.3).check()
    assert grads[4][0].abs() > 0.1
    assert all((gradient[:, 0] == 0).all() for gradient in grads[:3])


# --- dropout ------------------------------------------------------------------------------------------------


def test_bits_that_are_not_defined_are_not_used(kernels):
    """Bits past a sequence, and those of keys that a causal mask hides, may have any value."""
    lengths = (40, 0, 9, 65)
    for causal in (False, True):
        extras = kernels.extras(bias=randn(4, 2, 70, 70), gate=randn(2), causal=causal)
        own = kernels.call(lengths, capacity=5, slack=5, p=0.3, offset=2**31 + 5, **extras)
        bits, own.bits = own.bits, None
        expected, columns = own.run(), torch.arange(96, device=bits.device)
        defined = torch.zeros(sum(lengths) + 5, 96, dtype=torch.bool, device=bits.device)
        for start, n in sequences(own.inputs):
            seen = (columns <= columns[:n, None]) | (not causal)
            defined[start : start + n] = (columns < n) & seen
        defined = (defined.unflatten(1, (3, 32)).long() << columns[:32]).sum(-1)
        defined = torch.where(defined >= 2**31, defined - 2**32, defined).int()
        noise = torch.randint(-(2**31), 2**31, bits.shape, generator=torch.Generator().manual_seed(1))
        for own.bits in (bits, bits & defined | noise.to(bits) & ~defined):
            assert_bit_equal(own.run(), expected)
        own.bits = ~bits  # they are read at all
        assert not any(torch.equal(a, b) for a, b in zip(own.run()[:3], expected, strict=False))


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0), ()], ids=str)
def test_empty_sequences_and_capacity(call, lengths):
    for capacity in (0, 150, 700):
        grads = call(lengths, capacity=capacity, gate=randn(2)).check()
        assert all((gradient[sum(lengths) :] == 0).all() for gradient in grads[:3])
    longest = max(lengths, default=0)
    for shape in ((len(lengths), 1, longest, longest), (1, 1, 1, 1)):
        call(lengths, capacity=4, bias=randn(*shape)).check()


def test_no_rows(call):
    own = call((0, 0), slack=3, bias=randn(1, 2, 3, 3), gate=randn(2))
    grads = own.run()
    assert [t.shape for t in grads] == [own.inputs.q.shape] * 3 + [(1, 2, 3, 3), (2,)]
    assert all((gradient == 0).all() for gradient in grads)


def test_strided_inputs_with_poisoned_gaps(call):
    own = call((70, 2, 5), bias=randn(3, 2, 70, 70))
    expected, (total, nheads, headdim) = own.run(), own.inputs.q.shape

    def apart(t, first):
        """Behind so many elements of a wider row; q, k and v must lie at multiples of 16 bytes."""
        wide = t.new_full((nheads, total, 3, headdim + 8), math.nan)
        return wide[:, :, 1, first : first + headdim].transpose(0, 1).copy_(t)

    ends = own.inputs.cu_seqlens.repeat_interleave(2)
    ends[1::2] = 99
    bias = own.inputs.bias.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    qkv = {name: apart(getattr(own.inputs, name), 8) for name in "qkv"}
    own.inputs = own.inputs._replace(**qkv, cu_seqlens=ends[::2], bias=bias)
    own.dout, own.out = apart(own.dout, 1), apart(own.out, 1)
    lse = own.lse.new_full((nheads, total + 13), math.nan)
    lse[:, :total] = own.lse
    own.lse = lse[:, :total]
    assert_bit_equal(own.run(), expected)


@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize(("p", "saved"), ((0.0, False), (0.25, False), (0.25, True)))
def test_neighbours_and_unused_cells_may_be_poison(kernels, p, saved, bad):
    """Tiles reach into the next sequence, and into rows after the last one."""
    lengths = (70, 40, 129) if kernels.hopper else (18, 3, 17)
    end, bias = sum(lengths), randn(3, 2, max(lengths), max(lengths))
    own = kernels.call(lengths, saved=saved, capacity=90, p=p, **kernels.extras(bias=bias, gate=randn(2)))
    own.need = own.need._replace(dgate=False)  # it is one sum over all rows
    clean, bias = own.run(), own.inputs.bias
    poisoned = torch.ones(end + 90, dtype=torch.bool, device=own.lse.device)
    poisoned[: lengths[0]] = poisoned[end - lengths[2] : end] = False
    for t in (*own.inputs[:3], own.dout, own.out):
        t[poisoned] = bad
    own.lse[:, poisoned] = bad
    if bias is not None:
        bias[1] = bad
        bias[2, :, lengths[2] :] = bad
        bias[2, :, :, lengths[2] :] = bad
    dirty = own.run()
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[~poisoned], e[~poisoned])
        assert (a[end:] == 0).all()
        assert math.isinf(bad) or a[lengths[0] : end - lengths[2]].isnan().all()
    if bias is not None:
        assert torch.equal(dirty[3][[0, 2]], clean[3][[0, 2]])


def test_a_table_of_places_is_read(kernels):
    lengths, extras = (20, 2 * kernels.tile + 2, 33, 0), kernels.extras(gate=randn(2), causal=True)
    own = kernels.call(lengths, capacity=150, p=0.1, saved=False, **extras)
    expected = own.run()
    own.places = places_ref(own.inputs.cu_seqlens, sum(lengths) + 150, max(lengths))
    assert_bit_equal(own.run(), expected)
    ends = torch.zeros_like(own.inputs.cu_seqlens)  # the places say it all
    own.inputs = own.inputs._replace(cu_seqlens=ends)
    assert_bit_equal(own.run(), expected)


__all__ = [name for name in globals() if name.startswith("test_")]
