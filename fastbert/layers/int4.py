r"""Linear weights of 4 bits in groups of 32 columns, which run as 8-bit weights, exactly.

    w_ci ≈ q_ci m_cg s_c       q from -7 to 7,  m_cg from 1 to 18 per group g = ⌊i / 32⌋,  s_c per channel

s_c = max_i |w_ci| / 126. q m is an integer from -126 to 126, so the weight is one of `linear_int8`: a file
holds q and m, 4.25 bits per weight, and memory holds q m. Nothing is lost from one to the other. Of the
smallest m that keeps all of a group in range and the two below it, m has the least squared error.

Source: Yao et al. 2022, "ZeroQuant", sec. 4.1 (groups); Dettmers et al. 2023, "QLoRA", sec. 3 (scales of
scales).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops import integer_table

GROUP = 32
MOST_FACTOR = 18
_MOST = integer_table.MOST[4]


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(integers q m (out, in) int8, scale (out,) float32) of a floating-point weight (out, in), finite."""
    groups = _grouped(weight.float())
    most = groups.abs().amax(2)
    scale = most.amax(1) / most.new_tensor(float(_MOST * MOST_FACTOR))
    scale.masked_fill_(scale < integer_table.SMALLEST_SCALE, 1.0)
    steps = groups / scale[:, None, None]
    least = (most / scale[:, None] / _MOST).ceil_().clamp_(1, MOST_FACTOR)
    best = torch.zeros_like(steps)
    best_error = torch.full_like(least, float("inf"))
    for below in range(3):
        factor = (least - below).clamp_min_(1)[:, :, None]
        found = (steps / factor).round_().clamp_(-_MOST, _MOST).mul_(factor)
        error = (found - steps).square_().sum(2)
        better = error < best_error
        best, best_error = (
            torch.where(better[:, :, None], found, best),
            torch.where(better, error, best_error),
        )
    return _flat(best, weight.shape[1]).to(torch.int8), scale


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q as `integer_table.packed`, m (out, ⌈in / 32⌉) uint8) of integers q m.

    Raises:
        ValueError: a group is of no q and m.
    """
    groups = _grouped(weight)
    most = groups.abs().amax(2)
    factors = torch.zeros_like(most)
    for factor in range(MOST_FACTOR, 0, -1):
        fits = (groups % factor == 0).all(2) & (most <= _MOST * factor)
        factors.masked_fill_(fits, factor)
    if not factors.all():
        raise ValueError("expected integers of 4 bits times a factor per group of 32")
    q = _flat(groups // factors[:, :, None], weight.shape[1])
    return integer_table.packed(q), factors.view(torch.uint8)


def unpacked(q: Tensor, factors: Tensor, width: int) -> Tensor:
    """The reverse of `packed`: integers (out, width) int8.

    Raises:
        ValueError: another shape or dtype, or a factor that is not from 1 to 18.
    """
    shapes = (q.shape[0], (width + 1) // 2), (q.shape[0], -(-width // GROUP))
    if (q.shape, factors.shape) != shapes or {q.dtype, factors.dtype} != {torch.uint8}:
        raise ValueError(f"expected uint8 {shapes}, got {q.dtype} {tuple(q.shape), tuple(factors.shape)}")
    if factors.numel() and not (factors.amin() >= 1 and factors.amax() <= MOST_FACTOR):
        raise ValueError(f"expected factors from 1 to {MOST_FACTOR}")
    integers = _grouped(integer_table.unpacked(q, width).clamp_(-_MOST, _MOST))
    return _flat(integers * factors.view(torch.int8)[:, :, None], width)


def bytes_of(out: int, width: int) -> int:
    """Bytes of the q and m of a weight (out, width) in a file."""
    return out * ((width + 1) // 2 + -(-width // GROUP))


def _grouped(weight: Tensor) -> Tensor:
    """(out, in) -> (out, groups, 32), zeros at the end."""
    return F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _flat(groups: Tensor, width: int) -> Tensor:
    return groups.flatten(1)[:, :width].contiguous()
