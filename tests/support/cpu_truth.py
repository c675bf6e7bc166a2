"""What the tests of compiled kernels share: rows among NaNs, and closeness to a float64 result."""

from __future__ import annotations

import math

import torch

from fastbert import testing
from fastbert.ops.activation import activate_ref, slope_ref

HALF = (torch.bfloat16, torch.float16)


def randn(*shape, dtype=torch.float32, seed=0):
    """The same normal numbers at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(*args):
    """The arguments, with floating-point tensors in float64."""
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def gelu_tanh_argument(z):
    """u of gelu_tanh(z) = z σ(u): 2 √(2/π) (z + 0.044715 z³)."""
    return 2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)


def activation64(z, activation):
    """(act, act') in float64, without the cancellation of 1 + tanh in the negative tail of gelu_tanh."""
    z = z.double()
    if activation != "gelu_tanh":
        return activate_ref(z, activation), slope_ref(z, activation)
    s, c = (torch.sigmoid(gelu_tanh_argument(a)) for a in (z, -z))
    return z * s, s + z * s * c * 2 * math.sqrt(2 / math.pi) * (1 + 0.134145 * z * z)


def strided_rows(rows, hidden, dtype, gap, seed):
    """(rows, hidden) with `gap` NaNs behind each row, as a view, and the memory it lies in."""
    memory = torch.full((rows * (hidden + gap) + 64,), float("nan"), dtype=dtype)
    view = memory[32 : 32 + rows * (hidden + gap)].view(rows, hidden + gap)[:, :hidden]
    view.copy_(randn(rows, hidden, seed=seed))
    return view, memory


def assert_rounds_to(actual, truth, scale=1.0, name=""):
    """`actual` is `truth` (float64) within a rounding step of its dtype, plus float32 noise times `scale`."""
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(truth.shape)}"
    error = (actual.double() - truth).abs()
    step = testing.rounding_step(truth, actual.dtype) if actual.dtype in HALF else 0.0
    allowed = step + 2**-20 * scale * (1 + truth.abs())
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    assert (error <= allowed).all(), f"{name}: off by {(error - allowed).max().item():.3g} more than allowed"


def assert_same_bits(a, b, name=""):
    """Equal bit for bit, NaNs and the signs of zeros included."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype), name
    same = torch.eq(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))
    assert same.all(), f"{name}: {int((~same).sum())} bytes differ"


def assert_same_values(actual, truth, name=""):
    """The same values; a zero's sign may depend on what it was added to."""
    assert (actual.shape, actual.dtype) == (truth.shape, truth.dtype), name
    different = ~(actual == truth)
    assert not different.any(), f"{name}: {int(different.sum())} elements differ"
