"""`linear_cross_entropy` by the `cpu` backend's `linear` and `cross_entropy`; float32 logits by `aten`.

A chunk has few rows, a vocabulary many columns. Making panels of a float32 weight for one such product takes
long compared with the product, and MKL needs none (csrc/cpu/NOTES.md). A half-precision weight must be
widened in any case, which making panels does.
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
    return (aten if x.dtype == torch.float32 else linear).linear_fwd(x, *args)


def _linear_panels(weight):
    return None if weight.dtype == torch.float32 else linear.linear_panels(weight)


linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(
    SimpleNamespace(linear_fwd=_linear_fwd, linear_panels=_linear_panels, linear_bwd=linear.linear_bwd),
    cross_entropy,
)
