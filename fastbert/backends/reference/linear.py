"""`linear` by the `reference` backend; contract in fastbert/ops/linear.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.activation import activate_ref, gradient_ref
from fastbert.ops.checks import FLOATS, TensorOrNone, compute_dtype

DTYPES = FLOATS


def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    save: bool,
    panels: Tensor | None = None,
    gated: str | None = None,
) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(x)
    pre = x.to(compute) @ weight.to(compute).T
    if bias is not None:
        pre = pre + bias.to(compute)
    y = activate_ref(pre, activation, gated)
    if residual is not None:
        y = y + residual.to(compute)
    return y.to(x.dtype), pre.to(x.dtype) if save and activation is not None else x.new_empty(0)


def linear_bwd(
    dy: Tensor,
    x: TensorOrNone,
    weight: TensorOrNone,
    pre: TensorOrNone,
    activation: str | None,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
    gated: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    compute, dtype = compute_dtype(dy), dy.dtype
    g = dy.to(compute)
    if activation is not None:
        g = gradient_ref(g, pre.to(compute), activation, gated)
    return (
        (g @ weight.to(compute)).to(dtype) if need_dx else dy.new_empty(0),
        (g.T @ x.to(compute)).to(dtype) if need_dweight else dy.new_empty(0),
        g.sum(0).to(dtype) if need_dbias else dy.new_empty(0),
    )
