"""`layer_norm` by the `reference` backend; contract in fastbert/ops/layer_norm.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import (
    LayerNormInputs,
    LayerNormNeeds,
    LayerNormSaved,
    own_dresidual,
    storage_dtype,
)

DTYPES = FLOATS


def layer_norm_fwd(inputs: LayerNormInputs, save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset = inputs
    compute = compute_dtype(x)
    z = x.to(compute)
    if x_bias is not None:
        z = z + x_bias.to(compute)
    if dropout_p > 0:
        z = z * keep_mask_2d(seed, offset, *x.shape, dropout_p=dropout_p) / (1.0 - dropout_p)
    if residual is not None:
        z = z + residual.to(compute)
    mean = z.mean(1)
    centred = z - mean.unsqueeze(1)
    rstd = (centred.square().mean(1) + eps).rsqrt()
    y = centred * rstd.unsqueeze(1) * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    empty = x.new_empty(0)
    dtype = storage_dtype(inputs)
    more = (y.to(x.dtype),) if rounded else ()
    y = y.to(dtype)
    if not save:
        return y, empty, mean.new_empty(0), mean.new_empty(0), *more
    summed = residual is not None or x_bias is not None or dropout_p > 0
    return y, z.to(dtype) if summed else empty, mean, rstd, *more


def layer_norm_bwd(
    dy: Tensor, saved: LayerNormSaved, need: LayerNormNeeds, drounded: Tensor | None = None
) -> tuple[Tensor, ...]:
    z, weight, mean, rstd, dropout_p, seed, offset = saved
    compute = compute_dtype(z)
    dy, rstd = dy.to(compute), rstd.unsqueeze(1)
    if drounded is not None:
        dy = dy + drounded.to(compute)
    x_hat = (z.to(compute) - mean.unsqueeze(1)) * rstd
    g = dy * weight.to(compute)
    dz = rstd * (g - g.mean(1, keepdim=True) - x_hat * (g * x_hat).mean(1, keepdim=True))
    dx = dz
    if dropout_p > 0:
        dx = dz * keep_mask_2d(seed, offset, *z.shape, dropout_p=dropout_p) / (1.0 - dropout_p)
    return (
        dx.to(need.x_dtype or z.dtype) if need.dx else z.new_empty(0),
        dz.to(z.dtype) if own_dresidual(saved, need) else z.new_empty(0),
        (dy * x_hat).sum(0) if need.dweight else mean.new_empty(0),
        dy.sum(0) if need.dweight else mean.new_empty(0),
        dx.sum(0) if need.dx_bias else mean.new_empty(0),
    )
