"""The last step of column sums: the partial sums of all programs, added in a fixed order."""

import triton
import triton.language as tl

# Of each launch: partial sums and columns of a tile.
SIZES = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}


@triton.jit(do_not_specialize=("n_partials",))
def _sum_partials_kernel(
    partials_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    n_partials,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out_i = Σ_p partials[i, p]; `partials` = [outputs, n_partials, HIDDEN]; i is the second grid index."""
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n_partials, BLOCK_M):
        p = start + tl.arange(0, BLOCK_M)
        at = (which.to(tl.int64) * n_partials + p)[:, None] * HIDDEN + cols[None, :]
        total += tl.load(partials_ptr + at, mask=(p < n_partials)[:, None] & col_mask[None, :], other=0.0)
    column_sums = tl.sum(total, 0)
    if which == 0:
        tl.store(out0_ptr + cols, column_sums, mask=col_mask)
    # Of two nested conditions the first is known when the kernel is compiled, the second when it runs.
    if out1_ptr is not None:  # noqa: SIM102
        if which == 1:
            tl.store(out1_ptr + cols, column_sums, mask=col_mask)
    if out2_ptr is not None:  # noqa: SIM102
        if which == 2:
            tl.store(out2_ptr + cols, column_sums, mask=col_mask)
