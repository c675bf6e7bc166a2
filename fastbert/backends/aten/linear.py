"""`linear` by the `aten` backend; contract in fastbert/ops/linear.py.

bfloat16 on a CPU: where the processor multiplies it at half the rate of float32 or not at all, products of
many rows go through float32 copies, whose cast costs less than it gains. Rounded once either way.
"""

from __future__ import annotations

import math
import platform
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.activation import activate_eager, halves, joined, slope_ref
from fastbert.ops.checks import FLOATS, as_dtype, compute_dtype
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.runtime.processor import amd_family

DTYPES = FLOATS

# The fewest rows for which casting the weight pays (csrc/cpu/NOTES.md).
_WIDE_ROWS = 64


@lru_cache(maxsize=1)
def bf16_is_slow() -> bool:
    """Whether this CPU multiplies bfloat16 slower than float32: x86 without AMX, except AMD's AVX512-BF16.

    Intel's vdpbf16ps has half the issue rate of its float32 multiply-add, so the two are equal at best.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    amx, bf16 = (
        getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    if amx is None or bf16 is None:  # private names of PyTorch >= 2.6
        return False
    return not amx() and not (amd_family() is not None and bf16())


def _widened(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and device.type == "cpu" and rows >= _WIDE_ROWS and bf16_is_slow()


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    x, weight, bias, activation, residual, gated, _ = inputs
    if _widened(x.shape[0], x.dtype, x.device):
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    else:
        y = F.linear(x, weight, bias)
    pre = x.new_empty(0)
    if gated is not None:
        if save:
            pre = y
        y = gate(y, activation, gated)
    elif activation is not None:
        if save:
            pre, y = y, torch.empty_like(y)
        _activate(pre if save else y, y, activation)
    if residual is not None:
        y.add_(residual)
    return y, pre


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, pre, activation, gated = saved
    if gated is not None:
        g = gate_bwd(dy, pre, activation, gated)
    else:
        g = dy if activation is None else _dact(dy, pre, activation)
    dbias = g.sum(0) if need.dbias else dy.new_empty(0)
    wide = torch.float32 if _widened(dy.shape[0], dy.dtype, dy.device) else dy.dtype
    g = as_dtype(g, wide)
    return (
        (g @ as_dtype(weight, wide)).to(dy.dtype) if need.dx else dy.new_empty(0),
        (g.t() @ as_dtype(x, wide)).to(dy.dtype) if need.dweight else dy.new_empty(0),
        dbias,
    )


def _activate(pre, y, activation):
    """y = act(pre), where `y` may be `pre`; PyTorch computes each of these in float32 and rounds once."""
    if activation == "gelu":
        if pre.device.type == "cpu" and (pre.dtype in (torch.bfloat16, torch.float16) or _is_far(pre)):
            _gelu_by_erfc(pre, y)
        else:
            torch.ops.aten.gelu.out(pre, out=y)
    elif activation == "gelu_tanh":
        torch.ops.aten.gelu.out(pre, approximate="tanh", out=y)
    elif activation == "relu":
        torch.clamp_min(pre, 0, out=y)
    elif activation == "silu":
        torch.ops.aten.silu.out(pre, out=y)
    elif activation == "tanh":
        torch.tanh(pre, out=y)
    else:
        y.copy_(activate_eager(pre, activation))


def gate(pre: Tensor, activation: str | None, gated: str) -> Tensor:
    """The gated activation of `pre`."""
    active, other = halves(pre, gated)
    return _activated(active, activation).mul_(other)


def gate_bwd(dy: Tensor, pre: Tensor, activation: str | None, gated: str) -> Tensor:
    """The gradient at `pre` of a gated activation."""
    active, other = halves(pre, gated)
    return joined(_dact(dy * other, active, activation), dy * _activated(active, activation), gated)


def _activated(z, activation):
    """act(z) of a strided `z`, as a new contiguous tensor."""
    z = z.contiguous()
    y = torch.empty_like(z)
    _activate(z, y, activation)
    return y


def _is_far(pre):
    """Whether PyTorch's float32 GELU on the CPU may be wrong.

    It returns inf from half of the greatest number on, and NaN for inf.
    """
    return pre.numel() > 0 and not pre.amax() < 0.25 * torch.finfo(pre.dtype).max


def _gelu_by_erfc(pre, y):
    """y = gelu(pre), correctly rounded: PyTorch's own on the CPU loses the negative tail to 1 + erf.

    In blocks that stay in the cache, because the float32 copies are twice the size of the tensor.
    """
    block = 32768 * torch.get_num_threads()
    for z, out in zip(pre.view(-1).split(block), y.view(-1).split(block), strict=True):
        wide = z.to(compute_dtype(z))
        out.copy_(torch.mul(wide, -math.sqrt(0.5)).erfc_().mul_(0.5).mul_(wide))


def _dact(dy, pre, activation):
    """dy * act'(pre), in float32 inside and rounded once."""
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dy, pre)
    if activation == "gelu_tanh":
        # beyond, the slope is 0 or 1, and PyTorch's powers of z overflow
        return torch.ops.aten.gelu_backward(dy, pre.clamp(-1e4, 1e4), approximate="tanh")
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, pre, 0)
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, pre)
    compute = compute_dtype(dy)
    return (dy.to(compute) * slope_ref(pre.to(compute), activation)).to(dy.dtype)
