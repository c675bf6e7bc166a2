"""`linear_cross_entropy` by the `triton` backend's `cross_entropy`; the products are PyTorch's."""

from __future__ import annotations

from fastbert.backends.aten import linear
from fastbert.backends.reference.linear_cross_entropy import chunked
from fastbert.backends.triton import forwarders
from fastbert.backends.triton.device import STORED

DTYPES = STORED
# Classes, so that rows of logits lie on 16 bytes.
ALIGNED = 64

linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(linear, forwarders, multiple=ALIGNED)
