"""Rows of activations on 8-bit floats (E4M3), in one pass: what the product of `linear_fp8` reads.

Math       x = act(x), rounded to its dtype, if there is an activation;  step = max |x_i| / 448, or 1 where
           that is below 2**-126;  q_i = e4m3(x_i (1 / step)).  As fastbert/ops/linear_fp8.py has it, to the
           bit; of a row that is not finite a part of q may be.
Tiling     A program owns BLOCK_M rows. It keeps their first BLOCK_N columns in registers between their
           largest element and their rounding, and reads further columns twice.
Precision  float32; the divisions are correctly rounded. E4M3 by the GPU's own conversion, to the nearest,
           halves to the even, at most 448; it needs compute capability 8.9.
Bytes      Of bfloat16 2 read and 1 written per element, in one launch. PyTorch's chain moves 39 in twelve.
           An activation costs nothing but its arithmetic; as a pass of its own it moves 4 bytes more.
Saved      Nothing: inference only.
Source     Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import activation as activation_kernels
from fastbert.kernels.activation import activate
from fastbert.kernels.launch import cdiv, launch, next_power_of_2

# The most columns that a program keeps in registers
ONE_BLOCK = 4096


@triton.jit
def _active_tile(
    x_ptr,
    x_stride,
    rows,
    start,
    n_rows,
    IN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """act(x) = [BLOCK_M, BLOCK_N] from column `start`, as its dtype has it, in float32."""
    cols = start + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        HALF: tl.constexpr = DTYPE != tl.float32  # noqa: SIM300
        FEW: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
        # Each activation is 0 at 0, so columns after the last one stay 0
        x = activate(x, ACTIVATION, FEW_DIGITS=FEW, CHEAP=HALF and not EXACT).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _store_e4m3(q_ptr, x, rows, start, n_rows, IN: tl.constexpr, BLOCK_N: tl.constexpr):
    """`x` = [BLOCK_M, BLOCK_N], rounded, as bytes."""
    cols = start + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]
    q = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(q_ptr + rows[:, None] * IN + cols[None, :], q, mask=mask)


@triton.jit(do_not_specialize=("n_rows",))
def _fp8_rows_kernel(
    x_ptr, q_ptr, step_ptr, x_stride, n_rows,
    IN: tl.constexpr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`q` = [rows, IN] bytes and `step` = [rows]."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = _active_tile(x_ptr, x_stride, rows, 0, n_rows, IN, ACTIVATION, EXACT, BLOCK_N)
    most = tl.max(tl.abs(first), 1)  # [BLOCK_M]
    for start in range(BLOCK_N, IN, BLOCK_N):
        x = _active_tile(x_ptr, x_stride, rows, start, n_rows, IN, ACTIVATION, EXACT, BLOCK_N)
        most = tl.maximum(most, tl.max(tl.abs(x), 1))
    step = tl.div_rn(most, 448.0)
    step = tl.where(step < 1.1754943508222875e-38, 1.0, step)
    tl.store(step_ptr + rows, step, mask=rows < n_rows)
    # 0 for an infinite step: infinity · 0 is NaN, and a NaN stays one
    inv = tl.div_rn(1.0, step)[:, None]
    _store_e4m3(q_ptr, first * inv, rows, 0, n_rows, IN, BLOCK_N)
    for start in range(BLOCK_N, IN, BLOCK_N):
        x = _active_tile(x_ptr, x_stride, rows, start, n_rows, IN, ACTIVATION, EXACT, BLOCK_N)
        _store_e4m3(q_ptr, x * inv, rows, start, n_rows, IN, BLOCK_N)


# --- launchers ----------------------------------------------------------------------------------------------


def rows_config(columns: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): at most 32 elements per thread."""
    block_n = min(ONE_BLOCK, max(16, next_power_of_2(columns)))
    return max(1, 1024 // block_n), block_n, max(1, block_n // 1024)


def rounded_rows(x: Tensor, activation: str | None = None) -> tuple[Tensor, Tensor]:
    """(q float8_e4m3fn (rows, in), step float32 (rows, 1)) of act(x)."""
    rows, depth = x.shape
    q = torch.empty((rows, depth), dtype=torch.uint8, device=x.device)
    step = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows > 0:
        block_m, block_n, num_warps = rows_config(depth)
        launch(
            _fp8_rows_kernel,
            (cdiv(rows, block_m),),
            x.device,
            x,
            q,
            step,
            x.stride(0),
            rows,
            IN=depth,
            ACTIVATION=activation,
            EXACT=activation_kernels.EXACT_GELU,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=num_warps,
        )
    return q.view(torch.float8_e4m3fn), step
