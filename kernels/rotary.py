"""Rotary positions, forward and backward: pairs of columns of each head are rotated by the row's angles.

Math       y_l = x_l cos - x_r sin,  y_r = x_r cos + x_l sin  per pair (l, r) of columns; backward has -sin.
           So each column is its own product with cos plus its partner's with ±sin. The other columns are
           copied.
Tiling     A program owns all columns of BLOCK_H heads of one row (token). It loads the row's position and
           tables once. In rotate-half the partners are HALF columns away, and are loaded again, from L1.
           Interleaved partners are neighbours within one thread. Rows are on the grid axis without a limit;
           offsets of rows are 64-bit.
Precision  Computed in float32 and rounded once.
Positions  For a position outside the tables nothing is read, and the rotated columns are NaN.
Saved      Nothing: backward reads the tables and positions that forward reads.
Source     Su et al. 2021, RoFormer, sec. 3.2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import cdiv, launch, next_power_of_2


@triton.jit(do_not_specialize=("max_positions",))
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr, row_stride, head_stride, heads, max_positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`x` and `y` = [rows, heads, HEAD_DIM], `cos` and `sin` = [max_positions, HALF]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK_D)
    rotated = cols < 2 * HALF
    mask = (head < heads)[:, None] & (cols < HEAD_DIM)[None, :]
    position = tl.load(positions_ptr + row).to(tl.int64)
    known = (position >= 0) & (position < max_positions)
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    x_ptr += row * row_stride
    at = head.to(tl.int64)[:, None] * head_stride
    x = tl.load(x_ptr + at + cols[None, :], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]
    if INTERLEAVED:
        pair = tl.arange(0, BLOCK_D // 2)
        c = tl.load(cos_ptr + pair, mask=known & (pair < HALF), other=float("nan"))
        s = tl.load(sin_ptr + pair, mask=known & (pair < HALF), other=float("nan"))
        c = tl.interleave(c, c)
        s = tl.interleave(-s, s)
        left, right = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_D // 2, 2)))
        partner = tl.reshape(tl.join(right, left), (BLOCK_H, BLOCK_D))
    else:
        is_left = cols < HALF
        pair = tl.where(is_left, cols, cols - HALF)
        c = tl.load(cos_ptr + pair, mask=known & rotated, other=float("nan"))
        s = tl.load(sin_ptr + pair, mask=known & rotated, other=float("nan"))
        s = tl.where(is_left, -s, s)
        other = tl.where(is_left, cols + HALF, cols - HALF)
        partner = tl.load(x_ptr + at + other[None, :], mask=mask & rotated[None, :], other=0.0)
        partner = partner.to(tl.float32)
    if BACK:
        s = -s
    y = tl.where(rotated[None, :], x * c[None, :] + partner * s[None, :], x)
    y_ptr += row * heads * HEAD_DIM
    tl.store(y_ptr + head[:, None] * HEAD_DIM + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def config(heads: int, headdim: int) -> tuple[int, int]:
    """(BLOCK_H, BLOCK_D): all columns, and up to 2,048 elements, which is 16 for each of 128 threads."""
    block_d = next_power_of_2(headdim)
    return min(next_power_of_2(heads), max(1, 2048 // block_d)), block_d


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, back: bool) -> Tensor:
    rows, heads, headdim = x.shape
    y = torch.empty((rows, heads, headdim), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        block_h, block_d = config(heads, headdim)
        launch(
            _rotary_kernel,
            (rows, cdiv(heads, block_h)),
            x.device,
            x,
            cos,
            sin,
            positions,
            y,
            x.stride(0),
            x.stride(1),
            heads,
            cos.shape[0],
            HEAD_DIM=headdim,
            HALF=cos.shape[1],
            INTERLEAVED=interleaved,
            BACK=back,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return y


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """y, contiguous: the contract of `fastbert.ops.rotary.rotary_fwd`."""
    return _rotated(x, cos, sin, positions, interleaved, False)


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """dx, contiguous: the contract of `fastbert.ops.rotary.rotary_bwd`."""
    return _rotated(dy, cos, sin, positions, interleaved, True)
