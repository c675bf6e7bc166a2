"""`linear_cross_entropy`: a backend's product and its loss, chunk by chunk; contract in fastbert/ops.

`chunked` makes the two functions of every backend from its `linear` and its `cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.backends.reference import cross_entropy, linear
from fastbert.ops.checks import FLOATS, TensorOrNone, compute_dtype
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.ops.linear_cross_entropy import LossInputs
from fastbert.runtime.table import HALF

DTYPES = FLOATS
ONLY_DX = LinearNeeds(True, False, False)


def chunked(
    linear: ModuleType | SimpleNamespace, cross_entropy: ModuleType, multiple: int = 1
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(linear_cross_entropy_fwd, linear_cross_entropy_bwd), by the launchers of two modules.

    In half precision the classes are brought to a multiple of `multiple` (see `_widened`).
    """

    def forward(inputs: LossInputs, save: bool):
        x, weight, bias, labels, labelled, ignore_index, label_smoothing, chunk_rows = inputs
        rows, classes, compute = x.shape[0], weight.shape[0], compute_dtype(x)
        weight, bias = _widened(weight, bias, multiple, label_smoothing)
        at = _labelled_rows(labels, labelled, ignore_index)
        x, targets = _take(x, at), _take(labels, at)
        total = targets.shape[0]
        parts = equal_parts(total, chunk_rows)
        product = product_by(linear, weight, bias, len(parts))
        loss, kept = x.new_zeros((), dtype=compute), x.new_empty(0)
        lse = x.new_zeros((2, total), dtype=compute)
        for part in parts:
            logits = product(x[part])
            mean, lse[:, part], _ = cross_entropy.cross_entropy_fwd(
                logits, targets[part], ignore_index, label_smoothing
            )
            if len(parts) == 1:
                loss, kept = mean, logits[:, :classes] if save else kept
            else:
                loss += mean * ((part.stop - part.start) / total)
        if at is not None:
            lse = lse.new_zeros((2, rows)).index_copy_(1, at, lse)
        return loss, lse, torch.full((), total, dtype=torch.int64, device=x.device), kept

    def backward(dloss, inputs: LossInputs, lse, count, logits, need: LinearNeeds):
        x, weight, bias, labels, labelled, ignore_index, label_smoothing, chunk_rows = inputs
        need_dx, need_dweight, need_dbias = need
        classes = logits.shape[1] if inputs.weight is None else inputs.weight.shape[0]
        if inputs.weight is not None:
            weight, bias = _widened(weight, bias, multiple, label_smoothing)
        if logits.dim() == 2 and logits.stride(0) > classes:  # with the columns that forward had added
            logits = logits.as_strided((logits.shape[0], logits.stride(0)), (logits.stride(0), 1))
        at = _labelled_rows(labels, labelled, ignore_index)
        rows, x, targets = labels.shape[0], _take(x, at), _take(labels, at)
        lse = lse if at is None else lse.index_select(1, at)
        parts = equal_parts(targets.shape[0], chunk_rows)

        def gradient(part: slice, logits: Tensor) -> Tensor:
            return cross_entropy.cross_entropy_bwd(
                dloss, logits, targets[part], lse[:, part].contiguous(), count, ignore_index, label_smoothing
            )

        if len(parts) == 1:
            if logits.dim() == 1:
                logits = product_by(linear, weight, bias, 1)(x)
            g = gradient(parts[0], logits)
            wide = weight is not None and weight.dtype != g.dtype
            x, weight = x if need_dweight else None, weight if need_dx or wide else None
            dx, dweight, dbias = linear.linear_bwd(g, LinearSaved(x, weight), need)
            return (_put(dx, at, rows) if need_dx else dx), _first(dweight, classes), _first(dbias, classes)

        sums = compute_dtype(x)
        dx = x.new_empty((x.shape[0], x.shape[1]) if need_dx else (0,))
        dweight = x.new_zeros(weight.shape if need_dweight else (0,), dtype=sums)
        dbias = x.new_zeros((weight.shape[0] if need_dbias else 0,), dtype=sums)
        product = product_by(linear, weight, bias, len(parts))
        for part in parts:
            g = gradient(part, product(x[part]))
            if need_dx:
                dx[part] = linear.linear_bwd(g, LinearSaved(None, weight), ONLY_DX)[0]
            if need_dweight:
                add_product(dweight, g, x[part])
            if need_dbias:
                dbias += g.sum(0, dtype=sums)
            del g  # before there are other logits
        dweight, dbias = (_first(t, classes).to(weight.dtype) for t in (dweight, dbias))
        return _put(dx, at, rows) if need_dx else dx, dweight, dbias

    return forward, backward


