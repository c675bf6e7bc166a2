"""Cases of `linear_norm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear_norm import new_arrivals
from fastbert.testing.error_rule import Case, Outputs, draws, with_grad
from fastbert.testing.op_cases.linear import ProductCase


@dataclass(frozen=True, repr=False)
class LinearNormCase(ProductCase):
    """A product with the op's options; with `arrivals` it has counters for one launch."""

    arrivals: bool = True
    bias: bool = True
    norm_bias: bool = True
    eps: float = 1e-12

    op = "linear_norm"
    marks = "arrivals=two_launches bias=no_bias norm_bias=no_norm_bias eps=eps{:g}"
    options = ("eps",)
    parts = ("linear", "layer_norm")

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        out = self.out_features
        return {
            "x": randn(self.rows, self.in_features),
            "weight": randn(out, self.in_features, scale=self.in_features**-0.5),
            "bias": randn(out, scale=0.5) if self.bias else None,
            "residual": randn(self.rows, out),
            "norm_weight": 1 + randn(out, scale=0.1),
            "norm_bias": randn(out, scale=0.1) if self.norm_bias else None,
            "arrivals": new_arrivals(device) if self.arrivals else None,
        }

    def in_parts(self, x: Tensor, weight: Tensor, bias: Tensor | None, **more: Any) -> Outputs:
        norm = more["norm_weight"], more["norm_bias"]
        return layer_norm(linear(x, weight), *norm, residual=more["residual"], x_bias=bias, eps=self.eps)

    def eager(self, x: Tensor, weight: Tensor, bias: Tensor | None, **more: Any) -> Outputs:
        z = F.linear(x, weight, bias) + more["residual"]
        return F.layer_norm(z, (self.out_features,), more["norm_weight"], more["norm_bias"], self.eps)

    def oracle(self, arrivals: Tensor | None, **inputs: Any) -> Outputs:
        return super().oracle(**inputs)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """The sum's error by Cauchy-Schwarz, times the largest gain of LayerNorm."""
        eps = torch.finfo(inputs["x"].dtype).eps
        wide = with_grad(inputs, (), torch.float64)
        x, weight, bias, residual = (wide[n] for n in ("x", "weight", "bias", "residual"))
        if not len(x):
            return 0.0
        z = F.linear(x, weight, bias) + residual
        size = 1 + (x.norm(dim=1).max() * weight.norm(dim=1).max()).item() + residual.abs().max().item()
        gain = (z.var(1, correction=0) + self.eps).rsqrt().max() * inputs["norm_weight"].abs().max()
        return 2 * eps * size * gain.item()

    def bytes(self, dtype: torch.dtype) -> int:
        rows, k, n = self.rows, self.in_features, self.out_features
        elements = rows * k + n * k + 2 * rows * n + n * (1 + self.bias + self.norm_bias)
        return elements * dtype.itemsize


SMALL = [LinearNormCase(5, 24, 40), LinearNormCase(3, 17, 9, arrivals=False, norm_bias=False)]
# These run every tile that BERT runs, with one part and with several, in one launch (one row, narrow rows)
# and in two, and more rows and columns than the kernels take.
ON_GPU = [
    *(LinearNormCase(rows, 768, 768) for rows in (1, 32, 128, 256)),
    *(LinearNormCase(rows, 3072, 768, bias=False) for rows in (16, 31, 64, 128, 200)),
    *(LinearNormCase(rows, 384, 384) for rows in (20, 100, 256)),
    LinearNormCase(256, 512, 2048),
    LinearNormCase(100, 136, 4096),
    LinearNormCase(100, 768, 768, arrivals=False),
    LinearNormCase(300, 768, 768),
]
CASES = [
    *SMALL,
    LinearNormCase(1, 1, 2),
    LinearNormCase(1, 96, 64, bias=False),
    LinearNormCase(16, 256, 128),
    LinearNormCase(17, 200, 130, eps=1e-5),  # no multiple of a vector or a tile
    LinearNormCase(33, 96, 136, arrivals=False),
    LinearNormCase(64, 512, 128),  # BERT-tiny's
    LinearNormCase(70, 31, 65, arrivals=False),
    LinearNormCase(256, 72, 48),
    LinearNormCase(257, 40, 48),  # more rows than a kernel takes
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    # models call it for at most 256 rows: of more, the first ones are timed
    rows = min(256, sum(lengths))
    return [LinearNormCase(rows, 768, 768), LinearNormCase(rows, 3072, 768)]
