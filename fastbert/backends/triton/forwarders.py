"""The `triton` launchers that only call their namesake in kernels/<op>.py; contracts in fastbert/ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastbert.backends.aten import linear_int8 as aten_int8
from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops import packing
from fastbert.ops.embedding import EmbeddingInputs
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.ops.linear_int8 import LinearInt8Inputs

DTYPES = {
    "cross_entropy": STORED,
    "embedding": STORED,
    "layer_norm": STORED,
    "linear": STORED,
    "linear_int8": STORED,
    # nothing is computed
    "packing": packing.DTYPES,
    "pooling": STORED,
    "rotary": STORED,
}


def _called(function: str, module: str = "") -> Callable[..., Any]:
    """`function` of kernels/<module>.py, by default its op's, which is imported at the first call."""
    module = module or function.rsplit("_", 1)[0]
    return lambda *args: getattr(kernels(module), function)(*args)


bad_ids = _called("bad_ids", "bad_ids")
cross_entropy_fwd, cross_entropy_bwd = _called("cross_entropy_fwd"), _called("cross_entropy_bwd")
embedding_bwd = _called("embedding_bwd")
layer_norm_fwd, layer_norm_bwd = _called("layer_norm_fwd"), _called("layer_norm_bwd")
packing_fwd, packing_bwd = _called("packing_fwd"), _called("packing_bwd")
pooling_fwd, pooling_bwd = _called("pooling_fwd"), _called("pooling_bwd")
rotary_fwd, rotary_bwd = _called("rotary_fwd"), _called("rotary_bwd")


def embedding_fwd(inputs: EmbeddingInputs, save: bool) -> tuple[Tensor, ...]:
    return kernels("embedding").embedding_fwd(inputs.in_floats(), save)


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    return kernels("linear_gated" if inputs.gated else "linear").linear_fwd(inputs, save)


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    return kernels("linear_gated" if saved.gated else "linear_backward").linear_bwd(dy, saved, need)


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    if inputs.float_rows:
        return aten_int8.linear_int8_fwd(inputs)
    return kernels("linear_int8").linear_int8_fwd(inputs)


def linear_int8_panels(weight: Tensor, gated: bool = False) -> Tensor:
    return kernels("linear_int8").channel_sums(weight)
