"""Operands of small calls, and the wrong ends, labels, indices and biases that every door refuses."""

from __future__ import annotations

import torch

from fastbert.runtime import loader

INT32 = torch.int32
SIZES = (-1, -(2**62), 2**62, 2**63 - 1)


def floats(*shape, fill=None):
    return torch.randn(shape) if fill is None else torch.full(shape, fill)


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


ENDS = (0, 3, 3, 8)  # of 9 rows
TOTAL, BATCH, HEADS, DIM, LONGEST = 9, 3, 3, 5, 5
WRONG_ENDS = [
    ((0, 3, 3, 2_000_000), "cu_seqlens"),
    ((0, 2**31 - 1, 2**31 - 1, 2**31 - 1), "cu_seqlens"),
    ((-100_000, 0, 3, 8), "cu_seqlens"),
    ((0, 8, 3, 8), "cu_seqlens"),
    ((0, -8, 3, 8), "cu_seqlens"),
    ((1, 3, 3, 8), "cu_seqlens"),
    ((0, 3, 3, 10), "cu_seqlens"),
    ((0, 0, 0, 8), "max_seqlen"),
]
CELLS = (BATCH, HEADS, LONGEST, LONGEST)


def panels_size(depth, columns, int8=False):
    module = loader.extension
    return (module.cpu_linear_int8_panels_size if int8 else module.cpu_linear_panels_size)(depth, columns)


IDS = (6, 0, 3, 6)
WRONG_IDS = [
    {name: ints(0, 1, bad, 0)}
    for name in ("input_ids", "position_ids", "token_type_ids")
    for bad in (7, -1, 2**62)
]
WRONG_LABELS = [{"labels": ints(0, bad, -100, 2)} for bad in (5, -1, 2**62, -(2**63))]


def bytes_of(n):
    return torch.zeros(n, dtype=torch.uint8)


WRONG_INDICES = [
    *({"indices": ints(*bad)} for bad in ((1, 2, 6), (-1, 2, 5), (1, 1, 5), (2, 1, 5))),
    *({"indices": ints(*bad)} for bad in ((1, 2, 2**62), (-(2**63), 2, 5))),
    {"total": 7},
]
WRONG_POSITIONS = [{"positions": ints(0, bad, 5, 0)} for bad in (6, -1, 2**62, -(2**63))]

BIAS_SHAPES = (
    (BATCH, HEADS, LONGEST, 2),
    (BATCH, HEADS, 2, LONGEST),
    (BATCH, HEADS, 2, 2),
    (2, HEADS, LONGEST, LONGEST),
    (BATCH, 2, LONGEST, LONGEST),
    (BATCH, HEADS, LONGEST, LONGEST + 1),
    (LONGEST, LONGEST),
    (0, 1, 1, 1),
)
BIASES = [{"bias": floats(*shape)} for shape in BIAS_SHAPES]
