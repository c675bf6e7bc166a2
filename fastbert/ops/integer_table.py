r"""Tables of integers, one float32 scale per row, which `fastbert.ops.embedding` looks up as floats.

    scale_v = max_j |w_vj| / most,  or 1 where that is below 2**-126      most = 127 (8 bits), 7 (4 bits)
    q_vj = clamp(round(w_vj / scale_v), -most, most)                      halves to the even integer
    row v = q_v scale_v                                                   in float32, rounded once

8 bits: int8 (rows, width). 4 bits: uint8 (rows, ⌈width / 2⌉). A byte holds the columns 2 i (low half) and
2 i + 1 (high half), each plus 8; the last half of an odd width is 8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops import checks

MOST = {8: 127, 4: 7}
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32


def bits_of(table: Tensor) -> int:
    """8 or 4: the bits of an integer of the table; 0 for a table of floats."""
    return {torch.int8: 8, torch.uint8: 4}.get(table.dtype, 0)


def columns(width: int, bits: int) -> int:
    """Columns of the tensor that stores rows of `width` integers."""
    return width if bits == 8 else (width + 1) // 2


def rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(integers, not packed, in int8; scale) of finite floats (rows, width); see the module."""
    wide, most = weight.float(), MOST[bits]
    scale = wide.abs().amax(1) / wide.new_tensor(float(most))
    # Rows too small to divide by become zeros
    scale.masked_fill_(scale < SMALLEST_SCALE, 1.0)
    return (wide / scale[:, None]).round_().clamp_(-most, most).to(torch.int8), scale


def packed(integers: Tensor) -> Tensor:
    """int8 (rows, width) from -8 to 7 -> uint8 (rows, ⌈width / 2⌉), two per byte."""
    even = F.pad(integers, (0, integers.shape[1] % 2)) + 8
    return (even[:, ::2] | (even[:, 1::2] << 4)).view(torch.uint8)


def unpacked(table: Tensor, width: int) -> Tensor:
    """The reverse of `packed`."""
    halves = torch.stack([table & 15, table >> 4], 2).flatten(1)
    return halves[:, :width].to(torch.int8) - 8


def looked_up(table: Tensor, scale: Tensor, ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The rows `ids` (…) as floats: (…, width) in `dtype`."""
    flat = ids.reshape(-1)
    rows = table.index_select(0, flat)
    if bits_of(table) == 4:
        rows = unpacked(rows, width)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    floats = rows.to(compute) * scale.index_select(0, flat).to(compute)[:, None]
    return floats.to(dtype).view(*ids.shape, width)


def check(table: object, scale: object, width: int, like: Tensor) -> Tensor:
    """`table`; an error names `word` or `word_scale` unless they are rows of `width` integers."""
    for name, t in (("word", table), ("word_scale", scale)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    assert isinstance(table, Tensor)
    assert isinstance(scale, Tensor)
    if (bits := bits_of(table)) == 0:
        raise TypeError(f"word: expected int8 or uint8, because word_scale is given, got {table.dtype}")
    rows = table.shape[0] if table.dim() else 0
    checks.operand("word", table, (rows, columns(width, bits)), (table.dtype,), like, strided=True)
    checks.operand("word_scale", scale, (rows,), (torch.float32,), like)
    return table
