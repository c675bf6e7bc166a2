"""`pack` and `unpack`: exact round trips, NaN in dropped rows, gradients, compilation, bad inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastbert.ops.packing import pack, unpack
from fastbert.runtime import dispatch
from tests.support.inputs import name
from tests.support.ops import assert_compiled_is_eager, backends, pinned

BACKENDS = backends("packing")


backend = pinned("packing")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    mask=st.integers(1, 4).flatmap(
        lambda batch: st.integers(1, 9).flatmap(
            lambda seqlen: st.lists(st.booleans(), min_size=batch * seqlen, max_size=batch * seqlen).map(
                lambda bits: torch.tensor(bits).view(batch, seqlen)
            )
        )
    ),
    inner=st.sampled_from([(), (1,), (3,), (2, 5)]),
    which=st.sampled_from(BACKENDS),
)
def test_round_trip_of_any_mask(mask, inner, which):
    batch, seqlen = mask.shape
    x = torch.randn(batch, seqlen, *inner)
    indices = mask.flatten().nonzero().flatten()
    with dispatch.use_backend(packing=which):
        packed = pack(x, indices)
        back = unpack(packed, indices, batch, seqlen)
        again = pack(back, indices)
    assert torch.equal(packed, x[mask])
    assert torch.equal(back, torch.where(mask.view(batch, seqlen, *(1,) * len(inner)), x, 0.0))
    assert torch.equal(again, packed)


def test_poison_reaches_neither_output_nor_gradient(backend):
    indices = torch.tensor([0, 1, 4, 6])
    x = torch.full((2, 4, 3), float("nan"))
    x.view(8, 3)[indices] = torch.randn(4, 3)
    x.requires_grad_()
    y = pack(x, indices)
    assert y.isfinite().all()
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    kept = torch.zeros(8, dtype=torch.bool).index_fill(0, indices, True).view(2, 4)
    assert torch.equal(dx[kept], 2 * x.detach()[kept])
    assert not dx[~kept].any()
    packed = torch.randn(4, 3, requires_grad=True)
    out = unpack(packed, indices, 2, 4)
    assert not out[~kept].any()
    poison = torch.full_like(out, float("nan"))
    poison[kept] = 1.0
    (dpacked,) = torch.autograd.grad(out, packed, poison)
    assert torch.equal(dpacked, torch.ones_like(packed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=name)
def test_ids_and_masks_can_be_packed(backend, dtype):
    x = torch.randint(0, 2, (3, 5)).to(dtype)
    indices = torch.tensor([1, 2, 9, 14])
    packed = pack(x, indices)
    assert packed.dtype == dtype
    assert torch.equal(packed, x.flatten()[indices])
    assert torch.equal(pack(unpack(packed, indices, 3, 5), indices), packed)


def test_gradcheck_twice(backend):
    indices = torch.tensor([0, 2, 3])
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    packed = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for function, argument in ((lambda t: pack(t, indices), x), (lambda t: unpack(t, indices, 2, 3), packed)):
        assert torch.autograd.gradcheck(function, argument)
        assert torch.autograd.gradgradcheck(function, argument)


@pytest.mark.sweep
def test_compiled_is_eager():
    def step(x, indices):
        packed = pack(x.transpose(0, 1), indices)
        return unpack(packed * packed, indices, x.shape[1], x.shape[0])

    def inputs(seqlen):
        kept = {5: 7, 8: 3, 9: 20}[seqlen]
        return torch.randn(seqlen, 3, 4, requires_grad=True), torch.randperm(3 * seqlen)[:kept].sort().values

    assert_compiled_is_eager(step, inputs, (5, 8, 9))


def test_backends_get_rows_without_gaps(monkeypatch):
    from fastbert.backends import aten

    seen = []
    for function in ("packing_fwd", "packing_bwd"):
        launch = getattr(aten, function)
        monkeypatch.setattr(
            aten, function, lambda x, *args, launch=launch: seen.append(x) or launch(x, *args)
        )
    indices = torch.tensor([1, 5])
    with dispatch.use_backend(packing="aten"):
        pack(torch.ones(2, 3, 8)[..., ::2], indices)
        unpack(torch.ones(2, 8)[..., ::2], indices, 2, 3)
    assert [tuple(x.shape) for x in seen] == [(6, 4), (2, 4)]
    assert all(x.stride(1) == 1 for x in seen)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_empty_batches(backend, shape):
    none = torch.empty(0, dtype=torch.int64)
    x = torch.empty(shape, requires_grad=True)
    packed = pack(x, none)
    assert packed.shape == (0, shape[2])
    assert unpack(packed, none, *shape[:2]).shape == shape
    packed.sum().backward()
    assert x.grad.shape == shape


X, I = torch.ones(2, 3, 4), torch.tensor([0, 5])
BAD = [
    (lambda: pack(X.to(torch.complex64), I), TypeError, "x: expected one of float32, .*got torch.complex64"),
    (lambda: pack(torch.ones(4), I), ValueError, r"x: expected shape \(batch, seqlen, ...\), got \(4,\)"),
    (lambda: pack(X, I.int()), TypeError, "indices: expected int64, got torch.int32"),
    (lambda: pack(X, torch.tensor([0, 6])), ValueError, r"indices: position 6 is out of range .* of 6"),
    (lambda: pack(X, torch.tensor([0, 3, 3])), ValueError, "indices: .*increasing.* got 3 before 3 at 1"),
    (lambda: unpack(X[0, :2], I, 2, 2), ValueError, "indices: position 5 is out of range .* of 4"),
    (lambda: unpack(X[0], I, 2, 3), ValueError, r"x: expected shape \(2, ...\).*got \(3, 4\)"),
    (lambda: unpack(X[0, :2], I, -1, 3), ValueError, "batch: expected an integer >= 0, got -1"),
    (lambda: unpack(X[0, :2], I, 2, 3.0), ValueError, "seqlen: expected an integer >= 0, got 3.0"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_inputs(call, error, message):
    with pytest.raises(error, match=message):
        call()
