"""`cuda`: CUDA C++ kernels through raw pointers and the current stream. Each launcher allocates the outputs.

The kernels come with `fastbert._C` where it was built with nvcc. They hold code for compute capability 8.0,
9.0, 10.0 and 12.0, and PTX for the rest.
"""

from __future__ import annotations

from fastbert.backends.cuda import attention, encoder_layers, feed_forward, layer_norm, linear
from fastbert.backends.cuda.attention import attention_bwd, attention_fwd
from fastbert.backends.cuda.device import available
from fastbert.backends.cuda.encoder_layers import encoder_layers_fwd, encoder_layers_gap
from fastbert.backends.cuda.feed_forward import feed_forward_bwd, feed_forward_fwd
from fastbert.backends.cuda.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastbert.backends.cuda.linear import linear_bwd, linear_fwd

DTYPES = {
    "attention": attention.DTYPES,
    "encoder_layers": encoder_layers.DTYPES,
    "feed_forward": feed_forward.DTYPES,
    "layer_norm": layer_norm.DTYPES,
    "linear": linear.DTYPES,
}

__all__ = [
    "DTYPES",
    "attention_bwd",
    "attention_fwd",
    "available",
    "encoder_layers_fwd",
    "encoder_layers_gap",
    "feed_forward_bwd",
    "feed_forward_fwd",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_fwd",
]
