"""The C++ attention: every instruction set, dtype, odd length and stride, against float64 in plain torch."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from fastbert import testing
from fastbert.backends import cpu
from fastbert.ops.attention import attention_ref, keep_mask
from fastbert.ops.dropout import philox_keep
from fastbert.runtime import native as _native
from fastbert.testing import serving
from fastbert.testing.op_cases.attention import CASES
from tests.support import cpu_build

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
SEED = torch.tensor([-0x123456789ABCDEF])
OFFSET = 2**32 - 7
FEW = 16  # tokens, below which AVX-512-BF16 leaves a sequence to the kernels for AVX-512
_C = _native.extension

pytest_plugins = ("tests.support.cpu_fixtures",)
pytestmark = pytest.mark.skipif(_C is None, reason=str(_native.missing))


@pytest.fixture
def isa(every_isa):
    """Each instruction set in turn. AVX-512-BF16 has kernels of its own for bf16; fp32 and fp16 must not show
    that it is in use.
    """
    return every_isa


def rounds_products(dtype) -> bool:
    """Whether P and dS are rounded to bf16 before their product."""
    return dtype == torch.bfloat16 and _C.cpu_isa() == "avx512_bf16"


def own_dtype() -> torch.dtype:
    """The storage type of the kernels that the instruction set in use has for itself."""
    return torch.bfloat16 if _C.cpu_isa() == "avx512_bf16" else torch.float32


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends(lengths) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def strided_qkv(total, nheads, headdim, dtype, capacity, gaps=(3, 5)):
    """q, k, v as views of one tensor, and the memory it lies in.

    A row is longer than its heads, a head longer than its elements; all between, and every row from `total`
    on, is NaN.
    """
    head_gap, row_gap = gaps
    row = 3 * nheads * (headdim + head_gap) + row_gap
    memory = torch.full(((total + capacity) * row + 64,), float("nan"), dtype=dtype)
    rows = memory[32:-32].view(total + capacity, row)[:, : row - row_gap]
    views = rows.unflatten(1, (3, nheads, headdim + head_gap))[..., :headdim].unbind(1)
    for seed, view in enumerate(views):
        view[:total] = randn(total, nheads, headdim, seed=seed + 1)
    return views, memory


def forward(q, k, v, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0, probs=False):
    """The backend itself: out, lse, probs."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return cpu.attention_fwd(
        q, k, v, ends(lengths), max(lengths, default=0) + slack, scale, causal, bias, gate, p,
        SEED if p else None, OFFSET, probs, False,
    )[:3]  # fmt: skip


