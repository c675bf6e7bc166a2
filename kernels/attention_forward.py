"""The kernel of attention's forward; its mathematics, tiling and launch are in kernels/attention.py."""

import triton
import triton.language as tl

from fastbert.kernels.attention_relative import FIXED_TYPES as _OF_DISTANCES
from fastbert.kernels.attention_relative import _with_distances
from fastbert.kernels.attention_tiles import (
    _finite,
    _in_window,
    _key_head,
    _keys_seen,
    _load_rows,
    _place,
    _slot,
    _whole_place,
)
from fastbert.kernels.philox import drawn_and_saved_keep, philox_keep

LN_2 = tl.constexpr(0.6931471805599453)
# Arguments for which 1 and multiples of 16 compile nothing anew.
_FIXED_TYPES = (
    "lse_head_stride",
    "bits_stride",
    "first_slot",
    "total",
    "n_sequences",
    "n_tiles",
    "max_seqlen",
    "offset",
    "threshold",
    "left",
    "right",
    *_OF_DISTANCES,
)


@triton.jit
def _score_tile(
    q, operands, bias, relative, first_row, first_key, length, window, scale,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, MASKED: tl.constexpr,
    RELATIVE: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`scores` = [BLOCK_M, BLOCK_N] in float32, -inf where not allowed; FOLDED: not yet scaled.

    RELATIVE: columns are compared with the keys that are left. That saves the keys' numbers, an instruction
    per column, but spills in the largest tiles. `operands`: pointers and strides of rows of q, k and v;
    `bias`: its pointer or None, the strides of its rows and keys; `window`: left and right.
    """
    q_ptr, q_stride, k_ptr, k_stride, _, _ = operands
    bias_ptr, bias_row_stride, bias_key_stride = bias
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
    scores = _with_distances(scores, relative, first_row, first_key, length, BLOCK_M, BLOCK_N, False)
    if bias_ptr is not None:
        key_at = bias_ptr + keys.to(tl.int64) * bias_key_stride
        if BIAS_HAS_ROWS:
            bias_at = key_at[None, :] + rows.to(tl.int64)[:, None] * bias_row_stride
            inside = (rows < length)[:, None] & (keys < length)[None, :]
            scores += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        else:
            scores += tl.load(key_at, mask=keys < length, other=0.0).to(tl.float32)[None, :]
    if MASKED:
        if RELATIVE:
            allowed = (tl.arange(0, BLOCK_N) < length - first_key)[None, :]
        else:
            allowed = (keys < length)[None, :]
        allowed = _in_window(allowed, rows[:, None], keys[None, :], *window, CAUSAL)
        scores = tl.where(allowed, scores, float("-inf"))
    return scores


@triton.jit
def _weights(scores, top, unit, left, FOLDED: tl.constexpr):
    """exp(S - top); FOLDED: `top` is in units of log 2, else in the scores' own."""
    if FOLDED and left is not None:
        return tl.exp2(scores * unit - _finite(top)[:, None])
    elif FOLDED:
        return tl.exp2(scores * unit - top[:, None])
    else:
        return tl.exp2((scores - _finite(top)[:, None]) * unit)


@triton.jit
def _walk(
    acc, norm, top, begin, end, q, operands, bias, relative, dropout, head, packed_rows, first_row, length,
    window, scale, unit,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, MASKED: tl.constexpr,
    BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to acc = Σ exp(S - top) v, norm = Σ exp(S - top), top = max S.

    `dropout`: seed_ptr or None, offset, threshold, and where its bits are saved: a pointer or None, a stride.
    """
    seed_ptr, offset, threshold, bits_ptr, bits_stride = dropout
    _, _, _, _, v_ptr, v_stride = operands
    left, _ = window
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)  # here: after a store of bits the loop would load it again
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        scores = _score_tile(
            q,
            *(operands, bias, relative, first_row, first_key, length, window, scale),
            *(HEAD_DIM, CAUSAL, FOLDED, MASKED, seed_ptr is not None, BIAS_HAS_ROWS),
            *(BLOCK_M, BLOCK_N, BLOCK_D, CHUNK),
        )
        if FOLDED:
            new_top = tl.maximum(top, tl.max(scores, 1) * unit)
            if left is not None:
                # A row may see no key of the first tiles.
                shrink = tl.exp2(top - _finite(new_top))
            else:
                shrink = tl.exp2(top - new_top)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2((top - _finite(new_top)) * unit)
        top = new_top
        weights = _weights(scores, top, unit, left, FOLDED)
        norm = norm * shrink + tl.sum(weights, 1)
        if seed_ptr is not None:
            if bits_ptr is not None:
                inside = first_row + tl.arange(0, BLOCK_M) < length
                keep = drawn_and_saved_keep(
                    *(seed, offset, head, packed_rows, inside, first_key, threshold, bits_ptr, bits_stride),
                    *(BLOCK_M, BLOCK_N),
                )
            else:
                keep = philox_keep(seed, offset, head, packed_rows, first_key, threshold, BLOCK_M, BLOCK_N)
            # Not `where`: LLVM would choose among halves of packed words, 2 instructions more per element.
            weights = tl.minimum(weights, tl.where(keep, float("inf"), 0.0))
        v = _load_rows(v_ptr, v_stride, first_key, length, HEAD_DIM, MASKED, BLOCK_N, BLOCK_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, norm, top


@triton.jit
def _store_rows(
    out_ptr, out_stride, lse_ptr,
    out, lse, first, end,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store `out` = [BLOCK_M, BLOCK_D] and `lse` = [BLOCK_M] in the packed rows from `first` to `end`."""
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = out_ptr + rows[:, None] * out_stride + dims[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows, lse, mask=rows < end)


@triton.jit
def _store_probs(probs_ptr, stride, probs, rows, first_key, max_seqlen, BLOCK_N: tl.constexpr):
    """Store `probs` = [BLOCK_M, BLOCK_N] in the square of max_seqlen, from column `first_key` on."""
    keys = first_key + tl.arange(0, BLOCK_N)
    probs_at = probs_ptr + rows.to(tl.int64)[:, None] * stride + keys[None, :]
    inside = (rows < max_seqlen)[:, None] & (keys < max_seqlen)[None, :]
    tl.store(probs_at, probs.to(probs_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, places_ptr, cu_seqlens_ptr, bias_ptr, gate_ptr, seed_ptr, out_ptr, lse_ptr,
    probs_ptr, bits_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, bias_batch_stride,
    bias_head_stride, bias_row_stride, bias_key_stride, out_stride, out_head_stride, lse_head_stride,
    probs_batch_stride, probs_head_stride, probs_row_stride, bits_stride,
    first_slot, total, n_sequences, n_tiles, max_seqlen, scale, unit, offset, threshold, keep_scale, left,
    right,
    columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr,
    query_stride, query_head_stride, key_stride, key_head_stride, distance_head_stride, positions_stride,
    reach,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr,
    BIAS_HAS_ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one sequence and head, or rows after the last sequence.

    With `probs_ptr` every sequence has `n_tiles` tiles, found in cu_seqlens; else the table has its place.
    """
    head = tl.program_id(0)
    if probs_ptr is not None:
        sequence, start, length, first_row = _whole_place(
            cu_seqlens_ptr, _slot(), n_sequences, n_tiles, BLOCK_M
        )
    else:
        sequence, start, length, first_row = _place(places_ptr, first_slot + _slot())
    wide_head = head.to(tl.int64)
    wide_sequence = tl.cast(sequence, tl.int64)
    out_ptr += wide_head * out_head_stride
    lse_ptr += wide_head * lse_head_stride
    if bits_ptr is not None:
        bits_ptr += wide_head * total * bits_stride
    if sequence == n_sequences:
        zeros, zero_lse = tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
        for first in range(start + first_row, total, length):
            _store_rows(
                *(out_ptr, out_stride, lse_ptr, zeros, zero_lse, tl.cast(first, tl.int64), total, HEAD_DIM),
                *(BLOCK_M, BLOCK_D),
            )
    else:
        if probs_ptr is not None or first_row < length:
            wide_start = start.to(tl.int64)
            q_ptr += wide_start * q_stride + wide_head * q_head_stride
            key_head = _key_head(head, GROUP).to(tl.int64)
            k_ptr += wide_start * k_stride + key_head * k_head_stride
            v_ptr += wide_start * v_stride + key_head * v_head_stride
            if bias_ptr is not None:
                bias_ptr += wide_sequence * bias_batch_stride + wide_head * bias_head_stride
            relative = (
                (columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr),
                (query_stride, query_head_stride, key_stride, key_head_stride),
                (distance_head_stride, positions_stride, reach),
                (wide_sequence, wide_start, wide_head),
            )
            operands = q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride
            bias = bias_ptr, bias_row_stride, bias_key_stride
            dropout = seed_ptr, offset, threshold, bits_ptr, bits_stride
            packed_rows = start + first_row + tl.arange(0, BLOCK_M)
            if CHUNK == BLOCK_D:
                q = _load_rows(q_ptr, q_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
            else:
                q = None
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            norm = tl.zeros((BLOCK_M,), tl.float32)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            begin, end = _keys_seen(
                *(first_row, tl.where(first_row < length, length, 0), left, right, CAUSAL, BLOCK_M, BLOCK_N),
            )
            first_seen = begin
            # Every row of the tile sees the keys from `whole` to `unmasked`.
            unmasked = end
            if CAUSAL:
                unmasked = tl.minimum(end, first_row)
            if right is not None:
                unmasked = tl.minimum(end, first_row + right + 1)
            unmasked = unmasked // BLOCK_N * BLOCK_N
            whole = begin
            if left is not None:
                whole = tl.maximum(first_row + BLOCK_M - 1 - left, 0)
                whole = tl.minimum((whole + BLOCK_N - 1) // BLOCK_N * BLOCK_N, unmasked)
            # The keys before `whole`, those before `unmasked` and the rest; without SPLIT all at once.
            for part in tl.static_range((0 if left is not None else 1) if SPLIT else 2, 3):
                upto = whole if part == 0 else unmasked if part == 1 else end
                acc, norm, top = _walk(
                    *(acc, norm, top, begin, upto),
                    q,
                    *(operands, bias, relative, dropout, head, packed_rows, first_row, length),
                    *((left, right), scale, unit),
                    *(HEAD_DIM, CAUSAL, FOLDED, part != 1, BIAS_HAS_ROWS),
                    *(BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, 1 if SPLIT and part != 1 else NUM_STAGES),
                )
                begin = upto
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
                *(out_ptr, out_stride, lse_ptr, acc * factor[:, None], lse, wide_start + first_row),
                *(wide_start + length, HEAD_DIM, BLOCK_M, BLOCK_D),
            )
            if probs_ptr is not None:
                probs_ptr += wide_sequence * probs_batch_stride + wide_head * probs_head_stride
                rows = first_row + tl.arange(0, BLOCK_M)
                for first_key in tl.range(first_seen, end, BLOCK_N, num_stages=1):
                    scores = _score_tile(
                        q,
                        *(operands, bias, relative, first_row, first_key, length, (left, right), scale),
                        *(HEAD_DIM, CAUSAL, FOLDED, True, False, BIAS_HAS_ROWS),
                        *(BLOCK_M, BLOCK_N, BLOCK_D, CHUNK),
                    )
                    probs = _weights(scores, top, unit, left, FOLDED) * inverse[:, None]
                    probs = tl.where((rows < length)[:, None], probs, 0.0)
                    _store_probs(probs_ptr, probs_row_stride, probs, rows, first_key, max_seqlen, BLOCK_N)
                unseen = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for first_key in tl.range(0, first_seen, BLOCK_N):
                    _store_probs(probs_ptr, probs_row_stride, unseen, rows, first_key, max_seqlen, BLOCK_N)
                for first_key in tl.range((end + BLOCK_N - 1) // BLOCK_N * BLOCK_N, max_seqlen, BLOCK_N):
                    _store_probs(probs_ptr, probs_row_stride, unseen, rows, first_key, max_seqlen, BLOCK_N)
