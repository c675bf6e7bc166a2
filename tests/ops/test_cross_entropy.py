"""`cross_entropy`: gradients, ignored rows, extreme logits, compilation, bad inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastbert.ops.cross_entropy import cross_entropy, cross_entropy_ref
from fastbert.runtime import dispatch
from tests.support.inputs import name, randn
from tests.support.ops import HALF, pinned, served

INF = float("inf")


SERVED = served("cross_entropy")


backend = pinned("cross_entropy")


@pytest.fixture(params=SERVED, ids=lambda served: f"{served[0]}-{name(served[1])}")
def dtype(request):
    """A dtype; each backend that serves it is pinned in turn."""
    with dispatch.use_backend(cross_entropy=request.param[0]):
        yield request.param[1]


LABELS = torch.tensor([1, -100, 0, 5, -100])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_reference_is_what_pytorch_defines(smoothing):
    logits = randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(
        cross_entropy_ref(logits, LABELS, -100, smoothing),
        F.cross_entropy(logits, LABELS, label_smoothing=smoothing),
    )


@pytest.mark.parametrize("rows", [0, 4])
def test_no_label_gives_a_loss_of_zero(dtype, rows):
    logits = randn(rows, 6, dtype=dtype, grad=True)
    loss = cross_entropy(logits, torch.full((rows,), -100))
    assert loss.item() == 0
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert dlogits.shape == logits.shape
    assert not dlogits.any()


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_rows_reach_neither_loss_nor_gradient(backend, poison, smoothing):
    logits = randn(5, 6)
    dirty = logits.clone()
    dirty[LABELS == -100] = poison
    results = []
    for t in (logits, dirty):
        t.requires_grad_()
        loss = cross_entropy(t, LABELS, label_smoothing=smoothing)
        results.append((loss, torch.autograd.grad(loss, t)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][LABELS == -100].any()


def test_only_labelled_rows_are_computed(backend, monkeypatch):
    """On the CPU no float32 copy of a backend has more rows than are labelled."""
    logits, labels = randn(4000, 50, dtype=torch.bfloat16), torch.full((4000,), -100)
    labels[::1000] = 1
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                sizes.append(out.numel())
            return out

    with Spy():
        cross_entropy(logits, labels)
    assert max(sizes) <= 2 * 4000  # the two numbers saved for each row


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3])
def test_ignore_index(backend, ignore_index):
    logits = randn(6, 5)
    labels = torch.tensor([ignore_index, 1, 2, ignore_index, 4, 1])
    torch.testing.assert_close(
        cross_entropy(logits, labels, ignore_index=ignore_index),
        F.cross_entropy(logits, labels, ignore_index=ignore_index),
    )


def test_large_logits_keep_their_digits(backend):
    """At 1e4 a float32 step is 1e-3: `x - lse` from one saved number would be off by that much."""
    small = randn(3, 6)
    logits = (small + 1e4).requires_grad_()
    exact = (logits.detach().double() - 1e4).requires_grad_()  # the same softmax
    labels = torch.tensor([1, 0, 5])
    loss, expected = cross_entropy(logits, labels), cross_entropy_ref(exact, labels)
    assert abs(loss.item() - expected.item()) < 1e-6
    (dlogits,), (dexact,) = (torch.autograd.grad(v, t) for v, t in ((loss, logits), (expected, exact)))
    torch.testing.assert_close(dlogits.double(), dexact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_are_finite(dtype, size):
    logits = torch.zeros(2, 4, dtype=dtype)
    logits[:, 1] = size
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([1, 0]))
    (dlogits,) = torch.autograd.grad(loss, logits)
    expected = cross_entropy_ref(logits.detach().double(), torch.tensor([1, 0]))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    assert dlogits.isfinite().all()


def test_classes_ruled_out_by_minus_infinity(backend):
    logits = torch.tensor([[1.0, -INF, 2.0], [-INF, 0.5, -INF]], requires_grad=True)
    labels = torch.tensor([2, 1])
    loss = cross_entropy(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert dlogits.isfinite().all()
    assert not dlogits[logits.detach() == -INF].any()
    assert cross_entropy(logits, torch.tensor([1, 1])).item() == INF
    assert cross_entropy(logits, labels, label_smoothing=0.1).item() == INF


@pytest.mark.parametrize("autocast", [None, *HALF], ids=name)
def test_dtypes(dtype, autocast):
    logits = randn(5, 6, dtype=dtype, grad=True)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = cross_entropy(logits, LABELS.int())
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == ()
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert dlogits.dtype == dtype
    torch.testing.assert_close(
        loss.double(), cross_entropy_ref(logits.double(), LABELS), rtol=1e-6, atol=1e-6
    )


X = torch.ones(5, 6)
NAN = float("nan")
BAD = [
    ({"logits": X[0]}, ValueError, r"logits: expected shape \(rows, classes\).*got \(6,\)"),
    ({"logits": torch.ones(5, 0)}, ValueError, r"logits: .*classes >= 1, got \(5, 0\)"),
    ({"labels": LABELS[:3]}, ValueError, r"labels: expected shape \(5,\), got \(3,\)"),
    ({"labels": LABELS + 1}, ValueError, "labels: label -99 is out of range for 6 classes"),
    ({"labels": LABELS.clamp(min=6)}, ValueError, r"labels: label 6 .*\(ignore_index is -100\)"),
    ({"ignore_index": -1}, ValueError, "labels: label -100 is out of range"),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an integer, got None"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: .*\[0, 1\], got 1.5"),
    ({"label_smoothing": NAN}, ValueError, "label_smoothing: .*got nan"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_inputs(change, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(**{"logits": X, "labels": LABELS, **change})
