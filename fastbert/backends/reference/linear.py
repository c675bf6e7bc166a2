"""`linear` by the `reference` backend; contract in fastbert/ops/linear.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.activation import activate_ref, gradient_ref
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved

DTYPES = FLOATS


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    x, weight, bias, activation, residual, gated, _ = inputs
    compute = compute_dtype(x)
    pre = x.to(compute) @ weight.to(compute).T
    if bias is not None:
        pre = pre + bias.to(compute)
    y = activate_ref(pre, activation, gated)
    if residual is not None:
        y = y + residual.to(compute)
    return y.to(x.dtype), pre.to(x.dtype) if save and activation is not None else x.new_empty(0)


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, pre, activation, gated = saved
    compute, dtype = compute_dtype(dy), dy.dtype
    g = dy.to(compute)
    if activation is not None:
        g = gradient_ref(g, pre.to(compute), activation, gated)
    return (
        (g @ weight.to(compute)).to(dtype) if need.dx else dy.new_empty(0),
        (g.T @ x.to(compute)).to(dtype) if need.dweight else dy.new_empty(0),
        g.sum(0).to(dtype) if need.dbias else dy.new_empty(0),
    )
