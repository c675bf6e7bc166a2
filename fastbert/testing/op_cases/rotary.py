"""Cases of `rotary`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.checks import TensorOrNone
from fastbert.testing.error_rule import Case, Outputs, draws

THETA = 10_000.0


@dataclass(frozen=True, repr=False)
class RotaryCase(Case):
    """Packed sequences of `lengths` tokens: the first `heads` of a product that has half as many more.

    `rotary_dim` None: all of headdim. `padded`: all lengths are equal, and no positions are passed.
    """

    lengths: tuple[int, ...]
    heads: int = 2
    headdim: int = 16
    rotary_dim: int | None = None
    interleaved: bool = False
    padded: bool = False

    op = "rotary"
    marks = "rotary_dim=rotary{} interleaved padded"
    options = ("interleaved",)
    grad_inputs = ("x",)

    @property
    def shape(self) -> str:
        sizes = len(self.lengths), max(self.lengths), self.heads, self.headdim
        return f"{'x'.join(map(str, sizes))}-total{sum(self.lengths)}"

    @property
    def half(self) -> int:
        return (self.rotary_dim or self.headdim) // 2

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        rows = (len(self.lengths), max(self.lengths)) if self.padded else (sum(self.lengths),)
        product = randn(*rows, self.heads + self.heads // 2, self.headdim)
        # computed in float64, so that the tables of float32 are correctly rounded
        powers = torch.arange(self.half, dtype=torch.float64) / self.half
        angles = torch.arange(max(self.lengths), dtype=torch.float64)[:, None] * THETA**-powers
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in self.lengths])
        return {
            "x": product[..., : self.heads, :],
            "cos": angles.cos().to(compute).to(device),
            "sin": angles.sin().to(compute).to(device),
            "positions": None if self.padded else positions.to(device),
        }

    def eager(self, x: Tensor, cos: Tensor, sin: Tensor, positions: TensorOrNone) -> Outputs:
        """As transformers computes it, in float32: cos and sin of the head's width, and rotate_half."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        c, s = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
        wide, rest = x[..., : 2 * self.half].to(cos.dtype), x[..., 2 * self.half :]
        if self.interleaved:
            c, s = c.repeat_interleave(2, -1), s.repeat_interleave(2, -1)
            turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
        else:
            c, s = torch.cat((c, c), -1), torch.cat((s, s), -1)
            turned = torch.cat((-wide[..., self.half :], wide[..., : self.half]), -1)
        return torch.cat(((wide * c + turned * s).to(x.dtype), rest), -1)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """A rounding of the larger product."""
        return torch.finfo(inputs["x"].dtype).eps * inputs["x"].abs().max().item()

    def flops(self) -> int:
        return 6 * sum(self.lengths) * self.heads * self.half

    def bytes(self, dtype: torch.dtype) -> int:
        rows = sum(self.lengths)
        tables = 2 * max(self.lengths) * self.half * 4
        return 2 * rows * self.heads * self.headdim * dtype.itemsize + 4 * rows + tables


SMALL = [
    RotaryCase((3, 1, 9), 3, 8),
    RotaryCase((5, 0, 2), 2, 10, rotary_dim=6),
    RotaryCase((4, 3), 2, 12, rotary_dim=8, interleaved=True),
    RotaryCase((4, 4), 2, 6, interleaved=True, padded=True),
]
ON_GPU = [  # the blocks of base and large, of queries and keys
    RotaryCase((33, 1, 40), 24, 64),
    RotaryCase((33, 1, 40), 32, 64, interleaved=True),
]
CASES = [
    *SMALL,
    RotaryCase((1,), 1, 2),
    RotaryCase((2, 3), 1, 3, rotary_dim=2, interleaved=True),
    RotaryCase((70, 3, 33), 24, 64),  # ModernBERT-base's queries and keys
    RotaryCase((20, 20), 12, 64, padded=True),
    RotaryCase((40,), 5, 80, rotary_dim=66),  # no multiple of a vector
    RotaryCase((40,), 5, 80, rotary_dim=66, interleaved=True),
    RotaryCase((33, 7), 6, 128, interleaved=True),
    RotaryCase((512,), 1, 32, rotary_dim=2),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [RotaryCase(lengths, 24, 64)]
