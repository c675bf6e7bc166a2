"""`linear_int8` by the `cpu` backend: csrc/cpu/linear_int8; contract in fastbert/ops/linear_int8.py.

`packed` is laid out for the instruction set in use when it was made; where that has changed, which only tests
do, its size no longer fits and the weight is packed for the call.
"""

from __future__ import annotations

import torch

from fastbert.backends.native import DTYPE_CODES, vector
from fastbert.ops.activation import CODES
from fastbert.runtime.dispatch import plain
from fastbert.runtime.native import address
from fastbert.runtime.native import extension as _C


def linear_int8_pack(weight):
    (out, depth), weight = weight.shape, plain(weight).contiguous()
    packed = weight.new_empty(_C.cpu_linear_int8_packed_size(depth, out), dtype=torch.uint8)
    _C.cpu_linear_int8_pack(depth, out, address(weight), packed.data_ptr(), torch.get_num_threads())
    return packed


def linear_int8_fwd(x, weight, scale, bias, activation, packed=None):
    (rows, depth), out = x.shape, weight.shape[0]
    if packed is None or packed.numel() != _C.cpu_linear_int8_packed_size(depth, out):
        packed = linear_int8_pack(weight)
    y = x.new_empty(rows, out)
    _C.cpu_linear_int8(
        DTYPE_CODES[x.dtype], rows, out, depth, x.data_ptr(), x.stride(0), packed.data_ptr(),
        address(scale), *vector(bias), CODES[activation], y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y
