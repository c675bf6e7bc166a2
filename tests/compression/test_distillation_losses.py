"""Losses between rows: what PyTorch defines, gradients, a teacher that is the student, bad inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastbert.compression.distillation import losses
from tests.support.inputs import name
from tests.support.ops import DTYPES

ROWS, WIDTH = 9, 12
TEMPERATURE = 3.0


def soft(student, teacher):
    """The cross-entropy with soft labels, less its least value, the teacher's entropy."""
    p = (teacher / TEMPERATURE).softmax(1)
    entropy = torch.special.entr(p).sum(1).mean()
    return TEMPERATURE**2 * (F.cross_entropy(student / TEMPERATURE, p) - entropy)


def unit(student, teacher):
    return (F.normalize(student) - F.normalize(teacher)).norm(dim=1).square().mean()


LOSSES = {
    "soft_cross_entropy": (lambda *args: losses.soft_cross_entropy(*args, TEMPERATURE), soft),
    "mean_squared": (losses.mean_squared, F.mse_loss),
    "cosine": (losses.cosine, lambda s, t: (1 - F.cosine_similarity(s, t)).mean()),
    "unit_distance": (losses.unit_distance, unit),
}
of_each = pytest.mark.parametrize("loss", LOSSES)


def rows(dtype=torch.float64, count=ROWS):
    g = torch.Generator().manual_seed(count)
    student, teacher = (torch.randn(count, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    return student.to(dtype).requires_grad_(), 2 * teacher.to(dtype)


@of_each
def test_loss_and_gradient_are_as_defined(loss):
    found, expected = LOSSES[loss]
    student, teacher = rows()
    both = found(student, teacher), expected(student, teacher)
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    grads = (torch.autograd.grad(t, student)[0] for t in both)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@of_each
def test_gradcheck_and_the_teacher_learns_nothing(loss):
    student, teacher = rows()
    assert torch.autograd.gradcheck(lambda s: LOSSES[loss][0](s, teacher), student)
    LOSSES[loss][0](student, teacher.requires_grad_()).backward()
    assert teacher.grad is None


@of_each
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_half_precision_is_computed_in_float32(loss, dtype):
    student, teacher = rows(dtype)
    found = LOSSES[loss][0](student, teacher)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.dtype == wide
    assert torch.equal(found, LOSSES[loss][0](student.to(wide), teacher.to(wide)))
    assert torch.autograd.grad(found, student)[0].dtype == dtype


@of_each
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_the_teacher_itself_has_no_loss_and_no_gradient(loss, dtype):
    student = rows(dtype)[0]
    found = LOSSES[loss][0](student, student.detach())
    assert found.item() == 0
    assert not torch.autograd.grad(found, student)[0].any()


@of_each
def test_no_rows(loss):
    student, teacher = rows(count=0)
    found = LOSSES[loss][0](student, teacher)
    assert found.item() == 0
    assert torch.autograd.grad(found, student)[0].shape == (0, WIDTH)


def test_the_temperature_divides_both_logits_and_is_squared_outside():
    student, teacher = rows()
    divided = losses.soft_cross_entropy(student / 4, teacher / 4)
    torch.testing.assert_close(losses.soft_cross_entropy(student, teacher, 4.0), 16 * divided)


def test_a_small_angle_keeps_its_digits():
    student = torch.tensor([[1.0, 1e-4]])
    assert losses.cosine(student, torch.tensor([[1.0, 0.0]])).item() == pytest.approx(5e-9, rel=1e-6)


def test_a_row_of_zeros():
    student = torch.zeros(1, 3, requires_grad=True)
    found = losses.cosine(student, torch.ones(1, 3))
    assert found.item() == pytest.approx(0.5)
    assert torch.autograd.grad(found, student)[0].isfinite().all()


@of_each
@pytest.mark.parametrize(
    ("student", "teacher", "error", "message"),
    [
        ([1.0], torch.ones(1, 2), TypeError, "student: expected a torch.Tensor, got list"),
        (torch.ones(2), torch.ones(2), ValueError, r"student: expected shape \(rows, columns >= 1\)"),
        (torch.ones(2, 3), torch.ones(3, 3), ValueError, r"teacher: expected shape \(2, 3\), got \(3, 3\)"),
        (torch.ones(2, 3), torch.ones(2, 3).int(), TypeError, "teacher: expected float32"),
    ],
    ids=["list", "1-D", "shape", "integers"],
)
def test_bad_inputs(loss, student, teacher, error, message):
    with pytest.raises(error, match=message):
        LOSSES[loss][0](student, teacher)


def test_bad_temperature():
    with pytest.raises(ValueError, match="temperature: expected a finite number > 0, got -1"):
        losses.soft_cross_entropy(*rows(), -1)
