r"""Cross-entropy over the labelled rows.

Forward, for row i with label t, K classes, label smoothing s, in float32 (float64 for float64 logits):

    m = max_k x_k,  l = log Σ_k exp(x_k - m)          so that log softmax(x)_k = (x_k - m) - l
    loss_i = l - (1 - s) (x_t - m) - s / K Σ_k (x_k - m)
    loss = Σ loss_i over the labelled rows / their number; 0 where there are none

Backward:

    dx_k = dloss / count * (softmax(x)_k - (1 - s) [k = t] - s / K),  0 in rows without a label

`lse` is saved in its two parts (m, l), because x - (m + l) loses its digits where logits reach 1e4. Rows
whose label is `ignore_index` are not computed: no value in them reaches the loss or a gradient. A logit of
-inf rules a class out. That is legal, but if the class is the label, or with label smoothing, the loss is
infinite by the formula.

Source: Szegedy et al. 2015, "Rethinking the Inception Architecture", sec. 7 (label smoothing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.runtime import dispatch


def cross_entropy_ref(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; in float64 for float64 `logits`, else in float32."""
    keep = labels != ignore_index
    x, labels = logits[keep].to(checks.compute_dtype(logits)), labels[keep].long()
    if labels.numel() == 0:
        return x.sum()  # 0, with a gradient of 0
    log_p = x - x.logsumexp(1, keepdim=True)
    loss = -log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    if label_smoothing > 0:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * log_p.mean(1)
    return loss.mean()


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


@torch.library.custom_op("fastbert::cross_entropy_fwd", mutates_args=())
def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss (), lse (2, rows), count () int64); lse is the max and the log of the sum, 0 where ignored."""
    rows, classes = checks.matrix("logits", logits)
    labels = checked_labels(labels, rows, classes, logits, ignore_index, label_smoothing)
    return dispatch.call("cross_entropy_fwd", logits, logits, labels, ignore_index, label_smoothing)


@cross_entropy_fwd.register_fake
def _(logits, labels, ignore_index, label_smoothing):
    compute = checks.compute_dtype(logits)
    return (
        logits.new_empty((), dtype=compute),
        logits.new_empty((2, logits.shape[0]), dtype=compute),
        labels.new_empty(()),
    )


@torch.library.custom_op("fastbert::cross_entropy_bwd", mutates_args=())
def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    count: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Dlogits, contiguous, in the dtype of `logits`."""
    rows, classes = checks.matrix("logits", logits)
    labels = checked_labels(labels, rows, classes, logits, ignore_index, label_smoothing)
    check_statistics(dloss, lse, count, rows, logits)
    return dispatch.call(
        "cross_entropy_bwd", logits, dloss, logits, labels, lse, count, ignore_index, label_smoothing
    )


@cross_entropy_bwd.register_fake
def _(dloss, logits, labels, lse, count, ignore_index, label_smoothing):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def check_statistics(dloss: Tensor, lse: Tensor, count: Tensor, rows: int, logits: Tensor) -> None:
    """Check what backward takes besides the arguments of forward."""
    compute = (checks.compute_dtype(logits),)
    checks.operand("dloss", dloss, (), compute, logits)
    checks.operand("lse", lse, (2, rows), compute, logits)
    checks.operand("count", count, (), (torch.int64,), logits)


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs, output):
    logits, labels, ctx.ignore_index, ctx.label_smoothing = inputs
    _loss, lse, count = output
    ctx.save_for_backward(logits, labels, lse, count)
    ctx.set_materialize_grads(False)


def _backward(launch, ctx, dloss):
    if dloss is None:
        return (None,) * 4
    return launch(dloss, *ctx.saved_tensors, ctx.ignore_index, ctx.label_smoothing), None, None, None


class CrossEntropyFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        output = dispatch.call("cross_entropy_fwd", inputs[0], *inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None) -> tuple[Any, ...]:
        return _backward(lambda *args: dispatch.call("cross_entropy_bwd", args[1], *args), ctx, dloss)


cross_entropy_fwd.register_autograd(
    lambda ctx, dloss, *_: _backward(cross_entropy_bwd, ctx, dloss), setup_context=_setup_context
)


# --- public function ----------------------------------------------------------------------------------------


def checked_labels(
    labels: Tensor, rows: int, classes: int, like: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """The labels as the backends take them; TypeError or ValueError where one of the arguments is wrong."""
    checks.int_tensor("labels", labels, like)
    checks.shape("labels", labels, (rows,))
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index: expected an integer, got {ignore_index!r}")
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a number in [0, 1], got {label_smoothing!r}")
    labels = labels.to(torch.int64)
    if checks.has_values(labels) and not torch.compiler.is_compiling():
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise ValueError(
                f"labels: label {wrong[0].item()} is out of range for {classes} classes "
                f"(ignore_index is {ignore_index})"
            )
    return labels.contiguous()


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of the labelled rows.

    Labels on the CPU are checked against the number of classes; on other devices that would stop the device.

    Args:
        logits: (rows, classes), float32, bfloat16, float16 or float64.
        labels: (rows,) int64 or int32, in [0, classes) or equal to `ignore_index`.
        ignore_index: label of the rows that do not count.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1].

    Returns:
        The loss, a scalar in float32 (float64 for float64 logits); 0 with zero gradients where nothing is
        labelled. The gradient has the dtype of `logits`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Szegedy et al. 2015, "Rethinking the Inception Architecture", sec. 7.
    """
    checks.float_tensor("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"logits: expected shape (rows, classes) with classes >= 1, got {tuple(logits.shape)}"
        )
    rows, classes = logits.shape
    labels = checked_labels(labels, rows, classes, logits, ignore_index, label_smoothing)
    if derivatives.plain_torch():
        return cross_entropy_ref(logits, labels, ignore_index, label_smoothing)
    args = (checks.rows(logits), labels, ignore_index, float(label_smoothing))
    if torch.compiler.is_compiling():
        return cross_entropy_fwd(*args)[0]
    if torch.is_grad_enabled() and logits.requires_grad:
        return CrossEntropyFunction.apply(*args)
    return dispatch.call("cross_entropy_fwd", args[0], *args)[0]
