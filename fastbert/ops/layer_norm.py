r"""LayerNorm, RMSNorm and NoNorm with the residual sum, a linear layer's bias and dropout in the same pass.

Forward, per row of `hidden` elements, in float32 (float64 for float64 input):

    z = residual + dropout(x + x_bias)
    mean = Σ z / hidden,  var = Σ (z - mean)² / hidden,  rstd = 1 / sqrt(var + eps)
    y = (z - mean) * rstd * weight + bias

Backward, with x_hat = (z - mean) * rstd and g = dy * weight:

    dz = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    dresidual = dz,  dx = dropout'(dz),  dx_bias = Σ_rows dx
    dweight = Σ_rows dy * x_hat,  dbias = Σ_rows dy

RMSNorm has no mean: rstd = 1 / sqrt(Σ z² / hidden + eps), y = z * rstd * weight, and backward is the same
without the term mean(g). NoNorm has no statistics: x_hat = z and dz = g. Where z is returned too, as layers
that normalise first need it, its gradient is added to dz.

`z` is rounded to the storage dtype only to be saved or returned; the statistics come from the unrounded sum.
Where `x` is of half precision and `residual` in float32, as in training under autocast, y, z and dresidual
are in float32 and dx is in `x`'s dtype: nothing is cast before or after. Then y can be returned once more,
rounded to `x`'s dtype, for the products that follow; its gradient is added to dy in float32.
In narrow rows that rounding is not small compared with the deviation. So half-precision rows of at most
`NARROW` columns are computed and saved in float32.
`residual`, `x_bias` and `bias` are optional. Dropout bits: `fastbert.ops.dropout`, plane 0, row and column.

Source: Ba, Kiros, Hinton 2016, "Layer Normalization", eq. 4; residual of Vaswani et al. 2017, sec. 3.1;
Zhang, Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4; Sun et al. 2020, "MobileBERT: a Compact
Task-Agnostic BERT for Resource-Limited Devices", eq. 3 (NoNorm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch

# Columns up to which a row of half precision is computed and saved in float32.
NARROW = 8
# The kinds of norm, by the names of their public functions.
KINDS = ("layer_norm", "rms_norm", "no_norm")


class LayerNormInputs(NamedTuple):
    """What forward computes from; `x` is (rows, hidden), in `residual`'s dtype or in half precision.

    Attributes:
        kind: one of `KINDS`.
        return_sum: whether z is an output also where backward does not need it.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    x_bias: Tensor | None = None
    eps: float = 1e-12
    dropout_p: float = 0.0
    seed: TensorOrNone = None
    offset: int = 0
    kind: str = "layer_norm"
    return_sum: bool = False


class LayerNormSaved(NamedTuple):
    """What backward computes from, besides the gradients of forward's outputs.

    RMSNorm has an empty `mean`; NoNorm also has an empty `rstd`.
    """

    z: Tensor
    weight: Tensor
    mean: Tensor
    rstd: Tensor
    dropout_p: float = 0.0
    seed: TensorOrNone = None
    offset: int = 0
    kind: str = "layer_norm"


class LayerNormNeeds(NamedTuple):
    """Which gradients backward computes; `dweight` includes dbias. `x_dtype` is dx's dtype; None is z's."""

    dx: bool
    dweight: bool
    dx_bias: bool
    dresidual: bool
    x_dtype: torch.dtype | None = None


def storage_dtype(inputs: LayerNormInputs) -> torch.dtype:
    """The dtype of y and z."""
    return inputs.x.dtype if inputs.residual is None else inputs.residual.dtype


def summed(inputs: LayerNormInputs) -> bool:
    """Whether z differs from x."""
    return inputs.residual is not None or inputs.x_bias is not None or inputs.dropout_p > 0


def stores_sum(inputs: LayerNormInputs, save: bool) -> bool:
    """Whether forward returns z; elsewhere z is empty."""
    return (save or inputs.return_sum) and summed(inputs)


