"""Dropout bits: Philox4x32-10, one definition for every backend.

`keep(seed, offset, plane, row, col)`: with key = (low, high 32 bits of seed) and
counter = (col >> 3, row, plane, offset), the four words of philox4x32_10(counter, key) are eight unsigned
16-bit lanes: lane 2 w is the low half of word w, lane 2 w + 1 its high half. The element is kept iff lane
`col & 7` is at least p * 2**16, rounded. So the share dropped is p to within 2**-17, and one call of Philox
serves eight columns. Kept values are scaled by 1 / (1 - p) of the requested p: the mean is off by
at most 2**-17 / (1 - p), 9e-6 at p = 0.1.

The bits depend on nothing else: not on the device, the backend, the tile shape or the address of the seed.
So forward, backward and recomputation agree without storing a mask. `SAVED_ON` lists where storing one is
faster all the same.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10).
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

# Device type -> dtypes in which attention's forward saves its bits for backward, one per probability. It is
# chosen only here: measured on a CPU, counted in instructions on a GPU. There float32's products have so many
# instructions that drawing the bits again hardly counts (kernels/NOTES.md).
SAVED_ON = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "cuda": (torch.bfloat16, torch.float16),
}


def threshold(dropout_p: float) -> int:
    """The threshold of a 16-bit lane in the upper half of 32 bits: a smaller `lane << 16` drops its element.

    A p below 2**-17 drops nothing; a p too near 1 keeps a share of 2**-16.
    """
    return min(round(dropout_p * 2**16), 2**16 - 1) << 16


def philox_blocks(
    seed: torch.Tensor, offset: int, plane: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit Philox words of each block of eight columns, as int64 in [0, 2**32).

    Args:
        seed: int64 tensor of one element.
        offset: call site, in [0, 2**32).
        plane, rows, blocks: int64 coordinates that broadcast against each other; block = column >> 3.
    """
    plane, rows, blocks = torch.broadcast_tensors(plane, rows, blocks)
    key = seed.reshape(())
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2 = blocks & _MASK, rows & _MASK, plane & _MASK
    c3 = torch.full_like(c0, offset & _MASK)
    for _ in range(ROUNDS):
        # int64 products wrap, and their 64 bits are still those of the unsigned product
        p0, p1 = c0 * _M0, c2 * _M1
        hi0, lo0 = (p0 >> 32) & _MASK, p0 & _MASK
        hi1, lo1 = (p1 >> 32) & _MASK, p1 & _MASK
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def lanes_of(words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The 16-bit lanes of words of `philox_blocks`, (..., 8), each shifted left by 16 as in `threshold`."""
    halves = [half for word in words for half in ((word << 16) & _MASK, word & (_MASK << 16))]
    return torch.stack(halves, dim=-1)


def philox_lanes(
    seed: torch.Tensor, offset: int, plane: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor
) -> torch.Tensor:
    """The 16-bit lane of each element, as int64 in [0, 2**16).

    Args:
        seed: int64 tensor of one element.
        offset: call site, in [0, 2**32).
        plane, rows, cols: int64 coordinates that broadcast against each other.
    """
    plane, rows, cols = torch.broadcast_tensors(plane, rows, cols)
    lanes = lanes_of(philox_blocks(seed, offset, plane, rows, cols >> 3))
    return lanes.gather(-1, (cols & 7).unsqueeze(-1)).squeeze(-1) >> 16


def philox_keep(
    seed: torch.Tensor,
    offset: int,
    plane: torch.Tensor | int,
    rows: torch.Tensor,
    cols: torch.Tensor,
    dropout_p: float,
) -> torch.Tensor:
    """Boolean keep mask of the broadcast shape of (plane, rows, cols); see the module's definition."""
    if not isinstance(plane, torch.Tensor):  # `as_tensor` would wait for a GPU
        plane = torch.full((), plane, dtype=torch.int64, device=rows.device)
    return philox_lanes(seed, offset, plane, rows, cols) >= threshold(dropout_p) >> 16


def keep_mask_2d(seed: torch.Tensor, offset: int, rows: int, cols: int, dropout_p: float) -> torch.Tensor:
    """Keep mask (rows, cols) of a 2-D tensor: plane 0."""
    device = seed.device
    return philox_keep(
        seed,
        offset,
        0,
        torch.arange(rows, device=device).unsqueeze(1),
        torch.arange(cols, device=device).unsqueeze(0),
        dropout_p,
    )
