"""`layer_norm` by the `aten` backend; contract in fastbert/ops/layer_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.reference import layer_norm as reference
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import (
    NARROW,
    LayerNormInputs,
    LayerNormNeeds,
    LayerNormSaved,
    own_dresidual,
    storage_dtype,
    stores_sum,
    summed,
)

DTYPES = FLOATS


def layer_norm_fwd(inputs: LayerNormInputs, save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, kind, _ = inputs
    if kind != "layer_norm":
        # PyTorch's own fused RMSNorm is not in every version that is served. A NoNorm has no faster form.
        return reference.layer_norm_fwd(inputs, save, rounded)
    # The sum is taken in float32 and normalised unrounded; native_layer_norm then needs no second cast.
    stats = compute_dtype(x)
    z = x
    if summed(inputs):
        z = x.to(stats)
        if x_bias is not None:
            z = z + x_bias
        if dropout_p > 0:
            z = z * (
                keep_mask_2d(seed, offset, *x.shape, dropout_p=dropout_p).to(stats)
                * (1.0 / (1.0 - dropout_p))
            )
        if residual is not None:
            z = z + residual
    wide = z.to(stats)
    scale, shift = weight.to(stats), None if bias is None else bias.to(stats)
    y, mean, rstd = torch.native_layer_norm(wide, wide.shape[1:], scale, shift, eps)
    if x.device.type == "cpu" and not torch.isfinite(mean + rstd).all():
        # Where squares overflow, PyTorch's merging of partial variances returns NaN instead of infinity.
        wrong = ~torch.isfinite(mean + rstd).squeeze(1)
        rows = wide[wrong]
        row_mean = rows.mean(1, keepdim=True)
        row_rstd = ((rows - row_mean).square().mean(1, keepdim=True) + eps).rsqrt()
        repaired = (rows - row_mean) * row_rstd * scale
        y[wrong] = repaired if shift is None else repaired + shift
        mean[wrong], rstd[wrong] = row_mean, row_rstd
    dtype = storage_dtype(inputs)
    more = (y.to(x.dtype),) if rounded else ()
    stored = z.to(dtype) if stores_sum(inputs, save) else x.new_empty(0)
    statistics = (mean.reshape(-1), rstd.reshape(-1)) if save else (mean.new_empty(0), mean.new_empty(0))
    return y.to(dtype), stored, *statistics, *more


def layer_norm_bwd(
    dy: Tensor,
    saved: LayerNormSaved,
    need: LayerNormNeeds,
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, ...]:
    z, weight, mean, rstd, dropout_p, seed, offset, kind = saved
    if kind != "layer_norm" or z.shape[1] <= NARROW:
        # PyTorch's z * rstd - mean * rstd cancels where a narrow row makes rstd large.
        return reference.layer_norm_bwd(dy, saved, need, drounded, dsum)
    stats = compute_dtype(z)
    if drounded is not None:
        dy = dy + drounded
    need_dz = need.dx or need.dx_bias or need.dresidual
    dz, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(stats),
        z.to(stats),
        z.shape[1:],
        mean.unsqueeze(1),
        rstd.unsqueeze(1),
        weight.to(stats),
        weight.new_zeros(weight.shape, dtype=stats),
        [need_dz, need.dweight, need.dweight],
    )
    if dsum is not None and need_dz:
        dz = dz + dsum
    dx = dz
    if dropout_p > 0 and (need.dx or need.dx_bias):
        keep = keep_mask_2d(seed, offset, *z.shape, dropout_p=dropout_p).to(stats)
        dx = dz * (keep * (1.0 / (1.0 - dropout_p)))
    return (
        dx.to(need.x_dtype or z.dtype) if need.dx else z.new_empty(0),
        dz.to(z.dtype) if own_dresidual(saved, need) else z.new_empty(0),
        dweight if need.dweight else mean.new_empty(0),
        dbias if need.dweight else mean.new_empty(0),
        dx.sum(0) if need.dx_bias else mean.new_empty(0),
    )
