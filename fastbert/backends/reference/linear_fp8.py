"""`linear_fp8` by the `reference` backend; contract in fastbert/ops/linear_fp8.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_fp8 import LinearFp8Inputs, linear_fp8_ref

DTYPES = FLOATS


def linear_fp8_fwd(inputs: LinearFp8Inputs) -> Tensor:
    return linear_fp8_ref(*inputs)
