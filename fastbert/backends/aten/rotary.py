"""`rotary` by the `aten` backend; contract in fastbert/ops/rotary.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.rotary import pairs

DTYPES = FLOATS


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, back: bool) -> Tensor:
    half = cos.shape[1]
    # (total, 1, half); products with half precision are float32
    c, s = (table.index_select(0, positions).unsqueeze(1) for table in (cos, sin))
    y = x.new_empty(x.shape)
    (left, right), (y_left, y_right) = (pairs(t, half, interleaved) for t in (x, y))
    first, second = (torch.add, torch.sub) if back else (torch.sub, torch.add)
    first(left * c, right * s, out=y_left)
    second(right * c, left * s, out=y_right)
    y[..., 2 * half :] = x[..., 2 * half :]
    return y


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return _rotated(x, cos, sin, positions, interleaved, False)


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return _rotated(dy, cos, sin, positions, interleaved, True)
