"""`attention` by the `cuda` backend: csrc/cuda/attention.cu; contract in fastbert/ops/attention.py.

The kernels have heads of HEADDIMS and 16-byte accesses. Calls with other heads, other alignments or `probs`
go to `aten`. They find their sequence in cu_seqlens, so they need no table of places.
"""

from __future__ import annotations

import torch

from fastbert.backends.aten import attention as aten
from fastbert.backends.cuda import device
from fastbert.backends.extension import attention as attention_args
from fastbert.ops.attention import AttentionInputs, AttentionNeeds
from fastbert.ops.attention_grid import bits_shape

DTYPES = (torch.bfloat16, torch.float16)
HEADDIMS = (32, 64, 128)


def readable(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can read these (total, nheads, headdim) tensors in place."""
    # 16 bytes are 8 elements
    return all(
        t.shape[2] in HEADDIMS and t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0
        for t in tensors
    )


def attention_fwd(inputs: AttentionInputs, return_probs, save_bits, places=None):
    q = inputs.q
    if return_probs or not readable(q, inputs.k, inputs.v):
        return aten.attention_fwd(inputs, return_probs, save_bits, places)
    total, nheads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=torch.float32)
    keep_bits = q.new_empty(bits_shape(nheads, total, inputs.max_seqlen, save_bits), dtype=torch.int32)
    args, _held = attention_args(inputs)
    with torch.cuda.device(q.device):
        device.extension.cuda_attention_fwd(
            args,
            out.data_ptr(),
            lse.data_ptr(),
            keep_bits.data_ptr() if save_bits else 0,
            *device.place(q.device),
        )
    return out, lse, q.new_empty(0), keep_bits


def attention_bwd(dout, inputs: AttentionInputs, out, lse, keep_bits, need: AttentionNeeds, places=None):
    return aten.attention_bwd(dout, inputs, out, lse, keep_bits, need, places)
