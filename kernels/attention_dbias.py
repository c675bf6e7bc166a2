"""dbias of attention, one tile of the bias per program.

The mathematics, the tiling and the launch are in kernels/attention_backward.py.
"""

import triton
import triton.language as tl

from fastbert.kernels.attention_backward_tiles import FIXED_TYPES, _query_tile
from fastbert.kernels.attention_tiles import _finite, _key_head, _keys_seen, _load_rows


@triton.jit(do_not_specialize=FIXED_TYPES)
def _attention_bwd_dbias_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, cu_seqlens_ptr, bias_ptr, gate_ptr, seed_ptr, bits_ptr, delta_ptr,
    norm_ptr, dbias_ptr,
    dout_stride, dout_head_stride, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, lse_head_stride, bits_stride,
    nheads, total, n_sequences, bias_batch, bias_heads, max_seqlen, splits, scale, unit, offset, threshold,
    keep_scale, left, right,
    columns_ptr, query_ptr, key_ptr, distance_ptr, positions_ptr,
    query_stride, query_head_stride, key_stride, key_head_stride, distance_head_stride, positions_stride,
    reach,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
    BIAS_HAS_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One tile of dbias = [splits, bias_batch, bias_heads, max_seqlen or 1, max_seqlen or 1].

    It sums every `splits`-th of the pairs of sequence and head that share the tile.
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
    # The index of the output's matrix, in the order of the output.
    matrix = place // key_tiles
    first_head = matrix % bias_heads
    first_sequence = matrix // bias_heads % bias_batch
    split = matrix // bias_heads // bias_batch
    # The number of heads that share this tile.
    heads = nheads // bias_heads
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
        key_head = tl.cast(_key_head(head, GROUP), tl.int64)
        k_at = k_ptr + wide_start * k_stride + key_head * k_head_stride
        v_at = v_ptr + wide_start * v_stride + key_head * v_head_stride
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
        dropout = seed_ptr, offset, threshold, bits_ptr, bits_stride
        if bits_ptr is not None:
            dropout = seed_ptr, offset, threshold, bits_ptr + wide_head * total * bits_stride, bits_stride
        operands = q_at, q_stride, k_at, k_stride, v_at, v_stride, dout_at, dout_stride
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
            begin, end = _keys_seen(row, key_end, left, right, False, BLOCK_M, BLOCK_N)
            if left is not None:
                begin = tl.maximum(begin, first_key)
            else:
                begin = first_key
            for key in tl.range(begin, end, BLOCK_N, num_stages=1):
                _, weights, dprobs = _query_tile(
                    q,
                    do,
                    *(operands, bias, relative, dropout, shift, row, key, start, head, length),
                    *((left, right), scale, unit, HEAD_DIM, CAUSAL, False, BIAS_HAS_ROWS),
                    *(BLOCK_M, BLOCK_N, BLOCK_D, CHUNK),
                )
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
