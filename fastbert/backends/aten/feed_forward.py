"""`feed_forward` by the `aten` backend's `linear`."""

from __future__ import annotations

from fastbert.backends.aten import linear
from fastbert.backends.reference.feed_forward import by_linear
from fastbert.ops.checks import FLOATS

DTYPES = FLOATS

feed_forward_fwd, feed_forward_bwd = by_linear(linear, linear)
