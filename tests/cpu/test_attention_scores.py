"""Scores of the C++ attention: bias, gate, causal masks, extreme values, rounding."""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import partial

import pytest
import torch

from fastbert.ops.attention import attention_ref
from tests.support import cpu_build
from tests.support.cpu_attention import (
    DTYPES,
    FEW,
    HALF,
    backward,
    check,
    everything,
    forward,
    own_dtype,
    randn,
    rounds_products,
    some_bias,
    strided_qkv,
    truth,
)
from tests.support.cpu_checks import on_each_isa
from tests.support.inputs import ends_of


@pytest.mark.parametrize("shape", list(itertools.product((1, 0), repeat=4)), ids=str)
def test_bias_broadcasts_in_every_way(every_isa, shape, guarded):
    lengths, nheads, slack = (5, 70, 26), 3, 2
    full = (len(lengths), nheads, 72, 72)
    sizes = [1 if one else size for one, size in zip(shape, full, strict=True)]
    bias = randn(*sizes, seed=5)
    bias = bias.masked_fill(
        torch.rand(bias.shape, generator=torch.Generator().manual_seed(6)) < 0.2, -math.inf
    )
    if not shape[2]:
        bias[:, :, 70:] = math.nan
    if not shape[3]:
        bias[..., 70:] = math.nan
    for form in (bias, bias.transpose(2, 3).contiguous().transpose(2, 3), bias.bfloat16()):
        got = check(lengths, nheads, 16, torch.float32, slack=slack, bias=form)
        if shape == (0, 0, 0, 0):
            for b, n in enumerate(lengths):
                assert not got["dbias"][b, :, n:].any()
                assert not got["dbias"][b, :, :, n:].any()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_bias_of_another_dtype(every_isa, dtype, guarded):
    lengths = (5, 33)
    bias = some_bias(2, 2, 33, lengths, dtype)
    actual = check(lengths, 2, 16, torch.bfloat16, bias=bias)
    assert actual["dbias"].dtype == torch.float32


def test_bias_as_a_view(every_isa, guarded):
    bias = randn(2, 2, 66, 99, seed=5)[:, :, ::2, ::3]
    check((5, 33), 2, 16, torch.float32, bias=bias)
    bias = randn(33, 33, 2, seed=5).permute(2, 0, 1).unsqueeze(0)
    check((5, 33), 2, 16, torch.float32, bias=bias)
    check((5, 33), 2, 16, torch.float32, bias=randn(1, 2, 70, 33, seed=5)[:, :, 3:36])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal(every_isa, dtype, guarded):
    check(tuple(range(1, 131, 2)), 1, 16, dtype, causal=True)


def test_a_causal_row_is_the_last_row_of_its_prefix(every_isa):
    n = 70
    (q, k, v), _ = strided_qkv(n, 2, 16, own_dtype(), 0)
    out, lse, probs = forward(q, k, v, (n,), causal=True, probs=True)
    for i in range(FEW - 1 if every_isa == "avx512_bf16" else 0, n):
        some = slice(0, i + 1)
        prefix, prefix_lse, prefix_probs = forward(q[some], k[some], v[some], (i + 1,), probs=True)
        pairs = ((out[i], prefix[i]), (lse[:, i], prefix_lse[:, i]))
        pairs += ((probs[0, :, i, some], prefix_probs[0, :, i]),)
        for a, b in pairs:
            # without a mask, so few keys are summed in another order
            if i < 64 and every_isa != "avx512_bf16":
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
            else:
                assert torch.equal(a, b), i
        assert not probs[0, :, i, i + 1 :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(every_isa, dtype, guarded):
    for gate in (torch.tensor([0.0, -1.25, 3.0, 1.0]), randn(8, seed=4)[::2], randn(4, seed=4).bfloat16()):
        actual = check((30, 11), 4, 16, dtype, gate=gate)
        if gate[0] == 0:
            assert not any(actual[name][:, 0].any() for name in ("out", "dq", "dk", "dv"))
            assert actual["dgate"][0] != 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 8, 17, 70))
