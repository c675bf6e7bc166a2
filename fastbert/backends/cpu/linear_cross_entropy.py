"""`linear_cross_entropy` by the `cpu` backend's `linear` and `cross_entropy`; in float32 the logits by `aten`
where MKL leads (csrc/cpu/NOTES.md).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fastbert.backends.aten import linear as aten
from fastbert.backends.cpu import cross_entropy, linear
from fastbert.backends.extension import STORED
from fastbert.backends.reference.linear_cross_entropy import chunked

DTYPES = STORED


def _linear_fwd(x, *args):
    by_aten = x.dtype == torch.float32 and linear.mkl_leads()
    return (aten if by_aten else linear).linear_fwd(x, *args)


linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(
    SimpleNamespace(linear_fwd=_linear_fwd, linear_bwd=linear.linear_bwd), cross_entropy
)
