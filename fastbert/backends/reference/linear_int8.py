"""`linear_int8` by the `reference` backend; contract in fastbert/ops/linear_int8.py."""

from __future__ import annotations

from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_int8 import linear_int8_ref

DTYPES = FLOATS


def linear_int8_fwd(x, weight, scale, bias, activation, panels=None):
    return linear_int8_ref(x, weight, scale, bias, activation)
