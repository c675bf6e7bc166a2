"""`linear` by the `reference` backend; contract in fastbert/ops/linear.py."""

from __future__ import annotations

import math

import torch

from fastbert.ops.checks import compute_dtype
from fastbert.ops.linear import activate_ref


def linear_fwd(x, weight, bias, activation, residual, save, packed=None):
    compute = compute_dtype(x)
    pre = x.to(compute) @ weight.to(compute).T
    if bias is not None:
        pre = pre + bias.to(compute)
    y = activate_ref(pre, activation)
    if residual is not None:
        y = y + residual.to(compute)
    return y.to(x.dtype), pre.to(x.dtype) if save and activation is not None else x.new_empty(0)


def linear_bwd(dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias):
    compute, dtype = compute_dtype(dy), dy.dtype
    g = dy.to(compute)
    if activation is not None:
        g = g * _slope(pre.to(compute), activation)
    return (
        (g @ weight.to(compute)).to(dtype) if need_dx else dy.new_empty(0),
        (g.T @ x.to(compute)).to(dtype) if need_dweight else dy.new_empty(0),
        g.sum(0).to(dtype) if need_dbias else dy.new_empty(0),
    )


def _slope(z, activation):
    """act'(z), in `z`'s dtype."""
    if activation == "gelu":
        density = torch.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
        return 0.5 * torch.erfc(-z * math.sqrt(0.5)) + z * density
    if activation == "gelu_tanh":
        c = math.sqrt(2.0 / math.pi)
        z = z.clamp(-1e4, 1e4)  # beyond, the slope is 0 or 1, and powers of z overflow
        t = torch.tanh(c * (z + 0.044715 * z * z * z))
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * c * (1.0 + 3 * 0.044715 * z * z)
    if activation == "relu":
        return (~(z <= 0)).to(z.dtype)  # 1 for NaN, as PyTorch has it
    s = torch.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))
