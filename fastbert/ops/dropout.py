"""Dropout bits: Philox4x32-10, one definition for every backend.

`keep(seed, offset, plane, row, col)`: with key = (low, high 32 bits of seed) and
counter = (col >> 2, row, plane, offset), the element is kept iff word `col & 3` of philox4x32_10(counter,
key), read as unsigned, is at least `threshold(p)`. The bits depend on nothing else: not on the device, the
backend, the tile shape or the address of the seed. So forward, backward and recomputation agree without
storing a mask. `SAVED_ON` lists where storing one is faster all the same.

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
    """The 32-bit threshold below which a Philox word drops its element."""
    return min(round(dropout_p * 2**32), _MASK)


def philox_blocks(
    seed: torch.Tensor, offset: int, plane: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit Philox words of each block of four columns, as int64 in [0, 2**32).

    Args:
        seed: int64 tensor of one element.
        offset: call site, in [0, 2**32).
        plane, rows, blocks: int64 coordinates that broadcast against each other; block = column >> 2.
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


def philox_words(
    seed: torch.Tensor, offset: int, plane: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor
) -> torch.Tensor:
    """The 32-bit Philox word of each element, as int64 in [0, 2**32).

    Args:
        seed: int64 tensor of one element.
        offset: call site, in [0, 2**32).
        plane, rows, cols: int64 coordinates that broadcast against each other.
    """
    plane, rows, cols = torch.broadcast_tensors(plane, rows, cols)
    words = torch.stack(philox_blocks(seed, offset, plane, rows, cols >> 2), dim=-1)
    return words.gather(-1, (cols & 3).unsqueeze(-1)).squeeze(-1)


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
    return philox_words(seed, offset, plane, rows, cols) >= threshold(dropout_p)


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
