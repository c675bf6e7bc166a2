"""The Triton cross-entropy: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from tests.support.triton_fixtures import DEVICE, DTYPES, fuzz, kernels_of, needs_lazy_memory
from tests.support.triton_sanitizer import lazy_rows

kernels = kernels_of("cross_entropy")
pytestmark = pytest.mark.usefixtures("checked_memory")
IGNORE = -100
INF = float("inf")


def batch(rows, classes, dtype=torch.float32, every=3, scale=2.0, seed=0):
    """Logits and labels. One in `every` rows is ignored and has logits of NaN."""
    g = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, classes, generator=g)).to(dtype)
    labels = torch.randint(classes, (rows,), generator=g)
    labels[every - 1 :: every] = IGNORE
    logits[labels == IGNORE] = torch.nan
    return logits.to(DEVICE), labels.to(DEVICE)


def run(module, logits, labels, smoothing=0.0, ignore_index=IGNORE, dloss=1.5):
    """(loss, lse, count, dlogits)."""
    saved = module.cross_entropy_fwd(logits, labels, ignore_index, smoothing)
    dloss = torch.tensor(dloss, device=logits.device)
    return *saved, module.cross_entropy_bwd(dloss, logits, labels, *saved[1:], ignore_index, smoothing)


def assert_right(logits, labels, smoothing=0.0, ignore_index=IGNORE):
    """Against the reference in float64, rounded once."""
    loss, lse, count, dlogits = run(kernels, logits, labels, smoothing, ignore_index)
    exact = run(
        reference, logits.double(), labels, smoothing, ignore_index, torch.tensor(1.5).double().item()
    )
    assert (loss.dtype, lse.dtype, count.dtype) == (torch.float32, torch.float32, torch.int64)
    assert (loss.shape, lse.shape, count.shape) == ((), (2, logits.shape[0]), ())
    assert (dlogits.dtype, dlogits.shape, dlogits.is_contiguous()) == (logits.dtype, logits.shape, True)
    assert count.item() == exact[2].item()
    kept = labels != ignore_index
    assert not lse[:, ~kept].any()
    assert not dlogits[~kept].any()
    size = 1 + logits[kept].abs().max().item() if kept.any() else 1.0
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-6, atol=3e-7 * size)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=3e-7)
    error = (dlogits.double() - exact[3]).abs()
    step = testing.rounding_step(exact[3], logits.dtype)
    slack = 2e-6 * 1.5 / max(1, count.item())
    assert (error <= slack + (0.51 * step if logits.dtype != torch.float32 else 0)).all()


@pytest.mark.sweep
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_edges_of_blocks(smoothing):
    """Numbers of classes around a block, and of several blocks."""
    for classes in (1, 2, 127, 128, 129, 255, 257, 4095, 4096, 4097, 8200):
        assert_right(*batch(4, classes), smoothing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 4095, 4096, 9000])
def test_the_largest_may_stand_in_any_block(dtype, place):
    logits, labels = batch(3, 9001, dtype)
    logits[0, place] = 30
    logits[1] -= 50
    assert_right(logits, labels, 0.1)
    labels[0] = place
    assert_right(logits, labels)


def test_rows_beyond_a_block_of_the_sum(monkeypatch):
    monkeypatch.setattr(kernels, "SUM_BLOCK", 8)
    for rows in (7, 8, 9, 21):
        assert_right(*batch(rows, 3))


@pytest.mark.parametrize("ignore_index", [-100, 0, 1, 16, 2**40])
def test_ignore_index(ignore_index):
    logits, labels = batch(7, 20)
    labels = labels.where(labels != IGNORE, ignore_index)
    logits = logits.nan_to_num(nan=3.0)
    assert_right(logits, labels, 0.1, ignore_index)


def test_ignored_rows_are_not_read():
    """Only one of their elements is in memory: the sanitizer reports reads of other elements."""
    labels = torch.full((5,), IGNORE, device=DEVICE)
    nothing = torch.full((5, 1), torch.nan, device=DEVICE).as_strided((5, 40), (1, 0))
    loss, lse, count, dlogits = run(kernels, nothing, labels)
    assert (loss.item(), count.item()) == (0.0, 0)
    assert not lse.any()
    assert torch.equal(dlogits, torch.zeros(5, 40, device=DEVICE))


def test_no_rows():
    loss, lse, count, dlogits = run(kernels, *batch(0, 5))
    assert (loss.item(), lse.shape, count.item(), dlogits.shape) == (0.0, (2, 0), 0, (0, 5))


def test_large_logits_keep_their_digits():
    """At 1e4, m + l in one number would be off by 1e-3."""
    logits, labels = batch(4, 300)
    shifted = (logits + 8192).sub(8192)
    for a, b in zip(run(kernels, shifted, labels), run(kernels, shifted + 8192, labels), strict=True):
        if a.shape != (2, 4):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert_right(logits * 5000, labels)


def test_minus_infinity_rules_a_class_out():
    logits, labels = batch(4, 9000)
    logits[:, :4200] = -INF  # the whole first block
    logits[0, 4300:] = -INF
    labels[0], labels[1], labels[3] = 4250, 8999, 4201
    assert_right(logits, labels)
    dlogits = run(kernels, logits, labels)[3]
    assert not dlogits[:, :4200].any()
    assert run(kernels, logits, labels, 0.1)[0].item() == INF
    labels[0] = 7
    assert run(kernels, logits, labels)[0].item() == INF


@pytest.mark.parametrize("poison", [torch.nan, INF])
def test_a_spoiled_logit_shows_in_the_loss(poison):
    logits, labels = batch(2, 5000)
    logits[1, 4500] = poison
    assert run(kernels, logits, labels)[0].isnan()
    labels[1] = IGNORE
    assert run(kernels, logits, labels)[0].isfinite()


@pytest.mark.parametrize("label", [-1, 40, 2**40])
def test_a_label_that_is_no_class_makes_the_loss_nan(label):
    """On a GPU labels are not checked; nothing outside the logits is read."""
    logits, labels = batch(3, 40)
    labels[1] = label
    assert run(kernels, logits, labels)[0].isnan()


def test_small_integers_are_exact():
    """Equal logits: every probability is 1/4, the loss log 4."""
    logits, labels = torch.full((8, 4), 3.0, device=DEVICE), torch.arange(8, device=DEVICE) % 4
    loss, _, count, dlogits = run(kernels, logits, labels, dloss=8.0)
    assert count.item() == 8
    torch.testing.assert_close(loss.item(), 2 * 0.6931471805599453, rtol=2e-7, atol=0)
    expected = torch.full((8, 4), 0.25, device=DEVICE).scatter_(1, labels[:, None], -0.75)
    torch.testing.assert_close(dlogits, expected, rtol=0, atol=1e-7)


@pytest.mark.sweep
@needs_lazy_memory
def test_gradients_beyond_2_to_31_elements(monkeypatch):
    """Rows of the gradient, which have no gaps, of 2**30 classes. The first block of them is computed."""
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    few, labels = batch(5, 20, torch.float16)
    classes = 2**30
    _, lse, count, expected = run(kernels, few, labels)
    launch = kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, grid, *args, **config: launch(kernel, (grid[0], 1), *args, **config)
    )
    empty = torch.empty
    output = lazy_rows(5, classes, classes, torch.float16)
    monkeypatch.setattr(
        torch, "empty", lambda shape, **options: output if shape == (5, classes) else empty(shape, **options)
    )
    wide = lazy_rows(5, classes, classes, torch.float16)
    wide[:, :20], wide[:, 20:4096] = few, -INF
    dloss = torch.tensor(1.5)
    dlogits = kernels.cross_entropy_bwd(dloss, wide, labels, lse, count, IGNORE, 0.0)
    assert dlogits is output
    assert torch.equal(dlogits[:, :20], expected)


def test_the_number_of_classes_compiles_nothing_anew(monkeypatch):
    """Answer spans have as many classes as a batch has tokens. 500 widths compile only a few kernels."""
    seen = set()

    def spy(kernel, grid, device, *args, **config):
        fixed = getattr(kernel, "kwargs", vars(kernel))["do_not_specialize"]
        assert {n for n, a in zip(kernel.arg_names, args, strict=False) if isinstance(a, int)} <= set(fixed)
        seen.add((kernel.fn.__name__, *sorted(config.items())))

    monkeypatch.setattr(kernels, "launch", spy)
    labels = torch.empty(3, device="meta")
    for classes in range(1, 513):
        logits = torch.empty((3, classes), device="meta")
        kernels.cross_entropy_fwd(logits, labels, IGNORE, 0.0)
        kernels.cross_entropy_bwd(labels, logits, labels, labels, labels, IGNORE, 0.0)
    assert len(seen) <= 1 + 2 * 3 * 5  # three blocks, five alignments


@pytest.mark.parametrize(
    ("classes", "stride", "align"),
    [(30522, 30522, 2), (32768, 32768, 16), (32, 40, 8), (7, 16, 1), (8, 12, 4)],
)
def test_alignments_are_what_the_sizes_have(monkeypatch, classes, stride, align):
    """The compiler makes loads as wide as the alignment says; the interpreter would miss a wrong one."""
    given = []
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, grid, device, *args, **config: given.append(config.get("ALIGN"))
    )
    logits, labels = torch.empty((3, stride), device="meta")[:, :classes], torch.empty(3, device="meta")
    kernels.cross_entropy_fwd(logits, labels, IGNORE, 0.0)
    kernels.cross_entropy_bwd(labels, logits, labels, labels, labels, IGNORE, 0.0)
    assert given == [align, None, align]


@pytest.mark.sweep
@fuzz(30)
@given(
    st.integers(0, 20),
    st.one_of(st.integers(1, 40), st.integers(1, 700)),
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.01, 2.0, 100.0]),
    st.integers(0, 99),
)
def test_fuzz(rows, classes, dtype, every, smoothing, scale, seed):
    assert_right(*batch(rows, classes, dtype, every, scale, seed), smoothing)