def backward(
    dout, q, k, v, out, lse, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0,
    needs=(True, True, True), keep_bits=None,
):  # fmt: skip
    """The backend itself: dq, dk, dv, dbias, dgate."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return cpu.attention_bwd(
        dout, q, k, v, out, lse, ends(lengths), max(lengths, default=0) + slack, scale, causal, bias, gate, p,
        SEED if p else None, OFFSET, keep_bits, *needs, bias is not None, gate is not None,
    )  # fmt: skip


def everything(q, k, v, dout, lengths, **options):
    """All that the backend gives, by name."""
    out, lse, probs = forward(q, k, v, lengths, **options, probs=True)
    again, again_lse, none = forward(q, k, v, lengths, **options)
    for a, b in ((again, out), (again_lse, lse)):
        assert torch.equal(a.nan_to_num(nan=7e3), b.nan_to_num(nan=7e3)), "probs change the result"
    assert none.shape == (0,)
    grads = backward(dout, q, k, v, out, lse, lengths, **options)
    return dict(
        zip(
            ("out", "lse", "probs", "dq", "dk", "dv", "dbias", "dgate"),
            (out, lse, probs, *grads),
            strict=True,
        )
    )


def truth(q, k, v, dout, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0):
    """The same in float64; what lies past the sequences, and unread cells of the bias, count as 0."""
    total = sum(lengths)
    size = max(lengths, default=0) + slack
    leaves = [t.detach().double() for t in (q, k, v)]
    for t in leaves:
        t[total:] = 0
    bias = None if bias is None else bias.double().nan_to_num(nan=0.0, neginf=-math.inf)
    gate = None if gate is None else gate.double()
    wanted = [t.requires_grad_() for t in (*leaves, bias, gate) if t is not None]
    keep = keep_mask(SEED, OFFSET, ends(lengths)[:-1], q.shape[1], size, p) if p else None
    out, lse, probs = attention_ref(*leaves, ends(lengths), size, scale, causal, bias, gate, p, keep)
    upstream = dout.double().nan_to_num()
    upstream[total:] = 0
    grads = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, upstream), strict=True))
    named = zip(("dq", "dk", "dv", "dbias", "dgate"), (*leaves, bias, gate), strict=True)
    return {
        "out": out.detach(), "lse": lse, "probs": probs.detach(),
        **{name: q.new_empty(0).double() if t is None else grads[id(t)] for name, t in named},
    }  # fmt: skip


def product_rounding(q, k, v, dout, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0):
    """What the roundings to bf16 may add up to in each result: those of exp(S - max) in out, of P in dv, of
    P ∘ (dP - delta) in dq and dk, each times the size of what it is multiplied by.
    """
    total, size, nheads = sum(lengths), max(lengths, default=0) + slack, q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, dout = (t.detach().double().nan_to_num() for t in (q, k, v, dout))
    probs = truth(q, k, v, dout, lengths, slack, scale, causal, bias, None, 0.0)["probs"]
    keep = torch.ones(probs.shape, dtype=torch.bool)
    if p:
        keep = keep_mask(SEED, OFFSET, ends(lengths)[:-1], nheads, size, p)
    gate = torch.ones(nheads) if gate is None else gate
    gate, kept = gate.double().abs().view(-1, 1, 1), 1 / (1 - p)

    def lost(x):  # by rounding; with float32 noise a value may go the other way, at the same loss
        return (x - x.bfloat16().double()).abs()

    bounds = {name: torch.zeros(q.shape, dtype=torch.float64) for name in ("out", "dq", "dk", "dv")}
    for b, (start, n) in enumerate(zip(ends(lengths).tolist(), lengths, strict=False)):
        if n < FEW:
            continue
        rows = slice(start, start + n)
        qs, ks, vs, up = (t[rows].transpose(0, 1) for t in (q, k, v, dout))  # (nheads, n, headdim)
        pr, kp = probs[b, :, :n, :n], keep[b, :, :n, :n]
        top = pr.amax(-1, keepdim=True).clamp_min(1e-300)  # 0 where no key is allowed
        dp = up @ vs.transpose(1, 2) * kp * kept
        ds = lost(pr * (dp - (pr * dp).sum(-1, keepdim=True)))
        for name, bound in (
            ("out", gate * kept * top * (lost(pr / top) * kp) @ vs.abs()),
            ("dv", gate * kept * (lost(pr) * kp).transpose(1, 2) @ up.abs()),
            ("dq", gate * abs(scale) * ds @ ks.abs()),
            ("dk", gate * abs(scale) * ds.transpose(1, 2) @ qs.abs()),
        ):
            bounds[name][rows] = bound.transpose(0, 1)
    assert not any(t[total:].any() for t in bounds.values())
    return bounds


def assert_close(actual, expected, dtype, noise=4e-6, rounded=None):
    """Each result is the true one rounded to its dtype, and noise of float32 sums in units of its largest;
    with `rounded`, what `product_rounding` says besides.
    """
    for name, t in expected.items():
        got = actual[name]
        wide = name in ("lse", "dbias", "dgate")
        assert got.shape == t.shape, name
        assert got.dtype == (torch.float32 if wide else dtype), name
        finite = t.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name}: NaN or infinity"
        assert torch.equal(got[~finite].double(), t[~finite]), name
        if not finite.any():
            continue
        products = rounded[name][finite] if rounded is not None and name in rounded else 0.0
        t, got = t[finite], got[finite].double()
        sums = {"dk": 4, "dv": 2, "dbias": 2, "dgate": 4}.get(name, 1)
        allowed = noise * sums * t.abs().max().clamp_min(1.0) + products
        if not wide and dtype in HALF:
            allowed = allowed + 0.5005 * testing.rounding_step(t.abs() + products, dtype)
        error = (got - t).abs()
        assert (error <= allowed).all(), f"{name}: off by {(error / allowed).max().item():.3g} of what may be"


def check(lengths, nheads, headdim, dtype, capacity=2, noise=4e-6, **options):
    """Forward and backward against float64, on strided inputs between NaNs, which stay as they are."""
    total = sum(lengths)
    (q, k, v), memory = strided_qkv(total, nheads, headdim, dtype, capacity)
    dout = randn(total + capacity, nheads, headdim, dtype=dtype, seed=9)
    dout[total:] = math.nan
    before = memory.clone()
    actual = everything(q, k, v, dout, lengths, **options)
    assert torch.equal(memory.view(torch.uint8), before.view(torch.uint8)), "an input was written"
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(actual[name][total:], torch.zeros(capacity, nheads, headdim, dtype=dtype)), name
    assert torch.equal(actual["lse"][:, total:], torch.zeros(nheads, capacity))
    rounded = product_rounding(q, k, v, dout, lengths, **options) if rounds_products(dtype) else None
    assert_close(actual, truth(q, k, v, dout, lengths, **options), dtype, noise, rounded)
    return actual


def some_bias(batch, nheads, size, lengths, dtype=torch.float32, blocked=0.25):
    """(batch, nheads, size, size), a quarter of it -inf, row 1 of the first sequence wholly; NaN where no
    token is.
    """
    bias = randn(batch, nheads, size, size, seed=5)
    holes = torch.rand(bias.shape, generator=torch.Generator().manual_seed(6)) < blocked
    bias = bias.masked_fill(holes, -math.inf)
    if size > 1:
        bias[0, :, 1] = -math.inf
    for b, n in enumerate(lengths):
        bias[b, :, n:], bias[b, :, :, n:] = math.nan, math.nan
    return bias.to(dtype)


def options_of(lengths, nheads, slack=0):
    """Everything at once: the widest path through the kernels."""
    size = max(lengths) + slack
    return dict(
        slack=slack,
        causal=True,
        bias=some_bias(len(lengths), nheads, size, lengths),
        gate=torch.tensor([1.5, -0.5, 0.0, 2.0])[:nheads],
        p=0.25,
        scale=0.3,
    )


# --- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_error_rule(isa, case, dtype):
    rows = testing.run_case(case, "cpu", dtype)
    assert {row.quantity for row in rows} >= {"out", "dqkv" if case.packed_qkv else "dq"}
    assert not [f"{row.quantity}: {row.reason}" for row in rows if not row.passed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_reads_the_bits_that_it_is_given(isa, dtype):
    """Saved ones give the bits that drawn ones give; where there is no key, it does not matter which."""
    lengths = (3, 0, 26, 1, 70, 129)
    (q, k, v), _ = strided_qkv(229, 2, 24, dtype, 2)
    dout, options = randn(231, 2, 24, dtype=dtype, seed=9), options_of(lengths, 2, slack=40)
    scale = options["scale"]
    out, lse, _, bits = cpu.attention_fwd(
        q, k, v, ends(lengths), 169, scale, True, options["bias"], options["gate"], 0.25, SEED, OFFSET,
        False, True,
    )  # fmt: skip
    assert (bits.dtype, tuple(bits.shape)) == (torch.int32, (2, 231, 6))
    drawn = backward(dout, q, k, v, out, lse, lengths, **options)
    noise = torch.randint(-(2**31), 2**31, bits.shape, generator=torch.Generator().manual_seed(1)).int()
    keys = torch.arange(6 * 32)
    start = 0
    for n in lengths:
        row = (keys >= n).unflatten(0, (6, 32)).long() << keys[:32]  # what is past the sequence
        other = torch.where(row.sum(-1) >= 2**31, row.sum(-1) - 2**32, row.sum(-1)).int()
        bits[:, start : start + n] ^= noise[:, start : start + n] & other
        start += n
    bits[:, start:] = noise[:, start:]
    for actual, e in zip(
        backward(dout, q, k, v, out, lse, lengths, **options, keep_bits=bits), drawn, strict=True
    ):
        assert torch.equal(actual.nan_to_num(), e.nan_to_num())
    flipped = backward(dout, q, k, v, out, lse, lengths, **options, keep_bits=~bits)
    assert not any(torch.equal(actual, e) for actual, e in zip(flipped[:3], drawn[:3], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_gradient_alone_has_the_same_bits(isa, dtype):
    lengths = (3, 0, 26, 1, 70)
    (q, k, v), _ = strided_qkv(100, 2, 24, dtype, 2)
    dout, options = randn(102, 2, 24, dtype=dtype, seed=9), options_of(lengths, 2)
    out, lse, _ = forward(q, k, v, lengths, **options)
    args = dout, q, k, v, out, lse, lengths
    every = backward(*args, **options)
    alone = options | {"bias": None, "gate": None}
    few = forward(q, k, v, lengths, **alone)[:2]
    plain = backward(*args[:4], *few, lengths, **alone)
    for needs in itertools.product((True, False), repeat=3):
        for given, expected in ((options, every), (alone, plain)):
            grads = backward(
                *args[:4], *((out, lse) if given is options else few), lengths, **given, needs=needs
            )
            for need, actual, e in zip((*needs, True, True), grads, expected, strict=True):
                assert torch.equal(actual, e) if need else actual.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("headdim", (16, 64))
def test_every_length(isa, dtype, headdim, guarded):
    check(tuple(range(1, 131)), 1, headdim, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("headdim", (16, 64))
def test_full_windows(isa, dtype, headdim, guarded):
    check((511, 512), 1, headdim, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("headdim", (1, 7, 8, 15, 17, 20, 31, 33, 48, 80, 128, 130))
def test_every_head_dimension(isa, dtype, headdim, guarded):
    lengths = (1, 5, 64, 0, 17, 65)
    check(lengths, 2, headdim, dtype)
    check(lengths, 2, headdim, dtype, **options_of(lengths, 2, slack=3))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_every_length_with_every_option(isa, dtype, guarded):
    lengths = tuple(range(1, 131, 3))
    check(lengths, 2, 16, dtype, **options_of(lengths, 2))


@pytest.mark.parametrize("n", (1, 2, 6, 7, 8, 16, 17, 24, 25, 63, 64, 65, 128, 129))
def test_a_sequence_alone_is_as_in_a_batch(isa, n):
    (q, k, v), _ = strided_qkv(n + 131, 2, 20, own_dtype(), 0)
    dout = randn(n + 131, 2, 20, dtype=own_dtype(), seed=9)
    whole = everything(q, k, v, dout, (n, 131))
    alone = everything(q[:n], k[:n], v[:n], dout[:n], (n,))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(alone[name], whole[name][:n]), name
    assert torch.equal(alone["lse"], whole["lse"][:, :n])
    assert torch.equal(alone["probs"][0], whole["probs"][0, :, :n, :n])


@pytest.mark.parametrize("heads", (1, 3, 4))
def test_each_head_is_as_if_alone(isa, heads):
    (q, k, v), _ = strided_qkv(40, heads, 24, own_dtype(), 0)
    dout = randn(40, heads, 24, dtype=own_dtype(), seed=9)
    whole = everything(q, k, v, dout, (33, 7))
    for h in range(heads):
        one = slice(h, h + 1)
        alone = everything(q[:, one], k[:, one], v[:, one], dout[:, one].contiguous(), (33, 7))
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(alone[name], whole[name][:, one]), name
        assert torch.equal(alone["lse"], whole["lse"][one])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_strides_of_q_k_and_v_are_their_own(isa, order, guarded):
    dtype = own_dtype()
    forms = (
        lambda seed: randn(30, 2, 16, dtype=dtype, seed=seed),
        lambda seed: randn(2, 30, 16, dtype=dtype, seed=seed).transpose(0, 1),
        lambda seed: randn(60, 5, 40, dtype=dtype, seed=seed)[::2, 1:4:2, 7:23],
    )
    q, k, v = (forms[i](seed) for seed, i in enumerate(order))
    dout = randn(30, 2, 16, dtype=dtype, seed=9)
    strided = everything(q, k, v, dout, (13, 17))
    plain = everything(*(t.contiguous() for t in (q, k, v)), dout, (13, 17))
    for name, t in plain.items():
        assert torch.equal(strided[name], t), name


def test_offsets_beyond_int32(isa):
    step, dtype = 2**31 // 16 + 64, torch.bfloat16 if isa == "avx512_bf16" else torch.float16
    try:
        storage = torch.empty(16 * step + 1024, dtype=dtype)  # mapped, and touched only where written
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not to be had: {error}")
    plain = [randn(17, 2, 16, dtype=dtype, seed=s) for s in range(3)]
    dout = randn(17, 2, 16, dtype=dtype, seed=9)
    expected = everything(*plain, dout, (1, 16))
    far = [storage.as_strided((17, 2, 16), (step, 16, 1), 64 * i) for i in range(3)]
    for view, t in zip(far, plain, strict=True):
        view.copy_(t)
    for i in range(3):  # one at a time, then all
        for chosen in ((i,), range(3)):
            mixed = [far[j] if j in chosen else plain[j] for j in range(3)]
            for name, t in everything(*mixed, dout, (1, 16)).items():
                assert torch.equal(t, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", (0.0, -0.7, 2.5))
def test_softmax_scale(isa, dtype, scale, guarded):
    check((9, 30), 2, 16, dtype, scale=scale, noise=1e-5)


# --- scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(itertools.product((1, 0), repeat=4)), ids=str)
def test_bias_broadcasts_in_every_way(isa, shape, guarded):
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
def test_bias_of_another_dtype(isa, dtype, guarded):
    lengths = (5, 33)
    bias = some_bias(2, 2, 33, lengths, dtype)
    actual = check(lengths, 2, 16, torch.bfloat16, bias=bias)
    assert actual["dbias"].dtype == torch.float32


def test_bias_as_a_view(isa, guarded):
    bias = randn(2, 2, 66, 99, seed=5)[:, :, ::2, ::3]
    check((5, 33), 2, 16, torch.float32, bias=bias)
    bias = randn(33, 33, 2, seed=5).permute(2, 0, 1).unsqueeze(0)
    check((5, 33), 2, 16, torch.float32, bias=bias)
    check((5, 33), 2, 16, torch.float32, bias=randn(1, 2, 70, 33, seed=5)[:, :, 3:36])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal(isa, dtype, guarded):
    check(tuple(range(1, 131, 2)), 1, 16, dtype, causal=True)


def test_a_causal_row_is_the_last_row_of_its_prefix(isa):
    n = 70
    (q, k, v), _ = strided_qkv(n, 2, 16, own_dtype(), 0)
    out, lse, probs = forward(q, k, v, (n,), causal=True, probs=True)
    for i in range(FEW - 1 if isa == "avx512_bf16" else 0, n):
        some = slice(0, i + 1)
        prefix, prefix_lse, prefix_probs = forward(q[some], k[some], v[some], (i + 1,), probs=True)
        pairs = ((out[i], prefix[i]), (lse[:, i], prefix_lse[:, i]))
        pairs += ((probs[0, :, i, some], prefix_probs[0, :, i]),)
        for a, b in pairs:
            if i < 64 and isa != "avx512_bf16":  # so few keys are summed in another order where all are seen
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
            else:
                assert torch.equal(a, b), i
        assert not probs[0, :, i, i + 1 :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(isa, dtype, guarded):
    for gate in (torch.tensor([0.0, -1.25, 3.0, 1.0]), randn(8, seed=4)[::2], randn(4, seed=4).bfloat16()):
        actual = check((30, 11), 4, 16, dtype, gate=gate)
        if gate[0] == 0:
            assert not any(actual[name][:, 0].any() for name in ("out", "dq", "dk", "dv"))
            assert actual["dgate"][0] != 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 8, 17, 70))
def test_rows_without_an_allowed_key(isa, dtype, n, guarded):
    for dead in ([0], [n - 1], list(range(n))):
        bias = randn(1, 1, n, n, seed=5)
        bias[:, :, dead] = -math.inf
        for p in (0.0, 0.25):
            got = check((n,), 2, 16, dtype, capacity=0, bias=bias, p=p)
            assert not any(t.any() for t in (got["out"][dead], got["dq"][dead], got["probs"][:, :, dead]))
            assert not got["dbias"][:, :, dead].any()
            assert (got["lse"][:, dead] == -math.inf).all()


def test_nan_is_not_taken_for_an_empty_row(isa):
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
def test_large_scores(isa, size, n):
    """Exact scores around ±1e4, some of them more than 88 apart; softmax sees only their differences."""
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


def test_lse_of_equal_scores(isa):
    q, k = torch.zeros(131, 1, 16), randn(131, 1, 16)
    for n in range(1, 131):
        lse = forward(q[:n], k[:n], k[:n], (n,))[1]
        expected = torch.tensor(math.log(n), dtype=torch.float64).float()
        assert ((lse - expected).abs() <= 2**-24 * 2 * expected).all(), n
        shifted = forward(q[:n], k[:n], k[:n], (n,), bias=torch.full((1, 1, 1, 1), 4096.0))[1]
        assert torch.equal(shifted, torch.full((1, n), 4096.0 + expected.item())), n


def test_exponential_is_within_one_ulp(isa):
    function = getattr(ctypes.CDLL(str(cpu_build.exponential())), f"exponential_{isa}")

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
def test_nearly_all_outputs_are_correctly_rounded(isa, dtype):
    q, k, v = (randn(300, 2, 64, dtype=dtype, seed=s) for s in range(3))
    out = forward(q, k, v, (128, 172))[0]
    expected = attention_ref(*(t.double() for t in (q, k, v)), ends((128, 172)), 172)[0]
    right = (out == expected.to(dtype)).double().mean()
    if not rounds_products(dtype):
        assert right >= 0.998
        return
    plain = []  # eager, as users write it: scores and P rounded
    for rows in (slice(0, 128), slice(128, 300)):
        qs, ks, vs = (t[rows].transpose(0, 1) for t in (q, k, v))
        scores = qs @ ks.transpose(1, 2) * 64**-0.5
        plain.append((scores.softmax(-1, dtype=torch.float32).to(dtype) @ vs).transpose(0, 1))
    eager = (torch.cat(plain) == expected.to(dtype)).double().mean()
    assert right >= max(0.58, 1.1 * eager), (right, eager)


def test_what_is_not_for_bf16_pairs_is_what_avx512_gives():
    """AVX-512-BF16 has kernels for bf16 alone, and for sequences that are not very short."""
    if _C.best_cpu_isa() != "avx512_bf16":
        pytest.skip("this processor has no avx512_bf16")
    before = _C.cpu_isa()
    for dtype, lengths, same in (
        (torch.float32, (5, 70, 0, 33), True),
        (torch.float16, (5, 70, 0, 33), True),
        (torch.bfloat16, (5, 1, 0, FEW - 1), True),
        (torch.bfloat16, (FEW,), False),
    ):
        (q, k, v), _ = strided_qkv(sum(lengths), 2, 20, dtype, 0)
        dout = randn(sum(lengths), 2, 20, dtype=dtype, seed=9)
        results = []
        for name in ("avx512", "avx512_bf16"):
            _C.set_cpu_isa(name)
            results.append(everything(q, k, v, dout, lengths, p=0.25))
        _C.set_cpu_isa(before)
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(results[0][name], results[1][name]) == same, (name, dtype, lengths)


@pytest.mark.parametrize("n", (1, 2, 16, 64, 128))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_integers_are_exact(isa, dtype, n):
    """Equal scores over 2^m keys: every P is 2^-m, and integers times it are rounded once, at the end."""

    def integers(seed):
        return torch.randint(-4, 5, (n, 2, 24), generator=torch.Generator().manual_seed(seed))

    q, k, v, dout = torch.zeros(n, 2, 24), integers(1), integers(2), integers(3)
    actual = everything(*(t.to(dtype) for t in (q, k, v, dout)), (n,), scale=0.5)
    expected = truth(q, k, v, dout, (n,), scale=0.5)
    for name in ("out", "dv"):
        assert torch.equal(actual[name], expected[name].to(dtype)), name


def test_subnormal_elements(isa):
    """vdpbf16ps takes them for 0; the other kernels keep them."""
    n, tiny = 16, 2.0**-130
    q, k = torch.zeros(n, 1, 16, dtype=torch.bfloat16), randn(n, 1, 16, dtype=torch.bfloat16)
    v = torch.full((n, 1, 16), tiny, dtype=torch.bfloat16)
    out, lse, _ = forward(q, k, v, (n,))
    assert torch.equal(out, torch.zeros_like(v) if isa == "avx512_bf16" else v)
    dv = backward(v, q, k, k, out, lse, (n,))[2]
    assert torch.equal(dv, torch.zeros_like(v) if isa == "avx512_bf16" else v)
    assert torch.equal(lse, torch.full((1, n), math.log(n)))


# --- dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (0.1, 0.9))
@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64))
def test_dropout_bits(isa, seed, p):
    """Equal scores and unit vectors for v and dout: out and dv show every bit, of columns up to 150."""
    n, nheads, lengths = 150, 2, (3, 150, 70)
    seed = torch.tensor([seed])
    dtype = own_dtype()
    q = torch.zeros(sum(lengths), nheads, n, dtype=dtype)
    unit = torch.cat([torch.eye(n, dtype=dtype)[:length] for length in lengths])
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-7, "atol": 0}
    unit = unit.unsqueeze(1).expand(-1, nheads, -1).contiguous()
    for offset in (0, 2**32 - 1):
        args = (ends(lengths), n, 1.0, False, None, None, p, seed, offset)
        out, lse, _, bits = cpu.attention_fwd(q, q, unit, *args, False, True)
        needs = (False, False, True, False, False)
        dv = cpu.attention_bwd(unit, q, q, unit, out, lse, *args, None, *needs)[2]
        start = 0
        for length in lengths:
            rows = torch.arange(start, start + length).unsqueeze(1)
            cells = slice(start, start + length)
            for head in range(nheads):
                keep = philox_keep(seed, offset, head, rows, torch.arange(length), p)
                dropped = out[cells, head, :length].float()
                assert torch.equal(dropped != 0, keep)
                columns = torch.arange(length)
                saved = bits[head, cells, columns // 32] >> (columns % 32) & 1
                assert torch.equal(saved.bool(), keep)
                assert torch.equal(dv[cells, head, :length].t() != 0, keep)
                assert torch.allclose(dropped, keep / (length * (1 - p)), **near)
                assert torch.allclose(dv[cells, head, :length].t().float(), dropped, **near)
                assert not out[cells, head, length:].any()
            start += length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 31, 64, 65, 130))
def test_dropout(isa, dtype, n, guarded):
    check((5, n), 3, 16, dtype, p=0.3)
    check((5, n), 3, 16, dtype, p=0.5, gate=torch.tensor([2.0, -1.0, 0.5]), bias=randn(1, 3, 1, n, seed=5))


def test_dropped_values_are_zero_whatever_they_were(isa):
    """A NaN in one column of dP reaches dS only where the bit keeps it (delta then carries it to its row)."""
    n = 40
    q, k, v, dout = (randn(n, 1, 16, dtype=own_dtype(), seed=s) for s in range(4))
    out, lse, _ = forward(q, k, v, (n,), p=0.5)
    v[11] = math.nan
    dq = backward(dout, q, k, v, out, lse, (n,), p=0.5)[0]
    keep = philox_keep(SEED, OFFSET, 0, torch.arange(n), torch.tensor(11), 0.5)
    assert torch.equal(dq[:, 0].isnan().any(-1), keep)


def test_a_vanishing_dropout_p_is_no_dropout(isa):
    q, k, v = (randn(70, 2, 16, dtype=own_dtype(), seed=s) for s in range(3))
    assert torch.equal(forward(q, k, v, (70,), p=1e-60)[0], forward(q, k, v, (70,))[0])


@pytest.mark.parametrize("scale", (1.0, 300.0))
@pytest.mark.parametrize("n", (3, 20, 64))
def test_few_keys_give_what_many_do(isa, n, scale):
    """Up to 64 keys a vector holds many queries; a bias of zeros leaves them to the general way."""
    q, k, v = (randn(n, 2, 16, dtype=own_dtype(), seed=s) for s in range(3))
    q = q * scale  # the largest score of a row far above the others, in any place
    few, many = (
        forward(q, k, v, (n,), probs=True),
        forward(q, k, v, (n,), bias=torch.zeros(1, 1, 1, 1), probs=True),
    )
    for a, b in zip(few, many, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(
            a.float(), b.float(), rtol=1e-5 if a.dtype == torch.float32 else 1e-2, atol=1e-6
        )


def test_few_keys_whose_scores_are_all_minus_infinite(isa):
    """Of one query alone: the others' rows are as without it."""
    q, k, v = (randn(20, 1, 16, dtype=torch.float32, seed=s) for s in range(3))
    k[:, :, 0] = 1.0 + k[:, :, 0].abs()
    rows = torch.arange(20) != 7
    expected = forward(q, k, v, (20,))[0]
    q[7], q[7, :, 0] = 0.0, -3e38
    out, lse, _ = forward(q, k * torch.tensor([4.0] + 15 * [1.0]), v, (20,))
    assert lse[0, 7] == -math.inf
    assert not out[7].any()
    assert out[rows].isfinite().all()
    assert expected.isfinite().all()


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", ((), (0,), (0, 0, 0), (0, 1, 0), (0, 7, 0, 0, 2)), ids=str)
@pytest.mark.parametrize("capacity", (0, 4))
def test_empty_sequences(isa, lengths, capacity, guarded):
    for slack in (0, 3):
        check(lengths, 2, 16, torch.float32, capacity=capacity, slack=slack)
        size = max(lengths, default=0) + slack
        bias = randn(len(lengths), 1, 1, size, seed=5)
        check(lengths, 2, 16, torch.bfloat16, capacity, slack=slack, bias=bias, gate=torch.ones(2), p=0.1)


