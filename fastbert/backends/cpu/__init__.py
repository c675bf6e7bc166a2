"""`cpu`: C++ kernels with AVX2, AVX-512 or AVX-512-BF16, through raw pointers. Launchers allocate outputs.

They run on PyTorch's own threads, `torch.get_num_threads()` of them. Environment:
FASTBERT_ISA=avx512_bf16|avx512|avx2_vnni|avx2|none|best, read at import (csrc/cpu/isa.h).
"""

from __future__ import annotations

from fastbert.backends.cpu import (
    attention,
    attention_received,
    cross_entropy,
    embedding,
    feed_forward,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_distillation,
    linear_int8,
    packing,
    rotary,
)
from fastbert.backends.cpu.attention import (
    attention_bwd,
    attention_fwd,
    reads_relative,
    table_panels,
    table_scores,
)
from fastbert.backends.cpu.attention_received import attention_received_fwd
from fastbert.backends.cpu.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from fastbert.backends.cpu.embedding import embedding_bwd, embedding_fwd
from fastbert.backends.cpu.encoder_layer import (
    close_team,
    encoder_layer_fwd,
    encoder_layer_weights,
    open_team,
)
from fastbert.backends.cpu.feed_forward import feed_forward_bwd, feed_forward_fwd
from fastbert.backends.cpu.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastbert.backends.cpu.linear import linear_bwd, linear_fwd, linear_panels, reads_wide
from fastbert.backends.cpu.linear_cross_entropy import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fastbert.backends.cpu.linear_distillation import linear_distillation_bwd, linear_distillation_fwd
from fastbert.backends.cpu.linear_int8 import linear_int8_fwd, linear_int8_panels
from fastbert.backends.cpu.packing import packing_bwd, packing_fwd
from fastbert.backends.cpu.rotary import rotary_bwd, rotary_fwd
from fastbert.backends.cpu.sizes import keeps_panels, sequence_blocks
from fastbert.runtime import loader

DTYPES = {
    "attention": attention.DTYPES,
    "attention_received": attention_received.DTYPES,
    "cross_entropy": cross_entropy.DTYPES,
    "embedding": embedding.DTYPES,
    "feed_forward": feed_forward.DTYPES,
    "layer_norm": layer_norm.DTYPES,
    "linear": linear.DTYPES,
    "linear_cross_entropy": linear_cross_entropy.DTYPES,
    "linear_distillation": linear_distillation.DTYPES,
    "linear_int8": linear_int8.DTYPES,
    "packing": packing.DTYPES,
    "rotary": rotary.DTYPES,
}

__all__ = [
    "DTYPES",
    "attention_bwd",
    "attention_fwd",
    "attention_received_fwd",
    "available",
    "close_team",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "embedding_bwd",
    "embedding_fwd",
    "encoder_layer_fwd",
    "encoder_layer_weights",
    "feed_forward_bwd",
    "feed_forward_fwd",
    "keeps_panels",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_distillation_bwd",
    "linear_distillation_fwd",
    "linear_fwd",
    "linear_int8_fwd",
    "linear_int8_panels",
    "linear_panels",
    "open_team",
    "packing_bwd",
    "packing_fwd",
    "reads_relative",
    "reads_wide",
    "rotary_bwd",
    "rotary_fwd",
    "sequence_blocks",
    "table_panels",
    "table_scores",
]


def available(device_type: str) -> str | None:
    """None where the kernels run on this device type, else why not."""
    if device_type != "cpu":
        return f"runs on cpu, not on {device_type}"
    return loader.cpu_gap()
