"""`linear_fp8` by the `aten` backend, which is torch._scaled_mm; contract in fastbert/ops/linear_fp8.py."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fastbert.ops.activation import activate_eager
from fastbert.ops.checks import FLOATS
from fastbert.ops.linear_fp8 import LinearFp8Inputs, linear_fp8_ref, rounded_rows

DTYPES = FLOATS

# With a scale per row torch._scaled_mm stores bfloat16 alone, and it takes multiples of _STEP for in and out
_STEP = 16


def linear_fp8_fwd(inputs: LinearFp8Inputs) -> Tensor:
    x, weight, scale, bias, activation, gated, input_activation = inputs
    if not multiplies(x, weight):
        return linear_fp8_ref(*inputs)
    q, step = rounded_rows(activate_eager(x, input_activation))
    return activate_eager(product(q, step, weight, scale, bias), activation, gated)


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` takes these sizes, dtypes and device."""
    out, depth = weight.shape
    fits = x.dtype == torch.bfloat16 and depth % _STEP == 0 and out % _STEP == 0 and len(x) > 0
    return fits and _scales_rows(x.device)


def product(q: Tensor, step: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, out) bfloat16 of rounded rows, sums in full float32."""
    bias = None if bias is None else bias.bfloat16()
    how = {"scale_a": step, "scale_b": scale[None], "bias": bias, "use_fast_accum": False}
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        q, weight.t(), out_dtype=torch.bfloat16, **how
    )


@lru_cache(maxsize=16)
def _scales_rows(device: torch.device) -> bool:
    """Whether torch._scaled_mm (a private name) exists and is right on this device with a scale per row.

    On NVIDIA it needs compute capability 9.0.
    """
    if not hasattr(torch, "_scaled_mm"):
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("linear_fp8: call it once before capturing a graph, so that it can be checked")
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(24, 64, generator=g) * 50, torch.randn(32, 64, generator=g)
    x[3] *= 1000
    weight[5] *= 0.001
    bias = torch.randn(32, generator=g)
    (q, step), (w, scale) = rounded_rows(x), rounded_rows(weight)
    truth = linear_fp8_ref(x, w, scale.flatten(), bias.bfloat16()).double()
    try:
        given = [t.to(device) for t in (q, step, w, scale.flatten(), bias.bfloat16())]
        found = product(*given).double().cpu()
    except RuntimeError:  # not implemented for this device
        return False
    return bool(((found - truth).abs() <= 2**-7 * (truth.abs() + 0.1)).all())
