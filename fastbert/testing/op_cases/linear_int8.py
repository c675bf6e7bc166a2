"""Cases of `linear_int8`.

The oracle quantises by the contract and computes the same integers, so only the epilogue's rounding is
measured. A backend whose integers differ by one is far outside the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.activation import activate_eager
from fastbert.ops.linear_int8 import quantize_rows
from fastbert.testing.error_rule import Outputs, draws
from fastbert.testing.op_cases import linear


@dataclass(frozen=True, repr=False)
class LinearInt8Case(linear.ProductCase):
    """A product with the op's options.

    `offset` moves x away from 0; `smooth` makes its columns uneven; `ties` puts it between two integers,
    where one rounding more or less is another integer.
    """

    activation: str | None = None
    bias: bool = True
    offset: float = 0.0
    gated: str | None = None
    smooth: bool = False
    ties: bool = False

    op = "linear_int8"
    marks = "activation={} gated={} bias=no_bias offset=offset{:g} smooth ties"
    options = ("activation", "gated")

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        g, randn = draws(seed, dtype, device)
        x = randn(self.rows, self.in_features) + self.offset
        if self.ties:
            wide = x.float().sort(1).values
            step = (wide[:, -1:].clamp(min=0) - wide[:, :1].clamp(max=0)) / wide.new_full((), 255.0)
            x = ((wide / step).floor() + 0.5) * step
            x[:, :1], x[:, -1:] = wide[:, :1], wide[:, -1:]
            x = x.to(dtype)
        weight = torch.randint(-127, 128, (self.out_features, self.in_features), generator=g)
        scale = (0.5 + torch.rand(self.out_features, generator=g)) / (73.0 * self.in_features**0.5)
        factors = torch.rand(self.in_features, generator=g).mul_(6.0).sub_(3.0).exp2_()
        return {
            "x": x,
            "weight": weight.to(torch.int8).to(device),
            "scale": scale.to(device),
            "bias": randn(self.out_features, scale=0.5) if self.bias else None,
            **({"smooth": factors.to(device), "x": x / factors.to(x)} if self.smooth else {}),
        }

    def eager(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, smooth: Tensor | None = None
    ) -> Outputs:
        centred, _, step = quantize_rows(x, smooth)
        acc = centred.double() @ weight.double().T  # the integers, exactly
        y = (acc.to(torch.promote_types(x.dtype, torch.float32)) * step * scale).to(x.dtype)
        return activate_eager(y if bias is None else y + bias, self.activation, self.gated)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """A few roundings of the product before the bias may cancel it."""
        x, weight, scale = inputs["x"], inputs["weight"], inputs["scale"]
        rows = x.float() * inputs.get("smooth", 1.0)
        most = (rows.norm(dim=1).max() * (weight.float() * scale[:, None]).norm(dim=1).max()).item()
        return torch.finfo(x.dtype).eps * (1 + most) * (1 + most if self.gated else 1)

    def bytes(self, dtype: torch.dtype) -> int:
        rows, k, n = self.rows, self.in_features, self.out_features
        return (rows * k + rows * n + n * self.bias) * dtype.itemsize + n * k + 4 * n


SMALL = [
    LinearInt8Case(5, 24, 40, "gelu"),
    LinearInt8Case(9, 40, 24, bias=False, ties=True),
    LinearInt8Case(3, 17, 9, bias=False, offset=3.0),
]
CASES = [
    *SMALL,
    LinearInt8Case(1, 1, 1),
    LinearInt8Case(64, 128, 512, "gelu"),  # BERT-tiny's FFN
    LinearInt8Case(33, 96, 192, "gelu_tanh", offset=-5.0),
    LinearInt8Case(33, 96, 192, "relu", bias=False),
    LinearInt8Case(33, 96, 192, "silu", offset=0.5),
    LinearInt8Case(33, 96, 192, "tanh"),
    LinearInt8Case(130, 31, 65, bias=False),  # no multiple of a vector or a tile
    LinearInt8Case(7, 1030, 24),  # more than one exact float32 sum
    LinearInt8Case(48, 768, 768),  # BERT-base's projections
    LinearInt8Case(33, 96, 192, "gelu", gated="first"),
    LinearInt8Case(20, 40, 130, "silu", bias=False, gated="second"),
    LinearInt8Case(33, 97, 192, "gelu", smooth=True),
]


def bench(lengths: tuple[int, ...]) -> list[LinearInt8Case]:
    calls = [c for c in linear.bench(lengths) if c.gated is None]
    return [LinearInt8Case(c.rows, c.in_features, c.out_features, c.activation, c.bias) for c in calls]
