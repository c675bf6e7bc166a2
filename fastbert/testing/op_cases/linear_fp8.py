"""Cases of `linear_fp8`. The oracle rounds by the contract, so only sums and the epilogue are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.activation import activate_eager
from fastbert.ops.linear_fp8 import rounded_rows
from fastbert.testing.error_rule import Outputs, draws
from fastbert.testing.op_cases import linear


@dataclass(frozen=True, repr=False)
class LinearFp8Case(linear.ProductCase):
    """A product with the op's options."""

    activation: str | None = None
    bias: bool = True
    gated: str | None = None
    input_activation: str | None = None

    op = "linear_fp8"
    marks = "activation={} gated={} bias=no_bias input_activation=after_{}"
    options = ("activation", "gated", "input_activation")

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        x = randn(self.rows, self.in_features)
        weight, scale = rounded_rows(randn(self.out_features, self.in_features, scale=self.in_features**-0.5))
        return {
            "x": x,
            "weight": weight,
            "scale": scale.flatten(),
            "bias": randn(self.out_features, scale=0.5) if self.bias else None,
        }

    def eager(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Outputs:
        q, step = rounded_rows(activate_eager(x, self.input_activation))
        acc = q.double() @ weight.double().T
        y = (acc.to(torch.promote_types(x.dtype, torch.float32)) * step * scale).to(x.dtype)
        return activate_eager(y if bias is None else y + bias, self.activation, self.gated)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """A few roundings of the product before the bias may cancel it."""
        x, weight, scale = inputs["x"], inputs["weight"], inputs["scale"]
        most = (x.float().norm(dim=1).max() * (weight.float() * scale[:, None]).norm(dim=1).max()).item()
        return torch.finfo(x.dtype).eps * (1 + most) * (1 + most if self.gated else 1)

    def bytes(self, dtype: torch.dtype) -> int:
        rows, k, n = self.rows, self.in_features, self.out_features
        return (rows * k + rows * n + n * self.bias) * dtype.itemsize + n * k + 4 * n


SMALL = [LinearFp8Case(3, 17, 9, bias=False), LinearFp8Case(5, 32, 48, "gelu")]
CASES = [
    *SMALL,
    LinearFp8Case(1, 1, 1),
    LinearFp8Case(64, 128, 512, "gelu"),  # BERT-tiny's FFN
    LinearFp8Case(33, 96, 192, "tanh", bias=False),
    LinearFp8Case(48, 768, 768),  # BERT-base's projections
    LinearFp8Case(33, 96, 192, "gelu", gated="first"),
    LinearFp8Case(20, 48, 160, "silu", bias=False, gated="second"),
    LinearFp8Case(33, 192, 96, bias=False, input_activation="gelu"),
]


def bench(lengths: tuple[int, ...]) -> list[LinearFp8Case]:
    calls = [c for c in linear.bench(lengths) if c.gated is None]
    return [LinearFp8Case(c.rows, c.in_features, c.out_features, c.activation, c.bias) for c in calls]