def test_many_sequences(isa, guarded):
    lengths = tuple(1 + i % 3 for i in range(10_000))
    check(lengths, 1, 4, torch.float32, gate=torch.ones(1), noise=1e-5)


# --- determinism, threads, processes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "nheads"),
    (((119,), 1), ((120,), 1), ((121,), 2), ((240, 241, 7), 1), ((500,), 1), ((9,) * 40, 2)),
    ids=str,
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, lengths, nheads, dtype, threads):
    """Where there are few sequences and heads, threads share one sequence's queries."""
    assert _C.has_team(), "PyTorch's OpenMP pool was not found: the kernels would never run in parallel"
    total = sum(lengths)
    (q, k, v), _ = strided_qkv(total, nheads, 20, dtype, 0)
    dout = randn(total, nheads, 20, dtype=dtype, seed=9)
    for options in ({}, options_of(lengths, nheads)):
        first = None
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            result = everything(q, k, v, dout, lengths, **options)
            first = first or result
            for name, t in first.items():
                assert torch.equal(result[name], t), (name, count)


def test_one_long_sequence_is_right_on_three_threads(isa, threads, guarded):
    torch.set_num_threads(3)
    check((131,), 1, 16, torch.float32)
    check((250, 3), 1, 16, torch.bfloat16, **options_of((250, 3), 1))


