"""Packed rows gathered from a padded batch, and scattered back among zeros.

Math       Forward: y[t] = x[indices[t]].  Backward: y[indices[t]] = x[t], 0 in every other row.
Tiling     A program owns BLOCK_M rows of the output and BLOCK_N of its columns. Backward writes each row
           once: indices rise strictly, so a binary search finds the packed row of a padded row, or that there
           is none. Writing zeros first and the kept rows over them would write those rows twice.
Precision  Nothing is rounded: elements move as integers of their size, so every bit arrives, also in NaN.
Source     Zhai et al. 2023, ByteTransformer, sec. III-B (the padding-free layout).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import MOST_REGISTERS, launch

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=("total",))
def _packing_fwd_kernel(
    x_ptr, indices_ptr, y_ptr, x_stride, y_stride, inner, total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`x` = [rows, inner], `y` = [total, inner]."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < total)[:, None] & (cols < inner)[None, :]
    taken = tl.load(indices_ptr + rows, mask=rows < total, other=0)
    x = tl.load(x_ptr + taken[:, None] * x_stride + cols[None, :], mask=mask)
    tl.store(y_ptr + rows[:, None] * y_stride + cols[None, :], x, mask=mask)


@triton.jit(do_not_specialize=("total", "rows", "steps"))
def _packing_bwd_kernel(
    x_ptr,
    indices_ptr,
    y_ptr,
    x_stride,
    y_stride,
    inner,
    total,
    rows,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`x` = [total, inner], `y` = [rows, inner]; 2**steps > total."""
    padded = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The first t with indices[t] >= row lies in [low, high].
    low = tl.zeros((BLOCK_M,), tl.int64)
    high = low + total
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(indices_ptr + middle, mask=searching, other=0) < padded
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    kept = (low < total) & (tl.load(indices_ptr + low, mask=low < total, other=-1) == padded)
    inside = (cols < inner)[None, :]
    x = tl.load(x_ptr + low[:, None] * x_stride + cols[None, :], mask=kept[:, None] & inside, other=0)
    tl.store(y_ptr + padded[:, None] * y_stride + cols[None, :], x, mask=(padded < rows)[:, None] & inside)


# --- launchers ----------------------------------------------------------------------------------------------


def config_for(inner: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): 2048 elements per program, 16 for each of its 128 threads."""
    block_n = max(16, min(512, triton.next_power_of_2(inner)))
    return max(1, 2048 // block_n), block_n


def _integers(t: Tensor) -> Tensor:
    return t.view(_AS_INTEGER[t.element_size()])


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    """Packed (total, inner) from padded (rows, inner): the contract of `fastbert.ops.packing.packing_fwd`."""
    total, inner = indices.shape[0], x.shape[1]
    y = torch.empty((total, inner), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        block_m, block_n = config_for(inner)
        launch(
            _packing_fwd_kernel,
            (triton.cdiv(total, block_m), triton.cdiv(inner, block_n)),
            x.device,
            _integers(x),
            indices,
            _integers(y),
            x.stride(0),
            y.stride(0),
            inner,
            total,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
    return y


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Padded (rows, inner) from packed (total, inner): the contract of `fastbert.ops.packing.packing_bwd`."""
    total, inner = x.shape
    y = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        block_m, block_n = config_for(inner)
        launch(
            _packing_bwd_kernel,
            (triton.cdiv(rows, block_m), triton.cdiv(inner, block_n)),
            x.device,
            _integers(x),
            indices,
            _integers(y),
            x.stride(0),
            y.stride(0),
            inner,
            total,
            rows,
            total.bit_length(),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
    return y
