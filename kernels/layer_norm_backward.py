"""The kernels of backward; their mathematics, tiling and launch are in kernels/layer_norm.py."""

import triton
import triton.language as tl

from fastbert.kernels.philox import dropped

# Arguments for which 1 and multiples of 16 compile nothing anew.
_FIXED_TYPES = ("n_rows", "offset", "threshold")


@triton.jit
def _bwd_tile(
    sources, dy_stride, z_stride,
    dropout, rows, col_start, mask, mean, rstd,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPS_OUTPUT: tl.constexpr,
):  # fmt: skip
    """`dy`, `x_hat` = [BLOCK_M, BLOCK_N] in float32; dy, that of y twice, is 0 outside the matrix.

    `sources`: dy, drounded, z. DROPS_OUTPUT: dy is that of what the norm returns, after `dropout`.
    """
    dy_ptr, drounded_ptr, z_ptr = sources
    cols = col_start + tl.arange(0, BLOCK_N)
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if drounded_ptr is not None:
        drounded_at = drounded_ptr + rows[:, None] * HIDDEN + cols[None, :]
        dy += tl.load(drounded_at, mask=mask, other=0.0).to(tl.float32)
    if DROPS_OUTPUT:
        dy = dropped(dy, dropout, rows, col_start, BLOCK_M, BLOCK_N)
    z = tl.load(z_ptr + rows[:, None] * z_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return dy, (z - mean[:, None]) * rstd[:, None]


@triton.jit
def input_gradient(g, x_hat, rstd, g_mean, gx_mean, HIDDEN: tl.constexpr, KIND: tl.constexpr):
    """The gradient of what was normalised. g = dy * weight, x_hat: [rows, columns]; rstd, the means: [rows].

    LayerNorm always normalises a row of one number to 0, so its gradient is 0. Compiled, g - g_mean would not
    be: it may be one fma with g's product, which keeps the product's rounding, and rstd is large there.
    """
    if KIND == "rms_norm":
        centred = g - x_hat * gx_mean[:, None]
    elif HIDDEN == 1:
        centred = g * 0.0  # a NaN stays one
    else:
        centred = g - g_mean[:, None] - x_hat * gx_mean[:, None]
    return rstd[:, None] * centred


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _layer_norm_bwd_kernel(
    dy_ptr, drounded_ptr, dsum_ptr, z_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, seed_ptr, dx_ptr,
    dresidual_ptr, dweight_ptr, dbias_ptr, dx_bias_ptr,
    dy_stride, z_stride,
    n_rows, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    DROPS_OUTPUT: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th row tile; this program's column sums go to its row of the partial sums.

    Of wide rows a program takes one column block; `means_ptr` then holds each row's mean(g) and
    mean(g * x_hat). DROPS_OUTPUT: dropout follows the norm (embedding.py), and is not x's.
    """
    program = tl.program_id(0)
    col_start = tl.program_id(1) * BLOCK_N
    cols = col_start + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dx_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sources, dropout = (dy_ptr, drounded_ptr, z_ptr), (seed_ptr, offset, threshold, keep_scale)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        mean = tl.zeros((BLOCK_M,), tl.float32)
        rstd = tl.full((BLOCK_M,), 1.0, tl.float32)
        if KIND == "layer_norm":
            mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
        if KIND != "no_norm":
            rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        dy, x_hat = _bwd_tile(
            *(sources, dy_stride, z_stride, dropout, rows, col_start, mask, mean, rstd),
            *(HIDDEN, BLOCK_M, BLOCK_N, DROPS_OUTPUT),
        )
        g = dy * weight
        if KIND == "no_norm":
            dz = g
        else:
            if HIDDEN <= BLOCK_N:
                g_mean = tl.sum(g, 1) / HIDDEN  # [BLOCK_M]
                gx_mean = tl.sum(g * x_hat, 1) / HIDDEN
            else:
                g_mean = tl.load(means_ptr + rows, mask=row_mask, other=0.0)
                gx_mean = tl.load(means_ptr + n_rows + rows, mask=row_mask, other=0.0)
            dz = input_gradient(g, x_hat, rstd, g_mean, gx_mean, HIDDEN, KIND)
        if dsum_ptr is not None:
            dsum_at = dsum_ptr + rows[:, None] * HIDDEN + cols[None, :]
            dz += tl.load(dsum_at, mask=mask, other=0.0).to(tl.float32)
        dx_at = rows[:, None] * HIDDEN + cols[None, :]
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + dx_at, dz.to(dresidual_ptr.dtype.element_ty), mask=mask)
        if not DROPS_OUTPUT:
            dz = dropped(dz, dropout, rows, col_start, BLOCK_M, BLOCK_N)
        if dx_ptr is not None:
            tl.store(dx_ptr + dx_at, dz.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight += dy * x_hat
            dbias += dy
        if dx_bias_ptr is not None:
            # Rows after the last have rstd (of a NoNorm dy) and dsum 0, so dz 0.
            dx_bias += dz
    partial_at = program.to(tl.int64) * HIDDEN + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial_at, tl.sum(dweight, 0), mask=col_mask)
        tl.store(dbias_ptr + partial_at, tl.sum(dbias, 0), mask=col_mask)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + partial_at, tl.sum(dx_bias, 0), mask=col_mask)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _wide_bwd_means_kernel(
    dy_ptr, drounded_ptr, z_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, seed_ptr, dy_stride, z_stride,
    n_rows, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, DROPS_OUTPUT: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g * x_hat) of one row, summed block by block."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    if KIND == "rms_norm":
        mean = tl.zeros((1,), tl.float32)
    else:
        mean = tl.load(mean_ptr + rows)
    rstd = tl.load(rstd_ptr + rows)
    g_sum = tl.zeros((1,), tl.float32)
    gx_sum = tl.zeros((1,), tl.float32)
    sources, dropout = (dy_ptr, drounded_ptr, z_ptr), (seed_ptr, offset, threshold, keep_scale)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        mask = cols < HIDDEN
        dy, x_hat = _bwd_tile(
            *(sources, dy_stride, z_stride, dropout, rows, col_start, mask[None, :], mean, rstd),
            *(HIDDEN, 1, BLOCK_N, DROPS_OUTPUT),
        )
        g = dy * tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
        g_sum += tl.sum(g, 1)
        gx_sum += tl.sum(g * x_hat, 1)
    tl.store(means_ptr + rows, g_sum / HIDDEN)
    tl.store(means_ptr + n_rows + rows, gx_sum / HIDDEN)