def product_by(
    linear: ModuleType | SimpleNamespace, weight: Tensor, bias: Tensor | None, times: int
) -> Callable[[Tensor], Tensor]:
    """The function that multiplies by `weight` with a backend's `linear`; it is called `times` times."""
    make = getattr(linear, "linear_panels", None) if times > 1 else None
    panels = make(weight) if make is not None else None
    return lambda x: linear.linear_fwd(LinearInputs(x, weight, bias, panels=panels), False)[0]


def _widened(
    weight: Tensor, bias: Tensor | None, multiple: int, label_smoothing: float
) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) with further classes up to a multiple, whose logits are -infinity: their share of the
    softmax is 0, and so is every gradient.

    cuBLAS takes its kernels of an older architecture where rows of logits do not lie on 16 bytes: 30,522
    classes took it 526, 519 and 486 us in a step of BERT-base on an H100, for 177 us of work each. Smoothed
    labels have a share of every class, so these stay as they are.
    """
    missing = -weight.shape[0] % multiple
    if missing == 0 or label_smoothing > 0 or weight.dtype not in HALF:
        return weight, bias
    known = weight.new_zeros(weight.shape[0]) if bias is None else bias
    wider = F.pad(known, (0, missing), value=-torch.inf)
    return F.pad(weight, (0, 0, 0, missing)), wider


def _labelled_rows(labels: Tensor, labelled: int, ignore_index: int) -> Tensor | None:
    """(labelled,) row numbers; None where all rows are labelled. `labelled` < 0 means unknown."""
    if labelled == labels.shape[0]:
        return None
    keep = labels != ignore_index
    if labelled < 0:
        return keep.nonzero().squeeze(1)
    return torch.nonzero_static(keep, size=labelled).squeeze(1)


def equal_parts(total: int, chunk_rows: int) -> list[slice]:
    """The rows 0 to total in as few parts as `chunk_rows` allows, of equal size but for the last."""
    size = -(-total // max(1, -(-total // chunk_rows)))
    return [slice(start, min(start + size, total)) for start in range(0, total, max(1, size))]


def _take(t: TensorOrNone, at: Tensor | None) -> TensorOrNone:
    return t if t is None or at is None else t.index_select(0, at)


def _first(t: Tensor, classes: int) -> Tensor:
    """The first rows of `t`, not as a view where it has no more.

    Autograd adds another gradient of a tied weight in place, except to a view: that takes fresh memory of the
    size of a vocabulary, 80 to 130 ms of a CPU's step.
    """
    return t if t.shape[0] <= classes else t[:classes]


def _put(t: Tensor, at: Tensor | None, rows: int) -> Tensor:
    """The opposite of `_take`: zeros in all other rows."""
    return t if at is None else t.new_zeros((rows, t.shape[1])).index_copy_(0, at, t)


def add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total += g.T @ x; the product is not rounded to storage dtype, which would cost a tenth more error."""
    if total.dtype == g.dtype:
        total.addmm_(g.t(), x)
    elif g.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype"):  # PyTorch >= 2.8
        total.add_(torch.mm(g.t(), x, out_dtype=total.dtype))
    else:
        total.addmm_(g.t().to(total.dtype), x.to(total.dtype))


linear_cross_entropy_fwd, linear_cross_entropy_bwd = chunked(linear, cross_entropy)
