"""`feed_forward` by the `triton` backend: the first product and the gradient between the two are its own.

The other products are PyTorch's, as in the table of `dispatch`.
"""

from __future__ import annotations

from fastbert.backends.aten import linear
from fastbert.backends.reference.feed_forward import by_linear
from fastbert.backends.triton import forwarders
from fastbert.backends.triton.device import STORED, kernels

DTYPES = STORED


def _inner_gradient(dy, down_weight, pre, activation, need_dup_bias):
    return kernels("feed_forward").inner_gradient(dy, down_weight, pre, activation, need_dup_bias)


feed_forward_fwd, feed_forward_bwd = by_linear(forwarders, linear, _inner_gradient)
