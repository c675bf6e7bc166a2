"""Losses between rows of a student and of its teacher: logits, hidden states, sentence vectors.

    soft_cross_entropy    T² · KL(softmax(t / T) ‖ softmax(s / T))
    mean_squared          Σ_columns (s - t)² / columns
    cosine                1 - cos(s, t) = ‖s/|s| - t/|t|‖² / 2
    unit_distance         ‖s/|s| - t/|t|‖²

Each is the mean over rows, a scalar in float32 (float64 for a float64 student); 0 where there are no rows.
The gradient is the student's only. `fastbert.ops.linear_distillation` is the first one for a vocabulary.

Source: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", sec. 2; Jiao et al.
2020, "TinyBERT", eq. 8 (hidden states); Sanh et al. 2019, "DistilBERT", sec. 2 (cosine); Sun et al. 2019,
"Patient Knowledge Distillation", sec. 3.2 (unit distance).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.linear_distillation import check_temperature, softened_divergence


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T² · mean KL(softmax(teacher / T) ‖ softmax(student / T)); its gradient is the soft cross-entropy's.

    Args:
        student, teacher: logits, (rows, classes).
        temperature: T > 0.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    _check(student, teacher)
    check_temperature(temperature)
    return softened_divergence(student, teacher, temperature)


def mean_squared(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of the mean over columns of (student - teacher)².

    Args:
        student, teacher: (rows, width).
    """
    _check(student, teacher)
    compute = checks.compute_dtype(student)
    apart = student.to(compute) - teacher.detach().to(compute)
    return apart.square().sum() / max(1, apart.numel())


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of 1 - cos(student, teacher); 1/2 for a row of zeros.

    It is computed as half of `unit_distance`, which keeps the digits of small angles.

    Args:
        student, teacher: (rows, width).
    """
    return unit_distance(student, teacher) / 2


def unit_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of ‖student/|student| - teacher/|teacher|‖²; a row of zeros stays one.

    Args:
        student, teacher: (rows, width).
    """
    _check(student, teacher)
    compute = checks.compute_dtype(student)
    units = (torch.nn.functional.normalize(t.to(compute), dim=1) for t in (student, teacher.detach()))
    return (next(units) - next(units)).square().sum() / max(1, student.shape[0])


def _check(student: Tensor, teacher: Tensor) -> None:
    checks.float_tensor("student", student)
    checks.float_tensor("teacher", teacher, student)
    if student.dim() != 2 or student.shape[1] == 0:
        raise ValueError(f"student: expected shape (rows, columns >= 1), got {tuple(student.shape)}")
    checks.shape("teacher", teacher, tuple(student.shape))
