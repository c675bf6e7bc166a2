"""Each identity against the maps themselves, and in closed form; masses, causal attention and biases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fastbert.analysis.identities import Probabilities, uniform
from fastbert.layers.batch import PackedBatch

LENGTHS = [1, 7, 48, 2, 33]
HEADS, WIDTH = 3, 16
BIASES = (None, "shared", "per sequence", "per head")


def of(lengths=LENGTHS, dtype=torch.float64, seed=0, scale=1.0, bias=None, causal=False, width=WIDTH):
    draw = torch.Generator().manual_seed(seed)
    total, longest = sum(lengths), max(lengths)
    q, k = (scale * torch.randn(total, HEADS, width, dtype=torch.float64, generator=draw) for _ in range(2))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    shape = {"shared": (1, 1), "per sequence": (len(lengths), 1), "per head": (1, HEADS)}.get(bias)
    if shape is not None:
        bias = torch.randn(*shape, longest, longest, dtype=torch.float64, generator=draw)
    q, k = q.to(dtype), k.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return Probabilities(q, k, ends, longest, width**-0.5, bias, causal)


def maps(p):
    """[(nheads, length, length)] in float64, by softmax as it is defined."""
    found = []
    ends = p.cu_seqlens.tolist()
    for i, (first, last) in enumerate(itertools.pairwise(ends)):
        q, k = (t[first:last].double().transpose(0, 1) for t in (p.q, p.k))
        scores = p.scale * q @ k.transpose(1, 2)
        if p.bias is not None:
            bias = p.bias.double()
            scores = scores + bias[i if bias.shape[0] > 1 else 0, :, : last - first, : last - first]
        if p.causal:
            ahead = torch.ones(last - first, last - first).triu(1).bool()
            scores = scores.masked_fill(ahead, -math.inf)
        found.append(scores.softmax(-1))
    return found


def rows(found):
    """[(nheads, length)] -> (total, nheads)."""
    return torch.cat([t.transpose(0, 1) for t in found])


def close(found, expected, tolerance=1e-11):
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


cases = pytest.mark.parametrize("causal", [False, True])
biases = pytest.mark.parametrize("bias", BIASES)


@cases
@biases
def test_entropy_and_collision(bias, causal):
    p = of(bias=bias, causal=causal)
    close(p.entropy(), rows([torch.special.entr(m).sum(-1) for m in maps(p)]))
    close(p.collision(), rows([m.square().sum(-1) for m in maps(p)]))


@cases
@biases
@pytest.mark.parametrize("columns", [1, WIDTH, WIDTH + 5])
def test_values_and_received(columns, bias, causal):
    p = of(bias=bias, causal=causal)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(len(p.q), columns, dtype=torch.float64, generator=draw)
    ends = p.cu_seqlens.tolist()
    parts = [x[a:b] for a, b in itertools.pairwise(ends)]
    close(p.of_values(x), torch.cat([(m @ v).transpose(0, 1) for m, v in zip(maps(p), parts, strict=True)]))
    received = [(m.transpose(1, 2) @ v).transpose(0, 1) for m, v in zip(maps(p), parts, strict=True)]
    close(p.received(x), torch.cat(received))


def test_values_per_head():
    p = of()
    x = torch.randn(len(p.q), HEADS, 2, dtype=torch.float64)
    for head in range(HEADS):
        close(p.of_values(x)[:, head], p.of_values(x[:, head])[:, head])


@cases
@biases
def test_pairs(bias, causal):
    p = of(bias=bias, causal=causal)
    expected = torch.cat([each.permute(1, 2, 0).flatten(0, 1) for each in maps(p)])
    starts = p.cu_seqlens[:-1].tolist()
    places = [torch.cartesian_prod(*[torch.arange(n) + s] * 2) for s, n in zip(starts, LENGTHS, strict=True)]
    close(p.between(*torch.cat(places).unbind(1)), expected)


@cases
@biases
@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 2])
def test_offsets(offset, bias, causal):
    p = of(bias=bias, causal=causal)
    expected = []
    for m in maps(p):
        n = m.shape[-1]
        there = [(i, i + offset) for i in range(n) if 0 <= i + offset < n]
        diagonal = torch.zeros(HEADS, n, dtype=torch.float64)
        for i, j in there:
            diagonal[:, i] = m[:, i, j]
        expected.append(diagonal)
    close(p.at_offset(offset), rows(expected))


@cases
@pytest.mark.parametrize("bias", [None, "shared", "per head"])
@pytest.mark.parametrize("widths", [(16, 16), (16, 64), (64, 64)])
def test_overlap_of_two_models(widths, bias, causal):
    one = of(seed=1, bias=bias, causal=causal, width=widths[0])
    other = of(seed=2, bias=bias, causal=causal, width=widths[1])
    both = zip(maps(one), maps(other), strict=True)
    close(one.overlap(other), rows([(a * b).sum(-1) for a, b in both]))


@cases
def test_divergence(causal):
    one, other = of(seed=1, causal=causal), of(seed=2, causal=causal, width=WIDTH)
    both = zip(maps(one), maps(other), strict=True)
    close(
        one.divergence(other),
        rows([(torch.special.xlogy(a, a) - torch.special.xlogy(a, b)).sum(-1) for a, b in both]),
    )
    close(one.divergence(one), torch.zeros(len(one.q), HEADS, dtype=torch.float64))
    with pytest.raises(ValueError, match="bias: the divergence of attention under a bias"):
        of(bias="shared").divergence(one)


@cases
def test_uniform(causal):
    p = of(causal=causal)
    v = torch.randn_like(p.q)
    sequences = PackedBatch(p.cu_seqlens, p.max_seqlen, torch.randn(1, 1, 48, 48).double(), causal=causal)
    found = uniform(p.q, p.k, v, sequences)
    for first, last in zip(p.cu_seqlens.tolist(), p.cu_seqlens.tolist()[1:], strict=False):
        some = v[first:last]
        counts = torch.arange(1, last - first + 1)[:, None, None]
        expected = some.cumsum(0) / counts if causal else some.mean(0).expand_as(some)
        close(found[first:last], expected)


def test_a_hidden_key_stays_hidden_from_uniform_heads():
    p = of([4])
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    bias[..., 2] = -math.inf
    v = torch.randn_like(p.q)
    found = uniform(p.q, p.k, v, PackedBatch(p.cu_seqlens, 4, bias))
    close(found, v[[0, 1, 3]].mean(0).expand_as(v))


# -- closed forms --------------------------------------------------------------------------------------------


def test_one_hot_rows():
    """A row that sees one key alone: entropy 0, collision 1, all mass there."""
    length = 6
    k = torch.eye(length, WIDTH, dtype=torch.float64)[:, None].expand(-1, HEADS, -1).contiguous()
    q = 400.0 * k.roll(-2, 0)
    p = Probabilities(q, k, torch.tensor([0, length], dtype=torch.int32), length, 1.0)
    ones = torch.ones(length, HEADS, dtype=torch.float64)
    close(p.entropy(), 0 * ones)
    close(p.collision(), ones)
    there = (torch.arange(length) + 2 < length).double()[:, None].expand(-1, HEADS)
    close(p.at_offset(2), there)
    received = p.received(torch.ones(length, 1, dtype=torch.float64))
    close(received[..., 0], ones)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_float32_is_as_near_as_the_note_says(scale):
    """Absolute error of entropy: about 4 eps · lse."""
    p = of([512, 48], dtype=torch.float32, scale=scale, width=64)
    exact = rows([torch.special.entr(m).sum(-1) for m in maps(p)])
    bound = 16 * torch.finfo(torch.float32).eps * p.lse.abs().clamp_min(1.0).double()
    assert ((p.entropy().double() - exact).abs() <= bound).all()
    close(p.collision(), rows([m.square().sum(-1) for m in maps(p)]), 1e-4)


def test_half_precision_is_computed_in_float32():
    p = of(dtype=torch.bfloat16)
    sequences = PackedBatch(p.cu_seqlens, p.max_seqlen)
    made = Probabilities.of(p.q, p.k, sequences)
    assert made.q.dtype == torch.float32
    close(made.entropy(), rows([torch.special.entr(m).sum(-1) for m in maps(p)]), 1e-4)


@biases
@cases
@pytest.mark.parametrize("max_bytes", [HEADS * 8 * 48**2, HEADS * 8 * 48**2 * 3, 256 << 20])
def test_maps_of_some_sequences_at_a_time(max_bytes, bias, causal):
    """Each sequence once, no more memory than allowed, nothing outside a sequence."""
    p = of(bias=bias, causal=causal)
    p = Probabilities(p.q, p.k, p.cu_seqlens, p.max_seqlen, p.scale, p.bias, causal, max_bytes)
    expected, place = maps(p), 0
    for first, last, found in p.maps():
        assert first == place
        assert found.nbytes <= max_bytes
        for number in range(first, last):
            length = LENGTHS[number]
            each = found[number - first]
            close(each[:, :length, :length], expected[number])
            assert each.count_nonzero() == each[:, :length, :length].count_nonzero()
        place = last
    assert place == len(LENGTHS)
    if max_bytes > 1 << 20:
        assert first == 0


def test_maps_too_large_are_refused():
    p = of(bias="shared")
    small = Probabilities(p.q, p.k, p.cu_seqlens, p.max_seqlen, p.scale, p.bias, max_bytes=50_000)
    expected = "max_bytes: 50,000 are too few for the attention maps of 48 tokens, 55,296 bytes"
    with pytest.raises(ValueError, match=expected):
        small.entropy()
