"""The kernels of forward; their mathematics, tiling and launch are in kernels/layer_norm.py."""

import triton
import triton.language as tl

from fastbert.kernels.philox import dropped

# Arguments for which 1 and multiples of 16 compile nothing anew.
_FIXED_TYPES = ("n_rows", "offset", "threshold")


@triton.jit
def row_of(vector_ptr, cols, HIDDEN: tl.constexpr):
    """[1, BLOCK_N] in float32: a parameter of every column.

    Loaded as a row, not as a vector: one row of activations then gives it its layout, and float32 parameters
    beside bfloat16 rows need no exchange between lanes.
    """
    inside = (cols < HIDDEN)[None, :]
    return tl.load(vector_ptr + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def centred_rows(z, inside, HIDDEN: tl.constexpr):
    """(mean = [BLOCK_M], z - mean or 0 where not `inside`) of whole rows `z` = [BLOCK_M, BLOCK_N]."""
    mean = tl.div_rn(tl.sum(z, 1), HIDDEN * 1.0)
    return mean, tl.where(inside, z - mean[:, None], 0.0)


@triton.jit
def merged(mean, squares, z, inside, col_start, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """(mean, Σ (z - mean)²) of the columns before `col_start` and of the block `z` that begins there."""
    count = tl.minimum(HIDDEN - col_start, BLOCK_N).to(tl.float32)
    share = count / (col_start + count)
    block_mean = tl.sum(z, 1) / count
    centred = tl.where(inside, z - block_mean[:, None], 0.0)
    delta = block_mean - mean
    mean += delta * share
    return mean, squares + (tl.sum(centred * centred, 1) + delta * delta * col_start * share)


@triton.jit
def rstd_of(squares, eps, HIDDEN: tl.constexpr):
    """`rstd` = [BLOCK_M] of the sums of squares over HIDDEN columns."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HIDDEN * 1.0) + eps))


@triton.jit
def _z_tile(
    sources, x_stride, residual_stride,
    dropout, rows, col_start, n_rows,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`z` = [BLOCK_M, BLOCK_N] in float32, 0 outside the matrix; `sources`: x, residual, x_bias."""
    x_ptr, residual_ptr, x_bias_ptr = sources
    cols = col_start + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < HIDDEN)[None, :]
    z = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if x_bias_ptr is not None:
        z += row_of(x_bias_ptr, cols, HIDDEN)
    z = dropped(z, dropout, rows, col_start, BLOCK_M, BLOCK_N)
    if residual_ptr is not None:
        residual_at = residual_ptr + rows[:, None] * residual_stride + cols[None, :]
        z += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _layer_norm_fwd_kernel(
    x_ptr, residual_ptr, x_bias_ptr, weight_ptr, bias_ptr, seed_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr,
    rounded_ptr,
    x_stride, residual_stride, y_stride, z_stride,
    n_rows, eps, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAVE_STATS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The rows of one tile. Where HIDDEN > BLOCK_N: one column block of them, with given mean and rstd."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col_start = tl.program_id(1) * BLOCK_N
    cols = col_start + tl.arange(0, BLOCK_N)
    row_mask = rows < n_rows
    col_mask = cols < HIDDEN
    mask = row_mask[:, None] & col_mask[None, :]
    sources, dropout = (x_ptr, residual_ptr, x_bias_ptr), (seed_ptr, offset, threshold, keep_scale)
    z = _z_tile(
        sources, x_stride, residual_stride, dropout, rows, col_start, n_rows, HIDDEN, BLOCK_M, BLOCK_N
    )
    if z_ptr is not None:
        tl.store(z_ptr + rows[:, None] * z_stride + cols[None, :], z.to(z_ptr.dtype.element_ty), mask=mask)
    if KIND == "no_norm":
        x_hat = z
    elif HIDDEN <= BLOCK_N:
        centred = z
        if KIND == "layer_norm":
            mean, centred = centred_rows(z, col_mask[None, :], HIDDEN)
        rstd = rstd_of(tl.sum(centred * centred, 1), eps, HIDDEN)
        if SAVE_STATS:
            if KIND == "layer_norm":
                tl.store(mean_ptr + rows, mean, mask=row_mask)
            tl.store(rstd_ptr + rows, rstd, mask=row_mask)
        x_hat = centred * rstd[:, None]
    else:
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        centred = z
        if KIND == "layer_norm":
            centred -= tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
        x_hat = centred * rstd[:, None]
    y = x_hat * row_of(weight_ptr, cols, HIDDEN)
    if bias_ptr is not None:
        y += row_of(bias_ptr, cols, HIDDEN)
    y_at = rows[:, None] * y_stride + cols[None, :]
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if rounded_ptr is not None:
        tl.store(rounded_ptr + y_at, y.to(rounded_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _wide_fwd_stats_kernel(
    x_ptr, residual_ptr, x_bias_ptr, seed_ptr, mean_ptr, rstd_ptr, x_stride, residual_stride,
    n_rows, eps, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """mean and rstd of one row: the mean and Σ(z - mean)² of its blocks, merged by Chan's rule.

    For RMSNorm rstd alone, of Σz².
    """
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mean = tl.zeros((1,), tl.float32)
    squares = tl.zeros((1,), tl.float32)
    sources, dropout = (x_ptr, residual_ptr, x_bias_ptr), (seed_ptr, offset, threshold, keep_scale)
    for col_start in range(0, HIDDEN, BLOCK_N):
        z = _z_tile(sources, x_stride, residual_stride, dropout, rows, col_start, n_rows, HIDDEN, 1, BLOCK_N)
        if KIND == "rms_norm":
            squares += tl.sum(z * z, 1)
        else:
            inside = (col_start + tl.arange(0, BLOCK_N) < HIDDEN)[None, :]
            mean, squares = merged(mean, squares, z, inside, col_start, HIDDEN, BLOCK_N)
    rstd = rstd_of(squares, eps, HIDDEN)
    if KIND == "layer_norm":
        tl.store(mean_ptr + rows, mean)
    tl.store(rstd_ptr + rows, rstd)
