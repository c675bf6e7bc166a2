"""`linear_cross_entropy` by the `cpu` backend's `linear` and `cross_entropy`."""

from __future__ import annotations

from fastbert.backends.cpu import cross_entropy, linear
from fastbert.backends.reference.linear_cross_entropy import chunked

linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(linear, cross_entropy)
