"""The kernel of linear's forward; its mathematics, tiling and launch are in kernels/linear.py."""

import triton
import triton.language as tl

from fastbert.kernels.activation import activate

# The depth of a sum of float32 products, a multiple of every BLOCK_K. A second accumulator takes the sums of
# this depth: in one chain of 3072 the rounding errors are 2.4 times as large.
PART = tl.constexpr(512)


@triton.jit
def _tile_at(index, row_tiles, COL_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, column tile) of the index-th tile in grouped order."""
    first_row = index // (GROUP_M * COL_TILES) * GROUP_M
    height = tl.minimum(row_tiles - first_row, GROUP_M)
    within = index % (GROUP_M * COL_TILES)
    return first_row + within % height, within // height


@triton.jit
def _halves(tile):
    """The left and the right half of a tile's columns."""
    cut = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(cut, (0, 2, 1)))


@triton.jit
def _bias(bias_ptr, cols, OUT: tl.constexpr):
    """`bias` = [1, columns] in float32."""
    return tl.load(bias_ptr + cols, mask=cols < OUT, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _epilogue(
    acc,
    bias_ptr,
    residual_ptr,
    y,
    pre,
    y_stride,
    residual_stride,
    row_start,
    col_start,
    n_rows,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
):
    """Finish and store `acc` = [BLOCK_M, SPLIT * part], part by part."""
    if SPLIT > 1:
        left, right = _halves(acc)
        HALF: tl.constexpr = acc.shape[1] // 2
        _epilogue(
            left,
            bias_ptr,
            residual_ptr,
            y,
            pre,
            y_stride,
            residual_stride,
            row_start,
            col_start,
            n_rows,
            OUT,
            ACTIVATION,
            SPLIT // 2,
            TMA,
            DTYPE,
            EXACT,
            BIAS_FIRST,
        )
        _epilogue(
            right,
            bias_ptr,
            residual_ptr,
            y,
            pre,
            y_stride,
            residual_stride,
            row_start,
            col_start + HALF,
            n_rows,
            OUT,
            ACTIVATION,
            SPLIT // 2,
            TMA,
            DTYPE,
            EXACT,
            BIAS_FIRST,
        )
    else:
        rows = row_start + tl.arange(0, acc.shape[0])
        cols = col_start + tl.arange(0, acc.shape[1])
        mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]
        at = rows.to(tl.int64)[:, None] * y_stride + cols[None, :]
        if bias_ptr is not None and not BIAS_FIRST:
            acc += _bias(bias_ptr, cols, OUT)
        if pre is not None:
            if TMA:
                pre.store([row_start, col_start], acc.to(DTYPE))
            else:
                tl.store(pre + at, acc.to(DTYPE), mask=mask)
        HALF_PRECISION: tl.constexpr = DTYPE != tl.float32  # noqa: SIM300
        few = DTYPE == tl.bfloat16  # noqa: SIM300
        acc = activate(acc, ACTIVATION, FEW_DIGITS=few, CHEAP=HALF_PRECISION and not EXACT)
        if residual_ptr is not None:
            residual_at = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + cols[None, :]
            acc += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        if TMA:
            y.store([row_start, col_start], acc.to(DTYPE))
        else:
            tl.store(y + at, acc.to(DTYPE), mask=mask)


@triton.jit
def _add_product(
    acc,
    x,
    weight,
    x_stride,
    weight_stride,
    row_start,
    col_start,
    n_rows,
    first,
    last,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """`acc` = [BLOCK_M, BLOCK_N] plus the product over [first, last) of the depth; `last` ends a tile."""
    if TMA:
        for k in range(first, last, BLOCK_K):
            x_tile = x.load([row_start, k])  # [BLOCK_M, BLOCK_K]
            weight_tile = weight.load([col_start, k])  # [BLOCK_N, BLOCK_K]
            acc = tl.dot(x_tile, weight_tile.T, acc, input_precision="ieee")
    else:
        rows = tl.minimum(row_start + tl.arange(0, acc.shape[0]), n_rows - 1).to(tl.int64)
        outs = tl.minimum(col_start + tl.arange(0, acc.shape[1]), OUT - 1).to(tl.int64)
        ks = tl.arange(0, BLOCK_K)
        x_at = x + rows[:, None] * x_stride + ks[None, :]
        weight_at = weight + outs[None, :] * weight_stride + ks[:, None]
        for k in range(first, last, BLOCK_K):
            if IN % BLOCK_K == 0:
                x_tile = tl.load(x_at + k)  # [BLOCK_M, BLOCK_K]
                weight_tile = tl.load(weight_at + k)  # [BLOCK_K, BLOCK_N]
            else:
                inside = ks < IN - k
                x_tile = tl.load(x_at + k, mask=inside[None, :], other=0.0)
                weight_tile = tl.load(weight_at + k, mask=inside[:, None], other=0.0)
            acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=("n_rows",))
def _linear_fwd_kernel(
    x,
    weight,
    bias_ptr,
    residual_ptr,
    y,
    pre,
    x_stride,
    weight_stride,
    y_stride,
    residual_stride,
    n_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    EXACT: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
):
    """With TMA `x`, `weight`, `y` and `pre` are tensor descriptors, else pointers."""
    DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    COL_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    row_tiles = tl.cdiv(n_rows, BLOCK_M)
    for tile in tl.range(tl.program_id(0), row_tiles * COL_TILES, tl.num_programs(0), flatten=TMA):
        row_tile, col_tile = _tile_at(tile, row_tiles, COL_TILES, GROUP_M)
        row_start, col_start = row_tile * BLOCK_M, col_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if bias_ptr is not None and BIAS_FIRST:
            acc += _bias(bias_ptr, col_start + tl.arange(0, BLOCK_N), OUT)
        operands = x, weight, x_stride, weight_stride, row_start, col_start, n_rows
        # In parts a depth that is no multiple of a tile spills.
        if DTYPE == tl.float32 and IN > PART and IN % BLOCK_K == 0:  # noqa: SIM300
            for first in range(0, IN, PART):
                last = tl.minimum(first + PART, IN)
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                acc += _add_product(part, *operands, first, last, IN, OUT, BLOCK_K, TMA)
        else:
            acc = _add_product(acc, *operands, 0, IN, IN, OUT, BLOCK_K, TMA)
        _epilogue(
            acc,
            bias_ptr,
            residual_ptr,
            y,
            pre,
            y_stride,
            residual_stride,
            row_start,
            col_start,
            n_rows,
            OUT,
            ACTIVATION,
            SPLIT,
            TMA,
            DTYPE,
            EXACT,
            BIAS_FIRST,
        )
