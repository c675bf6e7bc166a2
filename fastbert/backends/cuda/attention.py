"""`attention` by the `cuda` backend: csrc/cuda/attention*.cu; contract in fastbert/ops/attention.py.

The kernels have heads of HEADDIMS and 16-byte accesses. Calls with other heads or alignments, or `probs`, go
to the next backend. So do backward and dropout in float32, whose kernel is a forward for inference.
Forward's kernels find their sequence in cu_seqlens; backward's kernels read a table of places if they get
one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.cuda import device
from fastbert.backends.extension import STORED
from fastbert.backends.extension import attention as attention_args
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_grid import bits_shape
from fastbert.ops.attention_inputs import EVERYWHERE, AttentionNeeds
from fastbert.ops.checks import TensorOrNone
from fastbert.runtime import dispatch
from fastbert.runtime.streams import on
from fastbert.runtime.table import HALF

DTYPES = STORED
HEADDIMS = (32, 64, 128)
# rows of the tiles that a block of backward owns
ROWS = 64
# Whether forward and backward may use the kernels for compute capability 9.0.
HOPPER = True
HOPPER_BACKWARD = True


def readable(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> bool:
    """Whether the kernels for these dtypes can read these (total, nheads, headdim) tensors in place."""
    for t in tensors:
        pack = 16 // t.itemsize
        rows, heads, _ = t.stride()
        if t.shape[2] not in HEADDIMS or t.data_ptr() % 16 or rows % pack or heads % pack:
            return False
        if t.dtype not in dtypes:
            return False
    return True


def hopper_reads(inputs: AttentionInputs) -> bool:
    """Whether the kernels for compute capability 9.0 have this call's mathematics and layout.

    With heads of 32 dimensions there is only a forward, without dropout, window and shared heads.
    """
    total, nheads, headdim = inputs.q.shape
    if inputs.q.dtype == torch.float32 or inputs.bias is not None or not inputs.softmax_scale > 0:
        return False
    plain = inputs.dropout_p == 0 and inputs.window == EVERYWHERE and inputs.k.shape[1] == nheads
    if headdim != 64 and (headdim != 32 or not plain):
        return False
    for t in (inputs.q, inputs.k, inputs.v):
        # A tensor map is of a matrix: heads lie side by side, and rows do not overlap.
        (rows, heads, _), nheads = t.stride(), t.shape[1]
        if (nheads > 1 and heads != headdim) or (total > 1 and rows < nheads * headdim):
            return False
    return True


def hopper_serves(inputs: AttentionInputs) -> bool:
    """Whether forward by the kernel for compute capability 9.0 takes this call, which is `readable`."""
    total, nheads, headdim = inputs.q.shape
    sizes = inputs.cu_seqlens.shape[0] - 1, total, inputs.max_seqlen, nheads, headdim
    return (
        HOPPER
        and device.extension.cuda_attention_fills_hopper(*sizes, device.multiprocessors(inputs.q.device))
        and hopper_reads(inputs)
        and device.is_hopper(inputs.q.device)
    )


def attention_fwd(
    inputs: AttentionInputs, return_probs: bool, save_bits: bool, places: Tensor | None = None
) -> tuple[Tensor, ...]:
    q = inputs.q
    dtypes = HALF if inputs.dropout_p > 0 else DTYPES
    if return_probs or not readable(q, inputs.k, inputs.v, dtypes=dtypes):
        following = dispatch.next_function("cuda", "attention_fwd", q.device, q.dtype)
        return following(inputs, return_probs, save_bits, places)
    return forward(inputs, save_bits, hopper_serves(inputs))


def forward(inputs: AttentionInputs, save_bits: bool, hopper: bool) -> tuple[Tensor, ...]:
    """Forward of a `readable` call; `hopper` chooses the kernel for compute capability 9.0."""
    q = inputs.q
    total, nheads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=torch.float32)
    keep_bits = q.new_empty(bits_shape(nheads, total, inputs.max_seqlen, save_bits), dtype=torch.int32)
    args, _held = attention_args(inputs)
    extension = device.extension
    launch = extension.cuda_attention_hopper_fwd if hopper else extension.cuda_attention_fwd
    with on(q.device):
        launch(
            args,
            out.data_ptr(),
            lse.data_ptr(),
            keep_bits.data_ptr() if save_bits else 0,
            *device.place(q.device),
        )
    return out, lse, q.new_empty(0), keep_bits


def attention_bwd(
    dout: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    keep_bits: TensorOrNone,
    need: AttentionNeeds,
    places: Tensor | None = None,
) -> tuple[Tensor, ...]:
    q = inputs.q
    if not readable(q, inputs.k, inputs.v, dtypes=HALF):
        following = dispatch.next_function("cuda", "attention_bwd training", q.device, q.dtype)
        return following(dout, inputs, out, lse, keep_bits, need, places)
    total, nheads, _ = q.shape
    (dq, dk, dv), grad_stride, kv_grad_stride = _gradients(inputs, need)
    # per row: delta, the normaliser of P, the share of dgate
    rows = lse.new_empty(3 if need.dgate else 2, nheads, total)
    dbias = lse.new_empty(_dbias_shape(inputs) if need.dbias else (0, 0, 0, 0, 0))
    args, _held = attention_args(inputs)
    dout, out, lse = _whole(dout), _whole(out), lse.contiguous()
    first, slots = _slots(inputs, places)
    with on(q.device):
        device.extension.cuda_attention_bwd(
            args,
            0 if keep_bits is None or inputs.dropout_p == 0 else keep_bits.data_ptr(),
            *(dout.data_ptr(), out.data_ptr(), lse.data_ptr()),
            0 if places is None else places[first:].data_ptr(),
            slots,
            *(grad.data_ptr() if needed else 0 for grad, needed in zip((dq, dk, dv), need, strict=False)),
            *(grad_stride, kv_grad_stride, rows.data_ptr(), need.dgate),
            *(dbias.data_ptr() if dbias.numel() else 0, dbias.shape),
            hopper_serves_backward(inputs, need),
            *device.place(q.device),
        )
    dbias = dbias.sum(0) if need.dbias else lse.new_empty(0)
    return dq, dk, dv, dbias, rows[2].sum(1) if need.dgate else lse.new_empty(0)


def hopper_serves_backward(inputs: AttentionInputs, need: AttentionNeeds) -> bool:
    """Whether backward by the kernels for compute capability 9.0 takes this call, which is `readable`."""
    return (
        device.is_hopper(inputs.q.device)
        and HOPPER_BACKWARD
        and all(need[:3])
        and (inputs.gate is None or inputs.k.shape[1] == inputs.q.shape[1])
        and inputs.q.shape[2] == 64
        and hopper_reads(inputs)
    )


def _gradients(inputs: AttentionInputs, need: AttentionNeeds):
    """((dq, dk, dv), elements from row to row of dq, of dk and dv).

    They lie side by side where q, k and v do, which saves a copy.
    """
    q, k, v = inputs[:3]
    total, nheads, headdim = q.shape
    heads = nheads, k.shape[1], k.shape[1]
    size, kv_size = (n * headdim for n in heads[:2])
    whole = size + 2 * kv_size
    starts = (t.data_ptr() - q.data_ptr() for t in (k, v))
    aside = tuple(starts) == (size * q.element_size(), (size + kv_size) * q.element_size())
    if (
        all(need[:3])
        and total > 0
        and aside
        and q.stride() == k.stride() == v.stride() == (whole, headdim, 1)
    ):
        return q.new_empty((total, sum(heads), headdim)).split(heads, 1), whole, whole
    grads = (q.new_empty(t.shape if needed else 0) for t, needed in zip((q, k, v), need[:3], strict=True))
    return tuple(grads), size, kv_size


def _whole(t: torch.Tensor) -> torch.Tensor:
    """`t`, contiguous and at a multiple of 16 bytes."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _dbias_shape(inputs: AttentionInputs) -> tuple[int, int, int, int, int]:
    """(parts, *bias.shape): dbias is summed in so many parts that the device has enough blocks.

    The number depends on shapes and the device alone, so sums have one order.
    """
    shape = inputs.bias.shape
    blocks = shape[0] * shape[1] * -(-shape[2] // ROWS) * -(-shape[3] // ROWS)
    if blocks == 0:
        return 1, *shape
    pairs = (inputs.cu_seqlens.shape[0] - 1) // shape[0] * (inputs.q.shape[1] // shape[1])
    return max(1, min(pairs, 2 * device.multiprocessors(inputs.q.device) // blocks)), *shape


def _slots(inputs: AttentionInputs, places: torch.Tensor | None) -> tuple[int, int]:
    """(where the table's section for tiles of ROWS begins, the blocks per head)."""
    sizes = inputs.q.shape[0], inputs.cu_seqlens.shape[0] - 1, inputs.max_seqlen
    if places is None:
        total, batch, max_seqlen = sizes
        return 0, device.extension.cuda_attention_bwd_slots(batch, total, max_seqlen)
    from fastbert.kernels.attention_slots import HEIGHTS, sections

    section = HEIGHTS.index(ROWS)
    first, end = sections(*sizes)[section : section + 2]
    return first, end - first
