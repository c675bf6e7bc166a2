"""`linear_distillation` by the products of the `cpu` backend's `linear_cross_entropy`."""

from __future__ import annotations

from fastbert.backends.cpu.linear_cross_entropy import products
from fastbert.backends.extension import STORED
from fastbert.backends.reference.linear_distillation import chunked

DTYPES = STORED

linear_distillation_fwd, linear_distillation_bwd = chunked(products)
