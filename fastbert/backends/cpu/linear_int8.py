"""`linear_int8` by the `cpu` backend: csrc/cpu/linear_int8; contract in fastbert/ops/linear_int8.py.

`panels` are laid out for the instruction set that was in use when they were made. Only tests change it. Then
the size of old panels no longer fits, and new ones are made for the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.extension import DTYPE_CODES, STORED, vector
from fastbert.ops.activation import CODES, GATE_CODES
from fastbert.ops.linear_int8 import LinearInt8Inputs
from fastbert.runtime.loader import address
from fastbert.runtime.loader import extension as _C
from fastbert.runtime.plain import plain

DTYPES = STORED


def linear_int8_panels(weight: Tensor, gated: bool = False) -> Tensor:
    (out, depth), weight = weight.shape, plain(weight).contiguous()
    panels = weight.new_empty(_C.cpu_linear_int8_panels_size(depth, out, gated), dtype=torch.uint8)
    threads = torch.get_num_threads()
    _C.cpu_linear_int8_panels(depth, out, address(weight), panels.data_ptr(), threads, gated)
    return panels


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    x, weight, scale, bias, activation, panels, gated, *_ = inputs
    (rows, depth), out, is_gated = x.shape, weight.shape[0], gated is not None
    if panels is None or panels.numel() != _C.cpu_linear_int8_panels_size(depth, out, is_gated):
        panels = linear_int8_panels(weight, is_gated)
    y = inputs.new_output()
    _C.cpu_linear_int8(
        DTYPE_CODES[x.dtype],
        rows,
        y.shape[1],
        depth,
        *(x.data_ptr(), x.stride(0)),
        panels.data_ptr(),
        address(scale),
        *vector(bias),
        CODES[activation],
        y.data_ptr(),
        torch.get_num_threads(),
        GATE_CODES[gated],
        *(0 if t is None else address(t) for t in (inputs.smooth, inputs.input_range)),
        inputs.float_rows,
    )
    return y
