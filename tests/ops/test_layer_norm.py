"""`layer_norm`, `rms_norm` and `no_norm`: gradients, compilation, layouts, autocast, dropout, bad inputs.

On every backend that serves the CPU here; the Triton kernels have a file of their own.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import layer_norm, layer_norm_ref, no_norm, rms_norm
from tests.support.inputs import name, randn
from tests.support.ops import HALF, assert_compiled_is_eager, pinned

backend = pinned("layer_norm")
NORMS = (partial(layer_norm, eps=1e-5), no_norm, partial(rms_norm, eps=1e-6))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize("hidden", [8, 33, 96])  # a narrow row is promoted
def test_half_precision_beside_a_float32_residual(backend, dtype, dropout_p, hidden):
    """As if it were cast to float32, to the bit; its gradient is in half precision and rounded once."""
    w, b, xb = (randn(hidden, grad=True) for _ in range(3))
    x, r = randn(6, hidden, dtype=dtype, grad=True), randn(6, hidden, grad=True)
    seed, dy = torch.tensor([5]) if dropout_p else None, randn(6, hidden)
    options = {"residual": r, "x_bias": xb, "eps": 1e-5, "dropout_p": dropout_p, "seed": seed}
    leaves = (x, r, w, b, xb)
    results = []
    for given in (x, x.float()):
        y = layer_norm(given, w, b, **options)
        assert y.dtype == torch.float32
        assert torch.equal(layer_norm(given.detach(), w, b, **options), y)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for both, cast in zip(*results, strict=True):
        assert both.dtype == cast.dtype
        assert torch.equal(both, cast)
    # dresidual alone, and dx alone
    y = layer_norm(x, w, b, **options)
    for i, leaf in enumerate((x, r)):
        (alone,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        assert torch.equal(alone, results[0][1 + i])


@pytest.mark.parametrize("which", ["both", "y", "rounded"])
@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_y_once_more_for_products(backend, dtype, which):
    """It is y cast, and its gradient is added to y's in float32: to the bit what a cast does."""
    w, b, xb = (randn(33, grad=True) for _ in range(3))
    x, r = randn(6, 33, dtype=dtype, grad=True), randn(6, 33, grad=True)
    dy, drounded = randn(6, 33), randn(6, 33, dtype=dtype)
    leaves, seed = (x, r, w, b, xb), torch.tensor([5])
    options = {"residual": r, "x_bias": xb, "dropout_p": 0.3, "seed": seed}
    twice = layer_norm(x, w, b, **options, rounded=True)
    y = layer_norm(x, w, b, **options)
    assert [t.dtype for t in twice] == [torch.float32, dtype]
    results = []
    for outputs in (twice, (y, y.to(dtype))):
        chosen = {"both": (0, 1), "y": (0,), "rounded": (1,)}[which]
        heads, grads = [outputs[i] for i in chosen], [(dy, drounded)[i] for i in chosen]
        results.append((*outputs, *torch.autograd.grad(heads, leaves, grads)))
    for ours, cast in zip(*results, strict=True):
        assert torch.equal(ours, cast)
    with torch.no_grad():
        for ours, without in zip(twice, layer_norm(x, w, b, **options, rounded=True), strict=True):
            assert torch.equal(ours, without)


def test_y_once_more_is_y_where_nothing_is_rounded(backend):
    x, w = randn(3, 16), randn(16)
    y, again = layer_norm(x, w, residual=x, rounded=True)
    assert again is y
    half = x.bfloat16()
    y, again = layer_norm(half, w, residual=half, rounded=True)
    assert again is y


def test_reference_is_what_pytorch_defines():
    x, w, b = (randn(*s, dtype=torch.float64) for s in ((5, 12), (12,), (12,)))
    torch.testing.assert_close(layer_norm_ref(x, w, b, eps=1e-5), F.layer_norm(x, (12,), w, b, 1e-5))
    torch.testing.assert_close(layer_norm_ref(x, w, eps=1e-5, kind="rms_norm"), F.rms_norm(x, (12,), w, 1e-5))
    torch.testing.assert_close(layer_norm_ref(x, w, b, kind="no_norm"), x * w + b)


