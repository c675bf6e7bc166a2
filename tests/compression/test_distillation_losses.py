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


# -- the likeliest words


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("count", [1, 5, WIDTH - 1])
def test_top_words_lack_the_divergence_among_the_other_words(count, temperature):
    student, teacher = rows()
    found = losses.top_words(student, *losses.likeliest(teacher, count, temperature), temperature)
    q, p = ((t / temperature).softmax(1).detach() for t in (student, teacher))
    others = torch.ones_like(p, dtype=torch.bool).scatter(1, teacher.topk(count).indices, False)
    p, q = (t[others].view(ROWS, -1) for t in (p, q))
    r = p.sum(1, keepdim=True)
    inner = (p / r * (p / r / (q / q.sum(1, keepdim=True))).log()).sum(1, keepdim=True)
    lacking = temperature**2 * (r * inner).mean()
    whole = losses.soft_cross_entropy(student, teacher, temperature)
    torch.testing.assert_close(whole - found, lacking, rtol=0, atol=1e-12)
    assert (lacking > 1e-4) == (count < WIDTH - 1)


def test_top_words_have_the_gradient_of_their_value():
    student, teacher = rows()
    taken = losses.likeliest(teacher, 4, TEMPERATURE)
    assert torch.autograd.gradcheck(lambda s: losses.top_words(s, *taken, TEMPERATURE), student)
    (whole,) = torch.autograd.grad(losses.soft_cross_entropy(student, teacher, TEMPERATURE), student)
    (found,) = torch.autograd.grad(losses.top_words(student, *taken, TEMPERATURE), student)
    # A likeliest word's gradient is T (q - p) / rows, as of the whole loss
    torch.testing.assert_close(found.gather(1, taken[0]), whole.gather(1, taken[0]), rtol=0, atol=1e-12)
    same = losses.top_words(teacher, *taken, TEMPERATURE)
    assert same.item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("chunk_bytes", [None, 1, 16 * WIDTH * 2])
def test_chunks_of_rows_change_nothing(dtype, chunk_bytes):
    teacher = rows()[1]
    words, scores = losses.likeliest(teacher.to(torch.float32), 3, 2.0)
    g = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(size, generator=g).to(dtype).requires_grad_()
        for size in ((ROWS, 8), (WIDTH, 8), (WIDTH,))
    )
    given = x, weight, bias
    found = losses.linear_top_words(*given, words, scores.to(dtype), 2.0, chunk_bytes)
    expected = losses.top_words(F.linear(*given), words, scores.to(dtype), 2.0)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype in (torch.bfloat16, torch.float16) else {}
    torch.testing.assert_close(found, expected, **tolerance)
    grads = (torch.autograd.grad(loss, given) for loss in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_no_rows_of_words():
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.zeros(WIDTH, 8, requires_grad=True)
    taken = losses.likeliest(torch.zeros(0, WIDTH), 3)
    found = losses.linear_top_words(x, weight, None, *taken)
    assert found.item() == 0
    assert not torch.autograd.grad(found, weight)[0].any()
