"""Cases of `linear_fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastbert.ops.activation import activate_eager
from fastbert.ops.linear_fp8 import rounded_rows
from fastbert.testing.error_rule import Outputs, draws
from fastbert.testing.op_cases.linear import EightBitCase


@dataclass(frozen=True, repr=False)
class LinearFp8Case(EightBitCase):
    """A product with the op's options."""

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

    def eager(self, **inputs: Any) -> Outputs:
        q, step = rounded_rows(activate_eager(inputs["x"], self.input_activation))
        return self.finished(q.double() @ inputs["weight"].double().T, step, inputs)


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


bench = LinearFp8Case.timed
