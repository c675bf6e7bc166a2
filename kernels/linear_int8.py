"""A linear layer on 8-bit integers, for inference: rows are rounded in one pass, and multiplied in another.

Math       The contract of fastbert/ops/linear_int8.py, to the bit up to the integers acc. tl.dot takes signed
           bytes on both sides, so it gets v = u - 128:
           acc = Σ (u - zero) w = Σ v w + (128 - zero) Σ w;  y = act(acc (step scale) + bias)
Tiling     Rounding: a program owns BLOCK_M rows. It keeps their first BLOCK_N columns in registers between
           their range and their rounding, and reads further columns twice. Product: a program owns a tile
           of [BLOCK_M, BLOCK_N], with a gate one of each half.
Precision  Each operation of rounding is rounded once: a product that a sum follows is `fma(a, b, 0)`, which
           no compiler fuses with the sum. Halves go to the even integer, by adding and subtracting
           1.5 · 2**23. Sums are int32, the epilogue float32, one rounding at the store.
Saved      Nothing. Σ w per output channel are the backend's panels, made once per weight.
Source     Jacob et al. 2017, Quantization and Training of Neural Networks, sec. 2.2 to 2.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import activation as activation_kernels
from fastbert.kernels import tuning
from fastbert.kernels.activation import activate
from fastbert.kernels.launch import MOST_REGISTERS, cdiv, launch, next_power_of_2
from fastbert.kernels.linear_forward import _tile_at

if TYPE_CHECKING:
    from fastbert.ops.linear_int8 import LinearInt8Inputs

# The most columns that a program keeps in registers while it rounds rows
ONE_BLOCK = 4096


@triton.jit
def _float_tile(
    x_ptr,
    smooth_ptr,
    x_stride,
    rows,
    start,
    n_rows,
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`x` = [BLOCK_M, BLOCK_N] from column `start`, in float32, times `smooth`; 0 outside the matrix."""
    cols = start + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if smooth_ptr is not None:
        x *= tl.load(smooth_ptr + cols, mask=cols < IN, other=0.0)[None, :]
    return x


@triton.jit
def _not_finite(x):
    return ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)


@triton.jit
def _rounded_product(a, b):
    """a · b, rounded to float32, and then to an integer."""
    product = tl.fma(a, b, tl.zeros_like(a))
    return (product + 12582912.0) - 12582912.0


@triton.jit
def _store_bytes(v_ptr, x, inv, zero, rows, start, n_rows, IN: tl.constexpr, BLOCK_N: tl.constexpr):
    """`v` of `x` = [BLOCK_M, BLOCK_N]; 0 where x is NaN."""
    cols = start + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]
    u = _rounded_product(x, tl.broadcast_to(inv[:, None], x.shape)) + zero[:, None]
    u = tl.minimum(tl.maximum(tl.where(u == u, u, 0.0), 0.0), 255.0)
    tl.store(v_ptr + rows[:, None] * IN + cols[None, :], (u - 128.0).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=("n_rows",))
