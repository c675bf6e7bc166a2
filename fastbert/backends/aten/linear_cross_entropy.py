"""`linear_cross_entropy` by the `aten` backend's `linear` and `cross_entropy`."""

from __future__ import annotations

from fastbert.backends.aten import cross_entropy, linear
from fastbert.backends.reference.linear_cross_entropy import chunked
from fastbert.ops.checks import FLOATS

DTYPES = FLOATS

linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(linear, cross_entropy)
