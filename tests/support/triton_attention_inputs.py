"""Inputs of the tests of Triton's attention, forward and backward."""

from __future__ import annotations

import math

import torch
from hypothesis import assume
from hypothesis import strategies as st

from fastbert.testing.op_cases.attention import AttentionCase
from tests.support.attention_calls import made
from tests.support.triton_fixtures import DEVICE, DTYPES
from tests.support.triton_sanitizer import lazy_rows

LOWEST = torch.finfo(torch.float32).min
INF = math.inf


def forward_args(
    lengths, nheads=2, headdim=16, dtype=torch.float32, capacity=0, slack=0, causal=False, **options
):
    """Arguments of `attention_fwd`, in its order; `options` replace the defaults."""
    sizes = {"capacity": capacity, "slack": slack, "causal": causal}
    inputs = made(lengths, nheads, headdim, dtype, device=DEVICE, **sizes)
    args = inputs._asdict() | {"return_probs": False, "save_bits": False}
    assert set(options) <= set(args)
    return args | options


def randn(*shape, dtype=torch.float32, seed=3):
    """Normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def strided(t: torch.Tensor, fill: float = float("nan")) -> torch.Tensor:
    """The same values, with elements of value `fill` between rows, heads and dimensions."""
    total, nheads, headdim = t.shape
    wide = torch.full((nheads, total, 3, headdim + 5), fill, dtype=t.dtype, device=t.device)
    view = wide[:, :, 1, :headdim].transpose(0, 1)
    return view.copy_(t)


def lazy(shape, strides, dtype) -> torch.Tensor:
    """A tensor of these strides, whose memory is mapped where it is touched; see `needs_lazy_memory`."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return lazy_rows(1, extent, extent, dtype).reshape(-1).as_strided(shape, strides)


def at_strides(t: torch.Tensor, *strides: int) -> torch.Tensor:
    """The same values in lazy memory."""
    return lazy(t.shape, strides, t.dtype).copy_(t)


def far_bits(keep_bits: torch.Tensor) -> torch.Tensor:
    """The same in rows of 2**29 words, as if max_seqlen were 2**34."""
    shape = (*keep_bits.shape[:2], 2**29)
    bits = lazy(shape, (shape[1] * shape[2], shape[2], 1), torch.int32)
    bits[..., : keep_bits.shape[2]] = keep_bits
    return bits


@st.composite
def attention_cases(draw):
    """(case, dtype, seed)."""
    length = st.one_of(st.integers(0, 8), st.integers(0, 35))
    lengths = tuple(draw(st.lists(length, min_size=1, max_size=3)))
    assume(sum(lengths) > 0)
    padded = draw(st.booleans()) and draw(st.booleans())
    lengths = (max(1, lengths[0]),) * min(len(lengths), 3) if padded else lengths
    bias = draw(st.sampled_from(["", "", "shared", "sequence", "keys"]))
    side = st.one_of(st.integers(-1, 3), st.integers(0, 36))
    nheads = draw(st.sampled_from([1, 1, 2]))
    case = AttentionCase(
        lengths,
        nheads=nheads,
        headdim=draw(st.sampled_from([8, 16, 24, 32, 40, 64])),
        padded=padded,
        capacity=0 if padded else draw(st.sampled_from([0, 0, 1, 40])),
        slack=0 if padded else draw(st.sampled_from([0, 0, 1, 20])),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(side, side))),
        kv_heads=draw(st.integers(1, nheads)),
        bias=bias,
        masked=bool(bias) and draw(st.booleans()),
        gate=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.0, 0.3])),
        packed_qkv=draw(st.booleans()),
        lse=draw(st.booleans()),
        probs=draw(st.booleans()),
    )
    return case, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20))
