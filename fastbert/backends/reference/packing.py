"""`packing` by the `reference` backend; contract in fastbert/ops/packing.py."""

from __future__ import annotations

from fastbert.ops import packing

DTYPES = packing.DTYPES


def packing_fwd(x, indices):
    return x[indices]


def packing_bwd(x, indices, rows):
    padded = x.new_zeros(rows, x.shape[1])
    padded[indices] = x
    return padded
