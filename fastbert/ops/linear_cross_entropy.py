r"""Cross-entropy of a linear layer's output, over the labelled rows, without all of their logits at a time.

Forward, with x (rows, in), weight (classes, in), bias (classes,), labels (rows,):

    logits = x @ weight.T + bias
    loss = the mean of cross_entropy(logits_i, label_i) over the labelled rows; 0 where there are none

Backward, with g the gradient of the logits (ops/cross_entropy.py):

    dx = g @ weight, 0 in rows without a label,  dweight = g.T @ x,  dbias = Σ_rows g

Only labelled rows are computed, in chunks of equal size whose logits, with their gradient, fit a stated
number of bytes. Logits and g have the storage dtype, as those of a linear layer have; dweight and dbias are
summed over the chunks in float32 (float64 for float64) and rounded once.

Saved: x and weight. The logits, too, if they fit one chunk; else backward computes them again, which is a
third more work in this layer and one or two hundredths of BERT's training step. Gradients made in forward
would save that, but they do not know dloss: in float16 they would lose what a GradScaler is there to keep,
they would be rounded twice, and a float32 dweight would be held, and read and written once more to be scaled.
The peak is the same: it falls where backward begins, and there a chunk exists either way.

Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", sec. 3, for the memory of
logits; Szegedy et al. 2015, "Rethinking the Inception Architecture", sec. 7 (label smoothing).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.cross_entropy import check_statistics, checked_labels, cross_entropy_ref
from fastbert.ops.linear import NEEDS, LinearNeeds, is_wide, operands, reads_wide
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch

# `chunk_bytes` by default: enough that in usual batches, 15% labelled, nothing is computed twice.
# That is 32 x 512 tokens in bfloat16 on a GPU, and 24 x 128 in float32 on a CPU.
CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**29}
UNKNOWN = -1  # the number of labelled rows, where the host has not seen it


class LossInputs(NamedTuple):
    """The arguments of forward that backward needs too."""

    x: TensorOrNone
    weight: TensorOrNone
    bias: TensorOrNone
    labels: Tensor
    labelled: int
    ignore_index: int
    label_smoothing: float
    chunk_rows: int


def linear_cross_entropy_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 `x`, else in float32."""
    compute = checks.compute_dtype(x)
    keep = labels != ignore_index
    logits = x[keep].to(compute) @ weight.to(compute).T
    if bias is not None:
        logits = logits + bias.to(compute)
    return cross_entropy_ref(logits, labels[keep], ignore_index, label_smoothing)


# --- custom ops: what torch.compile sees --------------------------------------------------------------------

# Where the number of labels is not known, these ops wait for the device: Inductor may not capture them.
_WAITING: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


def _checked(inputs: LossInputs) -> LossInputs:
    """Check what any caller may pass to `torch.ops`; the labels as the backends take them."""
    x, weight, bias, labels, labelled, ignore_index, label_smoothing, chunk_rows = inputs
    rows, depth = checks.matrix("x", x)
    classes = 0 if weight is None or weight.dim() == 0 else weight.shape[0]
    checks.operand("weight", weight, (classes, depth), (x.dtype,), x, strided=True, needed=True)
    checks.operand("bias", bias, (classes,), (x.dtype,), x)
    if not UNKNOWN <= labelled <= rows:
        raise ValueError(f"labelled: expected an integer from {UNKNOWN} to {rows}, got {labelled}")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected an integer >= 1, got {chunk_rows}")
    labels = checked_labels(labels, rows, classes, x, ignore_index, label_smoothing)
    _checked_number(None if labelled == UNKNOWN else labelled, labels, ignore_index)
    return inputs._replace(labels=labels)