def _int8_rows_kernel(
    x_ptr, smooth_ptr, range_ptr, v_ptr, offset_ptr, step_ptr, x_stride, n_rows,
    IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`v` = [rows, IN]; `offset` = 128 - zero and `step` = [rows], NaN where a row has no finite range."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = _float_tile(x_ptr, smooth_ptr, x_stride, rows, 0, n_rows, IN, BLOCK_N)
    lo = tl.minimum(tl.min(first, 1), 0.0)  # [BLOCK_M]
    hi = tl.maximum(tl.max(first, 1), 0.0)
    # min and max pass over NaN
    spoiled = tl.max(_not_finite(first), 1)
    for start in range(BLOCK_N, IN, BLOCK_N):
        x = _float_tile(x_ptr, smooth_ptr, x_stride, rows, start, n_rows, IN, BLOCK_N)
        lo = tl.minimum(lo, tl.min(x, 1))
        hi = tl.maximum(hi, tl.max(x, 1))
        spoiled = tl.maximum(spoiled, tl.max(_not_finite(x), 1))
    if range_ptr is not None:
        lo = tl.minimum(tl.zeros((BLOCK_M,), tl.float32), tl.load(range_ptr))
        hi = tl.maximum(tl.zeros((BLOCK_M,), tl.float32), tl.load(range_ptr + 1))
    step = tl.div_rn(hi - lo, 255.0)
    step = tl.where(step < 1.1754943508222875e-38, 1.0, step)
    bad = (spoiled != 0) | (step == float("inf"))
    inv = tl.div_rn(1.0, tl.where(bad, 1.0, step))
    zero = tl.where(bad, 0.0, _rounded_product(-lo, inv))
    tl.store(offset_ptr + rows, (128.0 - zero).to(tl.int32), mask=rows < n_rows)
    tl.store(step_ptr + rows, tl.where(bad, float("nan"), step), mask=rows < n_rows)
    _store_bytes(v_ptr, first, inv, zero, rows, 0, n_rows, IN, BLOCK_N)
    for start in range(BLOCK_N, IN, BLOCK_N):
        x = _float_tile(x_ptr, smooth_ptr, x_stride, rows, start, n_rows, IN, BLOCK_N)
        _store_bytes(v_ptr, x, inv, zero, rows, start, n_rows, IN, BLOCK_N)


@triton.jit
def _floats(acc, sums_ptr, scale_ptr, bias_ptr, offset, step, channels, inside):
    """acc (step scale) + bias of a tile; `channels` and `inside` = [BLOCK_N]."""
    acc += offset[:, None] * tl.load(sums_ptr + channels, mask=inside, other=0)[None, :]
    scale = tl.load(scale_ptr + channels, mask=inside, other=0.0)
    y = acc.to(tl.float32) * (step[:, None] * scale[None, :])
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=("n_rows",))
def _linear_int8_kernel(
    v_ptr, weight_ptr, sums_ptr, offset_ptr, step_ptr, scale_ptr, bias_ptr, y_ptr, n_rows,
    IN: tl.constexpr, OUT: tl.constexpr, ACTIVE: tl.constexpr, OTHER: tl.constexpr, ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of `y` = [rows, OUT]. Column c is row ACTIVE + c of the weight, gated by row OTHER + c."""
    row_tiles = (n_rows + BLOCK_M - 1) // BLOCK_M
    row_tile, col_tile = _tile_at(tl.program_id(0), row_tiles, (OUT + BLOCK_N - 1) // BLOCK_N, 8)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows and columns after the last one read the last one again and are not stored
    v_at = v_ptr + tl.minimum(rows, n_rows - 1).to(tl.int64)[:, None] * IN + ks[None, :]
    channels = tl.minimum(cols, OUT - 1).to(tl.int64)
    weight_at = weight_ptr + channels[None, :] * IN + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k in range(0, IN, BLOCK_K):
        inside = ks < IN - k
        v = tl.load(v_at + k, mask=inside[None, :], other=0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(weight_at + (ACTIVE * IN + k), mask=inside[:, None], other=0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(v, w, acc, out_dtype=tl.int32)
        if OTHER is not None:
            w = tl.load(weight_at + (OTHER * IN + k), mask=inside[:, None], other=0)
            gate = tl.dot(v, w, gate, out_dtype=tl.int32)
    there, inside = rows < n_rows, cols < OUT
    offset = tl.load(offset_ptr + rows, mask=there, other=0)
    step = tl.load(step_ptr + rows, mask=there, other=0.0)
    y = _floats(acc, sums_ptr, scale_ptr, bias_ptr, offset, step, ACTIVE + cols, inside)
    HALF: tl.constexpr = y_ptr.dtype.element_ty != tl.float32
    FEW: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
    y = activate(y, ACTIVATION, FEW_DIGITS=FEW, CHEAP=HALF and not EXACT)
    if OTHER is not None:
        y *= _floats(gate, sums_ptr, scale_ptr, bias_ptr, offset, step, OTHER + cols, inside)
    at = rows.to(tl.int64)[:, None] * OUT + cols[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


# --- launchers ----------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the product runs.

    Attributes:
        block_m, block_n, block_k: rows, columns and depth of a tile.
        num_warps, num_stages: Triton's.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def config(rows: int, gated: bool, capability: tuple[int, int]) -> Config:
    """By the rows: two accumulators of a gate have half of the columns each."""
    if capability == (0, 0):
        # Small, so that small tests have several tiles
        return Config(16, 32, 32, 4, 2)
    if rows <= 32:
        return Config(32, 32 if gated else 64, 128, 4, 4)
    if rows <= 512:
        return Config(64, 32 if gated else 64, 128, 4, 4)
    return Config(128, 64 if gated else 128, 128, 8, 3)


def rows_config(columns: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) of the pass that rounds rows: at most 32 elements per thread."""
    block_n = min(ONE_BLOCK, max(16, next_power_of_2(columns)))
    return max(1, 1024 // block_n), block_n, max(1, block_n // 1024)


def channel_sums(weight: Tensor) -> Tensor:
    """Σ w of each output channel as bytes, (4 out,) uint8: what the op calls panels."""
    return weight.sum(1, dtype=torch.int32).view(torch.uint8)


def quantized_rows(
    x: Tensor, smooth: Tensor | None, input_range: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(v int8 (rows, in), 128 - zero int32 (rows,), step float32 (rows,)) of `x`."""
    rows, depth = x.shape
    v = torch.empty((rows, depth), dtype=torch.int8, device=x.device)
    offset = torch.empty((rows,), dtype=torch.int32, device=x.device)
    step = torch.empty((rows,), dtype=torch.float32, device=x.device)
    block_m, block_n, num_warps = rows_config(depth)
    launch(
        _int8_rows_kernel,
        (cdiv(rows, block_m),),
        x.device,
        x,
        smooth,
        input_range,
        v,
        offset,
        step,
        x.stride(0),
        rows,
        IN=depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return v, offset, step


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    """The contract of `fastbert.ops.linear_int8.linear_int8_fwd`."""
    x, weight, scale, bias, activation, panels, gated, smooth, input_range, _ = inputs
    (rows, depth), out, y = x.shape, weight.shape[0], inputs.new_output()
    columns = y.shape[1]
    if rows == 0:
        return y
    v, offset, step = quantized_rows(x, smooth, input_range)
    sums = channel_sums(weight) if panels is None or panels.numel() != 4 * out else panels
    block_m, block_n, block_k, num_warps, num_stages = config(
        rows, gated is not None, tuning.device_of(x.device).capability
    )
    launch(
        _linear_int8_kernel,
        (cdiv(rows, block_m) * cdiv(columns, block_n),),
        x.device,
        v,
        weight,
        sums.view(torch.int32),
        offset,
        step,
        scale,
        bias,
        y,
        rows,
        IN=depth,
        OUT=columns,
        ACTIVE=columns if gated == "second" else 0,
        OTHER=None if gated is None else 0 if gated == "second" else columns,
        ACTIVATION=activation,
        EXACT=activation_kernels.EXACT_GELU,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=MOST_REGISTERS,
    )
    return y
