"""`linear_fp8` by the `triton` backend: its own pass rounds rows, and torch._scaled_mm multiplies them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.aten import linear_fp8 as aten
from fastbert.backends.triton.device import kernels
from fastbert.ops.activation import activate_eager

# What the product stores
DTYPES = (torch.bfloat16,)


def linear_fp8_fwd(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: str | None = None,
    input_activation: str | None = None,
) -> Tensor:
    if not aten.multiplies(x, weight):
        return aten.linear_fp8_fwd(x, weight, scale, bias, activation, gated, input_activation)
    q, step = kernels("linear_fp8").rounded_rows(x, input_activation)
    return activate_eager(aten.product(q, step, weight, scale, bias), activation, gated)