@torch.library.custom_op(
    "fastbert::linear_cross_entropy_fwd",
    mutates_args=(),
    schema=schema(LossInputs, returns=4),
    **_WAITING,
)
def linear_cross_entropy_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss (), lse (2, rows), count () int64, logits).

    lse as in `cross_entropy_fwd`. The logits are (labelled rows, classes) where they are kept for backward,
    of shape (0,) otherwise: always under torch.compile, which could not know their shape.
    """
    inputs = _checked(LossInputs(*args))
    return dispatch.call("linear_cross_entropy_fwd", inputs.x, inputs, False)


@linear_cross_entropy_fwd.register_fake
def _(*args):
    x, _, _, labels, *_ = args
    compute = checks.compute_dtype(x)
    return (
        x.new_empty((), dtype=compute),
        x.new_empty((2, x.shape[0]), dtype=compute),
        labels.new_empty(()),
        x.new_empty((0,)),
    )


@torch.library.custom_op(
    "fastbert::linear_cross_entropy_bwd",
    mutates_args=(),
    schema=schema("Tensor dloss", LossInputs, "Tensor lse, Tensor count, Tensor logits", NEEDS, returns=3),
    **_WAITING,
)
def linear_cross_entropy_bwd(dloss: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each of shape (0,) where not needed.

    Where logits are given, `x` is None if dweight is not needed, `weight` if dx is not: never here, because
    the custom op's forward keeps none.
    """
    inputs, (lse, count, logits), need = LossInputs(*args[:8]), args[8:11], LinearNeeds(*args[11:])
    x = inputs.x
    checks.operand("x", x, () if x is None else x.shape, checks.FLOATS, logits, strided=True, needed=True)
    inputs = _checked(inputs)
    check_statistics(dloss, lse, count, inputs.x.shape[0], inputs.x)
    checks.operand("logits", logits, (0,), (inputs.x.dtype,), inputs.x)
    if need.dbias and inputs.bias is None:
        raise ValueError("bias: expected a torch.Tensor, whose gradient is asked for, got None")
    return dispatch.call("linear_cross_entropy_bwd", logits, dloss, inputs, lse, count, logits, need)


@linear_cross_entropy_bwd.register_fake
def _(dloss, x, weight, bias, labels, *options):
    logits, need_dx, need_dweight, need_dbias = options[-4:]
    return (
        logits.new_empty((labels.shape[0], weight.shape[1]) if need_dx else (0,)),
        logits.new_empty((weight.shape[0], x.shape[1]) if need_dweight else (0,)),
        logits.new_empty((bias.shape[0] if need_dbias else 0,)),
    )


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs: LossInputs, output):
    _loss, lse, count, logits = output
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    again = logits.dim() == 1  # they were not kept
    x = inputs.x if again or need_dweight else None
    weight = inputs.weight if again or need_dx or is_wide(inputs.weight, inputs.x) else None
    ctx.save_for_backward(x, weight, inputs.bias, inputs.labels, lse, count, logits)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[4:]


def _backward(launch: Callable[..., Any], ctx: Any, dloss: Tensor | None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 8
    *tensors, lse, count, logits = ctx.saved_tensors
    need = LinearNeeds(*ctx.needs_input_grad[:3])
    inputs = LossInputs(*tensors, *ctx.options)
    wide = is_wide(inputs.weight, logits)
    if wide and not reads_wide(logits.device, logits.dtype, "linear_cross_entropy"):  # as in `linear`
        bias = None if inputs.bias is None else inputs.bias.to(logits.dtype)
        inputs = inputs._replace(weight=inputs.weight.to(logits.dtype), bias=bias)
    grads = launch(dloss, inputs, lse, count, logits, need)
    return *(g if needed else None for g, needed in zip(grads, need, strict=True)), *(None,) * 5


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        inputs = LossInputs(*args)
        output = dispatch.call("linear_cross_entropy_fwd", inputs.x, inputs, True)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Any, ...]:
        function = "linear_cross_entropy_bwd"
        return _backward(lambda *args: dispatch.call(function, args[4], *args), ctx, dloss)


