"""`linear_distillation`: memory, chunks, the teacher itself, frozen inputs, compilation, bad inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastbert.ops.linear_distillation import linear_distillation, linear_distillation_ref
from tests.support.inputs import name
from tests.support.ops import DTYPES, HALF, Largest, pinned

backend = pinned("linear_distillation")


def inputs(rows=7, width=4, classes=6, teacher_width=5, dtype=torch.float32, seed=0):
    """The student's x, weight and bias, which need a gradient, and the teacher's."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for columns in (width, teacher_width):
        shapes = (rows, columns), (classes, columns), (classes,)
        found += [torch.randn(*s, generator=g).to(dtype) for s in shapes]
    return [t.requires_grad_() for t in found[:3]] + found[3:]


def chunk(rows, classes=6, dtype=torch.float32):
    """`chunk_bytes` for this many rows."""
    return 3 * rows * classes * dtype.itemsize


def gradients(loss, given):
    return [loss.detach(), *torch.autograd.grad(loss, given[:3])]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_reference_is_what_pytorch_defines(temperature):
    x, w, b, *teacher = inputs(dtype=torch.float64)
    log_q, log_p = (F.linear(*t).div(temperature).log_softmax(1) for t in ((x, w, b), teacher))
    expected = temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    torch.testing.assert_close(linear_distillation_ref(x, w, b, *teacher, temperature), expected)


@pytest.mark.parametrize("chunk_rows", [2, 3, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(chunk_rows, bias):
    given = inputs(dtype=torch.float64)

    def loss(x, weight, b):
        options = {"temperature": 3.0, "chunk_bytes": chunk(chunk_rows, dtype=torch.float64)}
        return linear_distillation(x, weight, b if bias else None, *given[3:], **options)

    assert torch.autograd.gradcheck(loss, given[: 2 + bias] + [None] * (not bias))


# --- memory and chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_no_more_logits_than_a_chunk_exist(backend, dtype):
    given = inputs(600, 8, 97, 9, dtype)
    with Largest() as largest:
        torch.autograd.grad(linear_distillation(*given, 2.0, chunk(60, 97, dtype)), given[:3])
    assert largest.shape == (60, 97)
    with Largest() as largest:
        torch.autograd.grad(linear_distillation(*given, 2.0), given[:3])
    assert largest.shape == (600, 97)


def saved_shapes(given, **options):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        linear_distillation(*given, **options)
    return shapes


def test_logits_of_one_chunk_are_kept_for_backward(backend):
    given = inputs()
    assert saved_shapes(given).count((7, 6)) == 2
    assert (7, 6) not in saved_shapes(given, chunk_bytes=chunk(4))
    with torch.no_grad():
        assert saved_shapes(given) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_chunks_change_only_how_sums_are_rounded(dtype):
    given = inputs(90, 16, 31, 8, dtype)
    one, *others = (
        gradients(linear_distillation(*given, 2.0, chunk(rows, 31, dtype)), given) for rows in (1000, 1, 7)
    )
    eps = torch.finfo(dtype).eps
    for other in others:
        for a, e in zip(other, one, strict=True):
            assert a.dtype == e.dtype
            tolerance = (1e-6 if a.dim() == 0 and dtype != torch.float64 else 8 * eps) * e.abs().max().item()
            torch.testing.assert_close(a, e, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_sums_over_chunks_are_rounded_once(dtype):
    """512 contributions of 1 + 1/128 to one row of dweight: in the storage dtype the sum would stall."""
    x = torch.full((512, 1), 1 + 2.0**-7, dtype=dtype)
    weight, bias = torch.zeros(2, 1, dtype=dtype), torch.zeros(2, dtype=dtype)
    teacher = torch.tensor([[0.0], [0.0]], dtype=dtype), torch.tensor([64.0, -64.0], dtype=dtype)
    given = [x, weight.requires_grad_(), bias.requires_grad_(), x, *teacher]
    loss = 512 * linear_distillation(*given, chunk_bytes=chunk(1, 2, dtype))
    dweight, dbias = torch.autograd.grad(loss, given[1:3])
    assert dweight.flatten().tolist() == [-258.0, 258.0]
    assert dbias.tolist() == [-256.0, 256.0]


# --- the teacher --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_the_teacher_itself_has_no_loss_and_no_gradient(backend, dtype, chunk_rows):
    if dtype == torch.float64 and backend == "cpu":
        pytest.skip("it does not store float64")
    x, weight, bias = inputs(7, 16, 40, dtype=dtype)[:3]
    given = [x, weight, bias, x, weight, bias]
    for found in gradients(linear_distillation(*given, 2.0, chunk(chunk_rows, 40, dtype)), given):
        assert not found.any()


def test_only_the_student_learns(backend):
    given = [t.detach().requires_grad_() for t in inputs()]
    linear_distillation(*given).backward()
    assert all(t.grad is not None and t.grad.any() for t in given[:3])
    assert all(t.grad is None for t in given[3:])


def test_a_small_divergence_keeps_its_digits(backend):
    """Of nearly equal logits it is the sum of terms of both signs, a thousand times as large."""
    x, weight, bias = inputs(64, 16, 3000)[:3]
    teacher = [x.detach() + 2e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))]
    given = [x, weight, bias, *teacher, weight.detach(), bias.detach()]
    truth = linear_distillation_ref(*(t.double() for t in given))
    assert abs(linear_distillation(*given).item() / truth.item() - 1) < 5e-3
    log_q, log_p = (F.linear(*t).log_softmax(1) for t in (given[:3], given[3:]))
    usual = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean").item()
    assert abs(usual / truth.item() - 1) > 1e-2, "the sum of p (log p - log q) has lost them"


@pytest.mark.parametrize("chunk_rows", [3, 100])
@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False), (False, False, True)])
def test_frozen_inputs(backend, asked, chunk_rows):
    given = inputs()
    expected = torch.autograd.grad(linear_distillation(*given), given[:3])
    frozen = [t.detach().requires_grad_(a) for t, a in zip(given, asked, strict=False)] + given[3:]
    linear_distillation(*frozen, chunk_bytes=chunk(chunk_rows)).backward()
    for t, a, e in zip(frozen, asked, expected, strict=False):
        assert (t.grad is None) == (not a)
        if a:
            torch.testing.assert_close(t.grad, e)


