r"""The feed-forward block of an encoder layer: two products with an activation between them.

Forward, with x (rows, hidden), up_weight (inner, hidden), up_bias (inner,), down_weight (out, inner):

    pre = x @ up_weight.T + up_bias
    y = act(pre) @ down_weight.T

A gated activation makes `inner` columns of pre's 2 inner: up_weight is (2 inner, hidden).

The second product's bias belongs to what follows: `layer_norm` adds it in its own pass.

Backward:

    g = (dy @ down_weight) * act'(pre), gated as in fastbert/ops/activation.py
    dx = g @ up_weight,  dup_weight = g.T @ x,  dup_bias = Σ_rows g,  ddown_weight = dy.T @ act(pre)

As one op, a backend can make g in the epilogue of the product before it: the gradient of act(pre) is neither
written nor read. Where no backend does that, as for gated activations, two calls of `linear` are as good, and
`pays` is False.

A wide weight (ops/linear.py) is rounded by the op on a GPU, and its gradient is float32.

Products accumulate in float32 (float64 for float64); pre, act(pre) and g are kept in storage dtype.

Source: Vaswani et al. 2017, sec. 3.3; Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"; Shazeer 2020,
"GLU Variants Improve Transformer".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.ops.activation import activate_ref, activated_columns
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.linear import narrows
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF


class FeedForwardInputs(NamedTuple):
    """What forward computes from; matrices have two dimensions."""

    x: Tensor
    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    activation: str
    gated: str | None = None


class FeedForwardSaved(NamedTuple):
    """What backward computes from, besides dy.

    `x` is None where dup_weight is not needed, `up_weight` where dx is not, `down_weight` and `pre` where
    none of the first three gradients is, `inner` = act(pre) where ddown_weight is not.
    """

    x: TensorOrNone
    up_weight: TensorOrNone
    down_weight: TensorOrNone
    pre: TensorOrNone
    inner: TensorOrNone
    activation: str
    gated: str | None = None


class FeedForwardNeeds(NamedTuple):
    """Which gradients backward computes, and whether those of the weights are float32."""

    dx: bool
    dup_weight: bool
    dup_bias: bool
    ddown_weight: bool
    wide: bool = False

    @property
    def g(self) -> bool:
        """Whether the gradient between the two products is needed."""
        return self.dx or self.dup_weight or self.dup_bias


def feed_forward_ref(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    activation: str,
    gated: str | None = None,
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 `x`, else in float32."""
    compute = checks.compute_dtype(x)
    pre = x.to(compute) @ up_weight.to(compute).T
    if up_bias is not None:
        pre = pre + up_bias.to(compute)
    return (activate_ref(pre, activation, gated) @ down_weight.to(compute).T).to(x.dtype)


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


def _inner_columns(columns: int, activation: str | None, gated: str | None) -> int:
    """The columns of act(pre) for those of pre. Raises ValueError for an activation or gate unknown."""
    if activation is None:
        raise ValueError("activation: expected the name of one, got None: use `linear` twice")
    return activated_columns(columns, activation, gated, "up_weight")


# What `dispatch` calls the passes of training: one backend serves both.
_FORWARD_OF_TRAINING, _BACKWARD = "feed_forward_fwd training", "feed_forward_bwd training"


