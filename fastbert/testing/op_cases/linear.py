"""Cases of `linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.activation import activate_eager
from fastbert.testing.error_rule import Case, Outputs, draws


@dataclass(frozen=True, repr=False)
class ProductCase(Case):
    """(rows, in) by (out, in)."""

    rows: int
    in_features: int
    out_features: int

    shape = "{0.rows}x{0.in_features}x{0.out_features}"

    @property
    def ranked_rows(self) -> int:
        return self.rows

    def flops(self) -> int:
        return 2 * self.rows * self.in_features * self.out_features


@dataclass(frozen=True, repr=False)
class LinearCase(ProductCase):
    """A product with the op's options."""

    activation: str | None = None
    bias: bool = True
    residual: bool = False
    gated: str | None = None

    op = "linear"
    marks = "activation={} gated={} bias=no_bias residual"
    options = ("activation", "gated")
    grad_inputs = ("x", "weight", "bias", "residual")

    @property
    def kind(self) -> str:
        return "gated" if self.gated else "activation" if self.activation else ""

    @property
    def columns(self) -> int:
        """The result's."""
        return self.out_features // 2 if self.gated else self.out_features

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        return {
            "x": randn(self.rows, self.in_features),
            "weight": randn(self.out_features, self.in_features, scale=self.in_features**-0.5),
            "bias": randn(self.out_features, scale=0.5) if self.bias else None,
            "residual": randn(self.rows, self.columns) if self.residual else None,
        }

    def eager(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Outputs:
        y = activate_eager(F.linear(x, weight, bias), self.activation, self.gated)
        return y if residual is None else y + residual

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """Cauchy-Schwarz: a sum of products is off by some eps times the product of the two norms.

        A gate multiplies it by the other half.
        """
        eps = torch.finfo(inputs["x"].dtype).eps
        if self.gated:
            eps *= 1 + self._largest(inputs)
        if name in ("dweight", "dbias"):  # sums over rows of products of two unit normals
            return eps * (1 + self.rows)
        x, weight = inputs["x"], inputs["weight"]
        if name == "dx":
            return eps * (1 + self.out_features**0.5 * weight.norm(dim=0).max().item())
        return eps * (1 + (x.norm(dim=1).max() * weight.norm(dim=1).max()).item())

    @staticmethod
    def _largest(inputs: dict[str, Any]) -> float:
        """The largest magnitude of the product and its bias."""
        x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
        wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        return wide.abs().max().item()

    def bytes(self, dtype: torch.dtype) -> int:
        rows, k, n = self.rows, self.in_features, self.out_features
        elements = rows * k + n * k + rows * self.columns * (1 + self.residual) + n * self.bias
        return elements * dtype.itemsize


@dataclass(frozen=True, repr=False)
class EightBitCase(ProductCase):
    """A product of rows and a weight in 8 bits, with the op's options.

    The oracle rounds by the contract, so only sums and the epilogue are measured.
    """

    activation: str | None = None
    bias: bool = True
    gated: str | None = None

    def finished(self, acc: Tensor, step: Tensor, inputs: dict[str, Any]) -> Tensor:
        """What an exact product of the integers becomes."""
        x, bias = inputs["x"], inputs["bias"]
        y = (acc.to(torch.promote_types(x.dtype, torch.float32)) * step * inputs["scale"]).to(x.dtype)
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

    @classmethod
    def timed(cls, lengths: tuple[int, ...]) -> list[Case]:
        """Those of `linear` without a gate."""
        calls = [c for c in bench(lengths) if c.gated is None]
        return [cls(c.rows, c.in_features, c.out_features, c.activation, c.bias) for c in calls]


SMALL = [
    LinearCase(5, 24, 40, "gelu"),
    LinearCase(3, 17, 9, residual=True),
    LinearCase(6, 24, 48, "gelu", gated="first"),
]
# 128 to 32 of the largest tiles: one of these cases has them on every GPU of 19 to 204 multiprocessors. The
# first is also deep enough for the `cuda` kernel of compute capability 9.0, and has a second tile for some
# blocks; so is the first gated one.
ON_GPU = [
    LinearCase(2000, 264, 2000, "gelu"),
    LinearCase(1500, 200, 2000, residual=True),
    LinearCase(1000, 200, 2000, "gelu", residual=True),
    LinearCase(700, 200, 2000),
    LinearCase(1000, 200, 1000, "gelu"),
    LinearCase(2000, 264, 2000, "gelu", gated="first"),
    LinearCase(700, 200, 2000, "gelu", gated="first"),
    # few rows, two of them as they are timed: small tiles, and the longer ring of the `cuda` kernel
    *(LinearCase(rows, 768, 3072, "gelu") for rows in (16, 32, 128)),
]
CASES = [
    *SMALL,
    LinearCase(1, 1, 1),
    LinearCase(64, 128, 512, "gelu"),  # BERT-tiny's FFN
    LinearCase(64, 512, 128, residual=True),
    LinearCase(33, 96, 192, "gelu_tanh"),
    LinearCase(33, 96, 192, "relu", bias=False),
    LinearCase(33, 96, 192, "silu", residual=True),
    LinearCase(33, 96, 192, "tanh"),
    LinearCase(130, 31, 65, bias=False),  # no multiple of a vector or a tile
    LinearCase(48, 768, 768),  # BERT-base's projections
    LinearCase(16, 3072, 64, bias=False),  # the depth of its second product in the feed-forward
    LinearCase(48, 768, 2304, "gelu", bias=False, gated="first"),  # ModernBERT-base's first product
    LinearCase(33, 96, 192, "gelu_tanh", gated="second"),
    LinearCase(33, 96, 170, "relu", residual=True, gated="second"),  # halves that are no whole panels
    LinearCase(130, 31, 66, "silu", bias=False, residual=True, gated="first"),
    LinearCase(20, 40, 130, "tanh", gated="first"),
    LinearCase(1, 1, 2, "gelu", gated="second"),
]


def bench(lengths: tuple[int, ...]) -> list[LinearCase]:
    tokens = sum(lengths)
    attention = [LinearCase(tokens, 768, 2304), LinearCase(tokens, 768, 768, bias=False)]
    return [
        *attention,
        LinearCase(tokens, 768, 3072, "gelu"),
        LinearCase(tokens, 3072, 768, bias=False),
        LinearCase(tokens, 768, 2304, "gelu", bias=False, gated="first"),  # ModernBERT-base's
    ]
