r"""Linear layer on 8-bit floats (E4M3): x is rounded in the call, the weight beforehand. Inference only.

Per row of x, in float32 whatever x's dtype, each operation rounded once:

    x_i = act(x_i), rounded to x's dtype              if `input_activation` is given
    step = max_i |x_i| / 448,  or 1 where that is below 2**-126
    q_i = e4m3(x_i (1 / step))                        3 bits of mantissa, halves to even, at most 448

With weight (out, in) in E4M3 and scale (out,):

    y_c = act((Σ_i q_i weight_ci) (step scale_c) + bias_c)

in float32 (float64 for float64 x), rounded once; a backend for bfloat16 may round before the activation
too, as PyTorch does. A row with NaN or infinity in it makes a row of NaN. There is no backward.

`input_activation` is for the second product of a feed-forward block: the pass that rounds rows activates them
too, where an activation behind the first product would be a pass of its own.

E4M3 rounds each number by at most 1/16 of itself, down to 2**-14 of the row's largest. 8-bit integers have
one absolute step, so outliers cost more.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; scales per row and channel: Dettmers et al.
2022, "LLM.int8()", sec. 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.activation import activate_ref, activated_columns, check_activation
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of E4M3
SMALLEST_STEP = 2.0**-126


class LinearFp8Inputs(NamedTuple):
    """What forward computes from; `x` is (rows, in)."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    gated: str | None = None
    input_activation: str | None = None


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q E4M3 (rows, columns), step float32 (rows, 1)) of 2-D `x`; also what rounds a weight by channel."""
    wide = x.float()
    step = wide.abs().amax(1, keepdim=True) / wide.new_full((), MOST)
    step = step.masked_fill(step < SMALLEST_STEP, 1.0)
    return (wide * (1.0 / step)).clamp(-MOST, MOST).to(FP8), step


def linear_fp8_ref(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: str | None = None,
    input_activation: str | None = None,
) -> Tensor:
    """Plain PyTorch on 2-D `x`, sums in float64."""
    compute = checks.compute_dtype(x)
    q, step = rounded_rows(activate_ref(x.to(compute), input_activation).to(x.dtype))
    acc = q.double() @ weight.double().T
    pre = acc.to(compute) * (step.to(compute) * scale.to(compute))
    if bias is not None:
        pre = pre + bias.to(compute)
    return activate_ref(pre, activation, gated).to(x.dtype)


# --- custom op: what torch.compile sees ---------------------------------------------------------------------


@torch.library.custom_op(
    "fastbert::linear_fp8_fwd", mutates_args=(), schema=schema(LinearFp8Inputs, returns=1)
)
def linear_fp8_fwd(*args: Any) -> Tensor:
    """y for 2-D `x`."""
    inputs = LinearFp8Inputs(*args)
    checks.rounded_operands(inputs.x, inputs.weight, FP8, inputs.scale, inputs.bias)
    activated_columns(inputs.weight.shape[0], inputs.activation, inputs.gated)
    check_activation(inputs.input_activation, "input_activation")
    return dispatch.call("linear_fp8_fwd", inputs.x, inputs)


@linear_fp8_fwd.register_fake
def _(*args):
    x, weight, _, _, _, gated, _ = args
    return x.new_empty((x.shape[0], weight.shape[0] // (1 if gated is None else 2)))


# --- public function ----------------------------------------------------------------------------------------


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: str | None = None,
    input_activation: str | None = None,
) -> Tensor:
    """act(x @ (weight * scale).T + bias) with each row of x rounded to 8-bit floats.

    Args:
        x: (..., in), float32, bfloat16, float16 or float64; cast under autocast as `F.linear` does.
        weight: (out, in) float8_e4m3fn.
        scale: (out,) float32.
        bias: (out,) of `x`'s dtype or float32, or None.
        activation: "gelu" (erf), "gelu_tanh", "relu", "silu", "tanh" or None.
        gated: "first", "second" or None, as in `linear`.
        input_activation: an activation of x, before its rows are rounded, or None.

    Returns:
        y (..., out), gated (..., out / 2), of `x`'s dtype. An input without rows has an output without rows.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
        RuntimeError: gradients are enabled and an argument requires one.

    Source: Micikevicius et al. 2022.
    """
    checks.rounded_product(x, weight, FP8, scale, bias)
    columns = activated_columns(weight.shape[0], activation, gated)
    check_activation(input_activation, "input_activation")
    shape = x.shape
    (x,) = checks.under_autocast(x)
    if bias is not None:
        bias = (bias if bias.dtype in (x.dtype, torch.float32) else bias.float()).contiguous()
    inputs = LinearFp8Inputs(
        *(checks.rows(x), weight.contiguous(), scale.contiguous(), bias, activation, gated, input_activation)
    )
    if torch.compiler.is_compiling():
        y = linear_fp8_fwd(*inputs)
    else:
        y = dispatch.call("linear_fp8_fwd", inputs.x, inputs)
    return y if len(shape) == 2 else y.view(*shape[:-1], columns)
