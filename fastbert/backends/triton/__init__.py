"""`triton`: the kernels of `kernels/`, on CUDA tensors, and on CPU tensors in Triton's interpreter.

Triton is imported at the first launch, so that `import fastbert` needs neither Triton nor a driver.
"""

from __future__ import annotations

import torch

from fastbert.backends.triton.attention import attention_bwd, attention_fwd
from fastbert.backends.triton.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from fastbert.backends.triton.device import available
from fastbert.backends.triton.embedding import embedding_bwd, embedding_fwd
from fastbert.backends.triton.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastbert.backends.triton.linear import linear_bwd, linear_fwd
from fastbert.backends.triton.linear_cross_entropy import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fastbert.backends.triton.packing import packing_bwd, packing_fwd
from fastbert.backends.triton.pooling import pooling_bwd, pooling_fwd
from fastbert.ops import packing as _packing

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "attention": HALF_AND_SINGLE,
    "cross_entropy": HALF_AND_SINGLE,
    "embedding": HALF_AND_SINGLE,
    "layer_norm": HALF_AND_SINGLE,
    "linear": HALF_AND_SINGLE,
    "linear_cross_entropy": HALF_AND_SINGLE,
    "packing": _packing.DTYPES,  # nothing is computed
    "pooling": HALF_AND_SINGLE,
}

__all__ = [
    "DTYPES",
    "attention_bwd",
    "attention_fwd",
    "available",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "embedding_bwd",
    "embedding_fwd",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_fwd",
    "packing_bwd",
    "packing_fwd",
    "pooling_bwd",
    "pooling_fwd",
]
