"""`linear_norm` by the `reference` backend; contract in fastbert/ops/linear_norm.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_norm import LinearNormInputs, linear_norm_ref

DTYPES = FLOATS


def linear_norm_fwd(inputs: LinearNormInputs) -> Tensor:
    return linear_norm_ref(*inputs[:-1])
