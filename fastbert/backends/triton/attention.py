"""`attention` by the `triton` backend: kernels/attention.py; contract in fastbert/ops/attention.py.

Forward only. Backward is another backend's, from the out and lse that are saved here.
"""

from __future__ import annotations

from fastbert.backends.aten import attention_fwd as aten_attention_fwd
from fastbert.backends.triton.device import kernels


def attention_fwd(q, *args):
    module = kernels("attention")
    if q.shape[-1] > module.MAX_HEADDIM:  # no BERT has such heads; the kernel would spill
        return aten_attention_fwd(q, *args)
    return module.attention_fwd(q, *args)
