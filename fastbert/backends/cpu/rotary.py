"""`rotary` by the `cpu` backend: csrc/cpu/rotary; contract in fastbert/ops/rotary.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.extension import DTYPE_CODES, STORED
from fastbert.runtime.loader import extension as _C

DTYPES = STORED


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, back: bool) -> Tensor:
    y = x.new_empty(x.shape)
    _C.cpu_rotary(
        *(DTYPE_CODES[x.dtype], *x.shape, x.data_ptr(), *x.stride()[:2]),
        *(cos.data_ptr(), sin.data_ptr(), *cos.shape),
        *(positions.data_ptr(), positions.dtype == torch.int64, interleaved, back),
        *(y.data_ptr(), torch.get_num_threads()),
    )
    return y


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return _rotated(x, cos, sin, positions, interleaved, False)


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return _rotated(dy, cos, sin, positions, interleaved, True)
