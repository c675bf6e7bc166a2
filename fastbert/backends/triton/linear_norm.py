"""`linear_norm` by the `triton` backend: its own kernels for few rows, else PyTorch's product, its norm."""

from __future__ import annotations

from torch import Tensor

from fastbert.backends.aten.linear import linear_fwd
from fastbert.backends.aten.linear_norm import in_two_ops
from fastbert.backends.triton.device import kernels
from fastbert.backends.triton.forwarders import layer_norm_fwd
from fastbert.ops.linear_norm import LinearNormInputs
from fastbert.runtime.table import HALF

DTYPES = HALF


def joins_norm(rows: int, out_features: int) -> bool:
    return kernels("linear_norm").takes(rows, out_features)


def linear_norm_fwd(inputs: LinearNormInputs) -> Tensor:
    if joins_norm(inputs.x.shape[0], inputs.weight.shape[0]):
        return kernels("linear_norm").linear_norm_fwd(inputs)
    return in_two_ops(inputs, linear_fwd, layer_norm_fwd)
