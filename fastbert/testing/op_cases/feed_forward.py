"""Cases of `feed_forward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.activation import activate_eager
from fastbert.testing.error_rule import Case, Outputs, draws


@dataclass(frozen=True, repr=False)
class FeedForwardCase(Case):
    """(rows, hidden) through (inner, hidden), gated (2 inner, hidden), and (out, inner)."""

    rows: int
    hidden: int
    inner: int
    out: int
    activation: str = "gelu"
    bias: bool = True
    gated: str | None = None

    op = "feed_forward"
    shape = "{0.rows}x{0.hidden}x{0.inner}x{0.out}-{0.activation}"
    marks = "gated={} bias=no_bias"
    options = ("activation", "gated")
    grad_inputs = ("x", "up_weight", "up_bias", "down_weight")

    @property
    def columns(self) -> int:
        """The first product's."""
        return 2 * self.inner if self.gated else self.inner

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        return {
            "x": randn(self.rows, self.hidden),
            "up_weight": randn(self.columns, self.hidden, scale=self.hidden**-0.5),
            "up_bias": randn(self.columns, scale=0.5) if self.bias else None,
            "down_weight": randn(self.out, self.inner, scale=self.inner**-0.5),
        }

    def eager(self, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor) -> Outputs:
        pre = F.linear(x, up_weight, up_bias)
        return F.linear(activate_eager(pre, self.activation, self.gated), down_weight)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """Cauchy-Schwarz: a sum of products is off by some eps times the product of the two norms."""
        eps = torch.finfo(inputs["x"].dtype).eps
        x, up, down = inputs["x"], inputs["up_weight"], inputs["down_weight"]
        pre = 1 + (x.norm(dim=1).max() * up.norm(dim=1).max()).item()
        g = 1 + self.out**0.5 * down.norm(dim=0).max().item()
        if self.gated:
            g, pre = g * pre, pre * pre
        size = {
            "dx": g * self.columns**0.5 * up.norm(dim=0).max().item(),
            "dup_weight": g * self.rows,
            "dup_bias": g * self.rows,
            "ddown_weight": pre * self.rows,
        }
        return eps * (1 + size.get(name, pre * self.inner**0.5 * down.norm(dim=1).max().item()))

    def flops(self) -> int:
        return 2 * self.rows * (self.columns * self.hidden + self.inner * self.out)

    def bytes(self, dtype: torch.dtype) -> int:
        elements = self.rows * (self.hidden + 2 * self.inner + self.out)
        elements += self.columns * (self.hidden + self.bias) + self.inner * self.out
        return elements * dtype.itemsize


SMALL = [FeedForwardCase(5, 24, 40, 16), FeedForwardCase(3, 17, 9, 11, "relu", bias=False)]
# the rows and columns of op_cases/linear.py: one of these has the largest tiles on every GPU
ON_GPU = [
    FeedForwardCase(2000, 264, 2000, 264),
    FeedForwardCase(1500, 200, 2000, 200),
    FeedForwardCase(1000, 200, 2000, 96, "gelu_tanh"),
    FeedForwardCase(700, 136, 2000, 200, "silu", bias=False),
    FeedForwardCase(1000, 200, 1000, 200),
    FeedForwardCase(2000, 200, 2000, 264, "gelu_tanh"),
]
CASES = [
    *SMALL,
    FeedForwardCase(1, 1, 1, 1, "relu"),
    FeedForwardCase(64, 128, 512, 128),  # BERT-tiny's
    FeedForwardCase(33, 96, 192, 96, "gelu_tanh"),
    FeedForwardCase(33, 96, 192, 80, "relu"),
    FeedForwardCase(33, 96, 192, 96, "silu", bias=False),
    FeedForwardCase(70, 64, 200, 136, "tanh"),
    FeedForwardCase(130, 31, 65, 33),  # no multiple of a vector or a tile
    FeedForwardCase(40, 96, 144, 96, bias=False, gated="first"),
    FeedForwardCase(33, 31, 65, 33, "silu", gated="second"),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [FeedForwardCase(sum(lengths), 768, 3072, 768)]
