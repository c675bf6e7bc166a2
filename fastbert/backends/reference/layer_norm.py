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
    stores_sum,
)

DTYPES = FLOATS


def layer_norm_fwd(inputs: LayerNormInputs, save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, kind, _ = inputs
    compute = compute_dtype(x)
    z = x.to(compute)
    if x_bias is not None:
        z = z + x_bias.to(compute)
    if dropout_p > 0:
        z = z * keep_mask_2d(seed, offset, *x.shape, dropout_p=dropout_p) / (1.0 - dropout_p)
    if residual is not None:
        z = z + residual.to(compute)
    x_hat, mean, rstd = z, z.new_empty(0), z.new_empty(0)
    if kind == "layer_norm":
        mean = z.mean(1)
        x_hat = z - mean.unsqueeze(1)
    if kind != "no_norm":
        rstd = (x_hat.square().mean(1) + eps).rsqrt()
        x_hat = x_hat * rstd.unsqueeze(1)
    y = x_hat * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    dtype = storage_dtype(inputs)
    more = (y.to(x.dtype),) if rounded else ()
    stored = z.to(dtype) if stores_sum(inputs, save) else x.new_empty(0)
    statistics = (mean, rstd) if save else (mean.new_empty(0), mean.new_empty(0))
    return y.to(dtype), stored, *statistics, *more


def layer_norm_bwd(
    dy: Tensor,
    saved: LayerNormSaved,
    need: LayerNormNeeds,
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, ...]:
    z, weight, mean, rstd, dropout_p, seed, offset, kind = saved
    compute = compute_dtype(z)
    dy, rstd = dy.to(compute), rstd.unsqueeze(1)
    if drounded is not None:
        dy = dy + drounded.to(compute)
    x_hat = z.to(compute)
    if kind == "layer_norm":
        x_hat = x_hat - mean.unsqueeze(1)
    dz = g = dy * weight.to(compute)
    if kind != "no_norm":
        x_hat = x_hat * rstd
        centred = g - g.mean(1, keepdim=True) if kind == "layer_norm" else g
        dz = rstd * (centred - x_hat * (g * x_hat).mean(1, keepdim=True))
    if dsum is not None:
        dz = dz + dsum.to(compute)
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
