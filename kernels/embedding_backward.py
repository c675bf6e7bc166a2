"""The gradient of a table, by two kernels; mathematics, tiling and launch are in kernels/embedding.py."""

import triton
import triton.language as tl


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
    dz_ptr, order_ptr, starts_ptr, sums_ptr, dtable_ptr, skipped,
    HIDDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
    end = tl.where(some, first_chunk * CHUNK, last)
    total = _sorted_sum(dz_ptr, order_ptr, first, end, cols, col_mask, HIDDEN, BLOCK_M, BLOCK_N)
    for start in range(first_chunk, last_chunk, BLOCK_M):
        chunks = start + tl.arange(0, BLOCK_M)
        at = chunks.to(tl.int64)[:, None] * HIDDEN + cols[None, :]
        mask = (chunks < last_chunk)[:, None] & col_mask[None, :]
        total += tl.load(sums_ptr + at, mask=mask, other=0.0)
    after = tl.where(some, last_chunk * CHUNK, last)
    total += _sorted_sum(dz_ptr, order_ptr, after, last, cols, col_mask, HIDDEN, BLOCK_M, BLOCK_N)
    dtable = tl.sum(total, 0).to(dtable_ptr.dtype.element_ty)
    tl.store(dtable_ptr + row.to(tl.int64) * HIDDEN + cols, dtable, mask=col_mask)
