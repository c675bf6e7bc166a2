r"""Linear layer with the activation and the residual sum that follow it.

Forward, with x (rows, in), weight (out, in), bias (out,):

    pre = x @ weight.T + bias
    y = act(pre) + residual

A gated activation makes out / 2 columns of the `out` columns of pre.

Backward, with g = dy * act'(pre), gated as in fastbert/ops/activation.py:

    dx = g @ weight,  dweight = g.T @ x,  dbias = Σ_rows g,  dresidual = dy

The activations and their derivatives are in fastbert/ops/activation.py.

The product accumulates in float32 (float64 for float64). Activations are computed in float32 and rounded
once; given `pre`, at least 99.9% of GELU's half-precision outputs are correctly rounded. `pre` is kept for
backward, in the storage dtype, only where there is an activation.

`panels` are a copy of the weight in the order in which the serving backend reads it. The weight's owner makes
them with `panel_maker` and keeps them (runtime/prepared.py); other backends read `weight`. A backend with
panels has two more functions:

    linear_panels(weight, gated=False) -> panels; gated: of a weight whose activation is gated
    keeps_panels(linear, rows) -> whether a product of that many rows should read kept panels, instead of
        making its own; linear: "linear" or "linear_int8"

A weight is wide if it is float32 beside `x` of half precision, as autocast has it in training. A backend that
has `reads_wide` takes such a weight and its bias, also in `linear_cross_entropy`: it rounds the weight as it
reads it, and dweight and dbias are float32, of sums that were never rounded. Its `linear_bwd` gets the weight
whether or not dx is needed. For other backends the op casts, as PyTorch does. On a GPU, where there is
neither activation nor residual, the op rounds a wide weight itself and makes dweight in float32: autograd
would write it in half precision, read it and write it once more.

Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; Vaswani et al. 2017, sec. 3.3; Shazeer 2020,
"GLU Variants Improve Transformer".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.ops.activation import activate_ref, activated_columns
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF, rows_kind


class LinearInputs(NamedTuple):
    """What forward computes from; matrices have two dimensions."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    residual: Tensor | None = None
    gated: str | None = None
    panels: Tensor | None = None


class LinearSaved(NamedTuple):
    """What backward computes from, besides dy.

    `x` is None where dweight is not needed, `weight` where dx is not, `pre` without an activation.
    """

    x: TensorOrNone
    weight: TensorOrNone
    pre: TensorOrNone = None
    activation: str | None = None
    gated: str | None = None


class LinearNeeds(NamedTuple):
    """Which gradients backward computes."""

    dx: bool = True
    dweight: bool = True
    dbias: bool = True


