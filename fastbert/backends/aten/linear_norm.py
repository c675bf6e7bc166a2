"""`linear_norm` by the `aten` backend; contract in fastbert/ops/linear_norm.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastbert.backends.aten.layer_norm import layer_norm_fwd
from fastbert.backends.aten.linear import linear_fwd
from fastbert.ops.checks import FLOATS
from fastbert.ops.layer_norm import LayerNormInputs
from fastbert.ops.linear import LinearInputs
from fastbert.ops.linear_norm import LinearNormInputs

DTYPES = FLOATS


def in_two_ops(inputs: LinearNormInputs, product: Callable[..., Any], norm: Callable[..., Any]) -> Tensor:
    """The op by a backend's `linear_fwd` and another's `layer_norm_fwd`, which adds bias and residual."""
    x, weight, bias, residual, norm_weight, norm_bias, eps, _arrivals = inputs
    z = product(LinearInputs(x, weight), False)[0]
    return norm(LayerNormInputs(z, norm_weight, norm_bias, residual, bias, eps), False)[0]


def linear_norm_fwd(inputs: LinearNormInputs) -> Tensor:
    return in_two_ops(inputs, linear_fwd, layer_norm_fwd)