def test_variance_survives_a_large_mean(backend):
    """E[x²] - E[x]² would lose every digit here."""
    x = randn(4, 256) + 3000.0
    y = layer_norm(x, torch.ones(256))
    torch.testing.assert_close(
        y.double(), layer_norm_ref(x.double(), torch.ones(256).double()), rtol=0, atol=2e-3
    )


# PyTorch returns NaN or infinity, depending on how it splits the row
@pytest.mark.parametrize("hidden", [8, 70, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("rms", [False, True])
def test_a_variance_that_overflows_is_infinite(backend, rms, dtype, hidden):
    """The row is then its bias. Other rows, and their part of the gradients, are as without it."""
    x, dy = randn(4, hidden).to(dtype), randn(4, hidden).neg().to(dtype)
    w, b = 1 + 0.1 * randn(hidden).to(dtype), randn(hidden).to(dtype)

    def run(rows):
        leaves = [t.clone().requires_grad_() for t in (rows, w, b)]
        y = rms_norm(*leaves[:2], eps=1e-12) + leaves[2] if rms else layer_norm(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy[: len(rows)])

    for magnitude in (1e20, 1e30):
        y, dx, dw, db = run(torch.cat([x[:3], magnitude * x[3:]]))
        assert torch.equal(y[3], b)
        assert (dx[3] == 0).all()
        clean = run(x[:3])
        rtol = 1e-5 if dtype == torch.float32 else 0.05
        for actual, expected in zip((y[:3], dx[:3], dw, db - dy[3]), clean, strict=True):
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=0.02)
    assert run(torch.cat([x[:3], math.nan * x[3:]]))[0][3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_a_row_of_one_column_is_its_bias(backend, dropout_p, dtype):
    """It has no deviation, and only bias has a gradient."""
    leaves = [randn(*s, dtype=dtype, grad=True) for s in ((70, 1), (1,), (1,), (70, 1), (1,))]
    x, w, b, r, xb = leaves
    seed = torch.tensor([3]) if dropout_p else None
    y = layer_norm(x, w, b, residual=r, x_bias=xb, dropout_p=dropout_p, seed=seed)
    assert torch.equal(y, b.expand(70, 1))
    dx, dw, _db, dr, dxb = torch.autograd.grad(y, leaves, randn(70, 1, dtype=dtype))
    for grad in (dx, dw, dr, dxb):
        assert not grad.any()


@pytest.mark.sweep
def test_compiled_is_eager():
    seed = torch.tensor([5])

    def step(x, w, b, r, xb):
        dropped = {"dropout_p": 0.2, "seed": seed, "offset": 4}
        y, z = layer_norm(x.transpose(0, 1), w, b, residual=r, x_bias=xb, **dropped, return_sum=True)
        y, z = rms_norm(y, w, residual=z, eps=1e-6, return_sum=True)
        return no_norm(y * rms_norm(z, w, eps=1e-6), w, b, residual=z, **dropped)

    def inputs(tokens):
        return [randn(*s, grad=True) for s in ((4, tokens, 8), (8,), (8,), (tokens, 4, 8), (8,))]

    assert_compiled_is_eager(step, inputs)


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("x_dtype", [torch.float32, *HALF], ids=name)
@pytest.mark.parametrize("autocast", [None, *HALF], ids=name)
def test_dtypes_of_activations_and_parameters(backend, autocast, x_dtype, w_dtype):
    """Mixed dtypes in and out of autocast: computed in float32, gradients in each leaf's own dtype."""
    x, b = randn(3, 8, dtype=x_dtype, grad=True), randn(8, dtype=w_dtype)
    w = randn(8, dtype=w_dtype, grad=True)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = layer_norm(x, w, b)
    assert y.dtype == (x_dtype if autocast is None else torch.promote_types(x_dtype, w_dtype))
    expected = layer_norm_ref(x.double(), w.double(), b.double())
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1e-3)
    grads = torch.autograd.grad(y.square().sum(), (x, w))
    for a, e, leaf in zip(grads, torch.autograd.grad(expected.square().sum(), (x, w)), (x, w), strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a, e, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    "dtypes", [(d, d) for d in (torch.float32, *HALF)] + [(d, torch.float32) for d in HALF]
)
@pytest.mark.parametrize("hidden", [8, 33, 96])
def test_the_sum_is_returned(backend, hidden, dtypes, dropout_p, norm):
    """It is rounded once; y is the same without it, and its gradient passes the norm."""
    x, r = (randn(6, hidden, dtype=d, grad=True) for d in dtypes)
    w, xb, seed = randn(hidden, grad=True), randn(hidden, grad=True), torch.tensor([5])
    leaves, dy, dsum = (x, r, w, xb), randn(6, hidden, dtype=dtypes[1]), randn(6, hidden, dtype=dtypes[1])
    options = {"residual": r, "x_bias": xb, "dropout_p": dropout_p, "seed": seed}
    alone, (y, z) = (norm(x, w, **options, return_sum=returned) for returned in (False, True))
    assert torch.equal(y, alone)
    kept = x.float() + xb
    if dropout_p:
        kept = kept * keep_mask_2d(seed, 0, 6, hidden, dropout_p) * (1 / (1 - dropout_p))
    torch.testing.assert_close(z, (kept + r).to(dtypes[1]), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        # no sum is stored, so none is rounded
        assert torch.equal(norm(x, w, **options), y)
        for a, e in zip(norm(x, w, **options, return_sum=True), (y, z), strict=True):
            assert torch.equal(a, e)
    grads = {
        way: torch.autograd.grad(heads, leaves, given, retain_graph=True, allow_unused=True)
        for way, heads, given in (("y", y, dy), ("sum", z, dsum), ("both", (y, z), (dy, dsum)))
    }
    for a, e in zip(grads["y"], torch.autograd.grad(alone, leaves, dy), strict=True):
        assert torch.equal(a, e)
    assert torch.equal(grads["sum"][1], dsum)
    assert not grads["sum"][2].any()
    for both, *each in zip(*(grads[way] for way in ("both", "y", "sum")), strict=True):
        tolerance = 1e-5 if both.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(both, each[0] + each[1], rtol=tolerance, atol=3 * tolerance)


def test_the_sum_of_x_alone_is_x(backend):
    x, w = randn(3, 16, grad=True), randn(16)
    for norm in NORMS:
        y, z = norm(x, w, return_sum=True)
        assert z is x
        (dx,) = torch.autograd.grad((y, z), x, (torch.zeros(3, 16), torch.ones(3, 16)))
        assert torch.equal(dx, torch.ones(3, 16))


def test_rounded_and_sum(backend):
    x, r, w = randn(3, 16).bfloat16(), randn(3, 16), randn(16)
    y, rounded, z = layer_norm(x, w, residual=r, rounded=True, return_sum=True)
    assert torch.equal(rounded, y.bfloat16())
    assert torch.equal(z, x + r)


X, W = torch.ones(2, 3), torch.ones(3)
SEED = torch.tensor([1])
DROPPED = {"dropout_p": 0.1, "seed": SEED}
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x: expected shape \(\.\.\., hidden\).*got \(\)"),
    ({"x": torch.ones(2, 0)}, ValueError, r"x: .*hidden >= 1, got \(2, 0\)"),
    ({"weight": torch.ones(4)}, ValueError, r"weight: expected shape \(3,\), got \(4,\)"),
    ({"bias": torch.ones(1)}, ValueError, r"bias: expected shape \(3,\), got \(1,\)"),
    ({"x_bias": torch.ones(2)}, ValueError, r"x_bias: expected shape \(3,\), got \(2,\)"),
    ({"residual": torch.ones(3)}, ValueError, r"residual: expected shape \(2, 3\), got \(3,\)"),
    ({"eps": -1.0}, ValueError, "eps: expected a finite number >= 0, got -1.0"),
    (DROPPED | {"dropout_p": 1.0}, ValueError, r"dropout_p: .*in \[0, 1\), got 1.0"),
    ({"dropout_p": 0.1}, ValueError, "seed: dropout_p > 0 needs an int64 tensor.*got None"),
    (DROPPED | {"seed": SEED.int()}, ValueError, "seed: .*got torch.int32"),
    (DROPPED | {"seed": torch.ones(2).long()}, ValueError, r"seed: .*\(2,\)"),
    (DROPPED | {"offset": 2**32}, ValueError, r"offset: .*2\*\*32"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_inputs(change, error, message):
    takers = [layer_norm, *([] if "eps" in change else [no_norm]), *([] if "bias" in change else NORMS[2:])]
    for norm in takers:
        with pytest.raises(error, match=message):
            norm(**{"x": X, "weight": W, **change})
