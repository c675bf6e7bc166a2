"""Word, position and segment embeddings summed, LayerNorm and dropout in one pass.

Math       z = word[id] (or inputs_embeds) + position[pos] + segment[type];
           y = dropout((z - mean) * rstd * weight + bias)
Tiling     A program owns BLOCK_M whole tokens. Tokens wider than ONE_BLOCK are cut into blocks of columns,
           which the program gathers twice: for the statistics, then for the result.
Precision  Loads in storage dtype, then float32, one rounding at each store. The variance is that of centred
           values (wide tokens: merged block by block, Chan et al. 1979). The divisions and roots for mean and
           rstd are correctly rounded.
Saved      z in storage dtype, mean, rstd, where backward will ask for them.
Source     Devlin et al. 2018, BERT, fig. 2; Ba, Kiros, Hinton 2016, Layer Normalization, eq. 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import launch
from fastbert.kernels.philox import as_int32_bits, philox_keep, threshold_bits

ONE_BLOCK = 8192  # widest token that is held at once
WIDE_BLOCK = 4096  # columns at a time in wider ones


@triton.jit
def _row_starts(ids_ptr, stride, rows, row_mask):
    """Offsets of the tokens' rows in a table, [BLOCK_M] in int64; without ids token t has row t."""
    picked = rows
    if ids_ptr is not None:
        picked = tl.load(ids_ptr + rows, mask=row_mask, other=0)
    return picked * stride


@triton.jit
def _gathered(word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask):
    """`z` = [BLOCK_M, BLOCK_N] in float32, 0 outside the matrix."""
    z = tl.load(word_ptr + word_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if position_ptr is not None:
        row = position_ptr + position_at[:, None]
        z += tl.load(row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if segment_ptr is not None:
        row = segment_ptr + segment_at[:, None]
        z += tl.load(row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit(do_not_specialize=("n_rows", "offset", "threshold"))
def _embedding_fwd_kernel(
    ids_ptr, word_ptr, position_ids_ptr, position_ptr, segment_ids_ptr, segment_ptr, weight_ptr, bias_ptr,
    seed_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, word_stride, position_stride, segment_stride,
    y_stride, n_rows, eps, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens of one tile. `word_ptr` is inputs_embeds where `ids_ptr` is None."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < n_rows
    word_at = _row_starts(ids_ptr, word_stride, rows, row_mask)
    position_at = _row_starts(position_ids_ptr, position_stride, rows, row_mask)
    segment_at = _row_starts(segment_ids_ptr, segment_stride, rows, row_mask)
    mean = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)  # Σ (z - mean)²
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols < HIDDEN)[None, :]
        z = _gathered(
            word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask
        )  # fmt: skip
        if HIDDEN <= BLOCK_N:
            mean = tl.div_rn(tl.sum(z, 1), HIDDEN * 1.0)
            centred = tl.where(mask, z - mean[:, None], 0.0)
            squares = tl.sum(centred * centred, 1)
        else:
            count = tl.minimum(HIDDEN - col_start, BLOCK_N).to(tl.float32)
            share = count / (col_start + count)
            block_mean = tl.sum(z, 1) / count
            centred = tl.where(mask, z - block_mean[:, None], 0.0)
            delta = block_mean - mean
            mean += delta * share
            squares += tl.sum(centred * centred, 1) + delta * delta * col_start * share
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HIDDEN * 1.0) + eps))
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=row_mask)
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        col_mask = cols < HIDDEN
        mask = row_mask[:, None] & col_mask[None, :]
        if HIDDEN > BLOCK_N:
            z = _gathered(
                word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask
            )  # fmt: skip
        at = rows[:, None] * y_stride + cols[None, :]
        if z_ptr is not None:
            tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask)
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        y = (z - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
        if seed_ptr is not None:
            keep = philox_keep(seed_ptr, offset, 0, rows, col_start, threshold, BLOCK_M, BLOCK_N)
            y = tl.where(keep, y * keep_scale, 0.0)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launcher -----------------------------------------------------------------------------------------------


def fwd_config(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 32 elements a thread, and up to 1024 columns no sum leaves its warp."""
    block_n = WIDE_BLOCK if hidden > ONE_BLOCK else max(16, triton.next_power_of_2(hidden))
    return max(1, 1024 // block_n), block_n, max(1, block_n // 1024)


def embedding_fwd(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    word: Tensor | None,
    position_ids: Tensor | None,
    position: Tensor | None,
    token_type_ids: Tensor | None,
    segment: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, z, mean, rstd); the contract of `fastbert.ops.embedding.embedding_fwd`. Ids are not checked."""
    source = word if inputs_embeds is None else inputs_embeds
    rows = inputs_embeds.shape[0] if input_ids is None else input_ids.shape[0]
    hidden = source.shape[1]
    y = torch.empty((rows, hidden), dtype=source.dtype, device=source.device)
    z = torch.empty_like(y) if save else source.new_empty((0,))
    mean = source.new_empty((rows if save else 0,), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if rows > 0:
        block_m, block_n, num_warps = fwd_config(hidden)
        launch(
            _embedding_fwd_kernel, (triton.cdiv(rows, block_m),), source.device,
            input_ids, source, position_ids, position, token_type_ids, segment, ln_weight, ln_bias,
            seed if dropout_p > 0 else None, y,
            z if save else None, mean if save else None, rstd if save else None,
            source.stride(0), 0 if position is None else position.stride(0),
            0 if segment is None else segment.stride(0), y.stride(0), rows, eps,
            as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p),
            HIDDEN=hidden, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
        )  # fmt: skip
    return y, z, mean, rstd
