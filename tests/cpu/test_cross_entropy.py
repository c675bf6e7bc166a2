"""The C++ cross_entropy: every dtype, instruction set, odd size and stride, against float64 in torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastbert.backends import cpu, reference
from fastbert.ops.cross_entropy import cross_entropy_ref
from tests.support.cpu_checks import assert_same_on_any_threads
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, randn, strided_rows

DTYPES = (torch.float32, *HALF)
IGNORE = -100
INF, NAN = float("inf"), float("nan")


def labels_of(rows, classes, labelled=1.0, ignore_index=IGNORE, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=g)
    labels[torch.randperm(rows, generator=g)[round(labelled * rows) :]] = ignore_index
    return labels


def everything(logits, labels, smoothing=0.0, dloss=1.0, ignore_index=IGNORE):
    """Call the backend itself: loss, lse, count, dlogits."""
    loss, lse, count = cpu.cross_entropy_fwd(logits, labels, ignore_index, smoothing)
    dloss = torch.tensor(dloss)
    return loss, lse, count, cpu.cross_entropy_bwd(dloss, logits, labels, lse, count, ignore_index, smoothing)


def both_ways(rows, classes, dtype, smoothing=0.0, labelled=1.0, gap=3, ignore_index=IGNORE):
    """Forward and backward, each output against float64. Unlabelled rows and gaps are NaN."""
    logits, memory = strided_rows(rows, classes, dtype, gap, seed=classes)
    logits.mul_(2)
    labels = labels_of(rows, classes, labelled, ignore_index)
    keep = labels != ignore_index
    logits[~keep] = NAN
    before = memory.clone()
    loss, lse, count, dlogits = everything(logits, labels, smoothing, 1.5, ignore_index)
    assert (loss.dtype, lse.dtype, count.dtype, dlogits.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
        dtype,
    )
    assert (loss.shape, count.shape) == ((), ())
    assert count == keep.sum()
    wide = logits.double().requires_grad_()
    truth = cross_entropy_ref(wide, labels, ignore_index, smoothing)
    assert_rounds_to(loss, truth.detach(), 1.0, "loss")
    top = torch.where(keep, wide.detach().amax(1), 0.0)
    assert torch.equal(lse[0].double(), top)
    log_sum = torch.where(keep, (wide.detach() - top[:, None]).exp().sum(1).log(), 0.0)
    assert_rounds_to(lse[1], log_sum, 1.0, "log of the sum")
    (dtruth,) = torch.autograd.grad(1.5 * truth, wide)
    assert not dlogits[~keep].view(torch.uint8).any(), "ignored rows are zero"
    assert_rounds_to(dlogits, dtruth.nan_to_num(), 1.0 / max(1, int(count)), "dlogits")
    assert_same_bits(memory, before, "an input was written")


# --- results ----------------------------------------------------------------------------------------------


SIZES = {  # of each both_ways: rows, classes, options
    "classes": [(4, n, s, 0.75, 3) for n in range(1, 131) for s in (0.0, 0.1)],
    "many classes": [
        (3, n, s, 1.0, 1) for n in (1000, 4095, 4096, 4097, 8192, 12289, 30522) for s in (0.0, 0.2)
    ],
    "rows": [
        (n, *options) for n in (0, 1, 2, 33, 2000, 40000) for options in ((2, 0.0, 0.5, 3), (3, 0.3, 1.0, 3))
    ],
    "none and all labelled": [(7, 9, s, share, 3) for s in (0.0, 1.0) for share in (0.0, 1.0)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_size(isa, dtype, sizes, guarded):
    for rows, classes, smoothing, labelled, gap in SIZES[sizes]:
        both_ways(rows, classes, dtype, smoothing, labelled, gap)


@pytest.mark.parametrize("ignore_index", (-(2**63), -1, 0, 5, 2**63 - 1))
def test_ignore_index(isa, ignore_index):
    both_ways(50, 9, torch.float32, 0.1, 0.5, ignore_index=ignore_index)


@pytest.mark.parametrize("scale", (0.5, 3.0, 20.0))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_float32_error_is_no_larger_than_torchs(isa, scale, smoothing):
    logits, labels = scale * randn(16, 30522), labels_of(16, 30522)
    wide, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    truth = F.cross_entropy(wide, labels, label_smoothing=smoothing)
    theirs = F.cross_entropy(leaf, labels, label_smoothing=smoothing)
    loss, _, _, dlogits = everything(logits, labels, smoothing)
    assert abs(loss - truth) <= abs(theirs - truth) + 2**-22
    grads = [torch.autograd.grad(t, x)[0] for t, x in ((truth, wide), (theirs, leaf))]
    ours, theirs = ((t - grads[0]).abs() for t in (dlogits, grads[1]))
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= theirs.max() + 2**-24 / 16  # half a rounding step of the largest


def test_a_confident_row_keeps_its_digits(isa):
    """The label's own gradient, p - 1, is about 1e-7 here."""
    logits = torch.tensor([[16.0, 0.0, 0.25]])
    *_, dlogits = everything(logits, torch.tensor([0]))
    wide = logits.double().requires_grad_()
    (truth,) = torch.autograd.grad(cross_entropy_ref(wide, torch.tensor([0])), wide)
    assert ((dlogits - truth).abs() <= 0.1 * truth.abs()).all()