def test_100_repeats_give_the_same_bits(isa, threads):
    torch.set_num_threads(2)
    lengths = (20, 7, 33, 130)
    (q, k, v), _ = strided_qkv(sum(lengths), 3, 16, own_dtype(), 0)
    dout = randn(sum(lengths), 3, 16, dtype=own_dtype(), seed=9)
    options = options_of(lengths, 3)
    first = None
    for _ in range(100):
        out, lse, probs = forward(q, k, v, lengths, probs=True, **options)
        result = (out, lse, probs, *backward(dout, q, k, v, out, lse, lengths, **options))
        first = first or result
        assert all(torch.equal(a, b) for a, b in zip(first, result, strict=True))


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, text=True, capture_output=True,
        timeout=120,
    )  # fmt: skip


def test_isa_none_leaves_attention_to_another_backend():
    run = python(
        "import torch\n"
        "from fastbert.backends import cpu\n"
        "from fastbert.ops.attention import attention\n"
        "from fastbert.testing import serving\n"
        "q = torch.randn(1, 3, 1, 8)\n"
        "assert attention(q, q, q).shape == q.shape\n"
        "row = next(r for r in serving.choices('cpu') if r.op == 'attention' and r.dtype == 'float32')\n"
        "print(row.backend, row.why, sep='|')\n"
        "try:\n"
        "    cu = torch.tensor([0, 3], dtype=torch.int32)\n"
        "    cpu.attention_fwd(q[0], q[0], q[0], cu, 3, 1.0, False, None, None, 0.0, None, 0, False, False)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n",
        FASTBERT_ISA="none",
    )
    assert run.returncode == 0, run.stderr
    chosen, error = run.stdout.strip().splitlines()
    assert chosen == "aten|cpu: switched off by FASTBERT_ISA=none"
    assert error.startswith("no SIMD kernels: FASTBERT_ISA=none")


def test_the_fastest_backend_of_this_processor_serves():

    row = next(r for r in serving.choices("cpu") if r.op == "attention" and r.dtype == "bfloat16")
    assert (row.backend == "cpu") == (_C.cpu_isa() != "none"), row.why


# --- the sources under sanitizers -------------------------------------------------------------------------


def run_sanitized(sanitizers):
    if _C.best_cpu_isa() == "none":
        pytest.skip("this processor has no AVX2")
    driver = cpu_build.sanitized("attention", sanitizers)
    run = subprocess.run([str(driver)], text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split()[0]) > 500, run.stdout


def test_kernels_under_address_and_undefined_sanitizers():
    run_sanitized("address,undefined")


@pytest.mark.slow
def test_kernels_under_the_thread_sanitizer():
    run_sanitized("thread")