def _compiled_bwd(dloss, inputs, lse, count, logits, need):
    """The custom op, called as a backend's `linear_cross_entropy_bwd` is."""
    return linear_cross_entropy_bwd(dloss, *inputs, lse, count, logits, *need)


linear_cross_entropy_fwd.register_autograd(
    lambda ctx, dloss, *_: _backward(_compiled_bwd, ctx, dloss),
    setup_context=lambda ctx, inputs, output: _setup_context(ctx, LossInputs(*inputs), output),
)


# --- public function ----------------------------------------------------------------------------------------


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    labelled: int | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Mean cross-entropy of x @ weight.T + bias over the labelled rows, which alone are computed.

    Under autocast it casts as `F.linear` does. Labels on the CPU are checked against the number of classes;
    on other devices that would stop the device.

    Args:
        x: (rows, in), float32, bfloat16, float16 or float64.
        weight: (classes, in), of `x`'s dtype outside autocast.
        bias: (classes,) of `x`'s dtype outside autocast, or None.
        labels: (rows,) int64 or int32, in [0, classes) or equal to `ignore_index`.
        ignore_index: label of the rows that do not count.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1].
        labelled: number of rows whose label is not `ignore_index`, if the host knows it; otherwise the host
            waits for the GPU. Checked on the CPU only: on a GPU a wrong number makes a wrong loss.
        chunk_bytes: limit for the bytes of logits and their gradient at a time; one row is always computed.
            None means `CHUNK_BYTES` of the device. It changes nothing but how sums are rounded.

    Returns:
        The loss, a scalar in float32 (float64 for float64 `x`); 0 with zero gradients where nothing is
        labelled. Each gradient has its argument's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", sec. 3.
    """
    checks.float_tensor("x", x)
    checks.float_tensor("weight", weight, x)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x: expected shape (rows, in) with in >= 1, got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] == 0:
        raise ValueError(f"weight: expected shape (classes, {x.shape[1]}), got {tuple(weight.shape)}")
    rows, classes = x.shape[0], weight.shape[0]
    if bias is not None:
        checks.float_tensor("bias", bias, x)
        checks.shape("bias", bias, (classes,))
    labels = checked_labels(labels, rows, classes, x, ignore_index, label_smoothing)
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(x.device.type, 2**27)
    elif not isinstance(chunk_bytes, int) or isinstance(chunk_bytes, bool) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: expected an integer >= 1, got {chunk_bytes!r}")
    labelled = _checked_number(labelled, labels, ignore_index)
    x, weight, bias = operands(x, weight, bias, "linear_cross_entropy")
    bias = None if bias is None else bias.contiguous()
    chunk_rows = max(1, chunk_bytes // (2 * classes * x.element_size()))
    x, weight, smoothing = checks.rows(x), checks.rows(weight), float(label_smoothing)
    inputs = LossInputs(x, weight, bias, labels, labelled, ignore_index, smoothing, chunk_rows)
    if torch.compiler.is_compiling():
        return linear_cross_entropy_fwd(*inputs)[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs[:3]):
        return LinearCrossEntropyFunction.apply(*inputs)
    return dispatch.call("linear_cross_entropy_fwd", x, inputs, False)[0]


def _checked_number(labelled: int | None, labels: Tensor, ignore_index: int) -> int:
    """The number of labelled rows; UNKNOWN under torch.compile if the caller does not pass it."""
    if labelled is not None and (
        not isinstance(labelled, int) or isinstance(labelled, bool) or not 0 <= labelled <= labels.shape[0]
    ):
        raise ValueError(
            f"labelled: expected None or an integer from 0 to {labels.shape[0]}, got {labelled!r}"
        )
    if torch.compiler.is_compiling():
        return UNKNOWN if labelled is None else labelled
    if labelled is None or labels.device.type == "cpu":
        found = int((labels != ignore_index).sum())
        if labelled not in (None, found):
            raise ValueError(f"labelled: {labelled}, but labels has {found} other than {ignore_index}")
        return found
    return labelled
