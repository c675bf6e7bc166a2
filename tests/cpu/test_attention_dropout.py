"""Dropout of the C++ attention."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.backends import cpu
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_inputs import EVERYWHERE, AttentionNeeds
from fastbert.ops.dropout import philox_keep
from tests.support.cpu_attention import OFFSET, SEED, backward, forward, own_dtype, randn
from tests.support.inputs import ends_of


@pytest.mark.parametrize("p", (0.3, 0.9))  # 0.3: an odd threshold of 16 bits
@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64))
def test_dropout_bits(every_isa, seed, p):
    """With equal scores and unit vectors in v and dout, out and dv show every bit of 150 columns."""
    n, nheads, lengths = 150, 2, (3, 150, 70)
    seed = torch.tensor([seed])
    dtype = own_dtype()
    q = torch.zeros(sum(lengths), nheads, n, dtype=dtype)
    unit = torch.cat([torch.eye(n, dtype=dtype)[:length] for length in lengths])
    near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-7, "atol": 0}
    unit = unit.unsqueeze(1).expand(-1, nheads, -1).contiguous()
    for offset in (0, 2**32 - 1):
        rest = 1.0, EVERYWHERE, None, None, p, seed, offset
        inputs = AttentionInputs(q, q, unit, ends_of(lengths), n, *rest)
        out, lse, _, bits = cpu.attention_fwd(inputs, False, True)
        need = AttentionNeeds(False, False, True, False, False)
        dv = cpu.attention_bwd(unit, inputs, out, lse, None, need)[2]
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


def test_dropped_values_are_zero_whatever_they_were(every_isa):
    """A NaN in a column of dP reaches dS only where it is kept; delta carries it to the whole row."""
    n = 40
    q, k, v, dout = (randn(n, 1, 16, dtype=own_dtype(), seed=s) for s in range(4))
    out, lse, _ = forward(q, k, v, (n,), p=0.5)
    v[11] = math.nan
    dq = backward(dout, q, k, v, out, lse, (n,), p=0.5)[0]
    keep = philox_keep(SEED, OFFSET, 0, torch.arange(n), torch.tensor(11), 0.5)
    assert torch.equal(dq[:, 0].isnan().any(-1), keep)


def test_a_vanishing_dropout_p_is_no_dropout(every_isa):
    q, k, v = (randn(70, 2, 16, dtype=own_dtype(), seed=s) for s in range(3))
    assert torch.equal(forward(q, k, v, (70,), p=1e-60)[0], forward(q, k, v, (70,))[0])


@pytest.mark.parametrize("scale", (1.0, 300.0))
@pytest.mark.parametrize("n", (3, 20, 64))
def test_few_keys_give_what_many_do(every_isa, n, scale):
    """Up to 64 keys a vector holds many queries; a bias of zeros selects the general path."""
    q, k, v = (randn(n, 2, 16, dtype=own_dtype(), seed=s) for s in range(3))
    q = q * scale  # one score per row is far above the rest, in any place
    few = forward(q, k, v, (n,), probs=True)
    many = forward(q, k, v, (n,), bias=torch.zeros(1, 1, 1, 1), probs=True)
    for a, b in zip(few, many, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(
            a.float(), b.float(), rtol=1e-5 if a.dtype == torch.float32 else 1e-2, atol=1e-6
        )


def test_few_keys_whose_scores_are_all_minus_infinite(every_isa):
    """One query has such scores; the rows of other queries are as without it."""
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
