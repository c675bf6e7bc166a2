"""dq of attention, and what the other kernels of backward read: delta and the normaliser of P.

The mathematics, the tiling and the launch are in kernels/attention_backward.py.
"""

import triton
import triton.language as tl

from fastbert.kernels.attention_backward_tiles import FIXED_TYPES, _query_tile, _shift_of, _store_tile
from fastbert.kernels.attention_tiles import _key_head, _keys_seen, _load_rows, _place, _slot


@triton.jit(do_not_specialize=FIXED_TYPES)
def _attention_bwd_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, places_ptr, bias_ptr, gate_ptr, seed_ptr, bits_ptr,
    dq_ptr, delta_ptr, norm_ptr, dgate_ptr, rough_ptr,
    dout_stride, dout_head_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    out_stride, out_head_stride, bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride,
    grad_stride, grad_head_stride, lse_head_stride, bits_stride,
    first_slot, nheads, total, n_sequences, scale, unit, offset, threshold, keep_scale, left, right,
    columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr,
    query_stride, query_head_stride, key_stride, key_head_stride, distance_head_stride, positions_stride,
    reach,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr,
    BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr, ROUNDING: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """One tile of queries, or rows after the last sequence.

    Stores dq (unless `dq_ptr` is None) and per row: delta, the normaliser (FOLDED: lse in units of log 2,
    else 1 / Σ exp(S - lse)) and the share of dgate.

    ROUNDING > 0: corrects delta's error. `rough` of this program becomes 1 if the error of a row is more than
    ROUNDING times the row's Σ |dS|. AGAIN: only programs whose `rough` is 1, with the stored delta.
    """
    if rough_ptr is not None:
        rough_ptr += _slot() * nheads + tl.program_id(0)
    # The first condition is known when the kernel is compiled, the second when it runs.
    if AGAIN:  # noqa: SIM102
        if tl.load(rough_ptr) == 0:
            return
    rough = 0
    head = tl.program_id(0)
    sequence, start, length, first_row = _place(places_ptr, first_slot + _slot())
    wide_head = head.to(tl.int64)
    if dq_ptr is not None:
        dq_ptr += wide_head * grad_head_stride
    delta_ptr += wide_head * total
    norm_ptr += wide_head * total
    if dgate_ptr is not None:
        dgate_ptr += wide_head * total
    if sequence == n_sequences:
        zeros = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first in range(start + first_row, total, length):
            wide_first = tl.cast(first, tl.int64)
            if dq_ptr is not None:
                _store_tile(dq_ptr, grad_stride, zeros, wide_first, total, HEAD_DIM, BLOCK_M, BLOCK_D)
            if dgate_ptr is not None:
                tail = wide_first + tl.arange(0, BLOCK_M)
                tl.store(dgate_ptr + tail, tl.zeros((BLOCK_M,), tl.float32), mask=tail < total)
    else:
        if first_row < length:
            wide_start = start.to(tl.int64)
            dout_ptr += wide_start * dout_stride + wide_head * dout_head_stride
            q_ptr += wide_start * q_stride + wide_head * q_head_stride
            key_head = _key_head(head, GROUP).to(tl.int64)
            k_ptr += wide_start * k_stride + key_head * k_head_stride
            v_ptr += wide_start * v_stride + key_head * v_head_stride
            out_ptr += wide_start * out_stride + wide_head * out_head_stride
            if bias_ptr is not None:
                bias_ptr += tl.cast(sequence, tl.int64) * bias_batch_stride + wide_head * bias_head_stride
            if bits_ptr is not None:
                bits_ptr += wide_head * total * bits_stride
            operands = q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, dout_ptr, dout_stride
            bias = bias_ptr, bias_row_stride, bias_key_stride
            dropout = seed_ptr, offset, threshold, bits_ptr, bits_stride
            wide_sequence = tl.cast(sequence, tl.int64)
            relative = (
                (columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr),
                (query_stride, query_head_stride, key_stride, key_head_stride),
                (distance_head_stride, positions_stride, reach),
                (wide_sequence, wide_start, wide_head),
            )
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
            begin, end = _keys_seen(first_row, length, left, right, CAUSAL, BLOCK_M, BLOCK_N)
            dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            norm = tl.zeros((BLOCK_M,), tl.float32)
            dgate = tl.zeros((BLOCK_M,), tl.float32)
            rest = tl.zeros((BLOCK_M,), tl.float32)
            size = tl.zeros((BLOCK_M,), tl.float32)
            for first_key in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
                k, weights, dprobs = _query_tile(
                    q,
                    *(
                        do,
                        operands,
                        bias,
                        relative,
                        dropout,
                        shift,
                        first_row,
                        first_key,
                        start,
                        head,
                        length,
                    ),
                    *((left, right), scale, unit, HEAD_DIM, CAUSAL, FOLDED, BIAS_HAS_ROWS),
                    *(BLOCK_M, BLOCK_N, BLOCK_D, CHUNK),
                )
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
                # By division: where there is one key, delta is then dP to the last bit.
                delta += rest / tl.where(norm == 0.0, 1.0, norm)
                rough = tl.max((tl.abs(rest) > ROUNDING * size).to(tl.int32), 0)
            if dq_ptr is not None:
                _store_tile(
                    *(dq_ptr, grad_stride, dq * (inverse * scale)[:, None], wide_start + first_row),
                    *(wide_start + length, HEAD_DIM, BLOCK_M, BLOCK_D),
                )
            tl.store(delta_ptr + packed_rows, delta, mask=inside)
            tl.store(norm_ptr + packed_rows, shift + tl.log2(norm) if FOLDED else inverse, mask=inside)
            if dgate_ptr is not None:
                tl.store(dgate_ptr + packed_rows, dgate * inverse * keep_scale, mask=inside)
    if ROUNDING > 0.0:
        tl.store(rough_ptr, rough)
