"""`rotary` by the `reference` backend; contract in fastbert/ops/rotary.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.rotary import rotary_ref

DTYPES = FLOATS


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return rotary_ref(x, cos, sin, positions, interleaved)


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return rotary_ref(dy, cos, -sin, positions, interleaved)
