"""`feed_forward` by the `cpu` backend's `linear`."""

from __future__ import annotations

from fastbert.backends.cpu import linear
from fastbert.backends.extension import STORED
from fastbert.backends.reference.feed_forward import by_linear

DTYPES = STORED

feed_forward_fwd, feed_forward_bwd = by_linear(linear, linear)
