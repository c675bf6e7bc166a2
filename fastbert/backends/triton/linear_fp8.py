"""`linear_fp8` by the `triton` backend: its own pass rounds rows, and torch._scaled_mm multiplies them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.aten import linear_fp8 as aten
from fastbert.backends.triton.device import kernels
from fastbert.ops.activation import activate_eager
from fastbert.ops.linear_fp8 import LinearFp8Inputs

# What the product stores
DTYPES = (torch.bfloat16,)


def linear_fp8_fwd(inputs: LinearFp8Inputs) -> Tensor:
    x, weight, scale, bias, activation, gated, input_activation = inputs
    if not aten.multiplies(x, weight):
        return aten.linear_fp8_fwd(inputs)
    q, step = kernels("linear_fp8").rounded_rows(x, input_activation)
    return activate_eager(aten.product(q, step, weight, scale, bias), activation, gated)
