"""Windows and shared heads of the C++ attention: every edge, layout and number of threads."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.backends import cpu
from fastbert.ops.attention_checks import checked_window
from fastbert.ops.attention_grid import outside_window, pack_bits
from fastbert.ops.attention_inputs import AttentionNeeds
from tests.support.cpu_attention import (
    DTYPES,
    backward,
    check,
    everything,
    inputs_of,
    own_dtype,
    randn,
    some_bias,
    strided_qkv,
)
from tests.support.cpu_checks import assert_same_on_any_threads

WINDOWS = ((0, 0), (1, 0), (0, 25), (7, -1), (-1, 30), (16, 16), (24, 39), (63, 64))
# around one block of 24 queries, one panel of 64 keys, and a task of 120 queries
EDGES = (1, 23, 24, 25, 0, 63, 64, 65, 119, 121, 128, 129, 200)


def options_of(lengths, nheads, slack=0):
    """All options at once."""
    size = max(lengths) + slack
    bias = some_bias(len(lengths), nheads, size, lengths)
    gate = torch.tensor([1.5, -0.5, 0.25, 2.0])[:nheads]
    return {"slack": slack, "bias": bias, "gate": gate, "p": 0.25, "scale": 0.3}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_length(every_isa, dtype, window, guarded):
    check(tuple(range(1, 101)), 1, 16, dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_option(every_isa, dtype, window, guarded):
    check(EDGES, 2, 20, dtype, window=window, **options_of(EDGES, 2, slack=3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", (1, 2))
def test_shared_heads(every_isa, dtype, kv_heads, guarded):
    lengths = (70, 5, 0, 129)
    options = options_of(lengths, 4, slack=2)
    check(lengths, 4, 24, dtype, kv_heads=kv_heads)
    check((26, 41), 4, 24, dtype, kv_heads=kv_heads, window=(24, 39))  # each a key short of all
    check(lengths, 4, 24, dtype, kv_heads=kv_heads, causal=True, **options | {"gate": None})
    check(lengths, 4, 24, dtype, kv_heads=kv_heads, window=(20, 9), **options)


def test_shared_heads_are_read_as_copies_are(every_isa):
    """All but dk and dv, which are sums over the heads, have the bits of repeated keys and values."""
    lengths = (33, 140, 7)
    (q, k, v), _ = strided_qkv(180, 6, 24, own_dtype(), 0)
    k, v, dout = k[:, :2], v[:, 2:4], randn(180, 6, 24, dtype=own_dtype(), seed=9)
    for options in ({}, {"window": (30, 50), "p": 0.1}):
        shared = everything(q, k, v, dout, lengths, **options)
        copied = everything(q, *(t.repeat_interleave(3, 1) for t in (k, v)), dout, lengths, **options)
        for name in ("out", "lse", "probs", "dq"):
            assert torch.equal(shared[name], copied[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_bits_outside_the_window_do_not_matter(every_isa, dtype):
    lengths, window = (70, 1, 230), checked_window(False, (40, 11))
    (q, k, v), _ = strided_qkv(301, 2, 24, dtype, 0)
    dout = randn(301, 2, 24, dtype=dtype, seed=9)
    options = {"window": window, "p": 0.25, "slack": 9}
    inputs = inputs_of(q, k, v, lengths, **options)
    out, lse, _, bits = cpu.attention_fwd(inputs, False, True)
    drawn = backward(dout, q, k, v, out, lse, lengths, **options)
    outside = pack_bits(outside_window(max(lengths), window, q.device))[:, : bits.shape[2]]
    outside = torch.cat([outside[:n] for n in lengths])
    noise = torch.randint(-(2**31), 2**31, bits.shape, generator=torch.Generator().manual_seed(1)).int()
    bits[..., : outside.shape[1]] ^= noise[..., : outside.shape[1]] & outside
    saved = backward(dout, q, k, v, out, lse, lengths, **options, keep_bits=bits)
    for name, a, b in zip(("dq", "dk", "dv"), saved, drawn, strict=False):
        assert torch.equal(a, b), name
    flipped = backward(dout, q, k, v, out, lse, lengths, **options, keep_bits=~bits)
    assert not any(torch.equal(a, b) for a, b in zip(flipped[:3], drawn[:3], strict=True))


def test_nan_outside_the_window_stays_outside(every_isa):
    """No key further than a block of queries and a vector from the window is multiplied."""
    n, bad, (left, right) = 400, 201, (40, 9)
    tensors = [randn(n, 1, 16, dtype=own_dtype(), seed=s) for s in range(4)]
    clean = everything(*tensors, (n,), window=(left, right))
    reach = 24 + 16
    for t in tensors:
        t[bad] = math.nan
    got = everything(*tensors, (n,), window=(left, right))
    queries, keys = range(bad - right - reach, bad + left + reach), range(bad - left, bad + right + 1)
    touched = {j for i in queries for j in range(i - left - reach, i + right + reach)}
    far = [i for i in range(n) if i not in queries]
    assert 0 < len(far) < n
    for name in ("out", "dq"):
        assert torch.equal(got[name][far], clean[name][far]), name
    assert torch.equal(got["lse"][:, far], clean["lse"][:, far])
    untouched = [j for j in range(n) if j not in touched]
    assert 0 < len(untouched) < n
    for name in ("dk", "dv"):
        assert torch.equal(got[name][untouched], clean[name][untouched]), name
        assert got[name][list(keys)].isnan().all(), name
    # scores are masked to the key
    seen = [i for i in far if i < bad] + [bad - right - 1, bad + left + 1]
    tensors[2], tensors[1][bad] = randn(n, 1, 16, dtype=own_dtype(), seed=2), math.nan
    tensors[0] = randn(n, 1, 16, dtype=own_dtype(), seed=0)
    masked = everything(*tensors, (n,), window=(left, right))
    assert torch.equal(masked["out"][seen], clean["out"][seen])


@pytest.mark.parametrize(("lengths", "window"), (((700,), (64, 64)), ((130, 0, 400), (30, 5))), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_any_number_of_threads_gives_the_same_bits(every_isa, lengths, window, dtype):
    """Tasks of other lengths pack other keys."""
    total = sum(lengths)
    (q, k, v), _ = strided_qkv(total, 4, 20, dtype, 0)
    dout = randn(total, 4, 20, dtype=dtype, seed=9)
    for kv_heads, options in ((4, {}), (1, {"p": 0.25})):
        assert_same_on_any_threads(
            lambda kv=kv_heads, options=options: everything(
                q, k[:, :kv], v[:, :kv], dout, lengths, window=window, **options
            ).values()
        )


def test_what_the_extension_refuses(every_isa):
    (q, k, v), _ = strided_qkv(9, 4, 16, torch.float32, 0)
    inputs = inputs_of(q, k, v, (9,))
    needs = AttentionNeeds(True, False, False, False, False)
    for changes, message in (
        ({"k": k[:, :3], "v": v[:, :3]}, "kv_heads: expected a divisor of the 4 heads of q, got 3"),
        ({"window": (-2, 0)}, "window: expected -1 to"),
        ({"window": (0, -9)}, "window: expected -1 to"),
    ):
        wrong = inputs._replace(**changes)
        with pytest.raises(ValueError, match=message):
            cpu.attention_fwd(wrong, False, False)
        with pytest.raises(ValueError, match=message):
            cpu.attention_bwd(q, wrong, q, q[..., 0].t(), None, needs)
