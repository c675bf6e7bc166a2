"""Cases of `linear_int8`. A backend whose integers differ by one is far outside the error rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastbert.ops.activation import activate_eager
from fastbert.ops.linear_int8 import quantize_rows
from fastbert.testing.error_rule import Outputs, draws
from fastbert.testing.op_cases.linear import EightBitCase


@dataclass(frozen=True, repr=False)
class LinearInt8Case(EightBitCase):
    """A product with the op's options.

    `offset` moves x away from 0; `smooth` makes its columns uneven; `ties` puts it between two integers,
    where one rounding more or less is another integer; `static` gives all rows a range that clips some.
    """

    offset: float = 0.0
    smooth: bool = False
    ties: bool = False
    static: bool = False
    float_rows: bool = False

    op = "linear_int8"
    marks = "activation={} gated={} bias=no_bias offset=offset{:g} smooth ties static float_rows"
    options = ("activation", "gated", "float_rows")

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
            **({"input_range": torch.tensor([-1.5, 2.0], device=device)} if self.static else {}),
        }

    def eager(self, **inputs: Any) -> Outputs:
        if self.float_rows:
            weight = inputs["weight"].to(inputs["x"]) * inputs["scale"].to(inputs["x"])[:, None]
            y, bias = inputs["x"] @ weight.T, inputs["bias"]
            return activate_eager(y if bias is None else y + bias, self.activation, self.gated)
        centred, _, step = quantize_rows(inputs["x"], inputs.get("smooth"), inputs.get("input_range"))
        # the integers, exactly
        return self.finished(centred.double() @ inputs["weight"].double().T, step, inputs)


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
    LinearInt8Case(33, 97, 192, "gelu", smooth=True, static=True),
    LinearInt8Case(7, 1030, 70, bias=False, static=True),
    LinearInt8Case(33, 97, 192, "gelu", float_rows=True),
    LinearInt8Case(200, 1030, 70, bias=False, float_rows=True),
    LinearInt8Case(20, 40, 130, "silu", gated="second", float_rows=True),
]


bench = LinearInt8Case.timed