def test_losses_of_many_rows_are_summed_in_double(isa):
    """A float32 sum over so many rows is off by 1e-3."""
    rows = 200_000
    logits = torch.tensor([[0.25, -1.0]]).repeat(rows, 1)
    loss, *_ = everything(logits, torch.ones(rows, dtype=torch.int64))
    assert abs(loss - cross_entropy_ref(logits[:1].double(), torch.tensor([1]))) < 2e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_logits_are_exact(isa, dtype):
    logits = torch.full((4, 2), 3.0, dtype=dtype)
    loss, lse, _, dlogits = everything(logits, torch.tensor([0, 1, 1, 0]), dloss=4.0)
    assert loss == torch.tensor(2.0).log()
    assert torch.equal(lse[0], torch.full((4,), 3.0))
    assert torch.equal(dlogits, torch.tensor([[-0.5, 0.5], [0.5, -0.5], [0.5, -0.5], [-0.5, 0.5]]).to(dtype))
    loss, *_, dlogits = everything(logits[:, :1], torch.zeros(4, dtype=torch.int64))  # one class: certain
    assert loss == 0
    assert not dlogits.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dlogits_of_more_than_32_mib(isa, dtype, guarded):
    """Memory of that size is requested in batches; every row is written, most of them with zeros."""
    rows, classes = 2**25 // 30522 // dtype.itemsize + 40, 30522
    kept = torch.tensor([0, 7, rows // 2, rows - 1])
    logits, labels = torch.zeros(rows, classes, dtype=dtype), torch.full((rows,), IGNORE)
    logits[kept], labels[kept] = randn(4, classes, dtype=dtype), kept
    *_, dlogits = everything(logits, labels)
    assert_same_bits(dlogits[kept], everything(logits[kept], labels[kept])[3])
    dlogits[kept] = 0
    assert not dlogits.any()


# --- infinities and poison --------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", (5, 40, 5000))
def test_bad_rows_are_as_the_reference_has_them(isa, dtype, smoothing, classes):
    """NaN, infinities and rows of -inf: the same rows are NaN, infinite or finite."""
    for bad in (NAN, INF, -INF):
        for columns in ([1], [classes - 1], [0, 1], range(classes)):
            for label in (0, 1, classes - 1):
                logits = randn(3, classes, dtype=dtype)
                logits[1, list(columns)] = bad
                labels = torch.tensor([2, label, 3])
                loss, lse, count, dlogits = everything(logits, labels, smoothing)
                clean = everything(logits[[0, 2]], labels[[0, 2]], smoothing)
                expected = reference.cross_entropy_fwd(logits, labels, IGNORE, smoothing)
                torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
                assert_same_bits(lse[:, [0, 2]], clean[1], "the other rows")
                wide = reference.cross_entropy_bwd(
                    torch.tensor(1.0), logits, labels, expected[1], count, IGNORE, smoothing
                )
                assert torch.equal(dlogits.isnan(), wide.isnan())
                assert dlogits[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shift", (1e4, -1e4, 3e38))
def test_a_shift_of_all_logits_costs_nothing(isa, shift):
    small = torch.tensor([[1.0, 2.0, 3.0, 0.0]]) * (1.0 if abs(shift) < 1e9 else 0.0)
    plain, moved = (everything(t, torch.tensor([2])) for t in (small, small + shift))
    assert_same_bits(plain[0], moved[0])
    assert_same_bits(plain[3], moved[3])


@pytest.mark.parametrize("dloss", (0.0, NAN, INF, -2.0))
def test_the_upstream_gradient(isa, dloss):
    logits, labels = randn(5, 20), labels_of(5, 20, 0.6)
    keep = labels != IGNORE
    *_, one = everything(logits, labels)
    *_, dlogits = everything(logits, labels, dloss=dloss)
    assert not dlogits[~keep].any()
    torch.testing.assert_close(dlogits[keep], one[keep] * dloss, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stride", (0, 3))
def test_row_strides(isa, stride):
    """Expanded rows (stride 0) and overlapping ones."""
    logits, labels = randn(100).as_strided((4, 10), (stride, 1)), labels_of(4, 10)
    for a, b in zip(everything(logits, labels), everything(logits.clone(), labels), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("bad", (-1, 9, 2**40))
def test_labels_out_of_range_are_refused_before_memory_is_read(bad):
    """The op checks them as well, but not under torch.compile."""
    logits, labels = randn(6, 9), labels_of(6, 9)
    _, lse, count, _ = everything(logits, labels)
    labels[5] = bad
    message = rf"labels: label {bad} is out of range for 9 classes \(ignore_index is -100\)"
    with pytest.raises(ValueError, match=message):
        cpu.cross_entropy_fwd(logits, labels, IGNORE, 0.0)
    with pytest.raises(ValueError, match=message):
        cpu.cross_entropy_bwd(torch.tensor(1.0), logits, labels, lse, count, IGNORE, 0.0)


# --- determinism, threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "classes"), ((37, 5000), (40000, 3)))
def test_any_number_of_threads_gives_the_same_bits(isa, dtype, rows, classes):
    logits, labels = randn(rows, classes, dtype=dtype), labels_of(rows, classes, 0.7)
    assert_same_on_any_threads(lambda: everything(logits, labels, 0.1))
