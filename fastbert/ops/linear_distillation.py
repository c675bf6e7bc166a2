r"""Divergence of a teacher's softened predictions from a student's, without all of their logits at a time.

Forward, with x (rows, in), weight (classes, in), bias (classes,), the teacher's of the same names, of a width
of its own, and temperature T:

    s = x @ weight.T + bias,  t = teacher_x @ teacher_weight.T + teacher_bias
    q = softmax(s / T),  p = softmax(t / T)
    loss = T² / rows Σ_rows Σ_classes (q - p - p (log q - log p)) = T² · mean over rows of KL(p ‖ q)

The sums of q and of p are 1, so q - p changes nothing but the rounding error: that of log q and log p then
counts only times q - p. Backward, in the student's tensors only:

    g = dloss T / rows (q - p),  dx = g @ weight,  dweight = g.T @ x,  dbias = Σ_rows g

Rows are computed in chunks of equal size, so that both logits of a chunk and their gradient fit a stated
number of bytes. Logits and g have the storage dtype, as those of a linear layer have; dweight and dbias are
summed over the chunks in float32 (float64 for float64) and rounded once.

Saved: the inputs, and both logits if they fit one chunk; else backward computes them again.

Source: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", sec. 2, for the loss;
Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", sec. 3, for the memory of logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.linear import NEEDS, LinearNeeds
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch

# `chunk_bytes` by default: as many rows as those of `linear_cross_entropy`, with both logits.
CHUNK_BYTES = {"cpu": 3 * 2**26, "cuda": 3 * 2**28}


class DistillationInputs(NamedTuple):
    """The arguments of forward that backward needs too."""

    x: Tensor
    weight: Tensor
    bias: TensorOrNone
    teacher_x: Tensor
    teacher_weight: Tensor
    teacher_bias: TensorOrNone
    temperature: float
    chunk_rows: int


def softened_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T² · mean over rows of KL(softmax(teacher / T) ‖ softmax(student / T)); 0 where there are no rows.

    Plain PyTorch, differentiable by autograd in `student`; in float64 for a float64 student, else in float32.
    A class that the teacher rules out, with a logit of -inf, has a share of 0. One that the student alone
    rules out makes the loss infinite.

    Args:
        student, teacher: logits, (rows, classes).
        temperature: T > 0.
    """
    compute = checks.compute_dtype(student)
    log_q = (student.to(compute) / temperature).log_softmax(1)
    log_p = (teacher.detach().to(compute) / temperature).log_softmax(1)
    p = log_p.exp()
    # where p is 0, so is its product; a NaN of the logits stays in q - p
    apart = (log_p - log_q).nan_to_num(nan=0.0, posinf=torch.inf, neginf=0.0)
    return (log_q.exp() - p + p * apart).sum() * (temperature**2 / max(1, student.shape[0]))


def linear_distillation_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    temperature: float = 1.0,
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 `x`, else in float32."""
    compute = checks.compute_dtype(x)
    student, teacher = (
        torch.nn.functional.linear(x.to(compute), w.to(compute), None if b is None else b.to(compute))
        for x, w, b in ((x, weight, bias), (teacher_x, teacher_weight, teacher_bias))
    )
    return softened_divergence(student, teacher, temperature)


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


def _checked(inputs: DistillationInputs) -> DistillationInputs:
    """Check what any caller may pass to `torch.ops`."""
    x, weight, bias, teacher_x, teacher_weight, teacher_bias, temperature, chunk_rows = inputs
    rows, depth = checks.matrix("x", x)
    teacher_depth = checks.matrix("teacher_x", teacher_x)[1]
    classes = checks.matrix("weight", weight)[0]
    checks.operand("weight", weight, (classes, depth), (x.dtype,), x, strided=True)
    checks.operand("bias", bias, (classes,), (x.dtype,), x)
    checks.operand("teacher_x", teacher_x, (rows, teacher_depth), (x.dtype,), x, strided=True)
    checks.operand("teacher_weight", teacher_weight, (classes, teacher_depth), (x.dtype,), x, strided=True)
    checks.operand("teacher_bias", teacher_bias, (classes,), (x.dtype,), x)
    check_temperature(temperature)
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected an integer >= 1, got {chunk_rows}")
    return inputs


@torch.library.custom_op(
    "fastbert::linear_distillation_fwd", mutates_args=(), schema=schema(DistillationInputs, returns=1)
)
def linear_distillation_fwd(*args: Any) -> Tensor:
    """The loss (), in float32 (float64 for float64 `x`)."""
    inputs = _checked(DistillationInputs(*args))
    return dispatch.call("linear_distillation_fwd", inputs.x, inputs, False)[0]


@linear_distillation_fwd.register_fake
def _(x, *_):
    return x.new_empty((), dtype=checks.compute_dtype(x))


@torch.library.custom_op(
    "fastbert::linear_distillation_bwd",
    mutates_args=(),
    schema=schema("Tensor dloss", DistillationInputs, NEEDS, returns=3),
)
def linear_distillation_bwd(dloss: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each of shape (0,) where not needed. It computes the logits again."""
    inputs, need = _checked(DistillationInputs(*args[:-3])), LinearNeeds(*args[-3:])
    checks.operand("dloss", dloss, (), (checks.compute_dtype(inputs.x),), inputs.x)
    if need.dbias and inputs.bias is None:
        raise ValueError("bias: expected a torch.Tensor, whose gradient is asked for, got None")
    return dispatch.call("linear_distillation_bwd", inputs.x, dloss, inputs, None, None, need)


