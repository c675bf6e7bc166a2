"""The kernel of linear's forward, gated or not; mathematics, tiling and launch are in kernels/linear.py."""

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
def _store(to, row_start, col_start, at, tile, mask, TMA: tl.constexpr, DTYPE: tl.constexpr):
    """Store a tile by a tensor descriptor, or at the offsets `at` from a pointer."""
    if TMA:
        to.store([row_start, col_start], tile.to(DTYPE))
    else:
        tl.store(to + at, tile.to(DTYPE), mask=mask)


@triton.jit
def _load_depth(at, inside, WHOLE: tl.constexpr):
    """A tile of an operand; 0 where its depth is not `inside`, unless tiles divide the depth: WHOLE."""
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _epilogue(
    acc, gate, pointers, y_stride, residual_stride,
    row_start, col_start, n_rows,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr, EXACT: tl.constexpr, BIAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Finish and store `acc` = [BLOCK_M, SPLIT * part], GATED by `gate`, part by part."""
    if SPLIT > 1:
        left, right = _halves(acc)
        gate_left, gate_right = _halves(gate)
        HALF: tl.constexpr = acc.shape[1] // 2
        _epilogue(
            *(left, gate_left, pointers, y_stride, residual_stride, row_start, col_start, n_rows),
            *(OUT, ACTIVATION, GATED, SPLIT // 2, TMA, DTYPE, EXACT, BIAS_FIRST),
        )
        _epilogue(
            *(right, gate_right, pointers, y_stride, residual_stride, row_start, col_start + HALF, n_rows),
            *(OUT, ACTIVATION, GATED, SPLIT // 2, TMA, DTYPE, EXACT, BIAS_FIRST),
        )
    else:
        bias_ptr, gate_bias_ptr, residual_ptr, y, pre, gate_pre = pointers
        rows = row_start + tl.arange(0, acc.shape[0])
        cols = col_start + tl.arange(0, acc.shape[1])
        mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]
        at = rows.to(tl.int64)[:, None] * y_stride + cols[None, :]
        if bias_ptr is not None and not BIAS_FIRST:
            acc += _bias(bias_ptr, cols, OUT)
            if GATED:
                gate += _bias(gate_bias_ptr, cols, OUT)
        if pre is not None:
            pre_at = rows.to(tl.int64)[:, None] * (2 * OUT) + cols[None, :] if GATED else at
            _store(pre, row_start, col_start, pre_at, acc, mask, TMA, DTYPE)
            if GATED:
                _store(gate_pre, row_start, col_start, pre_at, gate, mask, TMA, DTYPE)
        HALF_PRECISION: tl.constexpr = DTYPE != tl.float32  # noqa: SIM300
        few = DTYPE == tl.bfloat16  # noqa: SIM300
        acc = activate(acc, ACTIVATION, FEW_DIGITS=few, CHEAP=HALF_PRECISION and not EXACT)
        if GATED:
            acc *= gate
        if residual_ptr is not None:
            residual_at = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + cols[None, :]
            acc += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        _store(y, row_start, col_start, at, acc, mask, TMA, DTYPE)


@triton.jit
def _add_product(
    acc, gate, operands, row_start, col_start, n_rows, first, last,
    IN: tl.constexpr, OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """`acc` = [BLOCK_M, BLOCK_N] plus the product over [first, last) of the depth, and `gate` if GATED.

    `last` ends a tile of the depth. Both accumulators share each tile of x.
    """
    x, weight, gate_weight, x_stride, weight_stride = operands
    if TMA:
        for k in range(first, last, BLOCK_K):
            x_tile = x.load([row_start, k])  # [BLOCK_M, BLOCK_K]
            weight_tile = weight.load([col_start, k])  # [BLOCK_N, BLOCK_K]
            acc = tl.dot(x_tile, weight_tile.T, acc, input_precision="ieee")
            if GATED:
                gate_tile = gate_weight.load([col_start, k])
                gate = tl.dot(x_tile, gate_tile.T, gate, input_precision="ieee")
    else:
        rows = tl.minimum(row_start + tl.arange(0, acc.shape[0]), n_rows - 1).to(tl.int64)
        outs = tl.minimum(col_start + tl.arange(0, acc.shape[1]), OUT - 1).to(tl.int64)
        ks = tl.arange(0, BLOCK_K)
        WHOLE: tl.constexpr = IN % BLOCK_K == 0
        x_at = x + rows[:, None] * x_stride + ks[None, :]
        weight_at = weight + outs[None, :] * weight_stride + ks[:, None]
        if GATED:
            gate_at = gate_weight + outs[None, :] * weight_stride + ks[:, None]
        for k in range(first, last, BLOCK_K):
            inside = ks < IN - k
            x_tile = _load_depth(x_at + k, inside[None, :], WHOLE)  # [BLOCK_M, BLOCK_K]
            weight_tile = _load_depth(weight_at + k, inside[:, None], WHOLE)  # [BLOCK_K, BLOCK_N]
            acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
            if GATED:
                gate_tile = _load_depth(gate_at + k, inside[:, None], WHOLE)
                gate = tl.dot(x_tile, gate_tile, gate, input_precision="ieee")
    return acc, gate


@triton.jit(do_not_specialize=("n_rows",))
def _linear_fwd_kernel(
    x, weight, gate_weight,
    bias_ptr, gate_bias_ptr, residual_ptr,
    y, pre, gate_pre,
    x_stride, weight_stride, y_stride, residual_stride, n_rows,
    IN: tl.constexpr, OUT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, EXACT: tl.constexpr, BIAS_FIRST: tl.constexpr,
):  # fmt: skip
    """With TMA `x`, the weights, `y` and `pre` are tensor descriptors, else pointers.

    With `gate_weight` a second product gates the first. The halves of pre then share rows of 2 * OUT.
    """
    DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    GATED: tl.constexpr = gate_weight is not None
    COL_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    row_tiles = tl.cdiv(n_rows, BLOCK_M)
    operands = x, weight, gate_weight, x_stride, weight_stride
    pointers = bias_ptr, gate_bias_ptr, residual_ptr, y, pre, gate_pre
    for tile in tl.range(tl.program_id(0), row_tiles * COL_TILES, tl.num_programs(0), flatten=TMA):
        row_tile, col_tile = _tile_at(tile, row_tiles, COL_TILES, GROUP_M)
        row_start, col_start = row_tile * BLOCK_M, col_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if bias_ptr is not None and BIAS_FIRST:
            cols = col_start + tl.arange(0, BLOCK_N)
            acc += _bias(bias_ptr, cols, OUT)
            if GATED:
                gate += _bias(gate_bias_ptr, cols, OUT)
        place = row_start, col_start, n_rows
        # In parts a depth that is no multiple of a tile spills.
        if DTYPE == tl.float32 and IN > PART and IN % BLOCK_K == 0:  # noqa: SIM300
            for first in range(0, IN, PART):
                last = tl.minimum(first + PART, IN)
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                part, gate_part = _add_product(
                    part, part, operands, *place, first, last, IN, OUT, GATED, BLOCK_K, TMA
                )
                acc += part
                if GATED:
                    gate += gate_part
        else:
            acc, gate = _add_product(acc, gate, operands, *place, 0, IN, IN, OUT, GATED, BLOCK_K, TMA)
        _epilogue(
            *(acc, gate, pointers, y_stride, residual_stride),
            *place,
            *(OUT, ACTIVATION, GATED, SPLIT, TMA, DTYPE, EXACT, BIAS_FIRST),
        )