def own_dresidual(saved: LayerNormSaved, need: LayerNormNeeds) -> bool:
    """Whether backward returns dresidual: it is needed, and differs from dx or dx is not needed."""
    return need.dresidual and (
        saved.dropout_p > 0 or not need.dx or need.x_dtype not in (None, saved.z.dtype)
    )


def widened(x: Tensor, *tensors: Tensor | None) -> tuple[TensorOrNone, ...]:
    """`tensors` in float32 if `x` is narrow and of half precision (see the module), else as they are."""
    if x.shape[-1] > NARROW or x.dtype.itemsize > 2:
        return tensors
    return tuple(None if t is None else t.float() for t in tensors)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    keep_mask: Tensor | None = None,
    kind: str = "layer_norm",
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 `x`, else in float32.

    `keep_mask` (the shape of `x`, bool) says which elements dropout keeps; None keeps all. `kind`: see
    `KINDS`.
    """
    compute = checks.compute_dtype(x)
    z = x.to(compute)
    if x_bias is not None:
        z = z + x_bias.to(compute)
    if keep_mask is not None:
        z = z * keep_mask / (1.0 - dropout_p)
    if residual is not None:
        z = z + residual.to(compute)
    if kind == "layer_norm":
        z = z - z.mean(-1, keepdim=True)
    if kind != "no_norm":
        z = z * (z.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = z * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype)


def statistics(kind: str, rows: int) -> tuple[int, int]:
    """The elements of `mean` and of `rstd` for as many rows."""
    return rows if kind == "layer_norm" else 0, 0 if kind == "no_norm" else rows


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


# What `dispatch` calls the passes of training: one backend serves both.
_FORWARD_OF_TRAINING, _BACKWARD = "layer_norm_fwd training", "layer_norm_bwd training"


@torch.library.custom_op(
    "fastbert::layer_norm_fwd", mutates_args=(), schema=schema(LayerNormInputs, "bool save", returns=4)
)
def layer_norm_fwd(*args: Any) -> tuple[Tensor, ...]:
    """(y, z, mean, rstd) for 2-D `x`; z, mean, rstd are empty where not needed (see the module)."""
    inputs, save = LayerNormInputs(*args[:-1]), args[-1]
    x, weight, bias, residual, x_bias, _, dropout_p, seed, offset, kind, _ = inputs
    _check_kind(kind)
    hidden = checks.matrix("x", x)[1]
    for name, vector in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        checks.operand(name, vector, (hidden,), (x.dtype, torch.float32), x)
    checks.operand("residual", residual, x.shape, (x.dtype,), x, strided=True)
    checks.dropout(dropout_p, seed, offset, x)
    return dispatch.call(_FORWARD_OF_TRAINING if save else "layer_norm_fwd", x, inputs, save)


@layer_norm_fwd.register_fake
def _(*args):
    inputs, save = LayerNormInputs(*args[:-1]), args[-1]
    x, stats = inputs.x, checks.compute_dtype(inputs.x)
    rows = statistics(inputs.kind, x.shape[0] if save else 0)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.shape if stores_sum(inputs, save) else (0,)),
        *(x.new_empty((count,), dtype=stats) for count in rows),
    )


_NEEDS = "bool need_dx, bool need_dweight, bool need_dxbias, bool need_dresidual"


@torch.library.custom_op(
    "fastbert::layer_norm_bwd",
    mutates_args=(),
    schema=schema("Tensor dy", LayerNormSaved, _NEEDS, "Tensor? dsum", returns=5),
)
def layer_norm_bwd(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """(dx, dresidual, dweight, dbias, dx_bias); `dsum` is the gradient of the returned z.

    A gradient that is not wanted is an empty tensor of its own and costs no memory; `need_dweight` includes
    dbias. Without dropout dresidual equals dx, and is empty where dx is wanted as well.
    """
    *saved, need_dx, need_dweight, need_dxbias, need_dresidual, dsum = args
    saved = z, weight, mean, rstd, dropout_p, seed, offset, kind = LayerNormSaved(*saved)
    _check_kind(kind)
    rows, hidden = checks.matrix("z", z)
    checks.operand("dy", dy, z.shape, (z.dtype,), z, strided=True)
    checks.operand("dsum", dsum, z.shape, (z.dtype,), z)
    checks.operand("weight", weight, (hidden,), (z.dtype, torch.float32), z)
    for name, statistic, count in zip(("mean", "rstd"), (mean, rstd), statistics(kind, rows), strict=True):
        checks.operand(name, statistic, (count,), (checks.compute_dtype(z),), z)
    checks.dropout(dropout_p, seed, offset, z)
    need = LayerNormNeeds(need_dx, need_dweight, need_dxbias, need_dresidual)
    return dispatch.call(_BACKWARD, dy, dy, saved, need, *_present(None, dsum))


@layer_norm_bwd.register_fake
def _(dy, z, weight, mean, rstd, dropout_p, seed, offset, kind, *needs_and_dsum):
    need_dx, need_dweight, need_dxbias, need_dresidual = needs_and_dsum[:4]
    hidden = z.shape[1]
    return (
        z.new_empty(z.shape if need_dx else (0,)),
        z.new_empty(z.shape if need_dresidual and (dropout_p > 0 or not need_dx) else (0,)),
        rstd.new_empty((hidden if need_dweight else 0,)),
        rstd.new_empty((hidden if need_dweight else 0,)),
        rstd.new_empty((hidden if need_dxbias else 0,)),
    )


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs: LayerNormInputs, output):
    _y, z, mean, rstd = output[:4]
    ctx.save_for_backward(z if summed(inputs) else inputs.x, inputs.weight, mean, rstd, inputs.seed)
    ctx.set_materialize_grads(False)
    ctx.dropout_p, ctx.offset, ctx.x_dtype = inputs.dropout_p, inputs.offset, inputs.x.dtype
    ctx.bias_dtype = None if inputs.bias is None else inputs.bias.dtype
    ctx.x_bias_dtype = None if inputs.x_bias is None else inputs.x_bias.dtype
    ctx.kind = inputs.kind


def _backward(
    launch: Callable[..., Any], ctx: Any, dy: Any, drounded: Any = None, dsum: Any = None
) -> tuple[Any, ...]:
    if dy is None and drounded is None and dsum is None:
        return (None,) * 12
    z, weight, mean, rstd, seed = ctx.saved_tensors
    if dy is None:
        dy, drounded = torch.zeros_like(z) if drounded is None else drounded.float(), None
    saved = LayerNormSaved(z, weight, mean, rstd, ctx.dropout_p, seed, ctx.offset, ctx.kind)
    x, weight_wanted, bias, residual, x_bias = ctx.needs_input_grad[:5]
    need = LayerNormNeeds(x, weight_wanted or bias, x_bias, residual, ctx.x_dtype)
    more = (None if t is None else t.contiguous() for t in (drounded, dsum))
    dx, dresidual, dweight, dbias, dx_bias = launch(dy.contiguous(), saved, need, *_present(*more))
    if not own_dresidual(saved, need):
        dresidual = dx
    grads = (
        dx if x else None,
        checks.as_dtype(dweight, weight.dtype) if weight_wanted else None,
        checks.as_dtype(dbias, ctx.bias_dtype) if bias else None,
        dresidual if residual else None,
        checks.as_dtype(dx_bias, ctx.x_bias_dtype) if x_bias else None,
    )
    return *grads, *(None,) * 7


# Arguments after `save` and after `need` are passed only if they say something: a backend of a third party
# need not have them.


def _asked(rounded: bool) -> tuple[bool, ...]:
    return (True,) if rounded else ()


def _present(drounded: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
    if dsum is None:
        return () if drounded is None else (drounded,)
    return drounded, dsum


class LayerNormFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch.

    Returns (y), with `rounded` y in `x`'s dtype behind it, and with `return_sum` z at the end.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # a separate setup_context would cost an inspect.signature at every call
        inputs, (save, rounded) = LayerNormInputs(*args[:-2]), args[-2:]
        key = inputs.x if inputs.residual is None else inputs.residual
        output = dispatch.call(_FORWARD_OF_TRAINING, key, inputs, save, *_asked(rounded))
        _setup_context(ctx, inputs, output)
        ctx.rounded = rounded
        return output[0], *output[4:], *((output[1],) if inputs.return_sum else ())

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *more: Tensor | None) -> tuple[Any, ...]:
        drounded, dsum = (*(() if ctx.rounded else (None,)), *more, None)[:2]
        grads = _backward(lambda *args: dispatch.call(_BACKWARD, args[0], *args), ctx, dy, drounded, dsum)
        return *grads, None


def _compiled_bwd(dy, saved, need, _drounded=None, dsum=None):
    """The custom op, called as a backend's `layer_norm_bwd` is; z has x's dtype there."""
    return layer_norm_bwd(dy, *saved, *need[:4], dsum)


layer_norm_fwd.register_autograd(
    lambda ctx, dy, dsum, *_: _backward(_compiled_bwd, ctx, dy, None, dsum),
    setup_context=lambda ctx, inputs, output: _setup_context(ctx, LayerNormInputs(*inputs[:-1]), output),
)


def _takes_both(x: Tensor, residual: Tensor) -> bool:
    """Whether backends add the two as they are. torch.compile makes the cast part of what is before it."""
    mixed = x.dtype.itemsize == 2 and residual.dtype == torch.float32
    return mixed and x.shape[-1] > NARROW and not torch.compiler.is_compiling()


# --- public functions ---------------------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rounded: bool = False,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """LayerNorm(residual + dropout(x + x_bias)) over the last dimension, in one pass.

    Args:
        x: (..., hidden), float32, bfloat16, float16 or float64.
        weight: (hidden,), gamma; its dtype may differ from `x`'s (float32 parameters, half-precision
            activations).
        bias: (hidden,) beta, or None.
        residual: the shape of `x`, or None. Where its dtype differs, the sum is promoted, as PyTorch's `+`
            does, and the result with it.
        x_bias: (hidden,) bias of the linear layer that made `x`, or None.
        eps: added to the variance, >= 0.
        dropout_p: probability of dropping an element of `x + x_bias`, in [0, 1), exact to 2**-17.
        seed: int64 tensor of one element on `x`'s device; needed where dropout_p > 0.
        offset: the call site, in [0, 2**32): two sites with one seed need two offsets.
        rounded: whether to return (y, y in `x`'s dtype) where `x` is of half precision and y is in float32;
            elsewhere the two are one tensor.
        return_sum: whether to return (y, z), z = residual + dropout(x + x_bias) in y's dtype. The norm is
            that of the unrounded sum. Without residual, x_bias and dropout z is `x` itself.

    Returns:
        y of the shape of `x`. An input of no rows has an output of no rows. With `rounded` and `return_sum`
        (y, y in `x`'s dtype, z).

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Ba, Kiros, Hinton 2016, "Layer Normalization".
    """
    options = eps, dropout_p, seed, offset, "layer_norm", return_sum
    return _norm(LayerNormInputs(x, weight, bias, residual, x_bias, *options), rounded)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    eps: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rounded: bool = False,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """RMSNorm(residual + dropout(x + x_bias)) over the last dimension, in one pass: no mean and no bias.

    Args:
        x: (..., hidden), float32, bfloat16, float16 or float64.
        weight: (hidden,), of any of these dtypes.
        residual, x_bias, dropout_p, seed, offset: as in `layer_norm`.
        eps: added to the mean of the squares, >= 0.
        rounded, return_sum: as in `layer_norm`.

    Returns:
        y of the shape of `x`, or what `layer_norm` returns with `rounded` or `return_sum`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Zhang, Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    options = eps, dropout_p, seed, offset, "rms_norm", return_sum
    return _norm(LayerNormInputs(x, weight, None, residual, x_bias, *options), rounded)


def no_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    rounded: bool = False,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """weight · (residual + dropout(x + x_bias)) + bias, in one pass: MobileBERT's NoNorm, without statistics.

    Args:
        x: (..., hidden), float32, bfloat16, float16 or float64.
        weight, bias: (hidden,), of any of these dtypes; `bias` may be None.
        residual, x_bias, dropout_p, seed, offset: as in `layer_norm`.
        rounded, return_sum: as in `layer_norm`.

    Returns:
        y of the shape of `x`, or what `layer_norm` returns with `rounded` or `return_sum`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Sun et al. 2020, "MobileBERT: a Compact Task-Agnostic BERT for Resource-Limited Devices", eq. 3.
    """
    options = 0.0, dropout_p, seed, offset, "no_norm", return_sum
    return _norm(LayerNormInputs(x, weight, bias, residual, x_bias, *options), rounded)


def _norm(inputs: LayerNormInputs, rounded: bool) -> Tensor | tuple[Tensor, ...]:
    """All kinds, of arguments as they came."""
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, kind, return_sum = inputs
    ordinary = weight is not None and checks.are_ordinary(x, weight, bias, residual, x_bias)
    if not ordinary:
        checks.float_tensor("weight", weight, checks.float_tensor("x", x))
        checks.float_tensors(x, bias=bias, x_bias=x_bias, residual=residual)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (..., hidden) with hidden >= 1, got {tuple(x.shape)}")
    checks.shapes(x.shape[-1:], weight=weight, bias=bias, x_bias=x_bias)
    if residual is not None and residual.shape != x.shape:
        checks.shape("residual", residual, x.shape)
    eps = checks.eps(eps)
    seed = checks.dropout(dropout_p, seed, offset, x)
    given, shape, dtype, twice = x, x.shape, x.dtype, False
    if not ordinary or shape[-1] <= NARROW:
        if residual is not None and residual.dtype != x.dtype and not _takes_both(x, residual):
            dtype = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(dtype), residual.to(dtype)
        elif residual is None and checks.autocast_dtype(x) is not None:
            # as in PyTorch, a norm returns the parameters' precision under autocast
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        given, dtype = x, x.dtype if residual is None else residual.dtype
        weight, bias, x_bias = (checks.norm_vector(v, dtype) for v in (weight, bias, x_bias))
        x, weight, bias, residual, x_bias = widened(x, x, weight, bias, residual, x_bias)
        twice = rounded and x.dtype != dtype and residual is not None and residual.dtype == dtype
    if not ordinary or len(shape) != 2:
        x, residual = checks.rows(x), None if residual is None else checks.rows(residual)
    inputs = LayerNormInputs(
        x, weight, bias, residual, x_bias, eps, float(dropout_p), seed, offset, kind, return_sum
    )
    if return_sum and not summed(inputs):
        inputs = inputs._replace(return_sum=False)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs[:5])
    if torch.compiler.is_compiling():
        y, z, *_ = layer_norm_fwd(*inputs, save)
        more = [z]
    elif save:
        y, *more = LayerNormFunction.apply(*inputs, save, twice)
    else:
        key = x if residual is None else residual
        y, z, _, _, *more = dispatch.call("layer_norm_fwd", key, inputs, save, *_asked(twice))
        more.append(z)
    y = checks.as_dtype(y if len(shape) == 2 else y.view(shape), dtype)
    if not rounded and not return_sum:
        return y
    found = [y]
    if rounded:
        found.append(more[0].view(shape) if twice else y)
    if return_sum:
        found.append(checks.as_dtype(more[-1].view(shape), dtype) if inputs.return_sum else given)
    return tuple(found)
