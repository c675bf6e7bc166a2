"""Tensor maps: what a host would make with cuTensorMapEncodeTiled."""

from __future__ import annotations

import struct
from collections.abc import Sequence

MAGIC = 0x70616D726F736E65
SWIZZLES = (0, 32, 64, 128)


def tensor_map(
    address: int,
    element_bytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 0,
) -> bytes:
    """128 bytes that the emulator takes for a CUtensorMap, by `TensorMap` in hopper.h.

    Args:
        address: the tensor's address, a multiple of 16.
        element_bytes: 1, 2, 4 or 8.
        shape: sizes, the outermost axis first, as PyTorch has them.
        strides: stride per axis, in elements; the last stride is 1.
        box: sizes of a tile.
        swizzle: bytes of a swizzled row, or 0.

    Raises: ValueError for what cuTensorMapEncodeTiled refuses.
    """
    rank = len(shape)
    if not (1 <= rank <= 5 and len(strides) == len(box) == rank):
        raise ValueError(f"shape, strides, box: expected 1 to 5 axes each, got {shape}, {strides}, {box}")
    if address % 16 or strides[-1] != 1 or any(s * element_bytes % 16 for s in strides[:-1]):
        raise ValueError(f"address and strides: expected multiples of 16 bytes, got {address:#x}, {strides}")
    if swizzle not in SWIZZLES or box[-1] * element_bytes > (swizzle or 1 << 20):
        raise ValueError(f"swizzle: expected one of {SWIZZLES} and no shorter than a row, got {swizzle}")
    if not all(1 <= b <= 256 for b in box) or box[-1] * element_bytes % 16:
        raise ValueError(f"box: expected 1 to 256 elements and rows of 16 bytes, got {box}")

    def five(values: Sequence[int]) -> list[int]:
        return [*reversed(values), *[1] * (5 - rank)]

    sizes = struct.pack("<3I5I5II", rank, element_bytes, swizzle, *five(shape), *five(box), 0)
    steps = struct.pack("<5Q", *five([s * element_bytes for s in strides]))
    return struct.pack("<QQ", MAGIC, address) + sizes + steps + bytes(16)
