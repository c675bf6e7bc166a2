"""Attention of one query per sequence, that of its first token, over packed sequences. Inference only.

Math       asked = softmax_scale Wkᵀ q;  s_t = asked · x_t + bias_t;  p = softmax(s);  mixed = Σ_t p_t x_t
           y = (Wv mixed + bv) gate, per sequence and head; 0 where no token is allowed.
           No key and no value is made: both products with a weight run over sequences, not over tokens.
Tiling     Three kernels. `asked`: a program owns 16 sequences, a head and BLOCK_N columns. `mixed`: a program
           owns a part of one sequence and up to 16 heads, the rows of a product. It reads each token once, in
           tiles of BLOCK_T, with an online softmax. A tile is cut into columns, and each warp owns some: the
           slices of its 3-D product. `asked` and the sums stay in registers; only the scores, sums over
           columns, cross the warps. `value`: a program owns 16 sequences, a head and BLOCK_D columns of the
           output. It adds the parts up, always in one order, and multiplies with the value's weight.
           The number of parts is set on the host, from max_seqlen; where a part begins, by the sequence.
Precision  Products of the storage type are summed in float32. `asked` and `mixed` are float32, and each is
           multiplied as two terms of the storage type, its rounding and the rest: where large columns of x
           cancel, one rounding per column would be worse than one per key. The row of `asked` is first
           divided by a power of two, so that float16 neither overflows nor loses the rest. p is rounded to
           the storage type, the output once.
Saved      Nothing.
Source     Vaswani et al. 2017, sec. 3.2; Milakov, Gimelshein 2018, alg. 3; Dao et al. 2023, Flash-Decoding.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.attention_tiles import LOG2_E, _finite
from fastbert.kernels.launch import MOST_REGISTERS, launch

if TYPE_CHECKING:
    from fastbert.ops.first_attention import FirstAttentionInputs

# The GPUs with 163 KiB of shared memory per program or more, and the interpreter.
_ROOMY = ((0, 0), (8, 0), (8, 7), (9, 0), (10, 0), (10, 3))
# The rows of a tensor core's product: sequences, or heads.
ROWS = tl.constexpr(16)
# The warps of a program of `mixed`, each of which owns a slice of the columns.
SLICES = 8
# Tokens of a tile.
BLOCK_T = 16
# Up to how many programs share a sequence, and the bytes that their sums may take.
MOST_PARTS = 8
MOST_BYTES = 1 << 26
_LOG2_E = tl.constexpr(LOG2_E)
_FIXED_TYPES = ("batch", "nheads")


@triton.jit
def _two_terms(value, like):
    """`value` = [..] in float32 as two terms of the dtype of `like`: its rounding and the rounded rest."""
    high = value.to(like)
    return high, (value - high.to(tl.float32)).to(like)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _first_attention_asked_kernel(
    q_ptr, weight_ptr, asked_ptr,
    q_stride, q_head_stride, weight_stride,
    batch, nheads, width, room, scale,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`asked` = [batch, nheads, room] in float32, 0 from `width` on; `q` = [batch, nheads, HEAD_DIM]."""
    head = tl.program_id(1).to(tl.int64)
    sequences = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    here, inside = (sequences < batch)[:, None], (cols < width)[None, :]
    asked = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first in tl.static_range(0, HEAD_DIM, BLOCK_K):
        dims = first + tl.arange(0, BLOCK_K)
        q_at = q_ptr + sequences[:, None] * q_stride + head * q_head_stride + dims[None, :]
        q = tl.load(q_at, mask=here & (dims < HEAD_DIM)[None, :], other=0.0)
        weight_at = weight_ptr + (head * HEAD_DIM + dims)[:, None] * weight_stride + cols[None, :]
        weight = tl.load(weight_at, mask=(dims < HEAD_DIM)[:, None] & inside, other=0.0)
        asked = tl.dot(q, weight, asked, input_precision="ieee")
    asked_at = asked_ptr + (sequences[:, None] * nheads + head) * room + cols[None, :]
    tl.store(asked_at, asked * scale, mask=here & (cols < room)[None, :])


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _first_attention_mixed_kernel(
    x_ptr, asked_ptr, cu_seqlens_ptr, bias_ptr, mixed_ptr, top_ptr, norm_ptr,
    x_stride, bias_batch_stride, bias_head_stride, bias_key_stride,
    nheads, width, room,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
    BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One part of a sequence: `mixed` = [batch, PARTS, nheads, room], not yet divided by `norm`.

    `top` and `norm` = [batch, PARTS, nheads]. A part without tokens has norm 0, and its `mixed` is unwritten.
    `asked` and `mixed` are 0 from `width` on; `room` keeps their rows aligned.
    CHUNKS * SLICES * SLICE columns hold the width.
    """
    part, sequence = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    known = heads < nheads
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - start).to(tl.int32)
    per_part = (length + PARTS * BLOCK_T - 1) // (PARTS * BLOCK_T) * BLOCK_T
    begin = part * per_part
    end = tl.minimum(begin + per_part, length)
    rows = (sequence * PARTS + part) * nheads + heads
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    if begin < end:
        x_ptr += start * x_stride
        if bias_ptr is not None:
            bias_ptr += sequence * bias_batch_stride
            bias_row = heads.to(tl.int64)[None, :] * bias_head_stride
        # [SLICES, 1, SLICE]: the columns of a chunk
        cols = (tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :])[:, None, :]
        asked_at = asked_ptr + (sequence * nheads + heads.to(tl.int64))[None, :, None] * room + cols
        asked, most = (), tl.zeros((ROWS,), tl.float32)
        for c in tl.static_range(CHUNKS):
            mask = known[None, :, None] & (cols < room - c * SLICES * SLICE)
            row = tl.load(asked_at + c * SLICES * SLICE, mask=mask, other=0.0)
            most = tl.maximum(most, tl.max(tl.max(tl.abs(row), 2), 0))
            asked += (row,)
        # A power of two, at least 2**-100: float32's bits without the fraction. 254 - exponent: its inverse.
        power = tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 0x0D800000)
        inverse = (0x7F000000 - power).to(tl.float32, bitcast=True) * 256.0
        unit = power.to(tl.float32, bitcast=True) * 0.00390625
        highs, lows, mixed = (), (), ()
        for c in tl.static_range(CHUNKS):
            turned = tl.trans(asked[c] * inverse[None, :, None], 0, 2, 1)
            high, low = _two_terms(turned, x_ptr.dtype.element_ty)
            highs += (high,)
            lows += (low,)
            mixed += (tl.zeros((SLICES, ROWS, SLICE), tl.float32),)
        for first in tl.range(begin, end, BLOCK_T, num_stages=NUM_STAGES):
            tokens = first + tl.arange(0, BLOCK_T)
            x_at = x_ptr + tokens.to(tl.int64)[None, :, None] * x_stride + cols
            tile, parts = (), tl.zeros((SLICES, BLOCK_T, ROWS), tl.float32)
            for c in tl.static_range(CHUNKS):
                read = (tokens < length)[None, :, None] & (cols < width - c * SLICES * SLICE)
                x = tl.load(x_at + c * SLICES * SLICE, mask=read, other=0.0)
                parts = tl.dot(x, lows[c], parts, input_precision="ieee")
                parts = tl.dot(x, highs[c], parts, input_precision="ieee")
                tile += (x,)
            scores = tl.sum(parts, 0) * unit[None, :]
            allowed = (tokens < length)[:, None]
            if bias_ptr is not None:
                bias_at = bias_ptr + tokens.to(tl.int64)[:, None] * bias_key_stride + bias_row
                scores += tl.load(bias_at, mask=allowed & known[None, :], other=0.0).to(tl.float32)
            scores = tl.where(allowed, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 0))
            shrink = tl.exp2((top - _finite(new_top)) * _LOG2_E)
            top = new_top
            weights = tl.exp2((scores - _finite(top)[None, :]) * _LOG2_E)
            norm = norm * shrink + tl.sum(weights, 0)
            weights = tl.trans(weights.to(x_ptr.dtype.element_ty))[None, :, :]
            weights = tl.broadcast_to(weights, (SLICES, ROWS, BLOCK_T))
            sums = ()
            for c in tl.static_range(CHUNKS):
                own = tl.dot(weights, tile[c], mixed[c] * shrink[None, :, None], input_precision="ieee")
                sums += (own,)
            mixed = sums
        mixed_at = mixed_ptr + rows[None, :, None] * room + cols
        for c in tl.static_range(CHUNKS):
            mask = known[None, :, None] & (cols < room - c * SLICES * SLICE)
            tl.store(mixed_at + c * SLICES * SLICE, mixed[c], mask=mask)
    tl.store(top_ptr + rows, top, mask=known)
    tl.store(norm_ptr + rows, norm, mask=known)


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _first_attention_value_kernel(
    mixed_ptr, top_ptr, norm_ptr, weight_ptr, value_bias_ptr, gate_ptr, y_ptr, weight_stride,
    batch, nheads, width, room,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`y` = [batch, nheads, HEAD_DIM], from the parts that `_first_attention_mixed_kernel` has left."""
    head = tl.program_id(1).to(tl.int64)
    sequences = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    here, there = sequences < batch, dims < HEAD_DIM
    # [PARTS, ROWS]
    rows = (sequences[None, :] * PARTS + tl.arange(0, PARTS)[:, None]) * nheads + head
    tops = tl.load(top_ptr + rows, mask=here[None, :], other=float("-inf"))
    factor = tl.exp2((tops - _finite(tl.max(tops, 0))[None, :]) * _LOG2_E)
    norm = tl.sum(tl.load(norm_ptr + rows, mask=here[None, :], other=0.0) * factor, 0)
    # Not `> 0`: NaN counts as seen
    seen = norm != 0.0
    factor *= (1.0 / tl.where(seen, norm, 1.0))[None, :]
    # A part without tokens has no factor, and is unwritten
    written = (factor != 0.0)[:, :, None]
    y = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in tl.range(0, width, BLOCK_K, num_stages=NUM_STAGES):
        cols = first + tl.arange(0, BLOCK_K)
        mixed_at = mixed_ptr + rows[:, :, None] * room + cols[None, None, :]
        parts = tl.load(mixed_at, mask=written & (cols < room)[None, None, :], other=0.0)
        mixed = tl.sum(parts * factor[:, :, None], 0)
        weight_at = weight_ptr + (head * HEAD_DIM + dims)[:, None] * weight_stride + cols[None, :]
        weight = tl.load(weight_at, mask=there[:, None] & (cols < width)[None, :], other=0.0)
        high, low = _two_terms(mixed, weight.dtype)
        turned = tl.trans(weight)
        y = tl.dot(low, turned, y, input_precision="ieee")
        y = tl.dot(high, turned, y, input_precision="ieee")
    at = head * HEAD_DIM + dims
    if value_bias_ptr is not None:
        y += tl.load(value_bias_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        y *= tl.load(gate_ptr + head).to(tl.float32)
    y = tl.where(seen[:, None], y, 0.0)
    y_at = y_ptr + sequences[:, None] * (nheads * HEAD_DIM) + at[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=here[:, None] & there[None, :])


# --- launchers ----------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the work of `mixed` is cut.

    Attributes:
        parts: the programs that share a sequence, a power of two.
        chunks, slice: the columns are cut into chunks, one after another, and each into SLICES slices of so
            many columns.
        num_stages: Triton's.
    """

    parts: int
    chunks: int
    slice: int
    num_stages: int


def most_width(capability: tuple[int, int]) -> int:
    """The widest tokens whose `asked` and tiles fit into the shared memory of a program.

    1024 columns take 100 KiB without a second tile: too much for a GPU with 99 KiB.
    """
    return 1024 if capability in _ROOMY else 768


def config_for(
    batch: int, total: int, nheads: int, width: int, max_seqlen: int, device: tuning.Device
) -> Config:
    """As many parts as there are tiles in a sequence, multiprocessors, and bytes for.

    Of a graph's sequences most are empty, and their programs return at once: `total` shows how many are long.
    """
    long = max(1, min(batch, total // max(max_seqlen, 1)))
    programs = long * triton.cdiv(nheads, ROWS.value)
    most = min(MOST_PARTS, triton.next_power_of_2(triton.cdiv(max(max_seqlen, 1), BLOCK_T)))
    parts = 1
    while (
        2 * parts <= most
        and 2 * parts * programs <= device.multiprocessors
        and 2 * parts * batch * nheads * width * 4 <= MOST_BYTES
    ):
        parts *= 2
    chunk = 256 if width > 512 or width % 256 == 0 else 128
    num_stages = 3 if device.capability in _ROOMY else 2
    return Config(parts, triton.cdiv(width, chunk), chunk // SLICES, num_stages)


def first_attention_fwd(inputs: "FirstAttentionInputs") -> Tensor:
    """(batch, nheads * head_dim): the contract of `fastbert.ops.first_attention`, in half precision.

    The width is at most `most_width`.
    """
    (batch, nheads, _), (total, width) = inputs.q.shape, inputs.x.shape
    device = tuning.device_of(inputs.x.device)
    config = config_for(batch, total, nheads, width, inputs.max_seqlen, device)
    return first_attention_fwd_with(config, inputs)


def first_attention_fwd_with(config: Config, inputs: "FirstAttentionInputs") -> Tensor:
    """`first_attention_fwd` with a given config, for the tests."""
    x, q, key_weight, value_weight, value_bias, cu_seqlens, softmax_scale, bias, gate, _ = inputs
    (batch, nheads, head_dim), width = q.shape, x.shape[1]
    y = torch.empty((batch, nheads * head_dim), dtype=x.dtype, device=x.device)
    if batch == 0:
        return y
    x, q, key_weight, value_weight = map(_with_rows, (x, q, key_weight, value_weight))
    room = triton.cdiv(width, 16) * 16
    asked = torch.empty((batch, nheads, room), dtype=torch.float32, device=x.device)
    mixed = torch.empty((batch, config.parts, nheads, room), dtype=torch.float32, device=x.device)
    top, norm = torch.empty((2, batch, config.parts, nheads), dtype=torch.float32, device=x.device)
    launch(
        _first_attention_asked_kernel,
        (triton.cdiv(batch, ROWS.value), nheads, triton.cdiv(width, 128)),
        x.device,
        q,
        key_weight,
        asked,
        *q.stride()[:2],
        key_weight.stride(0),
        batch,
        nheads,
        width,
        room,
        softmax_scale,
        HEAD_DIM=head_dim,
        BLOCK_N=128,
        BLOCK_K=max(16, min(64, triton.next_power_of_2(head_dim))),
        num_warps=4,
        maxnreg=MOST_REGISTERS,
    )
    bias_strides = (0,) * 4
    if bias is not None:
        # A dimension of size 1 is shared: its stride is 0.
        bias_strides = tuple(s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    launch(
        _first_attention_mixed_kernel,
        (batch * config.parts, triton.cdiv(nheads, ROWS.value)),
        x.device,
        x,
        asked,
        cu_seqlens.contiguous(),
        bias,
        mixed,
        top,
        norm,
        x.stride(0),
        *bias_strides[:2],
        bias_strides[3],
        nheads,
        width,
        room,
        PARTS=config.parts,
        CHUNKS=config.chunks,
        SLICES=SLICES,
        SLICE=config.slice,
        BLOCK_T=BLOCK_T,
        NUM_STAGES=config.num_stages,
        num_warps=SLICES,
        maxnreg=MOST_REGISTERS,
    )
    launch(
        _first_attention_value_kernel,
        (triton.cdiv(batch, ROWS.value), nheads, triton.cdiv(head_dim, 16)),
        x.device,
        mixed,
        top,
        norm,
        value_weight,
        None if value_bias is None else value_bias.contiguous(),
        None if gate is None else gate.contiguous(),
        y,
        value_weight.stride(0),
        batch,
        nheads,
        width,
        room,
        HEAD_DIM=head_dim,
        PARTS=config.parts,
        BLOCK_D=16,
        BLOCK_K=64,
        NUM_STAGES=3,
        num_warps=4,
        maxnreg=MOST_REGISTERS,
    )
    return y


def _with_rows(t: Tensor) -> Tensor:
    """`t` where its last dimension is contiguous, else a copy."""
    return t if t.stride(-1) == 1 else t.contiguous()
