"""`linear_int8` by the `reference` backend; contract in fastbert/ops/linear_int8.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_int8 import linear_int8_ref

DTYPES = FLOATS


def linear_int8_fwd(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    panels: Tensor | None = None,
    gated: str | None = None,
    smooth: Tensor | None = None,
) -> Tensor:
    return linear_int8_ref(x, weight, scale, bias, activation, gated, smooth)