@torch.library.custom_op(
    "fastbert::feed_forward_fwd", mutates_args=(), schema=schema(FeedForwardInputs, "bool save", returns=3)
)
def feed_forward_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(y, pre, act(pre)) for 2-D `x`; the last two are of shape (0,) where not saved."""
    inputs, save = FeedForwardInputs(*args[:-1]), args[-1]
    x, up_weight, up_bias, down_weight, activation, gated = inputs
    hidden = checks.matrix("x", x)[1]
    columns = checks.matrix("up_weight", up_weight)[0]
    out = checks.matrix("down_weight", down_weight)[0]
    inner = _inner_columns(columns, activation, gated)
    checks.operand("up_weight", up_weight, (columns, hidden), (x.dtype,), x, strided=True)
    checks.operand("up_bias", up_bias, (columns,), (x.dtype,), x)
    checks.operand("down_weight", down_weight, (out, inner), (x.dtype,), x, strided=True)
    return dispatch.call(_FORWARD_OF_TRAINING if save else "feed_forward_fwd", x, inputs, save)


@feed_forward_fwd.register_fake
def _(x, up_weight, up_bias, down_weight, activation, gated, save):
    rows, columns = x.shape[0], up_weight.shape[0]
    return (
        x.new_empty((rows, down_weight.shape[0])),
        x.new_empty((rows, columns) if save else (0,)),
        x.new_empty((rows, _inner_columns(columns, activation, gated)) if save else (0,)),
    )


_NEEDS = "bool need_dx, bool need_dup_weight, bool need_dup_bias, bool need_ddown_weight"


@torch.library.custom_op(
    "fastbert::feed_forward_bwd",
    mutates_args=(),
    schema=schema("Tensor dy", FeedForwardSaved, _NEEDS, returns=4),
)
def feed_forward_bwd(dy: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dup_weight, dup_bias, ddown_weight), each of shape (0,) where not needed."""
    saved, need = FeedForwardSaved(*args[:7]), FeedForwardNeeds(*args[7:])
    x, up_weight, down_weight, pre, inner, activation, gated = saved
    rows, out = checks.matrix("dy", dy)
    _inner_columns(0, activation, gated)
    checks.operand("dy", dy, dy.shape, (dy.dtype,), dy)
    times = 1 if gated is None else 2
    columns = next((t.shape[-1:] for t in (down_weight, inner) if t is not None), ())
    if not columns and pre is not None:
        columns = tuple(n // times for n in pre.shape[-1:])
    ahead = tuple(times * n for n in columns)
    checks.operand("down_weight", down_weight, (out, *columns), (dy.dtype,), dy, strided=True, needed=need.g)
    checks.operand("pre", pre, (rows, *ahead), (dy.dtype,), dy, needed=need.g)
    checks.operand("inner", inner, (rows, *columns), (dy.dtype,), dy, needed=need.ddown_weight)
    hidden = next((t.shape[-1:] for t in (up_weight, x) if t is not None), ())
    checks.operand("up_weight", up_weight, (*ahead, *hidden), (dy.dtype,), dy, strided=True, needed=need.dx)
    checks.operand("x", x, (rows, *hidden), (dy.dtype,), dy, strided=True, needed=need.dup_weight)
    return dispatch.call(_BACKWARD, dy, dy, saved, need)


@feed_forward_bwd.register_fake
def _(dy, x, up_weight, down_weight, pre, inner, *options):
    need_dx, need_dup_weight, need_dup_bias, need_ddown_weight = options[-4:]
    return (
        dy.new_empty((dy.shape[0], up_weight.shape[1]) if need_dx else (0,)),
        dy.new_empty((pre.shape[1], x.shape[1]) if need_dup_weight else (0,)),
        dy.new_empty((pre.shape[1],) if need_dup_bias else (0,)),
        dy.new_empty((dy.shape[1], inner.shape[1]) if need_ddown_weight else (0,)),
    )


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _needs(ctx: Any) -> FeedForwardNeeds:
    dx, up, up_bias, down = ctx.needs_input_grad[:4]
    wide = any(ctx.needs_input_grad[7:])
    return FeedForwardNeeds(dx, up or wide, up_bias, down or wide, wide)


def _setup_context(ctx, inputs: FeedForwardInputs, save: bool, output):
    x, up_weight, _up_bias, down_weight, activation, gated = inputs
    _y, pre, inner = output
    need = _needs(ctx)
    ctx.save_for_backward(
        x if need.dup_weight else None,
        up_weight if need.dx else None,
        down_weight if need.g else None,
        pre if save and need.g else None,
        inner if save and need.ddown_weight else None,
    )
    ctx.set_materialize_grads(False)
    ctx.activation, ctx.gated = activation, gated


def _backward(launch: Callable[..., Any], ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    need = _needs(ctx)
    saved = FeedForwardSaved._make((*ctx.saved_tensors, ctx.activation, ctx.gated))
    grads = launch(dy.contiguous(), saved, need)
    dx, dup, dup_bias, ddown = (g if needed else None for g, needed in zip(grads, need[:4], strict=True))
    if need.wide:
        return dx, None, dup_bias, None, None, None, None, dup, ddown
    return (dx, dup, dup_bias, ddown, *(None,) * (len(ctx.needs_input_grad) - 4))


class FeedForwardFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch.

    The last two arguments are the wide weights that the two were rounded from, or None.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        inputs, save = FeedForwardInputs(*args[:6]), args[6]
        output = dispatch.call(_FORWARD_OF_TRAINING, inputs.x, inputs, save)
        _setup_context(ctx, inputs, save, output)
        return output[0]

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        return _backward(lambda *args: dispatch.call(_BACKWARD, args[0], *args), ctx, dy)


feed_forward_fwd.register_autograd(
    lambda ctx, dy, *_: _backward(lambda dy, saved, need: feed_forward_bwd(dy, *saved, *need[:4]), ctx, dy),
    setup_context=lambda ctx, inputs, output: _setup_context(
        ctx, FeedForwardInputs(*inputs[:-1]), inputs[-1], output
    ),
)


# --- public functions ---------------------------------------------------------------------------------------


def pays(x: Tensor, gated: str | None = None) -> bool:
    """Whether `feed_forward` saves time over two calls of `linear` for tokens like `x`, in training.

    It does in half precision on a GPU where the activation is not gated, and never in inference. `x` is
    (..., hidden).
    """
    return gated is None and x.is_cuda and (checks.autocast_dtype(x) or x.dtype) in HALF


def feed_forward(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    activation: str,
    gated: str | None = None,
) -> Tensor:
    """act(x @ up_weight.T + up_bias) @ down_weight.T. Under autocast it casts as `F.linear` does.

    Args:
        x: (..., hidden), float32, bfloat16, float16 or float64.
        up_weight: (inner, hidden), gated (2 inner, hidden), of `x`'s dtype outside autocast.
        up_bias: as many numbers as `up_weight` has rows, of `x`'s dtype outside autocast, or None.
        down_weight: (out, inner), of `x`'s dtype outside autocast.
        activation: "gelu" (erf), "gelu_tanh", "relu", "silu" or "tanh".
        gated: "first" or "second": with (a, b) the two halves of the first product's columns, the second
            product's argument is act(a) * b or a * act(b). None: it is act(a) of all columns.

    Returns:
        y (..., out). An input of no rows has an output of no rows.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Vaswani et al. 2017, sec. 3.3.
    """
    needed = up_weight is not None and down_weight is not None
    ordinary = needed and checks.are_ordinary(x, up_weight, up_bias, down_weight)
    if not ordinary:
        checks.float_tensor("up_weight", up_weight, checks.float_tensor("x", x))
        checks.float_tensor("down_weight", down_weight, x)
        checks.float_tensors(x, up_bias=up_bias)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (..., hidden) with hidden >= 1, got {tuple(x.shape)}")
    if up_weight.dim() != 2 or up_weight.shape[1] != x.shape[-1] or up_weight.shape[0] == 0:
        raise ValueError(f"up_weight: expected shape (inner, {x.shape[-1]}), got {tuple(up_weight.shape)}")
    inner = _inner_columns(up_weight.shape[0], activation, gated)
    if down_weight.dim() != 2 or down_weight.shape[1] != inner or down_weight.shape[0] == 0:
        raise ValueError(f"down_weight: expected shape (out, {inner}), got {tuple(down_weight.shape)}")
    checks.shapes(up_weight.shape[:1], up_bias=up_bias)
    shape, wide = (*x.shape[:-1], down_weight.shape[0]), (None, None)
    if not ordinary:
        if narrows(x, up_weight) and narrows(x, down_weight):
            wide, up_weight, down_weight = (up_weight, down_weight), up_weight.detach(), down_weight.detach()
        x, up_weight, up_bias, down_weight = checks.under_autocast(x, up_weight, up_bias, down_weight)
        checks.same_dtypes(x, up_weight=up_weight, down_weight=down_weight, up_bias=up_bias)
        up_weight, down_weight = checks.rows(up_weight), checks.rows(down_weight)
        up_bias = None if up_bias is None else up_bias.contiguous()
    inputs = FeedForwardInputs(checks.rows(x), up_weight, up_bias, down_weight, activation, gated)
    given = (*inputs[:4], *wide)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if torch.compiler.is_compiling():
        y = feed_forward_fwd(*inputs, save)[0]
    elif save:
        y = FeedForwardFunction.apply(*inputs, save, *wide)
    else:
        y = dispatch.call("feed_forward_fwd", x, inputs, save)[0]
    return y if len(shape) == 2 else y.view(shape)
