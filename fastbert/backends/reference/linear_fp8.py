"""`linear_fp8` by the `reference` backend; contract in fastbert/ops/linear_fp8.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_fp8 import linear_fp8_ref

DTYPES = FLOATS


def linear_fp8_fwd(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: str | None = None,
    input_activation: str | None = None,
) -> Tensor:
    return linear_fp8_ref(x, weight, scale, bias, activation, gated, input_activation)
