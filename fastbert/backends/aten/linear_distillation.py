"""`linear_distillation` by the `aten` backend's `linear`."""

from __future__ import annotations

from fastbert.backends.aten import linear
from fastbert.backends.reference.linear_distillation import chunked
from fastbert.ops.checks import FLOATS

DTYPES = FLOATS

linear_distillation_fwd, linear_distillation_bwd = chunked(linear)