def test_a_class_that_the_teacher_rules_out(backend):
    given = inputs()
    given[5] = given[5].index_fill(0, torch.tensor([2]), -torch.inf)
    p = F.linear(*given[3:]).softmax(1)
    q = F.linear(*given[:3]).log_softmax(1)
    expected = (torch.special.xlogy(p, p) - p * q).sum(1).mean()
    for a, e in zip(gradients(linear_distillation(*given), given), gradients(expected, given), strict=True):
        torch.testing.assert_close(a, e)


def test_infinite_and_undefined_logits(backend):
    given = [t.detach() for t in inputs()]
    given[2][2] = -torch.inf
    assert linear_distillation(*given) == torch.inf
    given[5][2] = -torch.inf
    assert linear_distillation(*given).isfinite(), "both rule the class out"
    for i in (0, 3):
        given = [t.detach() for t in inputs()]
        given[i][3, 1] = torch.nan
        assert linear_distillation(*given).isnan()


def test_no_rows(backend):
    given = inputs(rows=0)
    assert [t.abs().sum() for t in gradients(linear_distillation(*given), given)] == [0] * 4


@pytest.mark.parametrize("autocast", HALF, ids=name)
def test_autocast_casts_as_pytorch_does(autocast):
    given = inputs(70, 32, 50)
    with torch.autocast("cpu", autocast):
        loss = linear_distillation(*given, 2.0)
        log_q, log_p = (F.linear(*t).float().div(2).log_softmax(1) for t in (given[:3], given[3:]))
        expected = 4 * F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    for a, e in zip(gradients(loss, given), gradients(expected, given), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, e, rtol=0.05, atol=0.02 * e.abs().max().item())


X, W, B, TX, TW, TB = (t.detach() for t in inputs())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"x: expected shape \(rows, in\) with in >= 1, got \(4,\)"),
        ({"x": [1.0]}, TypeError, "x: expected a torch.Tensor, got list"),
        ({"weight": W.bfloat16()}, TypeError, "weight: expected x's dtype torch.float32, got torch.bfloat16"),
        ({"weight": W[:, :3]}, ValueError, r"weight: expected shape \(classes, 4\), got \(6, 3\)"),
        ({"bias": B[:5]}, ValueError, r"bias: expected shape \(6,\), got \(5,\)"),
        ({"teacher_x": TX[:5]}, ValueError, r"teacher_x: expected shape \(7, 5\), got \(5, 5\)"),
        ({"teacher_x": None}, TypeError, "teacher_x: expected a torch.Tensor, got NoneType"),
        ({"teacher_weight": TW[:5]}, ValueError, r"teacher_weight: expected shape \(6, 5\), got \(5, 5\)"),
        ({"teacher_bias": TB.double()}, TypeError, "teacher_bias: expected x's dtype torch.float32"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0, got 0.0"),
        ({"temperature": "2"}, ValueError, "temperature: expected a finite number > 0, got '2'"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes: expected an integer >= 1, got 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_inputs(change, error, message):
    given = {"x": X, "weight": W, "bias": B, "teacher_x": TX, "teacher_weight": TW, "teacher_bias": TB}
    with pytest.raises(error, match=message):
        linear_distillation(**{**given, **change})
