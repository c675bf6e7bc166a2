r"""A linear layer with the residual sum and the LayerNorm that follow it. Inference only.

With x (rows, in), weight (out, in), bias (out,), residual (rows, out):

    z = x @ weight.T + bias + residual
    mean = Σ z / out,  var = Σ (z - mean)² / out
    y = (z - mean) / sqrt(var + eps) * norm_weight + norm_bias

Computed in float32 (float64 for float64) and rounded once by `reference`; a backend that calls `linear` and
`layer_norm` rounds the product as well.

For few rows a GPU is busy with launches, and waits for the weight: one op may take one launch, or share the
depth among more multiprocessors. Where no backend does that, `linear` and `layer_norm` are as good, and
`pays` is False. A backend that does has one more function:

    joins_norm(rows, out) -> whether a product of that shape should be one op with its norm

With `arrivals`, counters that are zero before and after each call, such a backend can do with one launch.
Without them it takes two launches; the result is the same. Calls that may run at the same time must not share
them.

There is no custom op and no autograd here: training and torch.compile call `linear` and `layer_norm`.

Source: Ba, Kiros, Hinton 2016, "Layer Normalization", eq. 4; residual of Vaswani et al. 2017, sec. 3.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF, rows_kind

# How many counters a call may use.
ARRIVALS = 16


class LinearNormInputs(NamedTuple):
    """The arguments of `linear_norm` as a backend takes them: checked, matrices in two dimensions."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    eps: float
    arrivals: Tensor | None = None


def linear_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Plain PyTorch; computes in float64 for float64 `x`, else in float32. Arguments as in `linear_norm`."""
    compute = checks.compute_dtype(x)
    z = x.to(compute) @ weight.to(compute).T
    if bias is not None:
        z = z + bias.to(compute)
    z = z + residual.to(compute)
    centred = z - z.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * norm_weight.to(compute)
    if norm_bias is not None:
        y = y + norm_bias.to(compute)
    return y.to(x.dtype)


# --- public functions ---------------------------------------------------------------------------------------


def pays(x: Tensor, out_features: int) -> bool:
    """Whether `linear_norm` of these rows (rows, in) saves launches over `linear` and `layer_norm`.

    It does for few rows in half precision on a GPU, where a backend has a kernel that passed its self-check:
    for so many rows the kernel is no slower than the two ops.
    """
    if x.dtype not in HALF:
        return False
    try:
        op = f"linear_norm{rows_kind(x.shape[0])}"
        joins = dispatch.serving_function("joins_norm", (op,), x.device, x.dtype)
    except dispatch.BackendError:
        # A pinned backend that lacks this op may have the two others.
        return False
    return joins is not None and joins(x.shape[0], out_features)


def new_arrivals(device: torch.device | str) -> Tensor:
    """Counters for `linear_norm`, for calls that run one after the other."""
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-12,
    arrivals: Tensor | None = None,
) -> Tensor:
    """LayerNorm(x @ weight.T + bias + residual) over the last dimension, in one op.

    Args:
        x: (..., in), float32, bfloat16, float16 or float64.
        weight: (out, in) of `x`'s dtype.
        bias: (out,) of `x`'s dtype, or None.
        residual: (..., out) of `x`'s dtype.
        norm_weight: (out,), gamma; its dtype may differ from `x`'s.
        norm_bias: (out,) beta, or None.
        eps: added to the variance, >= 0.
        arrivals: counters of `new_arrivals`, or None; not shared by calls that may run at the same time. A
            call that does not end (an error of the device) leaves them undefined.

    Returns:
        y (..., out) in `x`'s dtype. An input of no rows has an output of no rows.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
        RuntimeError: gradients are enabled and an argument requires one.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization".
    """
    checks.float_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (..., in) with in >= 1, got {tuple(x.shape)}")
    for name, t in (("weight", weight), ("residual", residual), ("norm_weight", norm_weight)):
        checks.float_tensor(name, t, x)
    checks.float_tensors(x, bias=bias, norm_bias=norm_bias)
    checks.same_dtypes(x, weight=weight, bias=bias, residual=residual)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight: expected shape (out, {x.shape[-1]}), got {tuple(weight.shape)}")
    shape = (*x.shape[:-1], weight.shape[0])
    checks.shapes(weight.shape[:1], bias=bias, norm_weight=norm_weight, norm_bias=norm_bias)
    checks.shapes(shape, residual=residual)
    eps = checks.eps(eps)
    if arrivals is not None:
        checks.typed("arrivals", arrivals, torch.int32, x)
        checks.operand("arrivals", arrivals, (ARRIVALS,), (torch.int32,), x)
    norm_weight, norm_bias = (checks.norm_vector(v, x.dtype) for v in (norm_weight, norm_bias))
    rows = (
        checks.rows(x),
        checks.rows(weight),
        bias if bias is None else bias.contiguous(),
        checks.rows(residual),
    )
    inputs = LinearNormInputs(*rows, norm_weight, norm_bias, eps, arrivals)
    checks.inference_only("linear_norm", inputs, ", or use `linear` and `layer_norm`")
    y = dispatch.call(f"linear_norm_fwd{rows_kind(inputs.x.shape[0])}", x, inputs)
    return y if len(shape) == 2 else y.view(shape)
