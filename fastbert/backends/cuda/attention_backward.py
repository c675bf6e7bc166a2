"""Backward of `attention` by the `cuda` backend: csrc/cuda/attention_backward.cu.

float32, head dimensions other than HEADDIMS and tensors that 16-byte copies cannot read go to `aten`.
"""

from __future__ import annotations

import torch

from fastbert.backends.aten import attention as aten
from fastbert.backends.cuda import device
from fastbert.backends.extension import DTYPE_CODES, dropout
from fastbert.ops.attention import AttentionInputs, AttentionNeeds

HALF = (torch.bfloat16, torch.float16)
HEADDIMS = (32, 64, 128)
# Rows of the tiles that a block owns.
_HEIGHT = 64
_BYTES = 16


def served(inputs: AttentionInputs) -> bool:
    """Whether the kernels take this call."""
    q = inputs.q
    if q.dtype not in HALF or q.shape[-1] not in HEADDIMS:
        return False
    # The size of an element is 2.
    whole = all(t.data_ptr() % _BYTES == 0 for t in inputs[:3])
    return whole and all(s * 2 % _BYTES == 0 for t in inputs[:3] for s in t.stride()[:2])


def attention_bwd(dout, inputs: AttentionInputs, out, lse, keep_bits, need: AttentionNeeds, places=None):
    if not served(inputs):
        return aten.attention_bwd(dout, inputs, out, lse, keep_bits, need, places)
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset = inputs
    (total, nheads, headdim), batch = q.shape, cu_seqlens.shape[0] - 1
    dq, dk, dv = (q.new_empty(q.shape if needed else 0) for needed in need[:3])
    rows = lse.new_empty(3 if need.dgate else 2, nheads, total)
    parts, sizes = lse.new_empty(0), (1, 1, 0)
    multiprocessors = device.multiprocessors(q.device)
    if need.dbias:
        sizes = *bias.shape[:2], (bias.shape[2] > 1) + 2 * (bias.shape[3] > 1)
        parts = lse.new_empty(_parts(bias, batch, nheads, multiprocessors), *bias.shape)
    # Held until the launch is done.
    dout, out, lse, cu_seqlens = _readable(dout), _readable(out), lse.contiguous(), cu_seqlens.contiguous()
    gate = None if gate is None else gate.float().contiguous()
    table, bias_strides = None, (0, 0, 0)
    if bias is not None:
        table = bias.float().expand(batch, nheads, max_seqlen, max_seqlen)
        if table.stride(3) != 1 and max_seqlen > 1:  # one value for a whole row, or transposed
            table = table.contiguous()
        bias_strides = table.stride()[:3]
    keep_bits = keep_bits if dropout_p > 0 else None
    first, slots = _slots(batch, total, max_seqlen, places)
    with torch.cuda.device(q.device):
        device.extension.cuda_attention_bwd(
            (
                *(DTYPE_CODES[q.dtype], batch, nheads, headdim, total, max_seqlen, cu_seqlens.data_ptr()),
                *(n for t in (q, k, v) for n in (t.data_ptr(), *t.stride()[:2])),
                *(softmax_scale, causal, _address(table), *bias_strides, _address(gate)),
                *dropout(dropout_p, seed, offset),
            ),
            (
                *(_address(keep_bits), dout.data_ptr(), out.data_ptr(), lse.data_ptr()),
                *(0 if places is None else places[first:].data_ptr(), slots),
                *(grad.data_ptr() if needed else 0 for grad, needed in zip((dq, dk, dv), need, strict=False)),
                *(rows.data_ptr(), need.dgate),
                *(parts.data_ptr() if need.dbias else 0, max(1, parts.shape[0]), *sizes),
            ),
            *device.place(q.device),
        )
    dbias = parts.sum(0) if need.dbias else parts
    return dq, dk, dv, dbias, rows[2].sum(1) if need.dgate else lse.new_empty(0)


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _readable(t: torch.Tensor) -> torch.Tensor:
    """`t`, contiguous and at a multiple of 16 bytes."""
    t = t.contiguous()
    return t if t.data_ptr() % _BYTES == 0 else t.clone()


def _slots(batch, total, max_seqlen, places) -> tuple[int, int]:
    """(the first slot of the table's section for our tiles, the number of slots)."""
    if places is None:
        return 0, device.extension.cuda_attention_bwd_slots(batch, total, max_seqlen)
    from fastbert.kernels.attention_slots import HEIGHTS, sections

    section = HEIGHTS.index(_HEIGHT)
    first, last = sections(total, batch, max_seqlen)[section : section + 2]
    return first, last - first


def _parts(bias, batch, nheads, multiprocessors) -> int:
    """In how many parts a dbias is summed: enough blocks for the device, whatever the lengths."""
    tiles = [-(-n // _HEIGHT) for n in bias.shape[2:]]
    blocks = bias.shape[0] * bias.shape[1] * tiles[0] * tiles[1]
    pairs = batch // bias.shape[0] * (nheads // bias.shape[1]) if blocks else 0
    return max(1, min(pairs, 2 * multiprocessors // max(1, blocks)))