def test_rows_without_an_allowed_key(every_isa, dtype, n, guarded):
    for dead in ([0], [n - 1], list(range(n))):
        bias = randn(1, 1, n, n, seed=5)
        bias[:, :, dead] = -math.inf
        for p in (0.0, 0.25):
            got = check((n,), 2, 16, dtype, capacity=0, bias=bias, p=p)
            assert not any(t.any() for t in (got["out"][dead], got["dq"][dead], got["probs"][:, :, dead]))
            assert not got["dbias"][:, :, dead].any()
            assert (got["lse"][:, dead] == -math.inf).all()


def test_nan_is_not_taken_for_an_empty_row(every_isa):
    for n, bad in ((1, 0), (3, 2), (40, 17), (70, 69)):
        for headdim in (16, 33):
            q, k, v, dout = (randn(n, 1, headdim, dtype=own_dtype(), seed=s) for s in range(4))
            clean = everything(q, k, v, dout, (n,))
            q[bad] = math.nan
            got = everything(q, k, v, dout, (n,))
            others = [i for i in range(n) if i != bad]
            assert got["out"][bad].isnan().all()
            assert got["lse"][:, bad].isnan().all()
            assert got["probs"][0, :, bad].isnan().all()
            assert got["dq"][bad].isnan().all()
            assert torch.equal(got["out"][others], clean["out"][others])
            assert torch.equal(got["dq"][others], clean["dq"][others])
        bias = torch.full((1, 1, n, n), -math.inf)
        bias[..., bad] = math.nan
        out, lse, _ = forward(
            *(randn(n, 1, 16, dtype=own_dtype(), seed=s) for s in range(3)), (n,), bias=bias
        )
        assert out.isnan().all()
        assert lse.isnan().all()


@pytest.mark.parametrize("size", (1e4, -1e4))
@pytest.mark.parametrize("n", (1, 7, 33, 130))
def test_large_scores(every_isa, size, n):
    """Exact scores around ±1e4, some more than 88 apart; softmax depends on their differences alone."""
    q = torch.ones(n, 1, 2)
    k = torch.stack((torch.full((n,), size), (torch.arange(n) * 37 % 200).float()), -1).unsqueeze(1)
    v, dout = randn(n, 1, 2, seed=1), randn(n, 1, 2, seed=2)
    actual = everything(q, k, v, dout, (n,), scale=1.0)
    expected = truth(q, k, v, dout, (n,), scale=1.0)
    assert (actual["out"] - expected["out"]).abs().max() < 1e-6
    assert (actual["probs"] - expected["probs"]).abs().max() < 1e-6
    assert (actual["lse"] - expected["lse"]).abs().max() <= 2**-11  # half a step at 1e4
    # the rounding of dS times a k of 1e4, or a sum over n of them times a q of 1; dv = Pᵀ dout
    for name, allowed in (("dq", 5e-7 * abs(size)), ("dk", 4e-6 * n**0.5), ("dv", 4e-6)):
        assert (actual[name] - expected[name]).abs().max() <= allowed, name


def test_lse_of_equal_scores(every_isa):
    q, k = torch.zeros(131, 1, 16), randn(131, 1, 16)
    for n in range(1, 131):
        lse = forward(q[:n], k[:n], k[:n], (n,))[1]
        expected = torch.tensor(math.log(n), dtype=torch.float64).float()
        assert ((lse - expected).abs() <= 2**-24 * 2 * expected).all(), n
        shifted = forward(q[:n], k[:n], k[:n], (n,), bias=torch.full((1, 1, 1, 1), 4096.0))[1]
        assert torch.equal(shifted, torch.full((1, n), 4096.0 + expected.item())), n


