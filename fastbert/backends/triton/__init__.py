"""`triton`: the kernels of `kernels/`, on CUDA tensors, and on CPU tensors in Triton's interpreter.

Triton is imported at the first launch, so that `import fastbert` needs neither Triton nor a driver.
"""

from __future__ import annotations

from fastbert.backends.triton import (
    attention,
    attention_received,
    feed_forward,
    first_attention,
    forwarders,
    linear_cross_entropy,
    linear_fp8,
    linear_norm,
)
from fastbert.backends.triton.attention import (
    attention_bwd,
    attention_fwd,
    attention_places,
    reads_relative,
)
from fastbert.backends.triton.attention_received import attention_received_fwd
from fastbert.backends.triton.device import available
from fastbert.backends.triton.feed_forward import feed_forward_bwd, feed_forward_fwd
from fastbert.backends.triton.first_attention import first_attention_fwd, first_attention_pays
from fastbert.backends.triton.forwarders import (
    bad_ids,
    cross_entropy_bwd,
    cross_entropy_fwd,
    embedding_bwd,
    embedding_fwd,
    layer_norm_bwd,
    layer_norm_fwd,
    linear_bwd,
    linear_fwd,
    linear_int8_fwd,
    linear_int8_panels,
    packing_bwd,
    packing_fwd,
    pooling_bwd,
    pooling_fwd,
    rotary_bwd,
    rotary_fwd,
)
from fastbert.backends.triton.linear_cross_entropy import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fastbert.backends.triton.linear_fp8 import linear_fp8_fwd
from fastbert.backends.triton.linear_norm import joins_norm, linear_norm_fwd

DTYPES = {
    **forwarders.DTYPES,
    "attention": attention.DTYPES,
    "attention_received": attention_received.DTYPES,
    "feed_forward": feed_forward.DTYPES,
    "first_attention": first_attention.DTYPES,
    "linear_cross_entropy": linear_cross_entropy.DTYPES,
    "linear_fp8": linear_fp8.DTYPES,
    "linear_norm": linear_norm.DTYPES,
}

__all__ = [
    "DTYPES",
    "attention_bwd",
    "attention_fwd",
    "attention_places",
    "attention_received_fwd",
    "available",
    "bad_ids",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "embedding_bwd",
    "embedding_fwd",
    "feed_forward_bwd",
    "feed_forward_fwd",
    "first_attention_fwd",
    "first_attention_pays",
    "joins_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_fp8_fwd",
    "linear_fwd",
    "linear_int8_fwd",
    "linear_int8_panels",
    "linear_norm_fwd",
    "packing_bwd",
    "packing_fwd",
    "pooling_bwd",
    "pooling_fwd",
    "reads_relative",
    "rotary_bwd",
    "rotary_fwd",
]
