"""Losses between rows of a student and of its teacher: logits, hidden states, sentence vectors.

    soft_cross_entropy    T² · KL(softmax(t / T) ‖ softmax(s / T))
    mean_squared          Σ_columns (s - t)² / columns
    cosine                1 - cos(s, t) = ‖s/|s| - t/|t|‖² / 2
    unit_distance         ‖s/|s| - t/|t|‖²
    top_words             T² · KL over the teacher's k likeliest words, and the other words as one

Each is the mean over rows, a scalar in float32 (float64 for a float64 student); 0 where there are no rows.
The gradient is the student's only. `fastbert.ops.linear_distillation` is the first one for a vocabulary.

`top_words` needs k numbers of the teacher per row, and one more: the logarithm of the other words' sum. With
p and q the probabilities at temperature T and r = Σ p over the other words, it lacks r · T² · KL of p and q
among these words alone. So it is never above the whole divergence, and equal to it where r is 0.

Source: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", sec. 2; Jiao et al.
2020, "TinyBERT", eq. 8 (hidden states); Sanh et al. 2019, "DistilBERT", sec. 2 (cosine); Sun et al. 2019,
"Patient Knowledge Distillation", sec. 3.2 (unit distance).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastbert.ops import checks
from fastbert.ops.linear import linear
from fastbert.ops.linear_distillation import CHUNK_BYTES, check_temperature, softened_divergence


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


def likeliest(logits: Tensor, count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """A teacher's likeliest words, as `top_words` takes them.

    Args:
        logits: (rows, words).
        count: k, below the number of words.
        temperature: T > 0.

    Returns:
        (rows, k) int64, the words; (rows, k + 1), their logits / T, then the logarithm of Σ exp(logit / T)
        over all other words.
    """
    words = logits.topk(count).indices
    return words, _lumped(logits, words, temperature)


def top_words(student: Tensor, words: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T² · mean KL over the teacher's likeliest words, and all others as one; see the module.

    Args:
        student: logits, (rows, words).
        words, teacher: of `likeliest`, by the same temperature.
        temperature: T > 0.
    """
    check_temperature(temperature)
    return temperature**2 * softened_divergence(_lumped(student, words, temperature), teacher)


def linear_top_words(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    words: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """`top_words` of x @ weight.T + bias, without all logits at a time: backward computes them again.

    Args:
        x: (rows, in).
        weight: (words, in).
        bias: (words,) or None.
        words, teacher, temperature: see `top_words`.
        chunk_bytes: limit for the bytes of a chunk's logits and what is made of them; one row is always
            computed. None means `CHUNK_BYTES` of the device.
    """
    size = CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cpu"]) if chunk_bytes is None else chunk_bytes
    rows = max(1, size // (16 * weight.shape[0]))

    def chunk(x: Tensor, words: Tensor, teacher: Tensor) -> Tensor:
        return len(x) * top_words(linear(x, weight, bias), words, teacher, temperature)

    parts = zip(x.split(rows), words.split(rows), teacher.split(rows), strict=True)
    sums = [checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum() / max(1, len(x))


def _lumped(logits: Tensor, words: Tensor, temperature: float) -> Tensor:
    """(rows, k + 1): logits / T of the words, and the logarithm of the sum over all other words."""
    scaled = logits.to(checks.compute_dtype(logits)) / temperature
    others = scaled.scatter(1, words, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([scaled.gather(1, words), others], 1)


def _check(student: Tensor, teacher: Tensor) -> None:
    checks.float_tensor("student", student)
    checks.float_tensor("teacher", teacher, student)
    if student.dim() != 2 or student.shape[1] == 0:
        raise ValueError(f"student: expected shape (rows, columns >= 1), got {tuple(student.shape)}")
    checks.shape("teacher", teacher, tuple(student.shape))
