"""A mean, the first, the last or the maximum of the tokens of each packed sequence, forward and backward.

Math       mean y_i = Σ_t h_t / length;  mean_sqrt_len_tokens y_i = Σ_t h_t / sqrt(length);
           weightedmean y_i = Σ_t w_t h_t / Σ_t w_t, w = 1 … length;  cls, lasttoken y_i = h of that token;
           max y_i = max_t h_t, NaN kept. A sequence without tokens has zeros.
           Means: dh_t = dy_i times the factor of h_t;  cls, lasttoken: dh of that token = dy_i, else 0;
           max: dh_t = dy_i / ties where h_t = y_i, else 0. Rows after the last sequence: 0.
Tiling     A program owns one sequence and BLOCK_N columns, and walks over the tokens BLOCK_M at a time: the
           hidden states are read once, in rows, and only the result is written. No program depends on the
           sequence of another. Offsets of rows are 64-bit.
           Backward is cut in the same way. Each row is written once. Only max reads the hidden states: once
           to count the ties and once to find them. The rows after the last sequence are one more sequence.
Precision  Sums in float32, tile by tile in the order of the tokens; the result is float32. Gradients are
           computed in float32 and rounded once.
Source     Reimers and Gurevych 2019, Sentence-BERT, sec. 3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import cdiv, launch, next_power_of_2


@triton.jit
def _divisor(length, MODE: tl.constexpr):
    """What the sum over a sequence is divided by, float32."""
    count = tl.maximum(length, 1).to(tl.float32)
    if MODE == "mean_sqrt_len_tokens":
        count = tl.sqrt_rn(count)
    if MODE == "weightedmean":
        count = count * (count + 1) * 0.5
    return count


@triton.jit
def _pooling_fwd_kernel(
    x_ptr,
    cu_seqlens_ptr,
    y_ptr,
    x_stride,
    y_stride,
    width,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`x` = [total, width], `y` = [batch, width]."""
    sequence = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < width
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - start).to(tl.int32)
    x_ptr += start * x_stride
    if MODE == "cls" or MODE == "lasttoken":
        if MODE == "lasttoken":
            x_ptr += tl.maximum(length - 1, 0).to(tl.int64) * x_stride
        y = tl.load(x_ptr + cols, mask=inside & (length > 0), other=0.0).to(tl.float32)
    else:
        rows = tl.arange(0, BLOCK_M)
        if MODE == "max":
            y = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        else:
            y = tl.zeros((BLOCK_N,), tl.float32)
        spoiled = tl.zeros((BLOCK_N,), tl.int32)
        for first in range(0, length, BLOCK_M):
            tokens = first + rows
            mask = (tokens < length)[:, None] & inside[None, :]
            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]
            if MODE == "max":
                x = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
                y = tl.maximum(y, tl.max(x, 0))
                # A maximum may skip NaN, so NaN are counted.
                spoiled += tl.sum((x != x).to(tl.int32), 0)
            else:
                x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                if MODE == "weightedmean":
                    x *= (tokens + 1).to(tl.float32)[:, None]
                y += tl.sum(x, 0)
        if MODE == "max":
            y = tl.where(spoiled > 0, float("nan"), y)
            y = tl.where(length > 0, y, 0.0)
        else:
            y = y / _divisor(length, MODE)
    tl.store(y_ptr + sequence.to(tl.int64) * y_stride + cols, y, mask=inside)


@triton.jit(do_not_specialize=("batch", "n_rows"))
def _pooling_bwd_kernel(
    dy_ptr, x_ptr, y_ptr, cu_seqlens_ptr, dx_ptr,
    dy_stride, x_stride, y_stride,
    batch, n_rows, width,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dx` = [n_rows, width], `dy` and `y` = [batch, width]; sequence `batch`: the rows after the last."""
    sequence = tl.program_id(0)
    within = sequence < batch
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < width
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=within, other=0).to(tl.int64)
    length = (tl.where(within, end, n_rows) - start).to(tl.int32)
    row = sequence.to(tl.int64)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=inside & within, other=0.0).to(tl.float32)
    dx_ptr += start * width
    rows = tl.arange(0, BLOCK_M)
    if MODE == "mean" or MODE == "mean_sqrt_len_tokens" or MODE == "weightedmean":
        dy = dy / _divisor(length, MODE)
    if MODE == "max":
        x_ptr += start * x_stride
        y = tl.load(y_ptr + row * y_stride + cols, mask=inside & within, other=0.0).to(tl.float32)
        ties = tl.zeros((BLOCK_N,), tl.int32)
        for first in range(0, tl.where(within, length, 0), BLOCK_M):
            tokens = first + rows
            mask = (tokens < length)[:, None] & inside[None, :]
            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]
            x = tl.load(at, mask=mask, other=float("nan")).to(tl.float32)
            ties += tl.sum((x == y[None, :]).to(tl.int32), 0)
        dy = dy / tl.maximum(ties, 1).to(tl.float32)
    for first in range(0, length, BLOCK_M):
        tokens = first + rows
        mask = (tokens < length)[:, None] & inside[None, :]
        if MODE == "cls":
            given = tokens[:, None] == 0
        elif MODE == "lasttoken":
            given = tokens[:, None] == length - 1
        elif MODE == "max":
            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]
            x = tl.load(at, mask=mask & within, other=float("nan")).to(tl.float32)
            given = x == y[None, :]
        else:
            given = tokens[:, None] >= 0
        dx = tl.where(given, dy[None, :], 0.0)
        if MODE == "weightedmean":
            dx *= (tokens + 1).to(tl.float32)[:, None]
        at = dx_ptr + tokens.to(tl.int64)[:, None] * width + cols[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def config(width: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): 2048 elements per tile, which is 16 for each of 128 threads.

    Rows of a tile have at least 256 bytes where the width allows it; a wide sequence has several programs.
    """
    block_n = max(16, min(128, next_power_of_2(width)))
    return 2048 // block_n, block_n


def pooling_fwd(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """(batch, width): the contract of `fastbert.ops.pooling.pooling_fwd`."""
    batch, width = cu_seqlens.shape[0] - 1, hidden.shape[1]
    y = torch.empty((batch, width), dtype=torch.float32, device=hidden.device)
    if y.numel() > 0:
        block_m, block_n = config(width)
        launch(
            _pooling_fwd_kernel,
            (batch, cdiv(width, block_n)),
            hidden.device,
            hidden,
            cu_seqlens,
            y,
            hidden.stride(0),
            y.stride(0),
            width,
            MODE=mode,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
        )
    return y


def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """dhidden, contiguous: the contract of `fastbert.ops.pooling.pooling_bwd`."""
    batch, (rows, width) = cu_seqlens.shape[0] - 1, hidden.shape
    dx = torch.empty((rows, width), dtype=hidden.dtype, device=hidden.device)
    if dx.numel() > 0:
        block_m, block_n = config(width)
        launch(
            _pooling_bwd_kernel,
            (batch + 1, cdiv(width, block_n)),
            hidden.device,
            dy,
            hidden,
            y,
            cu_seqlens,
            dx,
            dy.stride(0),
            hidden.stride(0),
            y.stride(0),
            batch,
            rows,
            width,
            MODE=mode,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
        )
    return dx