def test_exponential_is_within_one_ulp(every_isa):
    function = getattr(ctypes.CDLL(str(cpu_build.exponential())), f"exponential_{every_isa}")

    def exponential(x):
        y = torch.empty_like(x)
        function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
        return y

    # every 499th float32 of [-0.0, -104], and a grid over what rounds to a subnormal or to zero
    first, last = 0x80000000, 0xC2D00000
    bits = torch.arange(first - 2**32, last - 2**32 + 1, 499)
    x = torch.cat((bits.to(torch.int32).view(torch.float32), torch.linspace(-104, -86, 100_001)))
    true = x.double().exp()
    ulp = torch.exp2(torch.floor(torch.log2(true)).clamp_min(-126.0) - 23)
    error = (exponential(x).double() - true).abs() / ulp
    assert error.max() <= 1.0, f"{error.max().item()} ulp at {x[error.argmax()].item()}"
    edges = torch.tensor([0.0, -0.0, -math.inf, -104.0, -1e30, math.nan] * 7)  # whole vectors, and a tail
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, math.nan] * 7)
    assert torch.equal(exponential(edges).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_nearly_all_outputs_are_correctly_rounded(every_isa, dtype):
    q, k, v = (randn(300, 2, 64, dtype=dtype, seed=s) for s in range(3))
    out = forward(q, k, v, (128, 172))[0]
    expected = attention_ref(*(t.double() for t in (q, k, v)), ends_of((128, 172)), 172)[0]
    right = (out == expected.to(dtype)).double().mean()
    if not rounds_products(dtype):
        assert right >= 0.998
        return
    plain = []  # eager PyTorch, with scores and P rounded
    for rows in (slice(0, 128), slice(128, 300)):
        qs, ks, vs = (t[rows].transpose(0, 1) for t in (q, k, v))
        scores = qs @ ks.transpose(1, 2) * 64**-0.5
        plain.append((scores.softmax(-1, dtype=torch.float32).to(dtype) @ vs).transpose(0, 1))
    eager = (torch.cat(plain) == expected.to(dtype)).double().mean()
    assert right >= max(0.58, 1.1 * eager), (right, eager)


def test_what_is_not_for_bf16_pairs_is_what_avx512_gives():
    """AVX-512-BF16 has kernels only for bf16, and not for very short sequences."""
    for dtype, lengths, same in (
        (torch.float32, (5, 70, 0, 33), True),
        (torch.float16, (5, 70, 0, 33), True),
        (torch.bfloat16, (5, 1, 0, FEW - 1), True),
        (torch.bfloat16, (FEW,), False),
    ):
        (q, k, v), _ = strided_qkv(sum(lengths), 2, 20, dtype, 0)
        dout = randn(sum(lengths), 2, 20, dtype=dtype, seed=9)
        call = partial(everything, q, k, v, dout, lengths, p=0.25)
        wide, pairs = on_each_isa(call, "avx512", "avx512_bf16")
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(wide[name], pairs[name]) == same, (name, dtype, lengths)


@pytest.mark.parametrize("n", (1, 2, 16, 64, 128))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_integers_are_exact(every_isa, dtype, n):
    """Equal scores over 2^m keys: every P is 2^-m, so sums of integers are rounded once, at the end."""

    def integers(seed):
        return torch.randint(-4, 5, (n, 2, 24), generator=torch.Generator().manual_seed(seed))

    q, k, v, dout = torch.zeros(n, 2, 24), integers(1), integers(2), integers(3)
    actual = everything(*(t.to(dtype) for t in (q, k, v, dout)), (n,), scale=0.5)
    expected = truth(q, k, v, dout, (n,), scale=0.5)
    for name in ("out", "dv"):
        assert torch.equal(actual[name], expected[name].to(dtype)), name


def test_subnormal_elements(every_isa):
    """vdpbf16ps reads them as 0; the other kernels keep them."""
    n, tiny = 16, 2.0**-130
    q, k = torch.zeros(n, 1, 16, dtype=torch.bfloat16), randn(n, 1, 16, dtype=torch.bfloat16)
    v = torch.full((n, 1, 16), tiny, dtype=torch.bfloat16)
    out, lse, _ = forward(q, k, v, (n,))
    assert torch.equal(out, torch.zeros_like(v) if every_isa == "avx512_bf16" else v)
    dv = backward(v, q, k, k, out, lse, (n,))[2]
    assert torch.equal(dv, torch.zeros_like(v) if every_isa == "avx512_bf16" else v)
    assert torch.equal(lse, torch.full((1, n), math.log(n)))
