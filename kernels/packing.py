"""Packed rows gathered from a padded batch, and scattered back among zeros.

Math       Forward: y[t] = x[indices[t]].  Backward: y[indices[t]] = x[t], 0 in every other row.
Tiling     A program owns BLOCK_M rows of the output and BLOCK_N of its columns. Backward writes each row
           once: indices rise strictly, so a binary search finds the packed row of a padded row, or that there
           is none. Writing zeros first and the kept rows over them would write those rows twice.
Indices    An index outside the padded batch is reported to the host (bad_ids.py). Forward fills its row
           with NaN (integers: the least one; bool: False) and backward leaves its row out.
Precision  Nothing is rounded: elements move as integers of their size, so every bit arrives, also in NaN.
Source     Zhai et al. 2023, ByteTransformer, sec. III-B (the padding-free layout).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.bad_ids import INDICES, BadIds, bad_ids, tell_bad
from fastbert.kernels.launch import MOST_REGISTERS, cdiv, launch, next_power_of_2

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _bad_indices(indices_ptr, at, total, rows, bad_ptr):
    """(indices, whether they are not rows of the padded batch) at `at` = [BLOCK_M]; one program reports."""
    indices = tl.load(indices_ptr + at, mask=at < total, other=0)
    bad = (indices < 0) | (indices >= rows)
    if tl.program_id(1) == 0:
        tell_bad(bad & (at < total), indices, bad_ptr, INDICES)
    return indices, bad


@triton.jit(do_not_specialize=("total", "padded_rows"))
def _packing_fwd_kernel(
    x_ptr, indices_ptr, y_ptr, bad_ptr, x_stride, y_stride,
    inner, total, padded_rows,
    SPOILED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`x` = [padded_rows, inner], `y` = [total, inner]; SPOILED: the bits of an element of a bad index."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < total)[:, None] & (cols < inner)[None, :]
    taken, bad = _bad_indices(indices_ptr, rows, total, padded_rows, bad_ptr)
    x_at = x_ptr + taken[:, None] * x_stride + cols[None, :]
    x = tl.load(x_at, mask=mask & ~bad[:, None], other=SPOILED)
    tl.store(y_ptr + rows[:, None] * y_stride + cols[None, :], x, mask=mask)


@triton.jit(do_not_specialize=("total", "rows", "steps"))
def _packing_bwd_kernel(
    x_ptr, indices_ptr, y_ptr, bad_ptr, x_stride, y_stride,
    inner, total, rows, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`x` = [total, inner], `y` = [rows, inner]; 2**steps > total."""
    padded = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _bad_indices(indices_ptr, padded, total, rows, bad_ptr)
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
    block_n = max(16, min(512, next_power_of_2(inner)))
    return max(1, 2048 // block_n), block_n


def _spoiled(dtype: torch.dtype) -> int:
    """The bits, as an integer, of NaN; of the least integer; or of False."""
    if dtype == torch.bool:
        return 0
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min
    return _integers(torch.tensor(float("nan"), dtype=dtype)).item()


def _integers(t: Tensor) -> Tensor:
    return t.view(_AS_INTEGER[t.element_size()])


def _checked(total: int, rows: int, device: torch.device) -> BadIds:
    """Where to report bad indices; IndexError for those of an earlier call, or for indices without rows."""
    bad = bad_ids(device)
    bad.check()
    if total > 0 and rows == 0:
        raise IndexError("indices: positions of a padded batch without rows")
    return bad


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    """Packed (total, inner) from padded (rows, inner): the contract of `fastbert.ops.packing.packing_fwd`.

    The row of an index outside the padded batch is NaN, and the next call raises an IndexError.
    """
    total, inner = indices.shape[0], x.shape[1]
    bad = _checked(total, x.shape[0], x.device)
    y = torch.empty((total, inner), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        block_m, block_n = config_for(inner)
        launch(
            _packing_fwd_kernel,
            (cdiv(total, block_m), cdiv(inner, block_n)),
            x.device,
            _integers(x),
            indices,
            _integers(y),
            bad.cells,
            x.stride(0),
            y.stride(0),
            inner,
            total,
            x.shape[0],
            SPOILED=_spoiled(x.dtype),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
    return y


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Padded (rows, inner) from packed (total, inner): the contract of `fastbert.ops.packing.packing_bwd`.

    An index outside the padded batch is left out, and the next call raises an IndexError.
    """
    total, inner = x.shape
    bad = _checked(total, rows, x.device)
    y = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        block_m, block_n = config_for(inner)
        launch(
            _packing_bwd_kernel,
            (cdiv(max(rows, total), block_m), cdiv(inner, block_n)),
            x.device,
            _integers(x),
            indices,
            _integers(y),
            bad.cells,
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
