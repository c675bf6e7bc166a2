r"""Linear layer with a weight of 8-bit integers; x is quantised in the call. Inference only.

Per row of x, in float32 whatever x's dtype (float64 is rounded first), each operation rounded once:

    x_i = x_i smooth_i                                if `smooth` is given
    lo = min(0, min_i x_i),  hi = max(0, max_i x_i)
    step = (hi - lo) / 255,  or 1 where that is below 2**-126 (a row of zeros, or nearly)
    inv = 1 / step
    zero = round(-lo inv)                             0 … 255
    u_i = clamp(round(x_i inv) + zero, 0, 255)

With `input_range`, of two elements, lo = min(0, input_range[0]) and hi = max(0, input_range[1]) in every row:
what lies outside is clipped, by the clamp above.

`round` takes halves to the even integer, and rounds before `zero` is added. With weight (out, in) of integers
from -127 to 127 and scale (out,):

    acc_c = Σ_i (u_i - zero) weight_ci                exact integers, so equal bit for bit in every backend
    y_c = act(float(acc_c) (step scale_c) + bias_c)   in float32 (float64 for float64 x), rounded once

The last bit of `inv` can change some u by one, so the arithmetic up to `acc` is specified here to the bit. A
row of x smooth with NaN or infinity in it, or where hi - lo overflows float32, makes a row of NaN. The
integers fit in 32 bits up to in = 65,536; a larger `in` raises.

With a gate, one half of the columns is activated and multiplies the other one before that rounding, as in
`linear`.

With `float_rows` x stays as it is: y_c = act((Σ_i x_i weight_ci) scale_c + bias_c), or the same with the
scale in each weight.

A backend may read the weight in its own order: `linear_int8_panels(weight, gated)` in its namespace makes
such a copy, which the op gets as `panels`. There is no backward: integers have no gradient.

Source: Jacob et al. 2017, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", sec. 2; per token and per channel: Dettmers et al. 2022, "LLM.int8()", sec. 2; smooth: Xiao et al.
2022, "SmoothQuant", eq. 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.activation import activate_ref, activated_columns
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch

MOST_INPUTS = 65_536
SMALLEST_STEP = 2.0**-126  # the smallest normal float32: below it 1 / step overflows


class LinearInt8Inputs(NamedTuple):
    """What forward computes from; `x` is (rows, in). `float_rows` excludes `smooth` and `input_range`."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    panels: Tensor | None = None
    gated: str | None = None
    smooth: Tensor | None = None
    input_range: Tensor | None = None
    float_rows: bool = False

    def new_output(self) -> Tensor:
        """Memory for y."""
        return self.x.new_empty(self.x.shape[0], self.weight.shape[0] // (1 if self.gated is None else 2))


def quantize_rows(
    x: Tensor, smooth: Tensor | None = None, input_range: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(u - zero, zero, step) of 2-D `x`: float32 (rows, in), (rows, 1), (rows, 1).

    Where a row or its range is not finite its integers are 0 and its step is NaN.
    """
    x = x.float() if smooth is None else x.float() * smooth
    if input_range is None:
        lo, hi = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    else:
        lo, hi = input_range.expand(x.shape[0], 2).split(1, 1)
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    width = hi - lo
    step = width / width.new_full((), 255.0)  # by a Python number, a GPU would multiply by its reciprocal
    step = step.masked_fill(step < SMALLEST_STEP, 1.0)
    bad = ~(torch.isfinite(step) & torch.isfinite(x).all(1, keepdim=True))
    inv = 1.0 / step.masked_fill(bad, 1.0)
    zero = torch.round(-lo * inv).masked_fill(bad, 0.0)
    u = (torch.round(x * inv) + zero).clamp(0, 255).masked_fill(bad, 0.0)
    return u - zero, zero, step.masked_fill(bad, float("nan"))


def linear_int8_ref(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: str | None = None,
    smooth: Tensor | None = None,
    input_range: Tensor | None = None,
    float_rows: bool = False,
) -> Tensor:
    """Plain PyTorch on 2-D `x`; sums in float64, the epilogue in float64 for float64 `x`, else in float32."""
    compute = checks.compute_dtype(x)
    if float_rows:
        rows, factors = x, scale.to(compute)
    else:
        rows, _, step = quantize_rows(x, smooth, input_range)
        factors = step.to(compute) * scale.to(compute)
    acc = rows.double() @ weight.double().T  # of integers below 2**31: exact in any order
    pre = acc.to(compute) * factors
    if bias is not None:
        pre = pre + bias.to(compute)
    return activate_ref(pre, activation, gated).to(x.dtype)


# --- custom op: what torch.compile sees ---------------------------------------------------------------------


@torch.library.custom_op(
    "fastbert::linear_int8_fwd", mutates_args=(), schema=schema(LinearInt8Inputs, returns=1)
)
def linear_int8_fwd(*args: Any) -> Tensor:
    """y for 2-D `x`."""
    inputs = LinearInt8Inputs(*args)
    x, weight, scale, bias, activation, panels, gated, smooth, input_range, float_rows = inputs
    checks.rounded_operands(x, weight, torch.int8, scale, bias)
    depth = x.shape[1]
    _check_depth(depth)
    activated_columns(weight.shape[0], activation, gated)
    if panels is not None:
        checks.operand("panels", panels, (panels.numel(),), (torch.uint8,), x)
    checks.operand("smooth", smooth, (depth,), (torch.float32,), x)
    checks.operand("input_range", input_range, (2,), (torch.float32,), x)
    _check_rounded(float_rows, smooth, input_range)
    return dispatch.call("linear_int8_fwd", x, inputs)


@linear_int8_fwd.register_fake
def _(*args):
    return LinearInt8Inputs(*args).new_output()


# --- public functions ---------------------------------------------------------------------------------------


def panel_maker(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The function (weight, gated=False) -> panels for the backend that serves such `x`, or None.

    Panels serve either gated calls or the rest.
    """
    return dispatch.serving_function("linear_int8_panels", ("linear_int8",), device, dtype)


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    panels: Tensor | None = None,
    gated: str | None = None,
    smooth: Tensor | None = None,
    input_range: Tensor | None = None,
    float_rows: bool = False,
) -> Tensor:
    """act(x @ (weight * scale).T + bias) with each row of x rounded to 8 bits, on integers.

    Args:
        x: (..., in), float32, bfloat16, float16 or float64, in <= 65,536; cast under autocast as `F.linear`
            does.
        weight: (out, in) int8, from -127 to 127.
        scale: (out,) float32: the value of one integer step in each row of `weight`.
        bias: (out,) of `x`'s dtype or float32, or None.
        activation: "gelu" (erf), "gelu_tanh", "relu", "silu", "tanh" or None.
        panels: made of `weight` by `panel_maker(…)` for the backend that serves this call; or None. Other
            backends work from `weight`.
        gated: "first", "second" or None, as in `linear`.
        smooth: (in,) float32, by which each row of x is multiplied before it is rounded; or None. `weight` is
            the weight divided by it.
        input_range: (2,) float32, the least and the largest x smooth, the same for all rows: what lies
            outside is clipped. None: each row has its own.
        float_rows: leave x as it is, and multiply in floating point.

    Returns:
        y (..., out), gated (..., out / 2), of `x`'s dtype. An input without rows has an output without rows;
        a row with NaN or infinity has an output of NaN.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
        RuntimeError: gradients are enabled and an argument requires one.

    Source: Jacob et al. 2017, sec. 2.
    """
    checks.rounded_product(x, weight, torch.int8, scale, bias, smooth=smooth, input_range=input_range)
    _check_depth(x.shape[-1])
    columns = activated_columns(weight.shape[0], activation, gated)
    if smooth is not None:
        checks.shape("smooth", checks.typed("smooth", smooth, torch.float32, x), x.shape[-1:])
        smooth = smooth.contiguous()
    if input_range is not None:
        checks.shape("input_range", checks.typed("input_range", input_range, torch.float32, x), (2,))
        input_range = input_range.contiguous()
    _check_rounded(float_rows, smooth, input_range)
    if panels is not None:
        checks.typed("panels", panels, torch.uint8, x)
    shape = x.shape
    (x,) = checks.under_autocast(x)
    if bias is not None:
        bias = (bias if bias.dtype in (x.dtype, torch.float32) else bias.float()).contiguous()
    inputs = LinearInt8Inputs(
        *(checks.rows(x), weight.contiguous(), scale.contiguous(), bias, activation, panels, gated),
        *(smooth, input_range, float_rows),
    )
    if torch.compiler.is_compiling():
        y = linear_int8_fwd(*inputs)
    else:
        y = dispatch.call("linear_int8_fwd", inputs.x, inputs)
    return y if len(shape) == 2 else y.view(*shape[:-1], columns)


def _check_depth(depth: int) -> None:
    if depth > MOST_INPUTS:
        raise ValueError(f"x: expected at most {MOST_INPUTS} elements per row, got {depth}")


def _check_rounded(float_rows: bool, smooth: Tensor | None, input_range: Tensor | None) -> None:
    if not isinstance(float_rows, bool):
        raise TypeError(f"float_rows: expected True or False, got {float_rows!r}")
    for name, given in (("smooth", smooth), ("input_range", input_range)):
        if float_rows and given is not None:
            raise ValueError(f"{name}: expected None with float_rows, got a tensor")