@linear_distillation_bwd.register_fake
def _(dloss, x, weight, *options):
    need_dx, need_dweight, need_dbias = options[-3:]
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight.shape if need_dweight else (0,)),
        x.new_empty((weight.shape[0] if need_dbias else 0,)),
    )


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs, kept=(None, None)):
    ctx.save_for_backward(*inputs[:6], *kept)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[6:]


def _backward(launch, ctx, dloss):
    if dloss is None:
        return (None,) * 8
    *tensors, logits, teacher_logits = ctx.saved_tensors
    need = LinearNeeds(*ctx.needs_input_grad[:3])
    grads = launch(dloss, DistillationInputs(*tensors, *ctx.options), logits, teacher_logits, need)
    return *(g if needed else None for g, needed in zip(grads, need, strict=True)), *(None,) * 5


class LinearDistillationFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs = DistillationInputs(*args)
        loss, *kept = dispatch.call("linear_distillation_fwd", inputs.x, inputs, True)
        _setup_context(ctx, inputs, kept)
        return loss

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Any, ...]:
        function = "linear_distillation_bwd"
        return _backward(lambda *args: dispatch.call(function, args[1].x, *args), ctx, dloss)


linear_distillation_fwd.register_autograd(
    lambda ctx, dloss: _backward(
        lambda dloss, inputs, _logits, _teacher_logits, need: linear_distillation_bwd(dloss, *inputs, *need),
        ctx,
        dloss,
    ),
    setup_context=lambda ctx, inputs, output: _setup_context(ctx, inputs),
)


# --- public function ----------------------------------------------------------------------------------------


def check_temperature(temperature: float) -> None:
    """ValueError unless `temperature` is a finite number above 0."""
    if not isinstance(temperature, (int, float)) or not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a finite number > 0, got {temperature!r}")


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """T² · mean over rows of KL(softmax(teacher's logits / T) ‖ softmax(student's logits / T)).

    Under autocast all tensors are cast, as `F.linear` does. The teacher's tensors get no gradient.

    Args:
        x: (rows, in), float32, bfloat16, float16 or float64.
        weight: (classes, in), of `x`'s dtype outside autocast, as are all tensors.
        bias: (classes,) or None.
        teacher_x: (rows, teacher_in), the same rows of the teacher.
        teacher_weight: (classes, teacher_in).
        teacher_bias: (classes,) or None.
        temperature: T > 0; it divides both logits.
        chunk_bytes: limit for the bytes of both logits and their gradient at a time; one row is always
            computed. None means `CHUNK_BYTES` of the device. It changes nothing but how sums are rounded.

    Returns:
        The loss, a scalar in float32 (float64 for float64 `x`); 0 with zero gradients where there are no
        rows. Each gradient has its argument's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", sec. 2.
    """
    given = {"x": x, "weight": weight, "bias": bias}
    given |= {"teacher_x": teacher_x, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    for name, t in given.items():
        if t is not None or not name.endswith("bias"):
            checks.float_tensor(name, t, None if name == "x" else x)
    for name, t in (("x", x), ("teacher_x", teacher_x)):
        if t.dim() != 2 or t.shape[1] == 0:
            raise ValueError(f"{name}: expected shape (rows, in) with in >= 1, got {tuple(t.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] == 0:
        raise ValueError(f"weight: expected shape (classes, {x.shape[1]}), got {tuple(weight.shape)}")
    classes = weight.shape[0]
    checks.shape("teacher_x", teacher_x, (x.shape[0], teacher_x.shape[1]))
    checks.shape("teacher_weight", teacher_weight, (classes, teacher_x.shape[1]))
    for name, t in (("bias", bias), ("teacher_bias", teacher_bias)):
        if t is not None:
            checks.shape(name, t, (classes,))
    check_temperature(temperature)
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cpu"])
    elif not isinstance(chunk_bytes, int) or isinstance(chunk_bytes, bool) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: expected an integer >= 1, got {chunk_bytes!r}")
    tensors = checks.under_autocast(*given.values())
    for name, t in zip(given, tensors, strict=True):
        if t is not None:
            checks.same_dtype(name, t, "x", tensors[0])
    chunk_rows = max(1, chunk_bytes // (3 * classes * tensors[0].element_size()))
    plain = [t if t is None else t.contiguous() if t.dim() == 1 else checks.rows(t) for t in tensors]
    student, teacher = plain[:3], [t if t is None else t.detach() for t in plain[3:]]
    inputs = DistillationInputs._make((*student, *teacher, float(temperature), chunk_rows))
    if torch.compiler.is_compiling():
        return linear_distillation_fwd(*inputs)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in student):
        return LinearDistillationFunction.apply(*inputs)
    return dispatch.call("linear_distillation_fwd", inputs.x, inputs, False)[0]
