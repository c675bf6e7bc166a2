"""`attention` by the `triton` backend; contract in fastbert/ops/attention.py.

kernels/attention.py and kernels/attention_backward.py launch the kernels, kernels/attention_places.py the one
that makes their table of places.
"""

from __future__ import annotations

from fastbert.backends.aten import attention as aten
from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops.attention import AttentionInputs, AttentionNeeds

DTYPES = STORED


def attention_places(cu_seqlens, total, max_seqlen):
    return kernels("attention_places").attention_places(cu_seqlens, total, max_seqlen)


def attention_fwd(inputs: AttentionInputs, return_probs, save_bits, places=None):
    module = kernels("attention")
    # No BERT has wider heads; the kernel would spill.
    backend = aten if inputs.q.shape[-1] > module.MAX_HEADDIM else module
    return backend.attention_fwd(inputs, return_probs, save_bits, places)


def attention_bwd(dout, inputs: AttentionInputs, out, lse, keep_bits, need: AttentionNeeds, places=None):
    wide = inputs.q.shape[-1] > kernels("attention").MAX_HEADDIM
    backend = aten if wide else kernels("attention_backward")
    return backend.attention_bwd(dout, inputs, out, lse, keep_bits, need, places)
