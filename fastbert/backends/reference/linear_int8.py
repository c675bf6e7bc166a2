"""`linear_int8` by the `reference` backend; contract in fastbert/ops/linear_int8.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_int8 import LinearInt8Inputs, linear_int8_ref

DTYPES = FLOATS


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    x, weight, scale, bias, activation, _, gated, smooth, input_range, float_rows = inputs
    return linear_int8_ref(x, weight, scale, bias, activation, gated, smooth, input_range, float_rows)
