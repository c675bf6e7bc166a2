"""`aten`: what a good PyTorch program would call. Runs on every device PyTorch runs on."""

from __future__ import annotations

from fastbert.backends.aten import (
    attention,
    attention_received,
    cross_entropy,
    embedding,
    encoder_layers,
    feed_forward,
    first_attention,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_distillation,
    linear_fp8,
    linear_int8,
    linear_norm,
    packing,
    pooling,
    rotary,
)
from fastbert.backends.aten.attention import attention_bwd, attention_fwd
from fastbert.backends.aten.attention_received import attention_received_fwd
from fastbert.backends.aten.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from fastbert.backends.aten.embedding import embedding_bwd, embedding_fwd
from fastbert.backends.aten.encoder_layers import encoder_layers_fwd
from fastbert.backends.aten.feed_forward import feed_forward_bwd, feed_forward_fwd
from fastbert.backends.aten.first_attention import first_attention_fwd
from fastbert.backends.aten.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastbert.backends.aten.linear import linear_bwd, linear_fwd
from fastbert.backends.aten.linear_cross_entropy import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fastbert.backends.aten.linear_distillation import linear_distillation_bwd, linear_distillation_fwd
from fastbert.backends.aten.linear_fp8 import linear_fp8_fwd
from fastbert.backends.aten.linear_int8 import linear_int8_fwd
from fastbert.backends.aten.linear_norm import linear_norm_fwd
from fastbert.backends.aten.packing import packing_bwd, packing_fwd
from fastbert.backends.aten.pooling import pooling_bwd, pooling_fwd
from fastbert.backends.aten.rotary import rotary_bwd, rotary_fwd

DTYPES = {
    "attention": attention.DTYPES,
    "attention_received": attention_received.DTYPES,
    "cross_entropy": cross_entropy.DTYPES,
    "embedding": embedding.DTYPES,
    "encoder_layers": encoder_layers.DTYPES,
    "feed_forward": feed_forward.DTYPES,
    "first_attention": first_attention.DTYPES,
    "layer_norm": layer_norm.DTYPES,
    "linear": linear.DTYPES,
    "linear_cross_entropy": linear_cross_entropy.DTYPES,
    "linear_distillation": linear_distillation.DTYPES,
    "linear_fp8": linear_fp8.DTYPES,
    "linear_int8": linear_int8.DTYPES,
    "linear_norm": linear_norm.DTYPES,
    "packing": packing.DTYPES,
    "pooling": pooling.DTYPES,
    "rotary": rotary.DTYPES,
}

__all__ = [
    "DTYPES",
    "attention_bwd",
    "attention_fwd",
    "attention_received_fwd",
    "available",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "embedding_bwd",
    "embedding_fwd",
    "encoder_layers_fwd",
    "feed_forward_bwd",
    "feed_forward_fwd",
    "first_attention_fwd",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_distillation_bwd",
    "linear_distillation_fwd",
    "linear_fp8_fwd",
    "linear_fwd",
    "linear_int8_fwd",
    "linear_norm_fwd",
    "packing_bwd",
    "packing_fwd",
    "pooling_bwd",
    "pooling_fwd",
    "rotary_bwd",
    "rotary_fwd",
]


def available(device_type: str) -> str | None:
    """None: PyTorch's operations run on every device of PyTorch."""
    return None
