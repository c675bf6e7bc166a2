"""What the kernels of attention's backward share: products, exponentials, a tile of queries, the store."""

import triton
import triton.language as tl

from fastbert.kernels.attention_relative import FIXED_TYPES as _OF_DISTANCES
from fastbert.kernels.attention_relative import _with_distances
from fastbert.kernels.attention_tiles import LOG2_E, _finite, _in_window, _load_rows
from fastbert.kernels.philox import philox_keep, saved_keep

UNIT = tl.constexpr(LOG2_E)
# Arguments for which 1 and multiples of 16 compile nothing anew.
FIXED_TYPES = (
    "lse_head_stride",
    "bits_stride",
    "first_slot",
    "nheads",
    "total",
    "n_sequences",
    "bias_batch",
    "bias_heads",
    "max_seqlen",
    "splits",
    "offset",
    "threshold",
    "left",
    "right",
    *_OF_DISTANCES,
)


@triton.jit
def _product(
    a, a_ptr, a_stride, first_a, b, b_ptr, b_stride, first_b, length,
    HEAD_DIM: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """a bᵀ = [BLOCK_A, BLOCK_B] in float32, of the rows from `first_a` and `first_b` on, by CHUNK dims."""
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
    scores, rows, keys, shift, bias, relative, first_row, first_key, length, window, scale, unit,
    CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """exp(S - lse) of the products `scores`, 0 where not allowed; FOLDED: `shift` = lse in units of log 2.

    `rows` and `shift` are [BLOCK_M, 1] and `keys` is [1, BLOCK_N], or all are TRANSPOSED. `bias`: its pointer
    or None, and the strides of its rows and keys; `window`: left and right.
    """
    bias_ptr, bias_row_stride, bias_key_stride = bias
    if not FOLDED:
        scores *= scale
    scores = _with_distances(scores, relative, first_row, first_key, length, BLOCK_M, BLOCK_N, TRANSPOSED)
    if bias_ptr is not None:
        bias_at = bias_ptr + keys.to(tl.int64) * bias_key_stride
        inside = keys < length
        if BIAS_HAS_ROWS:
            bias_at += rows.to(tl.int64) * bias_row_stride
            inside = inside & (rows < length)
        scores += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
    allowed = keys < length
    if relative[0][0] is not None:
        # Rows past the sequence have no lse: their exponentials might be infinite.
        allowed = allowed & (rows < length)
    allowed = _in_window(allowed, rows, keys, *window, CAUSAL)
    scores = tl.where(allowed, scores, float("-inf"))
    if FOLDED:
        return tl.exp2(scores * unit - shift)
    else:
        return tl.exp2((scores - shift) * unit)


@triton.jit
def _shift_of(lse, FOLDED: tl.constexpr):
    """The number that `_exponentials` subtracts; 0 for a row without an allowed key."""
    if FOLDED:
        return lse * UNIT
    else:
        return _finite(lse)


@triton.jit
def _store_tile(
    ptr, stride, tile, first, end, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store `tile` = [BLOCK, BLOCK_D] in the packed rows from `first` on, before `end`."""
    rows = first.to(tl.int64) + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * stride + dims[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _kept(
    dropout,
    head,
    packed_rows,
    inside,
    first_key,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Whether dropout keeps each pair of a tile: from saved bits, or drawn again.

    `dropout`: seed_ptr, offset, threshold, bits_ptr (None without saved bits) and the stride of their rows.
    """
    seed_ptr, offset, threshold, bits_ptr, bits_stride = dropout
    if bits_ptr is not None:
        return saved_keep(bits_ptr, bits_stride, packed_rows, inside, first_key, BLOCK_N, TRANSPOSED)
    else:
        seed = tl.load(seed_ptr)
        keep = philox_keep(seed, offset, head, packed_rows, first_key, threshold, BLOCK_M, BLOCK_N)
        return tl.trans(keep) if TRANSPOSED else keep


@triton.jit
def _query_tile(
    q, do, operands, bias, relative, dropout, shift, first_row, first_key, start, head, length, window, scale,
    unit,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FOLDED: tl.constexpr, BIAS_HAS_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(k = [BLOCK_N, BLOCK_D], exp(S - lse), dropped dout vᵀ: both [BLOCK_M, BLOCK_N] in float32).

    `operands`: pointers and strides of rows of q, k, v and dout. Without chunks `q` and `do` hold rows.
    """
    q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, dout_ptr, dout_stride = operands
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr, k_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
    if CHUNK == BLOCK_D:
        v = _load_rows(v_ptr, v_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
    else:
        v = None
    scores = _product(
        q,
        *(q_ptr, q_stride, first_row),
        k,
        *(k_ptr, k_stride, first_key, length, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK),
    )
    weights = _exponentials(
        *(scores, rows[:, None], keys[None, :], shift[:, None], bias, relative, first_row, first_key, length),
        *(window, scale, unit, CAUSAL, FOLDED, BIAS_HAS_ROWS, BLOCK_M, BLOCK_N, False),
    )
    dprobs = _product(
        do,
        *(dout_ptr, dout_stride, first_row),
        v,
        *(v_ptr, v_stride, first_key, length, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK),
    )
    if dropout[0] is not None:
        keep = _kept(dropout, head, start + rows, rows < length, first_key, BLOCK_M, BLOCK_N, False)
        dprobs = tl.where(keep, dprobs, 0.0)
    return k, weights, dprobs
