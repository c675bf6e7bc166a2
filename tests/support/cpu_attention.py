"""Inputs of the C++ attention, its exact results, and how near each instruction set must be."""

from __future__ import annotations

import math

import torch

from fastbert import testing
from fastbert.backends import cpu
from fastbert.ops.attention import AttentionInputs, attention_ref
from fastbert.ops.attention_checks import checked_window
from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_inputs import AttentionNeeds
from fastbert.runtime import loader
from tests.support.cpu_truth import randn
from tests.support.inputs import ends_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
SEED = torch.tensor([-0x123456789ABCDEF])
OFFSET = 2**32 - 7
FEW = 16  # tokens, below which AVX-512-BF16 leaves a sequence to the kernels for AVX-512
_C = loader.extension


def rounds_products(dtype) -> bool:
    """Whether P and dS are rounded to bf16 before their product."""
    return dtype == torch.bfloat16 and _C.cpu_isa() == "avx512_bf16"


def own_dtype() -> torch.dtype:
    """The dtype for which the instruction set in use has kernels of its own."""
    return torch.bfloat16 if _C.cpu_isa() == "avx512_bf16" else torch.float32


def strided_qkv(total, nheads, headdim, dtype, capacity, gaps=(3, 5)):
    """q, k, v as views of one tensor, and the memory it lies in.

    There are gaps behind each row and each head. The gaps, and every row from `total` on, are NaN.
    """
    head_gap, row_gap = gaps
    row = 3 * nheads * (headdim + head_gap) + row_gap
    memory = torch.full(((total + capacity) * row + 64,), float("nan"), dtype=dtype)
    rows = memory[32:-32].view(total + capacity, row)[:, : row - row_gap]
    views = rows.unflatten(1, (3, nheads, headdim + head_gap))[..., :headdim].unbind(1)
    for seed, view in enumerate(views):
        view[:total] = randn(total, nheads, headdim, seed=seed + 1)
    return views, memory


