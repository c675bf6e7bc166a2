"""`linear_distillation`: a backend's products and their divergence, chunk by chunk; contract in fastbert/ops.

`chunked` makes the two functions of every backend from its `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastbert.backends.reference import linear
from fastbert.backends.reference.linear_cross_entropy import ONLY_DX, add_product, equal_parts, product_by
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.linear import LinearNeeds, LinearSaved
from fastbert.ops.linear_distillation import DistillationInputs, softened_divergence

DTYPES = FLOATS

# Elements held in float32 at a time: a thread's cache on the CPU, a kernel's worth on a GPU.
_BLOCK = {"cpu": 2**16, "cuda": 2**26}


def chunked(linear: ModuleType | SimpleNamespace) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(linear_distillation_fwd, linear_distillation_bwd), by the launchers of `linear`."""

    def both(inputs: DistillationInputs, times: int) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """The function that computes the student's and the teacher's logits of some rows."""
        student = product_by(linear, inputs.weight, inputs.bias, times)
        teacher = product_by(linear, inputs.teacher_weight, inputs.teacher_bias, times)
        return lambda part: (student(inputs.x[part]), teacher(inputs.teacher_x[part]))

    def forward(inputs: DistillationInputs, save: bool):
        rows, temperature = inputs.x.shape[0], inputs.temperature
        loss = inputs.x.new_zeros((), dtype=compute_dtype(inputs.x))
        parts, kept = equal_parts(rows, inputs.chunk_rows), (None, None)
        logits_of = both(inputs, len(parts))
        for part in parts:
            student, teacher = logits_of(part)
            for block in _blocks(student):
                found = softened_divergence(student[block], teacher[block], temperature)
                loss += found * ((block.stop - block.start) / rows)
            kept = (student, teacher) if save and len(parts) == 1 else kept
        return loss, *kept

    def backward(dloss, inputs: DistillationInputs, logits, teacher_logits, need: LinearNeeds):
        x, weight, parts = inputs.x, inputs.weight, equal_parts(inputs.x.shape[0], inputs.chunk_rows)
        need_dx, need_dweight, need_dbias = need
        logits_of = both(inputs, len(parts))
        scale = dloss * (inputs.temperature / max(1, x.shape[0]))
        if len(parts) == 1:
            if logits is None:
                logits, teacher_logits = logits_of(parts[0])
            g = _gradient(logits, teacher_logits, inputs.temperature, scale)
            x, weight = x if need_dweight else None, weight if need_dx else None
            return linear.linear_bwd(g, LinearSaved(x, weight), need)
        sums = compute_dtype(x)
        dx = x.new_empty(x.shape if need_dx else (0,))
        dweight = x.new_zeros(weight.shape if need_dweight else (0,), dtype=sums)
        dbias = x.new_zeros((weight.shape[0] if need_dbias else 0,), dtype=sums)
        for part in parts:
            g = _gradient(*logits_of(part), inputs.temperature, scale)
            if need_dx:
                dx[part] = linear.linear_bwd(g, LinearSaved(None, weight), ONLY_DX)[0]
            if need_dweight:
                add_product(dweight, g, x[part])
            if need_dbias:
                dbias += g.sum(0, dtype=sums)
            del g  # before there are other logits
        return dx, dweight.to(x.dtype), dbias.to(x.dtype)

    return forward, backward


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, classes = logits.shape
    threads = torch.get_num_threads() if logits.device.type == "cpu" else 1
    size = max(1, threads * _BLOCK.get(logits.device.type, 2**22) // classes)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _gradient(student: Tensor, teacher: Tensor, temperature: float, scale: Tensor) -> Tensor:
    """scale · (softmax(student / T) - softmax(teacher / T)), in storage dtype."""
    g, compute = torch.empty_like(student), compute_dtype(student)
    for block in _blocks(student):
        q, p = ((t[block].to(compute) / temperature).softmax(1) for t in (student, teacher))
        g[block] = q.sub_(p).mul_(scale)
    return g


linear_distillation_fwd, linear_distillation_bwd = chunked(linear)