# The same in a schema
NEEDS = "bool need_dx, bool need_dweight, bool need_dbias"


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    gated: str | None = None,
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 `x`, else in float32."""
    compute = checks.compute_dtype(x)
    pre = x.to(compute) @ weight.to(compute).T
    if bias is not None:
        pre = pre + bias.to(compute)
    y = activate_ref(pre, activation, gated)
    if residual is not None:
        y = y + residual.to(compute)
    return y.to(x.dtype)


def forward_of(activation: str | None, save: bool, rows: int, gated: str | None = None) -> str:
    """The name of the call in `dispatch`: an activation, or few rows, may have a backend of their own."""
    if activation is None:
        return "linear_fwd"
    kind = "activation" if gated is None else "gated"
    return f"linear_fwd {kind} training" if save else f"linear_fwd {kind}{rows_kind(rows)}"


def backward_of(activation: str | None, gated: str | None = None) -> str:
    """The name of the backward call."""
    if activation is None:
        return "linear_bwd training"
    return "linear_bwd activation training" if gated is None else "linear_bwd gated training"


# --- wide weights -------------------------------------------------------------------------------------------


def is_wide(weight: Tensor | None, x: Tensor) -> bool:
    """Whether the weight is wide beside `x`."""
    return weight is not None and weight.dtype != x.dtype


def reads_wide(device: torch.device, dtype: torch.dtype, op: str = "linear") -> bool:
    """Whether the backend that serves `op` takes wide weights beside `x` of this dtype."""
    found = dispatch.serving_function("reads_wide", (op,), device, dtype)
    return found is not None and found()


def _is_trained_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast rounds a float32 weight in training."""
    return (
        checks.autocast_dtype(x) in HALF
        and x.dtype != torch.float64
        and weight.dtype == torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def narrows(x: Tensor, weight: Tensor) -> bool:
    """Whether an op rounds a wide weight itself, and makes its gradient by `wide_gradient`."""
    return x.is_cuda and _is_trained_wide(x, weight)


def wide_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀ x in float32, of sums that were never rounded."""
    if dy.is_cuda:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return dy.float().t() @ x.float()


def operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, op: str = "linear"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, weight, bias), cast where autocast is on.

    A weight in training stays wide if the backend that serves `op` takes it.
    """
    dtype = checks.autocast_dtype(x)
    wide = _is_trained_wide(x, weight) and (bias is None or bias.dtype == torch.float32)
    if wide and dtype is not None and reads_wide(x.device, dtype, op):
        return x.to(dtype), weight, bias
    x, weight, bias = checks.under_autocast(x, weight, bias)
    checks.same_dtypes(x, weight=weight, bias=bias)
    return x, weight, bias


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


@torch.library.custom_op("fastbert::linear_fwd", mutates_args=())
def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    save: bool,
    gated: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, pre) for 2-D `x`; pre is empty, of shape (0,), without an activation or where not saved."""
    rows, depth = checks.matrix("x", x)
    out = checks.matrix("weight", weight)[0]
    columns = activated_columns(out, activation, gated)
    checks.operand("weight", weight, (out, depth), (x.dtype,), x, strided=True)
    checks.operand("bias", bias, (out,), (x.dtype,), x)
    checks.operand("residual", residual, (rows, columns), (x.dtype,), x, strided=True)
    function = forward_of(activation, save, rows, gated)
    return dispatch.call(function, x, LinearInputs(x, weight, bias, activation, residual, gated), save)


@linear_fwd.register_fake
def _(x, weight, bias, activation, residual, save, gated=None):
    shape = (x.shape[0], weight.shape[0])
    columns = activated_columns(weight.shape[0], activation, gated)
    return x.new_empty(x.shape[0], columns), x.new_empty(shape if save and activation is not None else (0,))


@torch.library.custom_op(
    "fastbert::linear_bwd", mutates_args=(), schema=schema("Tensor dy", LinearSaved, NEEDS, returns=3)
)
def linear_bwd(dy: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each empty where not needed."""
    saved, need = LinearSaved(*args[:5]), LinearNeeds(*args[5:])
    x, weight, pre, activation, gated = saved
    rows, columns = checks.matrix("dy", dy)
    out = columns if gated is None else 2 * columns
    activated_columns(out, activation, gated)
    checks.operand("dy", dy, dy.shape, (dy.dtype,), dy)
    if x is not None or need.dweight:
        columns = () if x is None else x.shape[-1:]
        checks.operand("x", x, (rows, *columns), (dy.dtype,), dy, strided=True, needed=True)
    if weight is not None or need.dx:
        columns = () if weight is None else weight.shape[-1:]
        checks.operand("weight", weight, (out, *columns), (dy.dtype,), dy, strided=True, needed=True)
    checks.operand("pre", pre, (rows, out), (dy.dtype,), dy, needed=activation is not None)
    return dispatch.call(backward_of(activation, gated), dy, dy, saved, need)


@linear_bwd.register_fake
def _(dy, x, weight, pre, activation, gated, need_dx, need_dweight, need_dbias):
    rows, columns = dy.shape
    out = columns if gated is None else 2 * columns
    return (
        dy.new_empty((rows, weight.shape[1]) if need_dx else (0,)),
        dy.new_empty((out, x.shape[1]) if need_dweight else (0,)),
        dy.new_empty((out if need_dbias else 0,)),
    )


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs: LinearInputs, save: bool, output):
    x, weight, _bias, activation, _residual, gated, _panels = inputs
    need = ctx.needs_input_grad
    ctx.save_for_backward(
        x if need[1] or need[-1] else None,
        weight if need[0] or is_wide(weight, x) else None,
        output[1] if save and activation is not None else None,
    )
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.gated = activation, gated


