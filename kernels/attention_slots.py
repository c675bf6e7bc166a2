"""The sizes of attention's table of places, which the host knows without the lengths.

The table has a section for each height of HEIGHTS, the lowest first, and a section has a place for each slot
of the grid of a kernel whose tiles have that height. Contents of a place: fastbert/ops/attention_places.py.
"""

from __future__ import annotations

import torch

# Rows of the tiles that kernels own: every `block_m` of the forward, `block_m` of dq, `block_n` of dk and dv.
HEIGHTS = (16, 32, 64, 128)
# The int32 numbers of a place.
FIELDS = 4
# Ranking compares each sequence with all others. More sequences than these keep their order.
RANKED = 4096
# The most programs along an axis of the grid other than the first.
_MOST_ON_AXIS = 65535


def slots(height: int, total: int, batch: int, max_seqlen: int) -> int:
    """The slots for the tiles of any `batch` lengths within `total` rows, and for the tail."""
    if batch <= RANKED:
        # A length wastes at most height - 1 rows of its last tile.
        most = (total + batch * (height - 1)) // height
        found = torch.sym_min(-(-max_seqlen // height) * batch, most) + 1
    else:
        # Sequence b begins at slot start // height + b.
        found = total // height + batch + 1
    return in_planes(found)


def in_planes(n_slots: int) -> int:
    """As many slots, or a few more: a product of two numbers that the axes of `grid` hold."""
    planes = -(-n_slots // _MOST_ON_AXIS)
    return -(-n_slots // planes) * planes


def grid(n_slots: int, nheads: int) -> tuple[int, int, int]:
    """(heads, slots, planes of slots) for a number of `in_planes`; the heads of a slot run side by side."""
    planes = -(-n_slots // _MOST_ON_AXIS)
    return nheads, n_slots // planes, planes


def sections(total: int, batch: int, max_seqlen: int) -> tuple[int, ...]:
    """The first slot of each section, then the number of slots of the table."""
    found = [0]
    for height in HEIGHTS:
        found.append(found[-1] + slots(height, total, batch, max_seqlen))
    return tuple(found)
