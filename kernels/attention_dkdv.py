"""dk and dv of attention, one tile of keys per program.

The mathematics, the tiling and the launch are in kernels/attention_backward.py.
"""

import triton
import triton.language as tl

from fastbert.kernels.attention_backward_tiles import FIXED_TYPES, _exponentials, _kept, _product, _store_tile
from fastbert.kernels.attention_tiles import _finite, _load_rows, _place, _slot


@triton.jit(do_not_specialize=FIXED_TYPES)
def _attention_bwd_dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, places_ptr, bias_ptr, gate_ptr, seed_ptr, bits_ptr, delta_ptr,
    dk_ptr, dv_ptr,
    dout_stride, dout_head_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, grad_stride, grad_head_stride,
    lse_head_stride, bits_stride,
    first_slot, nheads, total, n_sequences, scale, unit, offset, threshold, keep_scale, left, right,
    columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr,
    query_stride, query_head_stride, key_stride, key_head_stride, distance_head_stride, positions_stride,
    reach,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr,
    BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, or of rows after the last sequence. No `dk_ptr`: no dk; dv likewise."""
    key_head = tl.program_id(0)
    sequence, start, length, first_key = _place(places_ptr, first_slot + _slot())
    wide_key_head = key_head.to(tl.int64)
    if dk_ptr is not None:
        dk_ptr += wide_key_head * grad_head_stride
    if dv_ptr is not None:
        dv_ptr += wide_key_head * grad_head_stride
    if sequence == n_sequences:
        zeros = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for first in range(start + first_key, total, length):
            wide_first = tl.cast(first, tl.int64)
            if dk_ptr is not None:
                _store_tile(dk_ptr, grad_stride, zeros, wide_first, total, HEAD_DIM, BLOCK_N, BLOCK_D)
            if dv_ptr is not None:
                _store_tile(dv_ptr, grad_stride, zeros, wide_first, total, HEAD_DIM, BLOCK_N, BLOCK_D)
    else:
        if first_key < length:
            wide_start = start.to(tl.int64)
            k_ptr += wide_start * k_stride + wide_key_head * k_head_stride
            v_ptr += wide_start * v_stride + wide_key_head * v_head_stride
            # The distance from delta to the normaliser.
            plane = tl.cast(total, tl.int64) * nheads
            keys = first_key + tl.arange(0, BLOCK_N)
            if CHUNK == BLOCK_D:
                k = _load_rows(k_ptr, k_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
                v = _load_rows(v_ptr, v_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
            else:
                k = None
                v = None
            dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            # The rows that see keys of the tile.
            begin = 0
            end = length
            if CAUSAL:
                begin = first_key // BLOCK_M * BLOCK_M
            if right is not None:
                begin = tl.maximum(first_key - right, 0) // BLOCK_M * BLOCK_M
            if left is not None:
                end = tl.minimum(length, first_key + BLOCK_N + left)
            factor = keep_scale
            wide_sequence = tl.cast(sequence, tl.int64)
            for member in tl.range(0, GROUP, num_stages=1):
                head = key_head * GROUP + member
                wide_head = tl.cast(head, tl.int64)
                dout_at = dout_ptr + wide_start * dout_stride + wide_head * dout_head_stride
                q_at = q_ptr + wide_start * q_stride + wide_head * q_head_stride
                bias = bias_ptr, bias_row_stride, bias_key_stride
                if bias_ptr is not None:
                    bias_at = bias_ptr + wide_sequence * bias_batch_stride + wide_head * bias_head_stride
                    bias = bias_at, bias_row_stride, bias_key_stride
                relative = (
                    (columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr),
                    (query_stride, query_head_stride, key_stride, key_head_stride),
                    (distance_head_stride, positions_stride, reach),
                    (wide_sequence, wide_start, wide_head),
                )
                delta_at = delta_ptr + wide_head * total + wide_start
                lse_at = lse_ptr + wide_head * lse_head_stride + wide_start
                dropout = seed_ptr, offset, threshold, bits_ptr, bits_stride
                if bits_ptr is not None:
                    bits_at = bits_ptr + wide_head * total * bits_stride
                    dropout = seed_ptr, offset, threshold, bits_at, bits_stride
                if gate_ptr is not None:
                    gate = tl.load(gate_ptr + head).to(tl.float32)
                    factor = keep_scale * gate
                for first_row in tl.range(begin, end, BLOCK_M, num_stages=NUM_STAGES):
                    rows = first_row + tl.arange(0, BLOCK_M)
                    q = _load_rows(q_at, q_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                    do = _load_rows(dout_at, dout_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                    # Rows after the sequence have dout 0 and delta 0: they add nothing, whatever their P is.
                    # One load fetches both: a small load is made whole by every thread.
                    both = delta_at + (rows.to(tl.int64)[:, None] + plane * tl.arange(0, 2)[None, :])
                    delta, shift = tl.split(tl.load(both, mask=(rows < length)[:, None], other=0.0))
                    inverse = shift
                    if not FOLDED:
                        shift = _finite(tl.load(lse_at + rows, mask=rows < length, other=0.0))
                    scores = _product(  # [BLOCK_N, BLOCK_M]
                        k,
                        *(k_ptr, k_stride, first_key, q, q_at, q_stride, first_row, length),
                        *(HEAD_DIM, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK),
                    )
                    probs = _exponentials(
                        *(scores, rows[None, :], keys[:, None], shift[None, :], bias, relative, first_row),
                        *(first_key, length, (left, right), scale, unit, CAUSAL, FOLDED, BIAS_HAS_ROWS),
                        *(BLOCK_M, BLOCK_N, True),
                    )
                    if not FOLDED:
                        probs *= inverse[None, :]
                    if dk_ptr is not None:
                        dprobs = _product(
                            v,
                            *(v_ptr, v_stride, first_key, do, dout_at, dout_stride, first_row, length),
                            *(HEAD_DIM, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK),
                        )
                    dropped = probs
                    if seed_ptr is not None:
                        inside = rows < length
                        keep = _kept(dropout, head, start + rows, inside, first_key, BLOCK_M, BLOCK_N, True)
                        dropped = tl.where(keep, probs, 0.0)
                        if dk_ptr is not None:
                            dprobs = tl.where(keep, dprobs, 0.0)
                    if dv_ptr is not None:
                        if GROUP > 1 and gate_ptr is not None:
                            dropped *= gate
                        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision="ieee")
                    if dk_ptr is not None:
                        dscores = probs * (dprobs * factor - delta[None, :])
                        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
            if GROUP > 1:
                # dv already has each head's gate.
                factor = keep_scale
            first, end = wide_start + first_key, wide_start + length
            if dk_ptr is not None:
                _store_tile(dk_ptr, grad_stride, dk * scale, first, end, HEAD_DIM, BLOCK_N, BLOCK_D)
            if dv_ptr is not None:
                _store_tile(dv_ptr, grad_stride, dv * factor, first, end, HEAD_DIM, BLOCK_N, BLOCK_D)
