"""`attention` by the `triton` backend; contract in fastbert/ops/attention.py.

The kernels are in kernels/attention.py and kernels/attention_backward.py.
"""

from __future__ import annotations

from fastbert.backends.aten import attention as aten
from fastbert.backends.triton.device import STORED, kernels

DTYPES = STORED


def attention_fwd(q, *args):
    module = kernels("attention")
    if q.shape[-1] > module.MAX_HEADDIM:
        # no BERT has such heads; the kernel would spill
        return aten.attention_fwd(q, *args)
    return module.attention_fwd(q, *args)


def attention_bwd(dout, q, *args):
    # with these comes Triton
    from fastbert.kernels import attention, attention_backward

    if q.shape[-1] > attention.MAX_HEADDIM:
        return aten.attention_bwd(dout, q, *args)
    return attention_backward.attention_bwd(dout, q, *args)
