"""Multi-head attention over packed sequences of any lengths, with bias, gate and dropout; forward.

Math       S = softmax_scale * q kᵀ + bias;  P = softmax(S) by row, lse = log Σ_j exp S_ij
           out = gate * dropout(P) v;  a row without an allowed key: out 0, lse -inf, probs 0
Tiling     A program owns BLOCK_M queries of one sequence and head and walks over its keys, BLOCK_N at a time,
           with an online softmax. The host knows only `total`: a slot of the grid finds its sequence and tile
           in cu_seqlens (`_place`), up to SORTED sequences the longest first, so that the last programs to
           start are short ones. Heads vary fastest: a token's heads are neighbours in memory. Slots past the
           last tile zero the rows past the last sequence. q, k, v are read in place, through their strides;
           only the last block of keys is masked (causal: those on the diagonal).
Precision  Products of the storage type summed in float32 (float32: IEEE products, no TF32); softmax in
           float32, exp as exp2; P rounded to storage type for P v; one rounding at the store. Without a bias
           the scale is folded into exp2's factor. With one, the maximum is subtracted before the factor: a
           mask of float32's lowest value must not overflow to -inf.
Saved      lse. Probabilities, where asked for, are computed again from the final maximum and sum; their
           grid holds every tile of max_seqlen, because cells outside a sequence are written, too.
           Dropout bits: plane = head, row = row in the packed layout, column = key in its sequence.
Source     Milakov, Gimelshein 2018, Online normalizer calculation for softmax, alg. 3;
           Dao 2023, FlashAttention-2, alg. 1.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.launch import MOST_REGISTERS, launch
from fastbert.kernels.philox import as_int32_bits, drawn_and_saved_keep, philox_keep, threshold_bits

MAX_HEADDIM = 128  # wider heads would spill
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# 1 and multiples of 16 compile nothing anew
_FIXED_TYPES = (
    "lse_head_stride", "bits_stride", "nheads", "total", "n_sequences", "n_tiles", "max_seqlen", "offset",
    "threshold",
)  # fmt: skip
SORTED = 64  # more sequences than this: ranking them costs more than the order gains


@triton.jit
def _place(
    cu_seqlens_ptr, slot, n_slots, n_sequences, n_tiles, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """(sequence, tile, how many slots share the tail) of a slot; sequence `n_sequences` is the tail.

    WHOLE: `n_tiles` for every sequence. Else each has tiles for its length: SEQUENCES > 0, at least
    n_sequences: without a gap, longest first; 0: in order, with at most one slot too many for each.
    """
    if WHOLE:
        sequence, tile, tail_slots = slot // n_tiles, slot % n_tiles, n_tiles
    elif SEQUENCES > 0:
        at = tl.arange(0, SEQUENCES)
        starts = tl.load(cu_seqlens_ptr + at, mask=at < n_sequences, other=0)
        lengths = tl.load(cu_seqlens_ptr + 1 + at, mask=at < n_sequences, other=0) - starts
        tiles = (lengths + BLOCK_M - 1) // BLOCK_M
        rank = lengths * SEQUENCES + at  # no two are equal
        before = tl.sum(tl.where(rank[None, :] > rank[:, None], tiles[None, :], 0), 1)
        here = (before <= slot) & (slot < before + tiles)
        used = tl.sum(tiles, 0)
        tail_slots = n_slots - used
        sequence, tile = n_sequences, slot - used
        if slot < used:  # of causal tiles, too, the long ones first
            sequence = tl.sum(tl.where(here, at, 0), 0)
            tile = tl.sum(tl.where(here, before + tiles - 1, 0), 0) - slot
    else:  # sequence b begins at slot start // BLOCK_M + b
        sequence, last = 0, n_sequences
        while sequence < last:
            middle = (sequence + last + 1) // 2
            if tl.load(cu_seqlens_ptr + middle) // BLOCK_M + middle <= slot:
                sequence = middle
            else:
                last = middle - 1
        begin = tl.load(cu_seqlens_ptr + sequence) // BLOCK_M + sequence
        tile, tail_slots = slot - begin, n_slots - begin
    return sequence, tile, tail_slots


@triton.jit
def _load_rows(
    ptr, stride, first, end, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`tile` = [BLOCK, BLOCK_D], the rows from `first` on; MASKED: 0 from row `end` on."""
    rows = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(first, tl.int64) * stride + (rows.to(tl.int64)[:, None] * stride + dims[None, :])
    if MASKED:
        return tl.load(at, mask=(rows < end - first)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _score_tile(
    q, q_ptr, q_stride, k_ptr, k_stride, bias_ptr, bias_row_stride, bias_key_stride,
    first_row, first_key, length, scale,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, MASKED: tl.constexpr,
    BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """`scores` = [BLOCK_M, BLOCK_N] in float32, -inf where not allowed; FOLDED: before their scale."""
    if q is not None:
        k = _load_rows(k_ptr, k_stride, first_key, length, HEAD_DIM, MASKED, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d in tl.static_range(0, BLOCK_D, CHUNK):
            part = _load_rows(q_ptr + d, q_stride, first_row, length, HEAD_DIM - d, True, BLOCK_M, CHUNK)
            k = _load_rows(k_ptr + d, k_stride, first_key, length, HEAD_DIM - d, MASKED, BLOCK_N, CHUNK)
            scores = tl.dot(part, tl.trans(k), scores, input_precision="ieee")
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    if not FOLDED:
        scores *= scale
    if bias_ptr is not None:
        key_at = bias_ptr + keys.to(tl.int64) * bias_key_stride
        if BIAS_HAS_ROWS:
            bias_at = key_at[None, :] + rows.to(tl.int64)[:, None] * bias_row_stride
            inside = (rows < length)[:, None] & (keys < length)[None, :]
            scores += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        else:
            scores += tl.load(key_at, mask=keys < length, other=0.0).to(tl.float32)[None, :]
    if MASKED:
        allowed = (keys < length)[None, :]
        if CAUSAL:
            allowed = allowed & (keys[None, :] <= rows[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
    return scores


@triton.jit
def _finite(top):
    """`top`, or 0 where no key has been allowed yet: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _weights(scores, top, unit, FOLDED: tl.constexpr):
    """exp(S - top); FOLDED: `top` counts in units of log 2, else in the scores' own."""
    if FOLDED:
        return tl.exp2(scores * unit - top[:, None])
    else:
        return tl.exp2((scores - _finite(top)[:, None]) * unit)


@triton.jit
def _walk(
    acc, norm, top, begin, end, q, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride,
    bias_ptr, bias_row_stride, bias_key_stride, seed_ptr, offset, threshold, bits_ptr, bits_stride,
    head, packed_rows, first_row, length, scale, unit,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, MASKED: tl.constexpr,
    BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Take the keys from `begin` to `end` into acc = Σ exp(S - top) v, norm = Σ exp(S - top), top = max S."""
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        scores = _score_tile(
            q, q_ptr, q_stride, k_ptr, k_stride, bias_ptr, bias_row_stride, bias_key_stride,
            first_row, first_key, length, scale,
            HEAD_DIM, CAUSAL, FOLDED, MASKED, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
        )  # fmt: skip
        if FOLDED:
            new_top = tl.maximum(top, tl.max(scores, 1) * unit)
            shrink = tl.exp2(top - new_top)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2((top - _finite(new_top)) * unit)
        top = new_top
        weights = _weights(scores, top, unit, FOLDED)
        norm = norm * shrink + tl.sum(weights, 1)
        if seed_ptr is not None:
            if bits_ptr is not None:
                inside = first_row + tl.arange(0, BLOCK_M) < length
                keep = drawn_and_saved_keep(
                    seed_ptr, offset, head, packed_rows, inside, first_key, threshold, bits_ptr, bits_stride,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
            else:
                keep = philox_keep(
                    seed_ptr, offset, head, packed_rows, first_key, threshold, BLOCK_M, BLOCK_N
                )
            weights = tl.where(keep, weights, 0.0)
        v = _load_rows(v_ptr, v_stride, first_key, length, HEAD_DIM, MASKED, BLOCK_N, BLOCK_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, norm, top


@triton.jit
def _store_rows(
    out_ptr, out_stride, lse_ptr, out, lse, first, end,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`out` = [BLOCK_M, BLOCK_D], `lse` = [BLOCK_M] into the packed rows from `first` on, before `end`."""
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = out_ptr + rows[:, None] * out_stride + dims[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows, lse, mask=rows < end)


@triton.jit
def _store_probs(probs_ptr, stride, probs, rows, first_key, max_seqlen, BLOCK_N: tl.constexpr):
    """`probs` = [BLOCK_M, BLOCK_N] into the square of max_seqlen, from column `first_key` on."""
    keys = first_key + tl.arange(0, BLOCK_N)
    probs_at = probs_ptr + rows.to(tl.int64)[:, None] * stride + keys[None, :]
    inside = (rows < max_seqlen)[:, None] & (keys < max_seqlen)[None, :]
    tl.store(probs_at, probs.to(probs_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, cu_seqlens_ptr, bias_ptr, gate_ptr, seed_ptr, out_ptr, lse_ptr, probs_ptr, bits_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride,
    out_stride, out_head_stride, lse_head_stride, probs_batch_stride, probs_head_stride, probs_row_stride,
    bits_stride, nheads, total, n_sequences, n_tiles, max_seqlen, scale, unit, offset, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, SEQUENCES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one sequence and head, or rows past the last sequence."""
    head = tl.program_id(0) % nheads
    sequence, tile, tail_slots = _place(
        cu_seqlens_ptr, tl.program_id(0) // nheads, tl.num_programs(0) // nheads, n_sequences, n_tiles,
        BLOCK_M, probs_ptr is not None, SEQUENCES,
    )  # fmt: skip
    wide_head = head.to(tl.int64)
    wide_sequence = tl.cast(sequence, tl.int64)
    start = tl.load(cu_seqlens_ptr + sequence)
    first_row = tile * BLOCK_M
    out_ptr += wide_head * out_head_stride
    lse_ptr += wide_head * lse_head_stride
    if bits_ptr is not None:
        bits_ptr += wide_head * total * bits_stride
    if sequence == n_sequences:
        zeros, zero_lse = tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
        for first in range(start + first_row, total, tail_slots * BLOCK_M):
            _store_rows(
                out_ptr, out_stride, lse_ptr, zeros, zero_lse, tl.cast(first, tl.int64), total,
                HEAD_DIM, BLOCK_M, BLOCK_D,
            )  # fmt: skip
    else:
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
        if probs_ptr is not None or first_row < length:
            wide_start = start.to(tl.int64)
            q_ptr += wide_start * q_stride + wide_head * q_head_stride
            k_ptr += wide_start * k_stride + wide_head * k_head_stride
            v_ptr += wide_start * v_stride + wide_head * v_head_stride
            if bias_ptr is not None:
                bias_ptr += wide_sequence * bias_batch_stride + wide_head * bias_head_stride
            packed_rows = start + first_row + tl.arange(0, BLOCK_M)
            if CHUNK == BLOCK_D:
                q = _load_rows(q_ptr, q_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
            else:
                q = None
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            norm = tl.zeros((BLOCK_M,), tl.float32)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            end = tl.where(first_row < length, length, 0)
            unmasked = end  # keys that every row of the tile may see
            if CAUSAL:
                end = tl.minimum(end, first_row + BLOCK_M)
                unmasked = tl.minimum(end, first_row)
            unmasked = unmasked // BLOCK_N * BLOCK_N
            if SPLIT:
                acc, norm, top = _walk(
                    acc, norm, top, 0, unmasked, q, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride,
                    bias_ptr, bias_row_stride, bias_key_stride, seed_ptr, offset, threshold,
                    bits_ptr, bits_stride, head, packed_rows, first_row, length, scale, unit,
                    HEAD_DIM, CAUSAL, FOLDED, False, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
                    NUM_STAGES,
                )  # fmt: skip
            else:
                unmasked = 0
            acc, norm, top = _walk(
                acc, norm, top, unmasked, end, q, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride,
                bias_ptr, bias_row_stride, bias_key_stride, seed_ptr, offset, threshold,
                bits_ptr, bits_stride, head, packed_rows, first_row, length, scale, unit,
                HEAD_DIM, CAUSAL, FOLDED, True, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
                1 if SPLIT else NUM_STAGES,
            )  # fmt: skip
            empty = norm == 0.0
            inverse = 1.0 / tl.where(empty, 1.0, norm)
            factor = inverse * keep_scale
            if gate_ptr is not None:
                factor *= tl.load(gate_ptr + head).to(tl.float32)
            if FOLDED:
                lse = (top + tl.log2(norm)) * LN_2
            else:
                lse = top + tl.log2(norm) * LN_2
            lse = tl.where(empty, float("-inf"), lse)
            _store_rows(
                out_ptr, out_stride, lse_ptr, acc * factor[:, None], lse, wide_start + first_row,
                wide_start + length, HEAD_DIM, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            if probs_ptr is not None:
                probs_ptr += wide_sequence * probs_batch_stride + wide_head * probs_head_stride
                rows = first_row + tl.arange(0, BLOCK_M)
                for first_key in tl.range(0, end, BLOCK_N, num_stages=1):
                    scores = _score_tile(
                        q, q_ptr, q_stride, k_ptr, k_stride, bias_ptr, bias_row_stride, bias_key_stride,
                        first_row, first_key, length, scale,
                        HEAD_DIM, CAUSAL, FOLDED, True, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
                    )  # fmt: skip
                    probs = _weights(scores, top, unit, FOLDED) * inverse[:, None]
                    probs = tl.where((rows < length)[:, None], probs, 0.0)
                    _store_probs(probs_ptr, probs_row_stride, probs, rows, first_key, max_seqlen, BLOCK_N)
                unseen = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for first_key in tl.range((end + BLOCK_N - 1) // BLOCK_N * BLOCK_N, max_seqlen, BLOCK_N):
                    _store_probs(probs_ptr, probs_row_stride, unseen, rows, first_key, max_seqlen, BLOCK_N)


# --- launcher -----------------------------------------------------------------------------------------------


_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def _most_registers(headdim: int, dtype: torch.dtype) -> int | None:
    """What ptxas spills nothing under, found by compiling: in float32 that of Triton 3.6 needs a limit for
    wide heads, and that of 3.9 spills to reach one.
    """
    if dtype != torch.float32:
        return MOST_REGISTERS
    return 168 if headdim > 64 and _TRITON < (3, 9) else None


class Config(NamedTuple):
    """How the work is cut.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        chunk: head dimensions in one product of q and k; all of them where q stays in registers.
        split: whether blocks of keys that need no mask have a loop of their own.
        num_warps, num_stages: as Triton has them.
    """

    block_m: int
    block_n: int
    chunk: int
    split: bool
    num_warps: int
    num_stages: int


def ladder(headdim: int, dtype: torch.dtype, extras: bool, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Configs from high tiles to low ones, none of which spills. `extras`: bias, dropout or probs, which
    need registers.
    """
    block_d = max(16, triton.next_power_of_2(headdim))
    if dtype == torch.float32:  # products without tensor cores hold whole rows of their operands
        if headdim > 64:
            return (Config(16, 16, 16, False, 8, 1),)
        return (Config(32, 16, 16, False, 8 if headdim > 32 and capability[0] == 12 else 4, 1),)
    low = Config(32, 32, block_d, False, 4, 2)
    if extras:
        return Config(64, 32, block_d, False, 4, 2), low
    if headdim > 64 and capability[0] not in (9, 10):  # operands in registers: 64 keys would spill
        return Config(64, 32, block_d, True, 4, 2), low
    if headdim > 64 or headdim <= 16:
        return Config(64, 64, block_d, True, 4, 2), low
    middle = Config(64, 64, block_d, True, 4, 3)
    if capability[0] == 9:  # a warp group's product is 64 rows high: two in flight
        return Config(128, 64, block_d, True, 4, 3), middle, low
    return middle, low


def candidates(
    headdim: int, dtype: torch.dtype, extras: bool, capability: tuple[int, int]
) -> tuple[Config, ...]:
    """What a tuner may choose from: the ladder, and beside it what only a measurement can rank."""
    found = ladder(headdim, dtype, extras, capability)
    block_d = max(16, triton.next_power_of_2(headdim))
    if dtype == torch.float32 or extras or block_d > 64:
        return found
    more = (
        Config(128, 64, block_d, True, 8, 2),
        Config(64, 64, block_d, True, 4, 2),
        Config(128, 128, block_d, True, 8, 2),
        Config(128, 64, block_d, True, 4, 2),
        Config(64, 128, block_d, True, 4, 2),
    )
    # float32 values of a tile of scores and of out that a thread holds, and rows of a warp; with more it
    # spills. From sm_90 on the operands of a product may stay in shared memory
    most, rows = {9: 128, 10: 96}.get(capability[0], 64), 32 if capability[0] == 9 else 16
    more = [c for c in more if c.block_m * (c.block_n + block_d) <= most * 32 * c.num_warps]
    more = [c for c in more if c.block_m <= rows * c.num_warps]
    return found + tuple(config for config in more if config not in found)


def heuristic(configs: tuple[Config, ...], max_seqlen: int, rows: int, multiprocessors: int) -> Config:
    """The highest tiles that a sequence fills and of which there are enough for the device.

    `rows`: of queries, those of all heads counted.
    """
    for config in configs:
        programs = triton.cdiv(rows, config.block_m)
        if config.block_m <= max_seqlen and 4 * programs >= 3 * multiprocessors:
            return config
    return configs[-1]


def tuning_key(headdim: int, dtype: torch.dtype, extras: bool) -> str:
    """What is computed, as kernels/tuned names it: "bfloat16 64" or "bfloat16 64 extras"."""
    return f"{str(dtype).removeprefix('torch.')} {headdim}{' extras' if extras else ''}"


@lru_cache(maxsize=4096)
def config_for(
    headdim: int,
    dtype: torch.dtype,
    extras: bool,
    seqlen_bucket: int,
    rows_bucket: int,
    device: tuning.Device,
) -> Config:
    """From the GPU's table, by bucket of max_seqlen, where there is work for the whole GPU; else from the
    heuristic.
    """
    configs = ladder(headdim, dtype, extras, device.capability)
    chosen = heuristic(configs, 2**seqlen_bucket, 2**rows_bucket, device.multiprocessors)
    if triton.cdiv(2**rows_bucket, configs[0].block_m) < device.multiprocessors:
        return chosen
    found = tuning.tuned(device, "attention", tuning_key(headdim, dtype, extras), seqlen_bucket)
    return chosen if found is None else Config(**found)


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    return_probs: bool,
    save_bits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, probs, keep_bits); the contract of `fastbert.ops.attention.attention_fwd`, headdim <=
    MAX_HEADDIM.
    """
    total, nheads, headdim = q.shape
    config = config_for(
        headdim, q.dtype, bias is not None or dropout_p > 0 or return_probs, tuning.bucket(max_seqlen),
        tuning.bucket(total * nheads), tuning.device_of(q.device),
    )  # fmt: skip
    return attention_fwd_with(
        config, q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset,
        return_probs, save_bits,
    )  # fmt: skip


def attention_fwd_with(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    return_probs: bool,
    save_bits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_fwd` by a given config, for the tuner and the tests."""
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    seed = seed if dropout_p > 0 else None
    out = torch.empty((total, nheads, headdim), dtype=q.dtype, device=q.device)
    lse = torch.empty((nheads, total), dtype=torch.float32, device=q.device)
    shape = (batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,)
    probs = torch.empty(shape, dtype=q.dtype, device=q.device)
    shape = (nheads, total, triton.cdiv(max_seqlen, 32)) if save_bits else (0,)
    keep_bits = torch.empty(shape, dtype=torch.int32, device=q.device)
    if total == 0 and probs.numel() == 0:
        return out, lse, probs, keep_bits
    # without a bias the greatest product is the greatest score, unless the scale turns the order
    folded = bias is None and softmax_scale > 0
    n_tiles = max(1, triton.cdiv(max_seqlen, config.block_m))
    sequences = max(16, triton.next_power_of_2(batch)) if batch <= SORTED and not return_probs else 0
    n_slots = slots(config.block_m, total, batch, n_tiles, sequences > 0, return_probs)
    bias_strides = (0,) * 4
    if bias is not None:  # a size of 1 is one for all
        bias_strides = tuple(s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    words = words_of(keep_bits, config.block_n) if save_bits else None
    launch(
        _attention_fwd_kernel, (n_slots * nheads,), q.device,
        q, k, v, cu_seqlens.contiguous(), bias, gate, seed, out, lse, probs if return_probs else None,
        words,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *bias_strides,
        *out.stride()[:2], lse.stride(0), *(probs.stride()[:3] if return_probs else (0, 0, 0)),
        0 if words is None else words.shape[2], nheads, total, batch, n_tiles, max_seqlen,
        softmax_scale, (softmax_scale if folded else 1.0) * LOG2_E,
        as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p),
        HEAD_DIM=headdim, CAUSAL=causal, FOLDED=folded,
        BIAS_HAS_ROWS=bias is not None and bias.shape[2] > 1, SPLIT=config.split,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(headdim)), CHUNK=config.chunk, SEQUENCES=sequences,
        NUM_STAGES=config.num_stages, num_warps=config.num_warps,
        maxnreg=_most_registers(headdim, q.dtype),
    )  # fmt: skip
    return out, lse, probs, keep_bits


def words_of(keep_bits: Tensor, block_n: int) -> Tensor:
    """The bits in words of which `block_n` columns are a whole number."""
    return keep_bits if block_n % 32 == 0 else keep_bits.view(torch.int16)


def slots(block_m: int, total: int, batch: int, n_tiles: int, ranked: bool, whole: bool) -> int:
    """Slots of the grid that hold the tiles of any `batch` lengths within `total` rows, and the tail's."""
    if whole:
        return n_tiles * (batch + 1)
    if ranked:  # a length wastes at most block_m - 1 rows of its last tile
        return min(n_tiles * batch, (total + batch * (block_m - 1)) // block_m) + 1
    return total // block_m + batch + 1