def _backward(launch: Callable[..., Any], ctx: Any, tensors: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 7
    need, need_dresidual = LinearNeeds(*ctx.needs_input_grad[:3]), ctx.needs_input_grad[4]
    dx = dweight = dbias = None
    if True in need:
        x, weight, pre = tensors
        # The backend of forward read a wide weight. Another may serve by now: autograd widens its gradients.
        if is_wide(weight, dy) and not reads_wide(dy.device, dy.dtype):
            weight = weight.to(dy.dtype)
        saved = LinearSaved(x, weight, pre, ctx.activation, ctx.gated)
        dx, dweight, dbias = launch(dy.contiguous(), saved, need)
    grads = dx if need.dx else None, dweight if need.dweight else None, dbias if need.dbias else None
    return *grads, None, dy if need_dresidual else None, None, None


class LinearFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch.

    The last argument is the wide weight that the weight was rounded from, or None: see `narrows`.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        inputs, save = LinearInputs(*args[:7]), args[7]
        function = forward_of(inputs.activation, save, inputs.x.shape[0], inputs.gated)
        output = dispatch.call(function, inputs.x, inputs, save)
        _setup_context(ctx, inputs, save, output)
        return output[0]

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        function = backward_of(ctx.activation, ctx.gated)
        tensors = ctx.saved_tensors  # once: checkpointing recomputes them
        grads = _backward(lambda *args: dispatch.call(function, args[0], *args), ctx, tensors, dy)
        wide = None
        if dy is not None and ctx.needs_input_grad[8]:
            wide = wide_gradient(dy.contiguous(), tensors[0])
        return *grads, None, wide


def _setup_compiled(ctx, inputs, output):
    *given, save, gated = inputs
    _setup_context(ctx, LinearInputs._make((*given, gated, None)), save, output)


linear_fwd.register_autograd(
    lambda ctx, dy, _: _backward(
        lambda dy, saved, need: linear_bwd(dy, *saved, *need), ctx, ctx.saved_tensors, dy
    ),
    setup_context=_setup_compiled,
)


# --- public functions ---------------------------------------------------------------------------------------


def panel_maker(
    device: torch.device, dtype: torch.dtype, rows: int = 0, gated: bool = False
) -> Callable[[Tensor], Tensor] | None:
    """The function that makes panels of a weight for the backend that serves such `x`.

    Panels of a weight serve either gated calls or the rest, as `gated` says. None where that backend has no
    panels, or keeps none for that many rows.
    """
    found = dispatch.serving_functions(("linear_panels", "keeps_panels"), ("linear",), device, dtype)
    if found is None:
        return None
    make_panels, keeps_panels = found
    if not keeps_panels("linear", rows):
        return None
    return partial(make_panels, gated=True) if gated else make_panels


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    panels: Tensor | None = None,
    gated: str | None = None,
) -> Tensor:
    """act(x @ weight.T + bias) + residual, in one op. Under autocast it casts as `F.linear` does.

    Args:
        x: (..., in), float32, bfloat16, float16 or float64.
        weight: (out, in), of `x`'s dtype outside autocast.
        bias: (out,) of `x`'s dtype outside autocast, or None.
        activation: "gelu" (erf), "gelu_tanh", "relu", "silu", "tanh" or None.
        residual: of the result's shape, or None. Where its dtype differs from the product's, the sum is
            promoted, as `+` does.
        panels: made of `weight` by `panel_maker(…)`, in the product's dtype, for the backend that serves this
            call; or None. Not used under torch.compile.
        gated: "first" or "second": with (a, b) the two halves of the product's columns, the activation's
            result is act(a) * b or a * act(b), of out / 2 columns. None: it is act(a) of all columns.

    Returns:
        y (..., out), gated (..., out / 2). An input of no rows has an output of no rows.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
    """
    ordinary = weight is not None and checks.are_ordinary(x, weight, bias, residual, panels)
    if not ordinary:
        checks.float_tensor("weight", weight, checks.float_tensor("x", x))
        checks.float_tensors(x, bias=bias, residual=residual, panels=panels)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (..., in) with in >= 1, got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight: expected shape (out, {x.shape[-1]}), got {tuple(weight.shape)}")
    shape = (*x.shape[:-1], activated_columns(weight.shape[0], activation, gated))
    checks.shapes(weight.shape[:1], bias=bias)
    checks.shapes(shape, residual=residual)
    wide = None
    if not ordinary:
        if activation is None and residual is None and narrows(x, weight):
            wide, weight = weight, weight.detach()
        x, weight, bias = operands(x, weight, bias)
        bias = None if bias is None else bias.contiguous()
        checks.same_dtypes(x, panels=panels)
        if residual is not None and residual.dtype != x.dtype:
            return linear(x, weight, bias, activation, panels=panels, gated=gated) + residual
        weight = checks.rows(weight)
    if not ordinary or len(shape) != 2:
        x, residual = checks.rows(x), None if residual is None else checks.rows(residual)
    grad = torch.is_grad_enabled()
    save = grad and any(t is not None and t.requires_grad for t in (x, weight, bias, wide))
    inputs = LinearInputs(x, weight, bias, activation, residual, gated, panels)
    if torch.compiler.is_compiling():
        y = linear_fwd(*inputs[:5], save, gated)[0]
    elif save or (grad and residual is not None and residual.requires_grad):
        y = LinearFunction.apply(*inputs, save, wide)
    else:
        function = forward_of(activation, save, x.shape[0], gated)
        y = dispatch.call(function, x, inputs, save)[0]
    return y if len(shape) == 2 else y.view(shape)
