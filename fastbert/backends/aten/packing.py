"""`packing` by the `aten` backend; contract in fastbert/ops/packing.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops import packing

DTYPES = packing.DTYPES


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    return x.index_select(0, indices)


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    return x.new_zeros(rows, x.shape[1]).index_copy_(0, indices, x)
