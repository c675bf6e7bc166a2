"""`attention` by the `triton` backend: kernels/attention.py, kernels/attention_backward.py; contract in
fastbert/ops/attention.py.
"""

from __future__ import annotations

from fastbert.backends.aten import attention_bwd as aten_attention_bwd
from fastbert.backends.aten import attention_fwd as aten_attention_fwd
from fastbert.backends.triton.device import kernels


def attention_fwd(q, *args):
    module = kernels("attention")
    if q.shape[-1] > module.MAX_HEADDIM:  # no BERT has such heads; the kernel would spill
        return aten_attention_fwd(q, *args)
    return module.attention_fwd(q, *args)


def attention_bwd(dout, q, *args):
    from fastbert.kernels import attention, attention_backward  # with them comes Triton

    if q.shape[-1] > attention.MAX_HEADDIM:
        return aten_attention_bwd(dout, q, *args)
    return attention_backward.attention_bwd(dout, q, *args)
