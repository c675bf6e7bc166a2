"""How many rows a CPU multiplies at a time; contracts in ops/linear.py and ops/encoder_layer.py.

The numbers are measured (csrc/cpu/NOTES.md).
"""

from __future__ import annotations

from torch import Tensor

# The fewest rows for which panels of a floating-point weight are made in the call and not kept: they cost
# next to nothing compared with the product.
MANY_ROWS = 1536
# Rows per block of a large batch, where each block makes its panels.
BLOCK_ROWS = 2048
# The same where the layer is fused, and its panels are made once for all blocks.
FUSED_ROWS = 1024


def keeps_panels(linear: str, rows: int) -> bool:
    return linear != "linear" or rows < MANY_ROWS


def sequence_blocks(cu_seqlens: Tensor, rows: int, fused: bool) -> list[tuple[int, int]]:
    least = FUSED_ROWS if fused else BLOCK_ROWS
    if rows < 2 * least:
        return []
    ends = cu_seqlens.tolist()
    if ends[-1] != rows:
        return []
    blocks, first = [], 0
    size = -(-rows // (rows // least))
    # The last block takes what would be too few rows for a block of their own.
    rest = min(least, MANY_ROWS)
    for last in range(1, len(ends)):
        if ends[last] - ends[first] >= size and rows - ends[last] >= rest:
            blocks.append((first, last))
            first = last
    return [*blocks, (first, len(ends) - 1)]
