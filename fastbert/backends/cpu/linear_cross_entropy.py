"""`linear_cross_entropy` by the `cpu` backend's `linear` and `cross_entropy`; the logits in part by `aten`.

A chunk has few rows, a vocabulary many columns. Making panels of a weight for one such product takes long
compared with the product. PyTorch's libraries need none: MKL in float32, oneDNN in bfloat16 where it is not
slower than float32 (csrc/cpu/NOTES.md). Elsewhere a half-precision weight must be widened in any case, which
making panels does.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fastbert.backends.aten import linear as aten
from fastbert.backends.cpu import cross_entropy, linear
from fastbert.backends.extension import STORED
from fastbert.backends.reference.linear_cross_entropy import chunked

DTYPES = STORED


def _by_aten(dtype):
    return dtype == torch.float32 or (dtype == torch.bfloat16 and not aten.bf16_is_slow())


def _linear_fwd(x, *args):
    return (aten if _by_aten(x.dtype) else linear).linear_fwd(x, *args)


def _linear_panels(weight):
    return None if _by_aten(weight.dtype) else linear.linear_panels(weight)


linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(
    SimpleNamespace(linear_fwd=_linear_fwd, linear_panels=_linear_panels, linear_bwd=linear.linear_bwd),
    cross_entropy,
)
