"""`packing` by the `reference` backend; contract in fastbert/ops/packing.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops import packing

DTYPES = packing.DTYPES


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    padded = x.new_zeros(rows, x.shape[1])
    padded[indices] = x
    return padded