def inputs_of(
    q, k, v, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0, window=None
) -> AttentionInputs:
    """The operands of the op."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    longest, seed = max(lengths, default=0) + slack, SEED if p else None
    window = checked_window(causal, window)
    return AttentionInputs(q, k, v, ends_of(lengths), longest, scale, window, bias, gate, p, seed, OFFSET)


def forward(q, k, v, lengths, probs=False, **options):
    """Call the backend itself: out, lse, probs."""
    return cpu.attention_fwd(inputs_of(q, k, v, lengths, **options), probs, False)[:3]


def backward(dout, q, k, v, out, lse, lengths, needs=(True, True, True), keep_bits=None, **options):
    """Call the backend itself: dq, dk, dv, dbias, dgate."""
    inputs = inputs_of(q, k, v, lengths, **options)
    need = AttentionNeeds(*needs, inputs.bias is not None, inputs.gate is not None)
    return cpu.attention_bwd(dout, inputs, out, lse, keep_bits, need)


def everything(q, k, v, dout, lengths, **options):
    """All results of the backend, by name."""
    out, lse, probs = forward(q, k, v, lengths, **options, probs=True)
    again, again_lse, none = forward(q, k, v, lengths, **options)
    for a, b in ((again, out), (again_lse, lse)):
        assert torch.equal(a.nan_to_num(nan=7e3), b.nan_to_num(nan=7e3)), "probs change the result"
    assert none.shape == (0,)
    grads = backward(dout, q, k, v, out, lse, lengths, **options)
    names = "out", "lse", "probs", "dq", "dk", "dv", "dbias", "dgate"
    return dict(zip(names, (out, lse, probs, *grads), strict=True))


def truth(
    q, k, v, dout, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0, window=None
):
    """The same in float64. Rows past the sequences and unread cells of the bias count as 0."""
    total = sum(lengths)
    size = max(lengths, default=0) + slack
    leaves = [t.detach().double() for t in (q, k, v)]
    for t in leaves:
        t[total:] = 0
    bias = None if bias is None else bias.double().nan_to_num(nan=0.0, neginf=-math.inf)
    gate = None if gate is None else gate.double()
    wanted = [t.requires_grad_() for t in (*leaves, bias, gate) if t is not None]
    keep = keep_mask(SEED, OFFSET, ends_of(lengths)[:-1], q.shape[1], size, p) if p else None
    packed = ends_of(lengths), size, scale, causal
    out, lse, probs = attention_ref(*leaves, *packed, bias, gate, p, keep, window)
    upstream = dout.double().nan_to_num()
    upstream[total:] = 0
    grads = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, upstream), strict=True))
    named = zip(("dq", "dk", "dv", "dbias", "dgate"), (*leaves, bias, gate), strict=True)
    return {
        "out": out.detach(),
        "lse": lse,
        "probs": probs.detach(),
        **{name: q.new_empty(0).double() if t is None else grads[id(t)] for name, t in named},
    }


def product_rounding(
    q, k, v, dout, lengths, slack=0, scale=None, causal=False, bias=None, gate=None, p=0.0, window=None
):
    """Bounds on what rounding to bf16 adds to each result.

    exp(S - max) is rounded for out, P for dv, and P ∘ (dP - delta) for dq and dk. Each bound is the rounding
    error times the size of the other factor.
    """
    total, size, nheads = sum(lengths), max(lengths, default=0) + slack, q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, dout = (t.detach().double().nan_to_num() for t in (q, k, v, dout))
    shared = nheads // k.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    probs = truth(q, k, v, dout, lengths, slack, scale, causal, bias, None, 0.0, window)["probs"]
    keep = torch.ones(probs.shape, dtype=torch.bool)
    if p:
        keep = keep_mask(SEED, OFFSET, ends_of(lengths)[:-1], nheads, size, p)
    gate = torch.ones(nheads) if gate is None else gate
    gate, kept = gate.double().abs().view(-1, 1, 1), 1 / (1 - p)

    def lost(x):  # by rounding; with float32 noise a value may go the other way, at the same loss
        return (x - x.bfloat16().double()).abs()

    bounds = {name: torch.zeros(q.shape, dtype=torch.float64) for name in ("out", "dq", "dk", "dv")}
    for b, (start, n) in enumerate(zip(ends_of(lengths).tolist(), lengths, strict=False)):
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
    return bounds | {name: bounds[name].unflatten(1, (-1, shared)).sum(2) for name in ("dk", "dv")}


def assert_close(actual, expected, dtype, noise=4e-6, rounded=None):
    """Each result is the true one, rounded to its dtype.

    Float32 sums may add `noise` times the largest value, and `rounded` what `product_rounding` allows.
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


def check(lengths, nheads, headdim, dtype, capacity=2, noise=4e-6, kv_heads=None, **options):
    """Forward and backward against float64, on strided inputs between NaNs; no input changes."""
    total = sum(lengths)
    (q, k, v), memory = strided_qkv(total, nheads, headdim, dtype, capacity)
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    dout = randn(total + capacity, nheads, headdim, dtype=dtype, seed=9)
    dout[total:] = math.nan
    before = memory.clone()
    actual = everything(q, k, v, dout, lengths, **options)
    assert torch.equal(memory.view(torch.uint8), before.view(torch.uint8)), "an input was written"
    for name in ("out", "dq", "dk", "dv"):
        assert actual[name].shape[0] == total + capacity
        assert not actual[name][total:].any(), name
    assert torch.equal(actual["lse"][:, total:], torch.zeros(nheads, capacity))
    rounded = product_rounding(q, k, v, dout, lengths, **options) if rounds_products(dtype) else None
    assert_close(actual, truth(q, k, v, dout, lengths, **options), dtype, noise, rounded)
    return actual


def some_bias(batch, nheads, size, lengths, dtype=torch.float32, blocked=0.25):
    """A bias (batch, nheads, size, size): -inf in a quarter of the cells, and in row 1 of the first sequence.

    Cells without a token are NaN.
    """
    bias = randn(batch, nheads, size, size, seed=5)
    holes = torch.rand(bias.shape, generator=torch.Generator().manual_seed(6)) < blocked
    bias = bias.masked_fill(holes, -math.inf)
    if size > 1:
        bias[0, :, 1] = -math.inf
    for b, n in enumerate(lengths):
        bias[b, :, n:], bias[b, :, :, n:] = math.nan, math.nan
    return bias.to(dtype)
