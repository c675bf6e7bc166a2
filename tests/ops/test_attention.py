"""`attention` against eager and sdpa: every length, bias that leaves one key, scales, cut products."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional as F

from fastbert import testing
from fastbert.backends.aten import attention as aten_attention
from fastbert.ops.attention import attention, attention_ref
from tests.support.attention_inputs import DOUBLE, DTYPES, PLAIN, grads_of, is_long, qkv, serving
from tests.support.inputs import ends_of

# --- the error rule: its cases are in test_error_rule.py ----------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("backend", PLAIN)
def test_float32_is_no_worse_than_eager_in_the_median(backend):
    ratios = []
    for case in testing.cases("attention"):
        with serving(backend, is_long(case)):
            rows = testing.run_case(case, "aten" if backend == "grid" else backend, torch.float32)
            ratios += [row.mean_error / row.eager_mean_error for row in rows if row.eager_mean_error > 0]
    assert torch.tensor(ratios).median() <= 1.02  # sums in another order differ by about one per cent


@pytest.mark.sweep
@pytest.mark.parametrize("backend", PLAIN)
def test_every_length_alone_is_as_in_a_batch(backend):
    dtype, tolerance = (torch.float64, 1e-12) if backend in DOUBLE else (torch.float32, 5e-6)
    with serving(backend, long=True):
        for n in (*range(1, 131), 511, 512):
            inputs = qkv(n, 1, 16, torch.float64, seed=n)
            out = attention(*(t.to(dtype) for t in inputs), ends_of([n]), n)
            expected = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in inputs)).transpose(0, 1)
            pairs = zip((out, *grads_of(out, inputs)), (expected, *grads_of(expected, inputs)), strict=True)
            assert all((a.double() - e).abs().max() < tolerance for a, e in pairs), n


@pytest.mark.sweep_of("triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", PLAIN)
def test_bias_that_leaves_one_key_picks_its_value(backend, dtype):
    n = 11
    q, k, v = qkv(n, 2, 16, DTYPES[dtype])
    picked = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    bias = torch.full((2, n, n), -math.inf)
    bias[:, torch.arange(n), picked] = 1.5
    with serving(backend):
        out = attention(q, k, v, ends_of([n]), n, bias=bias)
        dq, dk, dv = grads_of(out, (q, k, v))
    assert torch.equal(out, v[picked])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    # Triton's backward recomputes the scores in other tiles, so float32 sums may differ.
    near = 1e-6 if (backend, dtype) == ("triton", "fp32") else 0.0
    torch.testing.assert_close(dv[picked], dout, rtol=near, atol=0.0)
    assert max(dq.abs().max(), dk.abs().max()) <= 64 * torch.finfo(q.dtype).eps  # dP - delta cancels


# --- repeats, modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("scale", [0.0, -0.7, 3])
def test_softmax_scale(backend, scale):
    inputs = qkv(12, 2, 8, torch.float64)
    with serving(backend):
        out = attention(*inputs, ends_of([5, 7]), 7, softmax_scale=scale)
        grads = grads_of(out, inputs)
    truth = attention_ref(*inputs, ends_of([5, 7]), 7, softmax_scale=float(scale))[0]
    for a, e in zip((out, *grads), (truth, *grads_of(truth, inputs)), strict=True):
        assert torch.allclose(a, e, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", PLAIN)
def test_large_scores_do_not_overflow(backend, dtype):
    q, k, v = (t.detach() for t in qkv(12, 2, 16, DTYPES[dtype]))
    with serving(backend):
        out, lse = attention(100 * q, 100 * k, v, ends_of([5, 7]), 7, return_lse=True)
    truth, truth_lse, _ = attention_ref(*((100 * t).double() for t in (q, k)), v.double(), ends_of([5, 7]), 7)
    assert torch.isfinite(out).all()
    assert ((lse - truth_lse) / truth_lse).abs().max() < 1e-5
    assert (out - truth).abs().max() < 0.02


@pytest.mark.parametrize("nheads", [1, 3, 5])
def test_explicit_products_cut_by_heads_and_sequences(nheads, monkeypatch):
    """A tiny budget of scores cuts every run; bits and sums stay the same."""
    inputs = qkv(31, nheads, 8, torch.float64)
    bias = torch.randn(4, nheads, 9, 9, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(nheads, dtype=torch.float64, requires_grad=True)
    wanted = (*inputs, bias, gate)

    def run():
        out, lse = attention(
            *inputs,
            ends_of([8, 8, 8, 5]),
            9,
            bias=bias,
            gate=gate,
            dropout_p=0.3,
            seed=torch.tensor([1]),
            return_lse=True,
        )
        return (out, lse, *grads_of(out, wanted))

    expected = run()
    for scores in (1, 130, 200, 450):
        monkeypatch.setattr(aten_attention, "_MAX_SCORES", scores)
        monkeypatch.setattr(aten_attention, "_MAX_GRID_SCORES", scores)
        for backend in ("aten", "grid"):
            with serving(backend):
                for a, e in zip(run(), expected, strict=True):
                    assert torch.allclose(a, e, rtol=0, atol=1e-12)


def test_without_the_private_operator(monkeypatch):
    inputs = qkv(12, 2, 8, torch.bfloat16)
    expected = attention(*inputs, ends_of([5, 7]), 7, causal=True)
    monkeypatch.setattr(aten_attention, "_flash", None)
    for case in testing.small_cases("attention"):
        for dtype in DTYPES.values():
            assert all(row.passed for row in testing.run_case(case, "aten", dtype))
    with serving("aten"):
        out = attention(*inputs, ends_of([5, 7]), 7, causal=True)
    assert (out - expected).abs().max() <= 2**-7
