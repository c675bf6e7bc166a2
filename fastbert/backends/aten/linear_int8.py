"""`linear_int8` by the `aten` backend; contract in fastbert/ops/linear_int8.py.

PyTorch's integer product takes signed bytes on both sides, so it gets v = u - 128, and

    Σ (u - zero) w = Σ v w + (128 - zero) Σ w.

A first row of ones makes it return Σ w as well, in the same pass over the weight.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fastbert.ops.activation import activate_eager, halves
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.linear_int8 import SMALLEST_STEP, LinearInt8Inputs

DTYPES = FLOATS

# 512 products of at most 255 * 128 stay below 2**24, so float32 sums of them are exact.
_EXACT_SUM = 512
# On a GPU torch._int_mm takes only more than 16 rows, and only multiples of _GPU_STEP for in and out.
_GPU_ROWS = 24
_GPU_STEP = 8


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    x, weight, scale, bias, activation, _, gated, *_ = inputs
    compute = compute_dtype(x)
    if inputs.float_rows:
        pre = (x.to(compute) @ weight.to(compute).t()).mul_(scale.to(compute))
    else:
        centred, step = _sums(inputs)
        pre = centred.to(compute).mul_(step.to(compute) * scale.to(compute))
    if bias is not None:
        pre.add_(bias)
    if gated is None:
        return _activated(pre, activation, x.dtype).to(x.dtype)
    active, other = halves(pre, gated)
    return _activated(active, activation, x.dtype).mul(other).to(x.dtype)


def _sums(inputs):
    """(Σ (u - zero) weight int32 (rows, out), step float32 (rows, 1))."""
    x, smooth, input_range = inputs.x, inputs.smooth, inputs.input_range
    wide = x.float()
    if smooth is not None:
        wide = wide * smooth
    lo, hi = torch.aminmax(wide, dim=1, keepdim=True)
    # Rows with NaN or infinity: step * NaN makes the row NaN, whichever integers it has.
    spoiled = (lo - lo) + (hi - hi)
    if input_range is not None:
        lo, hi = (end.expand_as(lo).clone() for end in input_range)
    lo.clamp_(max=0)
    hi.clamp_(min=0)
    width = hi - lo
    step = width / width.new_full((), 255.0)  # by a Python number, a GPU would multiply by its reciprocal
    step.masked_fill_(step < SMALLEST_STEP, 1.0)
    inv = 1.0 / step
    zero = (lo * inv).neg_().round_()
    step = step + (width - width) + spoiled
    v = (wide * inv).round_().add_(zero).clamp_(0, 255).sub_(128).nan_to_num_(0)
    zero.nan_to_num_(0)
    return _product(v, zero, inputs.weight), step


def _product(v, zero, weight):
    """int32 (rows, out): Σ (v + 128 - zero) weight, v (rows, in) and zero (rows, 1) integers in float32."""
    rows, k = v.shape
    out = weight.shape[0]
    padded = _rows_given(rows + 1, k, out, weight.device)
    if padded and _int_mm_is_exact(weight.device):
        left = v.new_empty((padded, k), dtype=torch.int8)
        left[0] = 1
        left[1 : rows + 1] = v
        left[rows + 1 :] = 0
        # .contiguous() leaves the stride of a dimension of size 1 as it is, and _int_mm goes by it
        right = weight.as_strided((out, k), (k, 1)).t()
        acc = torch._int_mm(left, right)  # pyright: ignore[reportPrivateImportUsage]
        return torch.addcmul(acc[1 : rows + 1], (128 - zero).to(torch.int32), acc[:1])
    centred = v + (128 - zero)
    acc = torch.zeros((rows, out), dtype=torch.int32, device=v.device)
    for first in range(0, k, _EXACT_SUM):
        part = slice(first, first + _EXACT_SUM)
        acc += (centred[:, part] @ weight[:, part].t().float()).to(torch.int32)
    return acc


def _rows_given(rows, k, out, device):
    """How many rows torch._int_mm must get on `device` to multiply `rows` of them; 0 where it cannot."""
    if device.type == "cpu":
        # for k = 1 it reads past the end, by the stride (pytorch#195066)
        return rows if k > 1 else 0
    if k % _GPU_STEP or out % _GPU_STEP:
        return 0
    return max(_GPU_ROWS, -(-rows // _GPU_STEP) * _GPU_STEP)


@lru_cache(maxsize=16)
def _int_mm_is_exact(device: torch.device) -> bool:
    """Whether torch._int_mm (a private name) exists, runs on this device and returns exact sums there.

    Byte products on x86 without VNNI may saturate in 16 bits; an old GPU has none.
    """
    if not hasattr(torch, "_int_mm"):
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("linear_int8: call it once before capturing a graph, so that it can be checked")
    g = torch.Generator().manual_seed(0)
    ends = torch.tensor([-128, 127, -127, 0, 1], dtype=torch.int8)
    for rows in (_GPU_ROWS, 64):
        left = ends[torch.randint(2, (rows, 256), generator=g)]  # mostly sums of the largest products
        left[: rows // 2] = ends[torch.randint(5, (rows // 2, 256), generator=g)]
        right = ends[torch.randint(1, 3, (32, 256), generator=g)]
        right[:16] = 127
        try:
            operands = left.to(device), right.to(device).t()
            acc = torch._int_mm(*operands)  # pyright: ignore[reportPrivateImportUsage]
        except RuntimeError:  # not implemented for this device
            return False
        if not torch.equal(acc.double().cpu(), left.double() @ right.double().t()):
            return False
    return True


def _activated(pre, activation, dtype):
    """act(pre), in place where it can be, for a result that will be rounded to `dtype`."""
    if activation is None:
        return pre
    if activation == "gelu":
        if dtype in (torch.bfloat16, torch.float16):  # PyTorch's own loses the negative tail to 1 + erf
            return pre.mul(-math.sqrt(0.5)).erfc_().mul_(pre).mul_(0.5)
        return torch.nn.functional.gelu(pre)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(pre, approximate="tanh")
    if activation == "relu":
        return pre.clamp_(min=0)
    if activation == "silu":
        return torch.nn.functional.silu(pre, inplace=True)
    if activation == "tanh":
        return pre.tanh_()
    return activate_eager(pre, activation)
