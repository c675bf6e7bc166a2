"""`linear_cross_entropy` by the `cpu` backend's `linear` and `cross_entropy`; the logits in part by `aten`.

PyTorch's libraries multiply the logits where they are faster: MKL in float32 where it leads, oneDNN in
bfloat16 where that is fast and our product would widen it (csrc/cpu/NOTES.md).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fastbert.backends.aten import linear as aten
from fastbert.backends.cpu import cross_entropy, linear
from fastbert.backends.extension import STORED
from fastbert.backends.reference.linear_cross_entropy import chunked
from fastbert.ops.checks import as_dtype
from fastbert.ops.linear import LinearInputs

DTYPES = STORED


def _by_aten(dtype):
    if dtype == torch.float32:
        return linear.mkl_leads()
    return dtype == torch.bfloat16 and not linear.by_pairs(dtype) and not aten.bf16_is_slow()


def _linear_fwd(inputs: LinearInputs, save: bool):
    dtype, bias = inputs.x.dtype, inputs.bias
    if not _by_aten(dtype):
        return linear.linear_fwd(inputs, save)
    bias = None if bias is None else as_dtype(bias, dtype)
    return aten.linear_fwd(inputs._replace(weight=as_dtype(inputs.weight, dtype), bias=bias), save)


products = SimpleNamespace(linear_fwd=_linear_fwd, linear_bwd=linear.linear_bwd)

linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(products, cross_entropy)
