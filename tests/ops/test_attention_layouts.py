"""Layouts, lengths and masks of `attention`: each known bug of such kernels as a test."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fastbert import testing
from fastbert.backends import aten
from fastbert.ops.attention import attention, attention_ref
from fastbert.ops.attention_grid import from_grid, keep_mask, to_grid
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import AttentionCase
from tests.support.attention_inputs import DOUBLE, DTYPES, PLAIN, assert_near, grads_of, qkv, serving
from tests.support.inputs import ends_of
from tests.support.ops import assert_equal


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_equals_packed_and_sdpa(backend, dtype):
    q, k, v = (t.reshape(3, 5, 2, 8) for t in qkv(15, 2, 8, DTYPES[dtype]))
    bias = torch.randn(3, 1, 1, 5)
    with serving(backend):
        out, lse, probs = attention(q, k, v, bias=bias, return_lse=True, return_probs=True)
        with torch.no_grad():
            plain = attention(q, k, v, bias=bias)
            packed, packed_lse = attention(
                *(t.reshape(15, 2, 8) for t in (q, k, v)), ends_of([5, 5, 5]), 5, bias=bias, return_lse=True
            )
    assert torch.equal(plain.reshape(15, 2, 8), packed)
    assert out.shape == q.shape
    assert lse.shape == (3, 2, 5)
    assert probs.shape == (3, 2, 5, 5)
    assert torch.allclose(lse.transpose(0, 1).reshape(2, 15), packed_lse, rtol=0, atol=1e-5)
    sdpa = F.scaled_dot_product_attention(
        *(t.double().transpose(1, 2) for t in (q, k, v)), attn_mask=bias.double()
    )
    assert (plain - sdpa.transpose(1, 2)).abs().max() < 4 * torch.finfo(DTYPES[dtype]).eps * sdpa.abs().max()


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize(
    "lengths", [[0, 7, 0], [0, 0, 0, 1], [0, 1, 0, 1], [1], [1, 1, 1], [0], [0, 0], [], [3, 0, 0, 3]], ids=str
)
@pytest.mark.parametrize("capacity", [0, 3])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_zero_lengths(backend, lengths, capacity, options):
    longest, total = max(lengths, default=0), sum(lengths)
    inputs = qkv(total + capacity)
    bias = gate = None
    dropout = {}
    if options == "all":
        bias = torch.randn(len(lengths), 2, longest, longest, requires_grad=True)
        gate = torch.rand(2, requires_grad=True)
        dropout = {"dropout_p": 0.5, "seed": torch.tensor([2])}
    with serving(backend):
        out, lse = attention(
            *inputs,
            ends_of(lengths),
            longest,
            bias=bias,
            gate=gate,
            return_lse=True,
            causal=options == "all",
            **dropout,
        )
        wanted = [t for t in (*inputs, bias, gate) if t is not None]
        grads = grads_of(out, wanted)
    assert out.shape == (total + capacity, 2, 8)
    assert lse.shape == (2, total + capacity)
    for t in (out, lse, *grads):
        assert t.isfinite().all()
    keep = keep_mask(torch.tensor([2]), 0, ends_of(lengths)[:-1], 2, longest, 0.5) if dropout else None
    truth, _, _ = attention_ref(
        *inputs,
        ends_of(lengths),
        longest,
        bias=bias,
        gate=gate,
        causal=options == "all",
        dropout_p=0.5 if dropout else 0.0,
        keep_mask=keep,
    )
    for a, e in zip((out, *grads), (truth, *grads_of(truth, wanted)), strict=True):
        assert_near(a, e, 2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_poison_outside_the_sequences_changes_nothing(backend, dtype, options):
    lengths, capacity = (5, 0, 3), 4
    clean = qkv(sum(lengths) + capacity, 2, 16, DTYPES[dtype])
    dout = torch.randn(clean[0].shape).to(DTYPES[dtype])
    bias = torch.randn(3, 2, 7, 7, requires_grad=True)
    real = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    cells = (real.unsqueeze(2) & real.unsqueeze(1)).unsqueeze(1)

    def run(poison):
        inputs, g, b = [t.detach().clone() for t in clean], dout.clone(), bias.detach().clone()
        for t in (*inputs, g):
            t[sum(lengths) :] = poison
        b = torch.where(cells, b, poison).requires_grad_()
        inputs = [t.requires_grad_() for t in inputs]
        extra = {"bias": b, "dropout_p": 0.2, "seed": torch.tensor([1])} if options == "all" else {}
        out, lse = attention(*inputs, ends_of(lengths), 7, return_lse=True, **extra)
        grads = torch.autograd.grad(out, [*inputs, b][: 4 if extra else 3], g)
        with torch.no_grad():
            probs = attention(*inputs, ends_of(lengths), 7, return_probs=True, **extra)[1]
        through = attention(*inputs, ends_of(lengths), 7, return_probs=True, **extra)
        dprobs = torch.ones_like(through[1])
        return [out, lse, *grads, probs, *through, *torch.autograd.grad(through, inputs, (g, dprobs))]

    names = ["out", "lse", "dq", "dk", "dv", *(["dbias"] if options == "all" else []), "probs"]
    with serving(backend):
        expected = run(0.0)
        for poison in (math.nan, math.inf):
            actual = run(poison)
            assert_equal(actual, expected)
        for t in (actual[0], *actual[2:5]):
            assert torch.equal(t[sum(lengths) :], torch.zeros_like(t[sum(lengths) :]))
        assert torch.equal(actual[1][:, sum(lengths) :], torch.zeros(2, capacity))
        outside = (~cells).expand(3, 2, 7, 7)
        assert not actual[names.index("probs")][outside].any()
        if options == "all":
            assert not actual[names.index("dbias")][outside].any()


@pytest.mark.parametrize("backend", PLAIN)
def test_nan_in_one_sequence_stays_there(backend):
    inputs = [t.detach() for t in qkv(12)]
    with serving(backend):
        clean = attention(*inputs, ends_of([4, 5, 3]), 5)
        for t in inputs:
            t[4:9] = math.nan
        out = attention(*inputs, ends_of([4, 5, 3]), 5)
    assert_equal((out[:4], out[9:]), (clean[:4], clean[9:]))
    assert out[4:9].isnan().all()


def _kinds(t):
    """0 for a number, 1 for inf, 2 for -inf, 3 for NaN."""
    return t.isposinf() + 2 * t.isneginf().int() + 3 * t.isnan().int()


# Triton never reads the tiles of keys that a causal mask hides, so there a NaN spreads less
@pytest.mark.parametrize("backend", [b for b in PLAIN if b not in ("reference", "triton")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [5, 40])  # within one vector of keys, and beyond
@pytest.mark.parametrize("options", ["plain", "causal", "bias", "causal_bias"])
def test_numbers_that_are_none_go_where_the_reference_says(backend, dtype, length, options):
    """One NaN or infinity in an input, or a product that overflows, spreads as in the reference."""
    clean = qkv(length, 1, 8, DTYPES[dtype])
    bias = torch.randn(1, 1, length, length, generator=torch.Generator().manual_seed(1))
    dout = torch.randn(clean[0].shape, generator=torch.Generator().manual_seed(2)).to(DTYPES[dtype])
    values = [math.nan, math.inf, -math.inf]
    planted = [*((i, value) for i in ("q", "k", "v") for value in values)]
    planted += [("qk", 6e4 if dtype == "fp16" else 1e30), ("dout", math.nan)]
    planted += [("bias", value) for value in (math.nan, math.inf)] if "bias" in options else []

    def run():
        inputs = [t.detach().clone().requires_grad_() for t in given]
        out, lse = attention(
            *inputs,
            ends_of([length]),
            length,
            causal="causal" in options,
            return_lse=True,
            bias=changed["bias"] if "bias" in options else None,
        )
        return out.detach(), lse, *torch.autograd.grad(out, inputs, changed["dout"])

    for where, value in planted:
        changed = dict(zip(("q", "k", "v", "bias", "dout"), (*clean, bias, dout), strict=True))
        for name in ("q", "k") if where == "qk" else (where,):
            changed[name] = changed[name].detach().clone()
            changed[name][(0, 0, 3, 1) if name == "bias" else (1, 0, 3)] = value
        given = [changed[name] for name in ("q", "k", "v")]
        with serving("reference"):
            expected = run()
        with serving(backend):
            actual = run()
        for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
            found, wanted = _kinds(a), _kinds(e)
            if backend == "cpu" and "causal" in options and name in ("dk", "dv"):
                # the 24 queries of a block add nothing to keys after the block, not 0 · NaN
                wanted[24:][found[24:] == 0] = 0
            assert torch.equal(found, wanted), f"{where} {value}: {name}"


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["rows", "sequence", "everything"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_wholly_masked_rows_are_zero(backend, dtype, what, dropout_p):
    q, k, v = qkv(9, 2, 16, DTYPES[dtype])
    bias = torch.zeros(2, 1, 6, 6)
    bias[{"rows": (0, 0, slice(1, 3)), "sequence": (1,), "everything": ()}[what]] = -math.inf
    bias.requires_grad_()
    dead = {"rows": [1, 2], "sequence": [6, 7, 8], "everything": list(range(9))}[what]
    seed = torch.tensor([1])
    with serving(backend):
        out, lse = attention(
            q, k, v, ends_of([6, 3]), 6, bias=bias, dropout_p=dropout_p, seed=seed, return_lse=True
        )
        grads = grads_of(out, (q, k, v, bias))
        with torch.no_grad():
            probs = attention(
                q, k, v, ends_of([6, 3]), 6, bias=bias, dropout_p=dropout_p, seed=seed, return_probs=True
            )[1]
    assert all(t.isfinite().all() for t in (out, probs, *grads))
    assert torch.equal(out[dead], torch.zeros_like(out[dead]))
    assert torch.equal(grads[0][dead], torch.zeros_like(out[dead]))
    assert (lse[:, dead] == -math.inf).all()
    live = [i for i in range(9) if i not in dead]
    assert lse[:, live].isfinite().all()
    assert (out[live].abs().amax((1, 2)) > 0).all()
    if what == "sequence":
        assert not any(g[dead].any() for g in grads[:3])
        assert not grads[3][1].any()
        assert not probs[1].any()


@pytest.mark.sweep_of("triton")
@pytest.mark.parametrize("backend", PLAIN)
def test_strides_are_respected(backend):
    lengths, total = [5, 7], 14
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    forms = {
        "packed": lambda: randn(total, 3, 2, 8).unbind(1),
        "heads_first": lambda: [t.transpose(0, 1) for t in randn(3, 2, total, 8)],
        "sliced": lambda: [t[::2, 1:3, 4:12] for t in randn(3, 2 * total, 4, 16)],
        "headdim_strided": lambda: [t[..., ::2] for t in randn(3, total, 2, 16)],
        "headdim_first": lambda: [t.permute(2, 1, 0) for t in randn(3, 8, 2, total)],
        "expanded_heads": lambda: [t.expand(total, 2, 8) for t in randn(3, total, 1, 8)],
        "expanded_rows": lambda: [t.expand(total, 2, 8) for t in randn(3, 1, 2, 8)],
    }
    biases = {
        "transposed": randn(2, 2, 7, 7).transpose(-1, -2),
        "heads_last": randn(7, 7, 2).permute(2, 0, 1),
        "expanded": randn(2, 1, 1, 7).expand(2, 2, 7, 7),
        "sliced": randn(2, 2, 14, 21)[:, :, ::2, ::3],
        "queries": randn(2, 1, 7, 1),
    }
    gate = randn(4)[::2]
    with serving(backend):
        for i, (form, make) in enumerate(forms.items()):
            # their strides are independent, and a call takes the interpreter seconds
            every = [*biases.values()]
            for bias in (None, *(every[i % 5 : i % 5 + 1] if backend == "triton" else every)):
                tensors = [t.detach().requires_grad_() for t in make()]
                assert form == "packed" or not tensors[0].is_contiguous()
                results = []
                for copy in (False, True):
                    b = None if bias is None else bias.detach().requires_grad_()
                    used = (*tensors, b) if b is not None else tuple(tensors)
                    given_ = [t.contiguous() if copy else t for t in used]
                    out = attention(
                        *given_[:3],
                        ends_of(lengths),
                        7,
                        bias=given_[3] if b is not None else None,
                        gate=gate.contiguous() if copy else gate,
                    )
                    dout = torch.randn(2, 8, total, generator=torch.Generator().manual_seed(1)).permute(
                        2, 0, 1
                    )
                    grads = torch.autograd.grad(out, used, dout.contiguous() if copy else dout)
                    results.append((out, *grads))
                assert_equal(*results)


def test_views_of_packed_qkv_are_not_copied(noted):
    seen = noted(aten, "attention_fwd", lambda given, *_: [t.data_ptr() for t in (given.q, given.k, given.v)])
    packed, padded = torch.randn(10, 3, 2, 8), torch.randn(2, 5, 3, 2, 8)
    with dispatch.use_backend(attention="aten"), torch.no_grad():
        for tensor, rest in ((packed, (ends_of([4, 6]), 6)), (padded, ())):
            q, k, v = tensor.unbind(-3)
            attention(q, k, v, *rest)
            assert seen.pop() == [q.data_ptr(), k.data_ptr(), v.data_ptr()]


@pytest.mark.sweep
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_lengths_and_masks(data):
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=6), label="lengths")
    nheads, headdim = data.draw(st.sampled_from([(1, 16), (2, 8), (3, 5)]), label="heads")
    longest = max(lengths) + data.draw(st.sampled_from([0, 0, 3]), label="slack")
    total = sum(lengths) + data.draw(st.sampled_from([0, 0, 2]), label="capacity")
    causal = data.draw(st.booleans(), label="causal")
    p = data.draw(st.sampled_from([0.0, 0.0, 0.4]), label="dropout_p")
    seed = data.draw(st.integers(-(2**63), 2**63 - 1), label="seed")
    g = torch.Generator().manual_seed(seed & 0xFFFF)
    inputs = qkv(total, nheads, headdim, torch.float64, seed & 0xFFFF)
    bias = gate = None
    if data.draw(st.booleans(), label="has bias"):
        shape = [data.draw(st.sampled_from([1, full])) for full in (len(lengths), nheads, longest, longest)]
        bias = torch.randn(shape, generator=g, dtype=torch.float64)
        blocked = data.draw(st.sampled_from([0.0, 0.3, 0.9]), label="blocked")
        bias = bias.masked_fill(torch.rand(shape, generator=g) < blocked, -math.inf).requires_grad_()
    if data.draw(st.booleans(), label="has gate"):
        gate = torch.randn(nheads, generator=g, dtype=torch.float64, requires_grad=True)
    wanted = [t for t in (*inputs, bias, gate) if t is not None]
    seed = torch.tensor([seed])
    keep = keep_mask(seed, 3, ends_of(lengths)[:-1], nheads, longest, p) if p else None
    truth, truth_lse, _ = attention_ref(
        *inputs, ends_of(lengths), longest, causal=causal, bias=bias, gate=gate, dropout_p=p, keep_mask=keep
    )
    truths = (truth, *grads_of(truth, wanted))
    for backend in PLAIN:
        dtype, tolerance = (torch.float64, 1e-10) if backend in DOUBLE else (torch.float32, 5e-5)
        given_bias, given_gate = (None if t is None else t.to(dtype) for t in (bias, gate))
        with serving(backend):
            out, lse = attention(
                *(t.to(dtype) for t in inputs),
                ends_of(lengths),
                longest,
                causal=causal,
                bias=given_bias,
                gate=given_gate,
                dropout_p=p,
                seed=seed,
                offset=3,
                return_lse=True,
            )
            assert torch.equal(lse.isneginf(), truth_lse.isneginf())
            assert torch.allclose(lse.double(), truth_lse, rtol=0, atol=tolerance)
            for a, e in zip((out, *grads_of(out, wanted)), truths, strict=True):
                assert torch.allclose(a.double(), e, rtol=0, atol=tolerance)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=0, max_size=6), st.integers(0, 3), st.integers(0, 2))
def test_grid_round_trip(lengths, capacity, slack):
    x = torch.randn(sum(lengths) + capacity, 2)
    size = max(lengths, default=0) + slack
    grid = to_grid(x, ends_of(lengths), size)
    assert grid.shape == (len(lengths), size, 2)
    for b, n in enumerate(lengths):
        start = sum(lengths[:b])
        assert torch.equal(grid[b, :n], x[start : start + n])
        assert not grid[b, n:].any()
    back = from_grid(grid, ends_of(lengths), x.shape[0])
    assert torch.equal(back[: sum(lengths)], x[: sum(lengths)])
    assert not back[sum(lengths) :].any()


def test_long_sequence():
    rows = testing.run_case(AttentionCase((1100, 3), 1, 16), "aten", torch.float32)
    assert all(row.passed for row in rows)
