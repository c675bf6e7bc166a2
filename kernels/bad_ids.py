"""Ids outside a table or a batch: kernels report them, and the host raises an error that names one.

Nothing is read or written for such an id. Its row becomes NaN, or is left out, so that no result that looks
right is returned before the host knows.
"""

import ctypes
from functools import cache

import torch
import triton
import triton.language as tl

# Numbers in `ARGUMENTS`.
INPUT_IDS = tl.constexpr(0)
POSITION_IDS = tl.constexpr(1)
TOKEN_TYPE_IDS = tl.constexpr(2)
INDICES = tl.constexpr(3)
ARGUMENTS = (
    ("input_ids: token id", "in the table"),
    ("position_ids: position", "in the table"),
    ("token_type_ids: token type", "in the table"),
    ("indices: position", "in the padded batch"),
)


@triton.jit
def tell_bad(bad, ids, bad_ptr, ARGUMENT: tl.constexpr):
    """Report at `bad_ptr`, the `cells` of a `BadIds`, one of the `ids` where `bad`, both [n]."""
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(bad_ptr + 2 * ARGUMENT + 1, tl.max(tl.where(bad, ids, -(2**63)), 0))
        tl.store(bad_ptr + 2 * ARGUMENT, 1)


class BadIds:
    """Where kernels on a device report bad ids.

    It is host memory that the device can write to, so the host does not wait for it. A kernel writes only if
    there is such an id, also in a recorded graph; the host reads it at the next call.

    Attributes:
        cells: (8,) int64; per argument whether there was such an id, and one of them.
    """

    def __init__(self, device: torch.device):
        self.cells = torch.zeros(2 * len(ARGUMENTS), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen = (ctypes.c_int64 * self.cells.numel()).from_address(self.cells.data_ptr())

    def check(self) -> None:
        """Raise an IndexError if a kernel that has run found such an id, and forget it."""
        seen = self._seen
        for argument, (name, where) in enumerate(ARGUMENTS):
            if seen[2 * argument]:
                seen[2 * argument] = 0
                raise IndexError(f"{name} {seen[2 * argument + 1]} of an earlier call is not {where}")


@cache
def bad_ids(device: torch.device) -> BadIds:
    """The `BadIds` of the kernels on a device."""
    return BadIds(device)
