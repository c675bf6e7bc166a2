"""Backward of multi-head attention over packed sequences: dq, dk, dv, dbias, dgate from out and lse.

Math       P = exp(S - lse);  D = dropout(P);  delta = rowsum(dout ∘ out);  dP = gate * dropout'(dout vᵀ)
           dS = P ∘ (dP - delta);  dq = scale * dS k;  dk = scale * dSᵀ q;  dv = gate * Dᵀ dout
           dbias = Σ dS over its broadcast dimensions;  dgate = Σ_rows rowsum(D ∘ (dout vᵀ))
Tiling     Three kernels, each sum in registers and in one order: no atomics. dq: BLOCK_M queries of a
           sequence and head walk over its keys; it also writes delta, what normalises P, and each row's share
           of dgate. dk and dv: BLOCK_N keys walk over the queries, their tiles transposed, so that P and dS
           stay in registers as the left operand of a product. dbias: a tile of the bias walks over all
           sequences and heads (queries, keys) that share it; parts of a small one are added at the end.
           Slots of the grid as in kernels/attention.py; slots past the last tile zero the tail.
Precision  As in forward: products of the storage type summed in float32, P and dS rounded to storage type
           before their product, the rest in float32, one rounding at the store. lse carries the rounding of
           a large sum (at a mask of float32's lowest value it has lost the sum itself), so the first kernel
           adds up exp(S - lse) and all divide by that.
           out is rounded, and delta with it. Where a query sees one key, or nearly so, dS is smaller than
           that rounding. A row of dS adds up to 0; so in half precision the first kernel adds it up, and what
           is left, divided by the normaliser, goes off delta. Tiles in which that is more than the rounding
           of dS itself are computed once more by a second launch, with the delta so found.
Saved      out, lse and, where fastbert.ops.dropout.SAVED_ON says so, dropout's bits;
           else they are drawn again from the seed, once for dq, once for dk and dv.
Source     Dao 2023, FlashAttention-2, alg. 2; delta: Dao et al. 2022, FlashAttention, app. B.2.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.attention import LOG2_E, _finite, _load_rows, _place, slots, words_of
from fastbert.kernels.launch import MOST_REGISTERS, launch
from fastbert.kernels.philox import as_int32_bits, philox_keep, saved_keep, threshold_bits

UNIT = tl.constexpr(LOG2_E)
# 1 and multiples of 16 compile nothing anew
_FIXED_TYPES = (
    "lse_head_stride", "bits_stride", "nheads", "total", "n_sequences", "bias_batch", "bias_heads",
    "max_seqlen", "splits", "offset", "threshold",
)  # fmt: skip


@triton.jit
def _product(
    a, a_ptr, a_stride, first_a, b, b_ptr, b_stride, first_b, length, HEAD_DIM: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """a bᵀ = [BLOCK_A, BLOCK_B] in float32, of rows from `first_a` and `first_b` on; CHUNK dims at a time."""
    if CHUNK == BLOCK_D:
        return tl.dot(a, tl.trans(b), input_precision="ieee")
    else:
        acc = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
        for d in tl.static_range(0, BLOCK_D, CHUNK):
            a = _load_rows(a_ptr + d, a_stride, first_a, length, HEAD_DIM - d, True, BLOCK_A, CHUNK)
            b = _load_rows(b_ptr + d, b_stride, first_b, length, HEAD_DIM - d, True, BLOCK_B, CHUNK)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        return acc


@triton.jit
def _exponentials(
    scores, rows, keys, shift, bias_ptr, bias_row_stride, bias_key_stride, length, scale, unit,
    CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """exp(S - lse) of the products `scores`, 0 where not allowed; FOLDED: `shift` = lse in units of log 2.

    `rows`, `shift` are [BLOCK_M, 1] and `keys` [1, BLOCK_N], or the other way round.
    """
    if not FOLDED:
        scores *= scale
    if bias_ptr is not None:
        bias_at = bias_ptr + keys.to(tl.int64) * bias_key_stride
        inside = keys < length
        if BIAS_HAS_ROWS:
            bias_at += rows.to(tl.int64) * bias_row_stride
            inside = inside & (rows < length)
        scores += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
    allowed = keys < length
    if CAUSAL:
        allowed = allowed & (keys <= rows)
    scores = tl.where(allowed, scores, float("-inf"))
    if FOLDED:
        return tl.exp2(scores * unit - shift)
    else:
        return tl.exp2((scores - shift) * unit)


@triton.jit
def _shift_of(lse, FOLDED: tl.constexpr):
    """What `_exponentials` subtracts; 0 for a row without an allowed key."""
    if FOLDED:
        return lse * UNIT
    else:
        return _finite(lse)


@triton.jit
def _store_tile(
    ptr, stride, tile, first, end, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """`tile` = [BLOCK, BLOCK_D] into the packed rows from `first` on, before `end`."""
    rows = first.to(tl.int64) + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * stride + dims[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _query_tile(
    q, do, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, dout_ptr, dout_stride,
    bias_ptr, bias_row_stride, bias_key_stride, seed_ptr, bits_ptr, bits_stride, shift,
    first_row, first_key, start, head, length, scale, unit, offset, threshold,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(k = [BLOCK_N, BLOCK_D], exp(S - lse), dropped dout vᵀ: both [BLOCK_M, BLOCK_N] in float32)."""
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr, k_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
    if CHUNK == BLOCK_D:
        v = _load_rows(v_ptr, v_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
    else:
        v = None
    scores = _product(
        q, q_ptr, q_stride, first_row, k, k_ptr, k_stride, first_key, length,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
    )  # fmt: skip
    weights = _exponentials(
        scores, rows[:, None], keys[None, :], shift[:, None], bias_ptr, bias_row_stride, bias_key_stride,
        length, scale, unit, CAUSAL, FOLDED, BIAS_HAS_ROWS,
    )  # fmt: skip
    dprobs = _product(
        do, dout_ptr, dout_stride, first_row, v, v_ptr, v_stride, first_key, length,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
    )  # fmt: skip
    if seed_ptr is not None:
        if bits_ptr is not None:
            keep = saved_keep(bits_ptr, bits_stride, start + rows, rows < length, first_key, BLOCK_N, False)
        else:
            keep = philox_keep(seed_ptr, offset, head, start + rows, first_key, threshold, BLOCK_M, BLOCK_N)
        dprobs = tl.where(keep, dprobs, 0.0)
    return k, weights, dprobs


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _attention_bwd_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_ptr, bias_ptr, gate_ptr, seed_ptr,
    bits_ptr, dq_ptr, delta_ptr, norm_ptr, dgate_ptr, rough_ptr,
    dout_stride, dout_head_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    out_stride, out_head_stride, bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride,
    grad_stride, grad_head_stride, lse_head_stride, bits_stride,
    nheads, total, n_sequences, scale, unit, offset, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr, NUM_STAGES: tl.constexpr, ROUNDING: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries; of its rows delta, the normaliser (FOLDED: lse in units of log 2, else
    1 / Σ exp(S - lse)), and what they add to dgate. Or rows past the last sequence. No `dq_ptr`: no dq.

    ROUNDING > 0: takes delta's error off it, and says in `rough` of this program whether it is more than this
    part of a row's Σ |dS|. AGAIN: only programs of which `rough` says so, with the delta that was stored.
    """
    if AGAIN:  # noqa: SIM102 (one condition is of compile time, the other of run time)
        if tl.load(rough_ptr + tl.program_id(0)) == 0:
            return
    rough = 0
    head = tl.program_id(0) % nheads
    sequence, tile, tail_slots = _place(
        cu_seqlens_ptr, tl.program_id(0) // nheads, tl.num_programs(0) // nheads, n_sequences, 0,
        BLOCK_M, False, SEQUENCES,
    )  # fmt: skip
    wide_head = head.to(tl.int64)
    start = tl.load(cu_seqlens_ptr + sequence)
    first_row = tile * BLOCK_M
    if dq_ptr is not None:
        dq_ptr += wide_head * grad_head_stride
    delta_ptr += wide_head * total
    norm_ptr += wide_head * total
    if dgate_ptr is not None:
        dgate_ptr += wide_head * total
    if sequence == n_sequences:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first in range(start + first_row, total, tail_slots * BLOCK_M):
            wide_first = tl.cast(first, tl.int64)
            if dq_ptr is not None:
                _store_tile(dq_ptr, grad_stride, zeros, wide_first, total, HEAD_DIM, BLOCK_M, BLOCK_D)
            if dgate_ptr is not None:
                tail = wide_first + tl.arange(0, BLOCK_M)
                tl.store(dgate_ptr + tail, tl.zeros((BLOCK_M,), tl.float32), mask=tail < total)
    else:
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
        if first_row < length:
            wide_start = start.to(tl.int64)
            dout_ptr += wide_start * dout_stride + wide_head * dout_head_stride
            q_ptr += wide_start * q_stride + wide_head * q_head_stride
            k_ptr += wide_start * k_stride + wide_head * k_head_stride
            v_ptr += wide_start * v_stride + wide_head * v_head_stride
            out_ptr += wide_start * out_stride + wide_head * out_head_stride
            if bias_ptr is not None:
                bias_ptr += tl.cast(sequence, tl.int64) * bias_batch_stride + wide_head * bias_head_stride
            if bits_ptr is not None:
                bits_ptr += wide_head * total * bits_stride
            rows = first_row + tl.arange(0, BLOCK_M)
            packed_rows = wide_start + rows
            inside = rows < length
            do = _load_rows(dout_ptr, dout_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
            if AGAIN:
                delta = tl.load(delta_ptr + packed_rows, mask=inside, other=0.0)
            else:
                out = _load_rows(out_ptr, out_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
            if CHUNK == BLOCK_D:
                q = _load_rows(q_ptr, q_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
            else:
                q = None
            lse_at = lse_ptr + wide_head * lse_head_stride + packed_rows
            shift = _shift_of(tl.load(lse_at, mask=inside, other=0.0), FOLDED)
            factor = keep_scale
            if gate_ptr is not None:
                factor *= tl.load(gate_ptr + head).to(tl.float32)
            end = length
            if CAUSAL:
                end = tl.minimum(length, first_row + BLOCK_M)
            dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            norm = tl.zeros((BLOCK_M,), tl.float32)
            dgate = tl.zeros((BLOCK_M,), tl.float32)
            rest = tl.zeros((BLOCK_M,), tl.float32)
            size = tl.zeros((BLOCK_M,), tl.float32)
            for first_key in tl.range(0, end, BLOCK_N, num_stages=NUM_STAGES):
                k, weights, dprobs = _query_tile(
                    q, do, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, dout_ptr, dout_stride,
                    bias_ptr, bias_row_stride, bias_key_stride, seed_ptr, bits_ptr, bits_stride, shift,
                    first_row, first_key, start, head, length, scale, unit, offset, threshold,
                    HEAD_DIM, CAUSAL, FOLDED, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
                )  # fmt: skip
                norm += tl.sum(weights, 1)
                if dgate_ptr is not None:
                    dgate += tl.sum(weights * dprobs, 1)
                dscores = weights * (dprobs * factor - delta[:, None])
                if ROUNDING > 0.0:
                    rest += tl.sum(dscores, 1)
                    size += tl.sum(tl.abs(dscores), 1)
                if dq_ptr is not None:
                    dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
            inverse = 1.0 / tl.where(norm == 0.0, 1.0, norm)
            if ROUNDING > 0.0:
                # by division: where there is one key, delta is then dP to the last bit
                delta += rest / tl.where(norm == 0.0, 1.0, norm)
                rough = tl.max((tl.abs(rest) > ROUNDING * size).to(tl.int32), 0)
            if dq_ptr is not None:
                _store_tile(
                    dq_ptr, grad_stride, dq * (inverse * scale)[:, None], wide_start + first_row,
                    wide_start + length, HEAD_DIM, BLOCK_M, BLOCK_D,
                )  # fmt: skip
            tl.store(delta_ptr + packed_rows, delta, mask=inside)
            tl.store(norm_ptr + packed_rows, shift + tl.log2(norm) if FOLDED else inverse, mask=inside)
            if dgate_ptr is not None:
                tl.store(dgate_ptr + packed_rows, dgate * inverse * keep_scale, mask=inside)
    if ROUNDING > 0.0:
        tl.store(rough_ptr + tl.program_id(0), rough)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _attention_bwd_dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, cu_seqlens_ptr, bias_ptr, gate_ptr, seed_ptr,
    bits_ptr, delta_ptr, dk_ptr, dv_ptr,
    dout_stride, dout_head_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride,
    grad_stride, grad_head_stride, lse_head_stride, bits_stride,
    nheads, total, n_sequences, scale, unit, offset, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, or of rows past the last sequence; no `dk_ptr`: no dk, and so dv."""
    head = tl.program_id(0) % nheads
    sequence, tile, tail_slots = _place(
        cu_seqlens_ptr, tl.program_id(0) // nheads, tl.num_programs(0) // nheads, n_sequences, 0,
        BLOCK_N, False, SEQUENCES,
    )  # fmt: skip
    wide_head = head.to(tl.int64)
    start = tl.load(cu_seqlens_ptr + sequence)
    first_key = tile * BLOCK_N
    if dk_ptr is not None:
        dk_ptr += wide_head * grad_head_stride
    if dv_ptr is not None:
        dv_ptr += wide_head * grad_head_stride
    if sequence == n_sequences:
        zeros = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for first in range(start + first_key, total, tail_slots * BLOCK_N):
            wide_first = tl.cast(first, tl.int64)
            if dk_ptr is not None:
                _store_tile(dk_ptr, grad_stride, zeros, wide_first, total, HEAD_DIM, BLOCK_N, BLOCK_D)
            if dv_ptr is not None:
                _store_tile(dv_ptr, grad_stride, zeros, wide_first, total, HEAD_DIM, BLOCK_N, BLOCK_D)
    else:
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
        if first_key < length:
            wide_start = start.to(tl.int64)
            dout_ptr += wide_start * dout_stride + wide_head * dout_head_stride
            q_ptr += wide_start * q_stride + wide_head * q_head_stride
            k_ptr += wide_start * k_stride + wide_head * k_head_stride
            v_ptr += wide_start * v_stride + wide_head * v_head_stride
            if bias_ptr is not None:
                bias_ptr += tl.cast(sequence, tl.int64) * bias_batch_stride + wide_head * bias_head_stride
            delta_ptr += wide_head * total + wide_start
            plane = tl.cast(total, tl.int64) * nheads  # from delta to the normaliser
            lse_ptr += wide_head * lse_head_stride + wide_start
            if bits_ptr is not None:
                bits_ptr += wide_head * total * bits_stride
            keys = first_key + tl.arange(0, BLOCK_N)
            if CHUNK == BLOCK_D:
                k = _load_rows(k_ptr, k_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
                v = _load_rows(v_ptr, v_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
            else:
                k = None
                v = None
            factor = keep_scale
            if gate_ptr is not None:
                factor *= tl.load(gate_ptr + head).to(tl.float32)
            dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            begin = 0
            if CAUSAL:
                begin = first_key // BLOCK_M * BLOCK_M
            for first_row in tl.range(begin, length, BLOCK_M, num_stages=NUM_STAGES):
                rows = first_row + tl.arange(0, BLOCK_M)
                q = _load_rows(q_ptr, q_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                do = _load_rows(dout_ptr, dout_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                # rows past the sequence have dout 0 and delta 0: whatever their P, they add nothing;
                # both by one load: of one with few elements every thread would load all
                both = delta_ptr + (rows.to(tl.int64)[:, None] + plane * tl.arange(0, 2)[None, :])
                delta, shift = tl.split(tl.load(both, mask=(rows < length)[:, None], other=0.0))
                inverse = shift
                if not FOLDED:
                    shift = _finite(tl.load(lse_ptr + rows, mask=rows < length, other=0.0))
                scores = _product(  # [BLOCK_N, BLOCK_M]
                    k, k_ptr, k_stride, first_key, q, q_ptr, q_stride, first_row, length,
                    HEAD_DIM, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK,
                )  # fmt: skip
                probs = _exponentials(
                    scores, rows[None, :], keys[:, None], shift[None, :],
                    bias_ptr, bias_row_stride, bias_key_stride, length, scale, unit,
                    CAUSAL, FOLDED, BIAS_HAS_ROWS,
                )  # fmt: skip
                if not FOLDED:
                    probs *= inverse[None, :]
                if dk_ptr is not None:
                    dprobs = _product(
                        v, v_ptr, v_stride, first_key, do, dout_ptr, dout_stride, first_row, length,
                        HEAD_DIM, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK,
                    )  # fmt: skip
                dropped = probs
                if seed_ptr is not None:
                    if bits_ptr is not None:
                        keep = saved_keep(
                            bits_ptr, bits_stride, start + rows, rows < length, first_key, BLOCK_N, True
                        )
                    else:
                        keep = philox_keep(
                            seed_ptr, offset, head, start + rows, first_key, threshold, BLOCK_M, BLOCK_N
                        )
                        keep = tl.trans(keep)
                    dropped = tl.where(keep, probs, 0.0)
                    if dk_ptr is not None:
                        dprobs = tl.where(keep, dprobs, 0.0)
                if dv_ptr is not None:
                    dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision="ieee")
                if dk_ptr is not None:
                    dscores = probs * (dprobs * factor - delta[None, :])
                    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
            first, end = wide_start + first_key, wide_start + length
            if dk_ptr is not None:
                _store_tile(dk_ptr, grad_stride, dk * scale, first, end, HEAD_DIM, BLOCK_N, BLOCK_D)
            if dv_ptr is not None:
                _store_tile(dv_ptr, grad_stride, dv * factor, first, end, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _attention_bwd_dbias_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, cu_seqlens_ptr, bias_ptr, gate_ptr, seed_ptr,
    bits_ptr, delta_ptr, norm_ptr, dbias_ptr,
    dout_stride, dout_head_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, lse_head_stride,
    bits_stride, nheads, total, n_sequences, bias_batch, bias_heads, max_seqlen, splits,
    scale, unit, offset, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr, BIAS_HAS_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One tile of dbias = [splits, bias_batch, bias_heads, max_seqlen or 1, max_seqlen or 1], from every
    `splits`-th of the pairs of sequence and head that share it.
    """
    n_rows, n_keys = 1, 1
    if BIAS_HAS_ROWS:
        n_rows = max_seqlen
    if BIAS_HAS_KEYS:
        n_keys = max_seqlen
    row_tiles = (n_rows + BLOCK_M - 1) // BLOCK_M
    key_tiles = (n_keys + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0)
    first_row = place % row_tiles * BLOCK_M
    place = place // row_tiles
    first_key = place % key_tiles * BLOCK_N
    matrix = place // key_tiles  # of the output, in its order
    first_head = matrix % bias_heads
    first_sequence = matrix // bias_heads % bias_batch
    split = matrix // bias_heads // bias_batch
    heads = nheads // bias_heads  # that share this tile
    pairs = n_sequences // bias_batch * heads
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for pair in range(split, pairs, splits):
        sequence = first_sequence + pair // heads
        head = first_head + pair % heads
        wide_head = tl.cast(head, tl.int64)
        wide_sequence = tl.cast(sequence, tl.int64)
        start = tl.load(cu_seqlens_ptr + sequence)
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
        wide_start = start.to(tl.int64)
        dout_at = dout_ptr + wide_start * dout_stride + wide_head * dout_head_stride
        q_at = q_ptr + wide_start * q_stride + wide_head * q_head_stride
        k_at = k_ptr + wide_start * k_stride + wide_head * k_head_stride
        v_at = v_ptr + wide_start * v_stride + wide_head * v_head_stride
        bias_at = bias_ptr + wide_sequence * bias_batch_stride + wide_head * bias_head_stride
        if bits_ptr is not None:
            bits_at = bits_ptr + wide_head * total * bits_stride
        else:
            bits_at = None
        factor = keep_scale
        if gate_ptr is not None:
            factor *= tl.load(gate_ptr + head).to(tl.float32)
        row_end, key_end = length, length
        if BIAS_HAS_ROWS:
            row_end = tl.minimum(length, first_row + BLOCK_M)
        if BIAS_HAS_KEYS:
            key_end = tl.minimum(length, first_key + BLOCK_N)
        for row in tl.range(first_row, row_end, BLOCK_M, num_stages=1):
            rows = row + tl.arange(0, BLOCK_M)
            packed_rows = wide_start + rows
            inside = rows < length
            lse_at = lse_ptr + wide_head * lse_head_stride + packed_rows
            shift = _finite(tl.load(lse_at, mask=inside, other=0.0))
            inverse = tl.load(norm_ptr + wide_head * total + packed_rows, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + wide_head * total + packed_rows, mask=inside, other=0.0)
            if CHUNK == BLOCK_D:
                q = _load_rows(q_at, q_stride, row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                do = _load_rows(dout_at, dout_stride, row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
            else:
                q = None
                do = None
            for key in tl.range(first_key, key_end, BLOCK_N, num_stages=1):
                _, weights, dprobs = _query_tile(
                    q, do, q_at, q_stride, k_at, k_stride, v_at, v_stride, dout_at, dout_stride,
                    bias_at, bias_row_stride, bias_key_stride, seed_ptr, bits_at, bits_stride, shift,
                    row, key, start, head, length, scale, unit, offset, threshold,
                    HEAD_DIM, CAUSAL, False, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
                )  # fmt: skip
                acc += weights * inverse[:, None] * (dprobs * factor - delta[:, None])
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    dbias_ptr += tl.cast(matrix, tl.int64) * n_rows * n_keys
    if not BIAS_HAS_KEYS:
        acc = tl.sum(acc, 1, keep_dims=True)
        keys = tl.zeros((1,), tl.int32)
    if not BIAS_HAS_ROWS:
        acc = tl.sum(acc, 0, keep_dims=True)
        rows = tl.zeros((1,), tl.int32)
    at = dbias_ptr + rows.to(tl.int64)[:, None] * n_keys + keys[None, :]
    tl.store(at, acc, mask=(rows < n_rows)[:, None] & (keys < n_keys)[None, :])


# --- launcher -----------------------------------------------------------------------------------------------

SORTED = 32  # more sequences than this are not ranked; forward ranks 64, for which dq has too few registers


class Config(NamedTuple):
    """How the work of one kernel is cut.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        chunk: head dimensions in one product over them; all of them where tiles stay in registers.
        num_warps, num_stages: as Triton has them.
        max_registers: of a thread; ptxas spills to reach a limit, and without one too, each in other kernels.
    """

    block_m: int
    block_n: int
    chunk: int
    num_warps: int
    num_stages: int
    max_registers: int | None = MOST_REGISTERS


class Configs(NamedTuple):
    """One for each kernel."""

    dq: Config
    dkdv: Config
    dbias: Config


def ladder(
    headdim: int, dtype: torch.dtype, extras: bool, saved: bool, capability: tuple[int, int]
) -> tuple[Configs, ...]:
    """Configs from high tiles to low ones, none of which spills. `extras`: bias or drawn bits of dropout,
    which need registers; `saved`: saved bits, which need few.
    """
    block_d = max(16, triton.next_power_of_2(headdim))
    if dtype == torch.float32:  # products without tensor cores hold whole rows of their operands
        most = {True: MOST_REGISTERS, False: None}  # what does not spill was found by compiling
        dq = dkdv = dbias = Config(16, 16, min(32, block_d), 8, 1, most[headdim <= 32])
        if capability[0] == 12:
            dkdv = dkdv._replace(max_registers=most[headdim <= 32 or headdim > 64])
            dbias = dbias._replace(max_registers=most[headdim <= 64])
        return (Configs(dq, dkdv, dbias),)
    warp_groups = capability[0] in (9, 10)  # their products are 64 rows high, and read from shared memory
    wide = headdim > 64
    low = Config(32, 32, block_d, 4, 2)
    lowest = low._replace(num_stages=1) if wide and extras else low
    dq, dkdv = low, lowest
    if not (wide and extras) or capability[0] == 10:
        square = not (wide or extras) and (not saved or warp_groups or headdim <= 32)
        dq = Config(64, 64 if square else 32, block_d, 4, 2)
    if not (wide or extras) or (warp_groups and not (wide and extras and capability[0] == 9)):
        square = capability[0] == 9 and not (wide or extras)
        dkdv = Config(64 if square else 32, 64, block_d, 4, 2)
    dbias = Config(32, 16 if wide else 32, block_d, 4, 1)
    return Configs(dq, dkdv, dbias), Configs(low, lowest, dbias)


@lru_cache(maxsize=4096)
def configs_for(
    headdim: int,
    dtype: torch.dtype,
    extras: bool,
    saved: bool,
    seqlen_bucket: int,
    rows_bucket: int,
    device: tuning.Device,
) -> Configs:
    """The highest tiles that a sequence fills and of which there are enough for the device."""
    found = ladder(headdim, dtype, extras, saved, device.capability)
    for configs in found:
        high = max(configs.dq.block_m, configs.dkdv.block_n)
        if high <= 2**seqlen_bucket and 4 * triton.cdiv(2**rows_bucket, high) >= 3 * device.multiprocessors:
            return configs
    return found[-1]


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    keep_bits: Tensor | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dbias: bool,
    need_dgate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dgate); the contract of `fastbert.ops.attention.attention_bwd`, headdim <=
    `fastbert.kernels.attention.MAX_HEADDIM`.
    """
    total, nheads, headdim = q.shape
    configs = configs_for(
        headdim, q.dtype, bias is not None or (dropout_p > 0 and keep_bits is None),
        dropout_p > 0 and keep_bits is not None, tuning.bucket(max_seqlen), tuning.bucket(total * nheads),
        tuning.device_of(q.device),
    )  # fmt: skip
    return attention_bwd_with(
        configs, dout, q, k, v, out, lse, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate,
        dropout_p, seed, offset, keep_bits, need_dq, need_dk, need_dv, need_dbias, need_dgate,
    )  # fmt: skip


def attention_bwd_with(
    configs: Configs,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    keep_bits: Tensor | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dbias: bool,
    need_dgate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`attention_bwd` by given configs, for the tests."""
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    seed, keep_bits = (seed, keep_bits) if dropout_p > 0 else (None, None)
    dq, dk, dv = (
        torch.empty(q.shape if needed else (0,), dtype=q.dtype, device=q.device)
        for needed in (need_dq, need_dk, need_dv)
    )
    if total == 0:
        sizes = bias.shape if need_dbias else (0,), gate.shape if need_dgate else (0,)
        return dq, dk, dv, *(torch.zeros(size, dtype=torch.float32, device=q.device) for size in sizes)
    # of each row: delta, the normaliser of P, its share of dgate
    rows = torch.empty((3 if need_dgate else 2, nheads, total), dtype=torch.float32, device=q.device)
    delta, norm = rows[0], rows[1]
    dgate_rows = rows[2] if need_dgate else None
    folded = bias is None and softmax_scale > 0  # as in forward
    cu_seqlens = cu_seqlens.contiguous()
    bias_strides = (0,) * 4
    if bias is not None:  # a size of 1 is one for all
        bias_strides = tuple(s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    strides = tuple(s for t in (dout, q, k, v) for s in t.stride()[:2])
    dropout = as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p)
    scales = softmax_scale, (softmax_scale if folded else 1.0) * LOG2_E, *dropout
    sequences = max(16, triton.next_power_of_2(batch)) if batch <= SORTED else 0
    shared = {
        "HEAD_DIM": headdim, "CAUSAL": causal, "BIAS_HAS_ROWS": bias is not None and bias.shape[2] > 1,
        "BLOCK_D": max(16, triton.next_power_of_2(headdim)),
    }  # fmt: skip

    def words(block_n: int) -> tuple[Tensor | None, int]:
        found = None if keep_bits is None else words_of(keep_bits, block_n)
        return found, 0 if found is None else found.shape[2]

    def grid(block: int) -> tuple[int]:
        n_tiles = max(1, triton.cdiv(max_seqlen, block))
        return (slots(block, total, batch, n_tiles, sequences > 0, False) * nheads,)

    # of the storage type, relative; float32's delta is as good as its sums
    rounding = 0.0 if q.dtype == torch.float32 else torch.finfo(q.dtype).eps / 2
    config = configs.dq
    bits, bits_stride = words(config.block_n)
    rough = None
    if rounding > 0:
        rough = torch.empty(grid(config.block_m), dtype=torch.int32, device=q.device)
    for again in (False, True) if rounding > 0 and need_dq else (False,):
        launch(
            _attention_bwd_dq_kernel, grid(config.block_m), q.device,
            dout, q, k, v, out, lse, cu_seqlens, bias, gate, seed, bits, dq if need_dq else None, delta, norm,
            dgate_rows, rough, *strides, *out.stride()[:2], *bias_strides,
            *(dq.stride()[:2] if need_dq else (0, 0)), lse.stride(0), bits_stride,
            nheads, total, batch, *scales,
            FOLDED=folded, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CHUNK=config.chunk,
            SEQUENCES=sequences, NUM_STAGES=config.num_stages, ROUNDING=0.0 if again else rounding,
            AGAIN=again, num_warps=config.num_warps, maxnreg=config.max_registers, **shared,
        )  # fmt: skip
    if need_dk or need_dv:
        config = configs.dkdv
        bits, bits_stride = words(config.block_n)
        launch(
            _attention_bwd_dkdv_kernel, grid(config.block_n), q.device,
            dout, q, k, v, lse, cu_seqlens, bias, gate, seed, bits, rows,
            dk if need_dk else None, dv if need_dv else None,
            *strides, *bias_strides, *(dk if need_dk else dv).stride()[:2], lse.stride(0), bits_stride,
            nheads, total, batch, *scales,
            FOLDED=folded, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CHUNK=config.chunk,
            SEQUENCES=sequences, NUM_STAGES=config.num_stages, num_warps=config.num_warps,
            maxnreg=config.max_registers, **shared,
        )  # fmt: skip
    dbias = torch.empty((0,), dtype=torch.float32, device=q.device)
    if need_dbias:
        config = configs.dbias
        tiles = triton.cdiv(bias.shape[2], config.block_m) * triton.cdiv(bias.shape[3], config.block_n)
        programs = bias.shape[0] * bias.shape[1] * tiles
        pairs = batch // bias.shape[0] * (nheads // bias.shape[1]) if programs > 0 else 0
        # enough programs for the device; how many is the device's, so that its sums have one order
        splits = max(1, min(pairs, 2 * tuning.device_of(q.device).multiprocessors // max(1, programs)))
        parts = torch.empty((splits, *bias.shape), dtype=torch.float32, device=q.device)
        if programs > 0:
            bits, bits_stride = words(config.block_n)
            launch(
                _attention_bwd_dbias_kernel, (programs * splits,), q.device,
                dout, q, k, v, lse, cu_seqlens, bias, gate, seed, bits, delta, norm, parts,
                *strides, *bias_strides, lse.stride(0), bits_stride,
                nheads, total, batch, bias.shape[0], bias.shape[1], max_seqlen, splits, *scales,
                BIAS_HAS_KEYS=bias.shape[3] > 1, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                CHUNK=config.chunk, num_warps=config.num_warps, maxnreg=config.max_registers, **shared,
            )  # fmt: skip
        dbias = parts.sum(0)
    dgate = dgate_rows.sum(1) if need_dgate else torch.empty((0,), dtype=torch.float32, device=q.device)
    return dq, dk, dv, dbias, dgate
