"""The kernels of the embedding's backward; mathematics, tiling and launch are in kernels/embedding.py."""

import triton
import triton.language as tl

from fastbert.kernels.layer_norm_backward import input_gradient
from fastbert.kernels.philox import philox_keep


@triton.jit
def _dn_tile(
    dy_ptr,
    z_ptr,
    seed_ptr,
    dy_stride,
    z_stride,
    rows,
    col_start,
    mask,
    mean,
    rstd,
    offset,
    threshold,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`dn`, `x_hat` = [BLOCK_M, BLOCK_N] in float32; dn is 0 outside the matrix."""
    cols = col_start + tl.arange(0, BLOCK_N)
    dn = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        keep = philox_keep(tl.load(seed_ptr), offset, 0, rows, col_start, threshold, BLOCK_M, BLOCK_N)
        dn = tl.where(keep, dn * keep_scale, 0.0)
    z = tl.load(z_ptr + rows[:, None] * z_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return dn, (z - mean[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=("n_rows", "offset", "threshold"))
def _embedding_bwd_kernel(
    dy_ptr,
    z_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    seed_ptr,
    dz_ptr,
    dembeds_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_stride,
    z_stride,
    n_rows,
    offset,
    threshold,
    keep_scale,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every num_programs-th tile of tokens; this program's column sums go to its row of the partial sums.

    `dz` is in float32, for the tables; `dembeds` is the same in storage dtype. Of wide tokens a program takes
    one column block; `means_ptr` then holds each token's mean(g) and mean(g * x_hat).
    """
    program = tl.program_id(0)
    col_start = tl.program_id(1) * BLOCK_N
    cols = col_start + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        dn, x_hat = _dn_tile(
            dy_ptr,
            z_ptr,
            seed_ptr,
            dy_stride,
            z_stride,
            rows,
            col_start,
            mask,
            mean,
            rstd,
            offset,
            threshold,
            keep_scale,
            BLOCK_M,
            BLOCK_N,
        )
        if dweight_ptr is not None:
            dweight += dn * x_hat
            dbias += dn
        g = dn * weight
        if HIDDEN <= BLOCK_N:
            g_mean = tl.sum(g, 1) / HIDDEN  # [BLOCK_M]
            gx_mean = tl.sum(g * x_hat, 1) / HIDDEN
        else:
            g_mean = tl.load(means_ptr + rows, mask=row_mask, other=0.0)
            gx_mean = tl.load(means_ptr + n_rows + rows, mask=row_mask, other=0.0)
        dz = input_gradient(g, x_hat, rstd, g_mean, gx_mean, HIDDEN, "layer_norm")
        at = rows[:, None] * HIDDEN + cols[None, :]
        if dz_ptr is not None:
            tl.store(dz_ptr + at, dz, mask=mask)
        if dembeds_ptr is not None:
            tl.store(dembeds_ptr + at, dz.to(dembeds_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        partial_at = program.to(tl.int64) * HIDDEN + cols
        tl.store(dweight_ptr + partial_at, tl.sum(dweight, 0), mask=col_mask)
        tl.store(dbias_ptr + partial_at, tl.sum(dbias, 0), mask=col_mask)


@triton.jit(do_not_specialize=("n_rows", "offset", "threshold"))
def _wide_embedding_bwd_means_kernel(
    dy_ptr,
    z_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    seed_ptr,
    dy_stride,
    z_stride,
    n_rows,
    offset,
    threshold,
    keep_scale,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """mean(g) and mean(g * x_hat) of one token, summed block by block."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mean = tl.load(mean_ptr + rows)
    rstd = tl.load(rstd_ptr + rows)
    g_sum = tl.zeros((1,), tl.float32)
    gx_sum = tl.zeros((1,), tl.float32)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        col_mask = cols < HIDDEN
        dn, x_hat = _dn_tile(
            dy_ptr,
            z_ptr,
            seed_ptr,
            dy_stride,
            z_stride,
            rows,
            col_start,
            col_mask[None, :],
            mean,
            rstd,
            offset,
            threshold,
            keep_scale,
            1,
            BLOCK_N,
        )
        g = dn * tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        g_sum += tl.sum(g, 1)
        gx_sum += tl.sum(g * x_hat, 1)
    tl.store(means_ptr + rows, g_sum / HIDDEN)
    tl.store(means_ptr + n_rows + rows, gx_sum / HIDDEN)


@triton.jit
def _sorted_sum(
    dz_ptr,
    order_ptr,
    first,
    last,
    cols,
    col_mask,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Σ of the tokens [first, last) in sorted order: [BLOCK_M, BLOCK_N], whose rows are not yet summed."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        inside = at < last
        row = tl.load(order_ptr + at, mask=inside, other=0) * HIDDEN  # [BLOCK_M] in int64
        mask = inside[:, None] & col_mask[None, :]
        total += tl.load(dz_ptr + row[:, None] + cols[None, :], mask=mask, other=0.0)
    return total


@triton.jit
def _chunk_sums_kernel(
    dz_ptr,
    order_ptr,
    sorted_ptr,
    sums_ptr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """sums[c] = Σ dz of the c-th CHUNK tokens in sorted order if they share one id; else it is not read."""
    chunk = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    first = chunk * CHUNK
    if tl.load(sorted_ptr + first) == tl.load(sorted_ptr + first + CHUNK - 1):
        total = _sorted_sum(dz_ptr, order_ptr, first, first + CHUNK, cols, col_mask, HIDDEN, BLOCK_M, BLOCK_N)
        tl.store(sums_ptr + chunk.to(tl.int64) * HIDDEN + cols, tl.sum(total, 0), mask=col_mask)


@triton.jit(do_not_specialize=("skipped",))
def _table_bwd_kernel(
    dz_ptr,
    order_ptr,
    starts_ptr,
    sums_ptr,
    dtable_ptr,
    skipped,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row of the table: its run of sorted tokens is [starts[row], starts[row + 1]); row `skipped`: 0."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    first = tl.load(starts_ptr + row)
    last = tl.load(starts_ptr + row + 1)
    last = tl.where(row == skipped, first, last)
    # The chunks that lie in the run.
    first_chunk = (first + CHUNK - 1) // CHUNK
    last_chunk = last // CHUNK
    some = first_chunk < last_chunk
    total = _sorted_sum(
        dz_ptr,
        order_ptr,
        first,
        tl.where(some, first_chunk * CHUNK, last),
        cols,
        col_mask,
        HIDDEN,
        BLOCK_M,
        BLOCK_N,
    )
    for start in range(first_chunk, last_chunk, BLOCK_M):
        chunks = start + tl.arange(0, BLOCK_M)
        at = chunks.to(tl.int64)[:, None] * HIDDEN + cols[None, :]
        mask = (chunks < last_chunk)[:, None] & col_mask[None, :]
        total += tl.load(sums_ptr + at, mask=mask, other=0.0)
    total += _sorted_sum(
        dz_ptr,
        order_ptr,
        tl.where(some, last_chunk * CHUNK, last),
        last,
        cols,
        col_mask,
        HIDDEN,
        BLOCK_M,
        BLOCK_N,
    )
    dtable = tl.sum(total, 0).to(dtable_ptr.dtype.element_ty)
    tl.store(dtable_ptr + row.to(tl.int64) * HIDDEN + cols, dtable, mask=col_mask)
