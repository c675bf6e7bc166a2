"""`linear` by the `aten` backend; contract in fastbert/ops/linear.py."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F


def linear_fwd(x, weight, bias, activation, residual, save):
    y = F.linear(x, weight, bias)
    pre = x.new_empty(0)
    if activation is not None:
        if save:
            pre, y = y, torch.empty_like(y)
        _activate(pre if save else y, y, activation)
    if residual is not None:
        y.add_(residual)
    return y, pre


def linear_bwd(dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias):
    g = dy if activation is None else _dact(dy, pre, activation)
    return (
        g @ weight if need_dx else dy.new_empty(0),
        g.t() @ x if need_dweight else dy.new_empty(0),
        g.sum(0) if need_dbias else dy.new_empty(0),
    )


def _activate(pre, y, activation):
    """y = act(pre), where `y` may be `pre`; PyTorch computes each of these in float32 and rounds once."""
    if activation == "gelu":
        if pre.device.type == "cpu" and pre.dtype in (torch.bfloat16, torch.float16):
            _gelu_half(pre, y)
        else:
            torch.ops.aten.gelu.out(pre, out=y)
    elif activation == "gelu_tanh":
        torch.ops.aten.gelu.out(pre, approximate="tanh", out=y)
    elif activation == "relu":
        torch.clamp_min(pre, 0, out=y)
    else:
        torch.ops.aten.silu.out(pre, out=y)


def _gelu_half(pre, y):
    """y = gelu(pre), correctly rounded: PyTorch's own on the CPU loses the negative tail to 1 + erf.

    In blocks that stay in the cache, because the float32 copies are twice the size of the tensor.
    """
    block = 32768 * torch.get_num_threads()
    for z, out in zip(pre.view(-1).split(block), y.view(-1).split(block), strict=True):
        wide = z.float()
        out.copy_(torch.mul(wide, -math.sqrt(0.5)).erfc_().mul_(wide).mul_(0.5))


def _dact(dy, pre, activation):
    """dy * act'(pre), in float32 inside and rounded once."""
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dy, pre)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(dy, pre, approximate="tanh")
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, pre, 0)
    return torch.ops.aten.silu_backward(dy, pre)
