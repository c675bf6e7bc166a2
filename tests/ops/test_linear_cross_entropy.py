"""`linear_cross_entropy`: memory, chunks, frozen inputs, compilation, bad inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastbert.backends.aten import linear as aten_linear
from fastbert.backends.cpu import linear as cpu_linear
from fastbert.backends.reference import linear_cross_entropy as composed
from fastbert.ops import linear_cross_entropy as op
from fastbert.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from fastbert.runtime import dispatch
from tests.support.inputs import name
from tests.support.ops import (
    DTYPES,
    HALF,
    Largest,
    assert_equal,
    backends,
    pinned,
    served,
)

BACKENDS = backends("linear_cross_entropy")
SERVED = served("linear_cross_entropy")
IGNORE = -100
LABELS = torch.tensor([1, IGNORE, 0, 5, IGNORE, 5, 2])


backend = pinned("linear_cross_entropy")


def inputs(rows=7, width=4, classes=6, dtype=torch.float32, grad=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (rows, width), (classes, width), (classes,)
    return [torch.randn(*s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def chunk(rows, classes=6, dtype=torch.float32):
    """`chunk_bytes` for this many rows."""
    return 2 * rows * classes * dtype.itemsize


def gradients(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reference_is_what_pytorch_defines(smoothing):
    x, weight, bias = inputs(dtype=torch.float64)
    torch.testing.assert_close(
        linear_cross_entropy_ref(x, weight, bias, LABELS, IGNORE, smoothing),
        F.cross_entropy(F.linear(x, weight, bias), LABELS, label_smoothing=smoothing),
    )


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="a later PyTorch's tag")
@pytest.mark.parametrize("function", ["fwd", "bwd"])
def test_inductor_captures_no_waiting(function):
    """mode="reduce-overhead" records CUDA graphs, in which the host must not ask for the number of labels."""
    compiled = getattr(torch.ops.fastbert, f"linear_cross_entropy_{function}").default
    assert torch.Tag.cudagraph_unsafe in compiled.tags


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_no_more_logits_than_a_chunk_exist(backend, dtype):
    x, weight, bias = given = inputs(600, 8, 97, dtype)
    labels = torch.arange(600) % 97
    labels[::2] = IGNORE
    with Largest() as largest:
        loss = linear_cross_entropy(x, weight, bias, labels, chunk_bytes=chunk(60, 97, dtype))
        torch.autograd.grad(loss, given)
    assert largest.shape == (60, 97)
    with Largest() as largest:
        torch.autograd.grad(linear_cross_entropy(x, weight, bias, labels), given)
    assert largest.shape == (300, 97)  # the labelled ones


def saved_shapes(loss_of):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        loss = loss_of()
    return loss, shapes


def test_what_is_kept_for_backward(backend):
    x, weight, bias = inputs(7, 4, 6)

    def kept(**options):
        return saved_shapes(lambda: linear_cross_entropy(x, weight, bias, LABELS, **options))[1]

    assert (5, 6) in kept()  # logits of the labelled rows
    assert (5, 6) not in kept(chunk_bytes=chunk(4))
    weight.requires_grad_(False)
    assert (7, 4) not in kept()  # x is not asked for
    assert (7, 4) in kept(chunk_bytes=chunk(4))  # except where logits are recomputed
    with torch.no_grad():
        assert kept() == []


# --- chunks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_chunks_change_only_how_sums_are_rounded(dtype):
    labels = torch.arange(90) % 31
    labels[::4] = IGNORE
    results = []
    for rows in (1, 10, 1000):
        given = inputs(90, 16, 31, dtype)
        loss = linear_cross_entropy(*given, labels, label_smoothing=0.1, chunk_bytes=chunk(rows, 31, dtype))
        results.append(gradients(loss, given))
    eps = torch.finfo(dtype).eps
    for result in results[:-1]:
        for a, e in zip(result, results[-1], strict=True):
            assert a.dtype == e.dtype
            scale = e.abs().max().item()
            tolerance = (1e-6 if a.dim() == 0 and dtype != torch.float64 else 4 * eps) * scale
            torch.testing.assert_close(a, e, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_sums_over_chunks_are_rounded_once(dtype):
    """512 contributions of 1 + 1/256 to one row of dweight: in the storage dtype the sum would stall."""
    x = torch.full((512, 1), 1 + 2.0**-7, dtype=dtype)
    weight = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    bias = torch.zeros(2, dtype=dtype, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.int64)
    loss = 512 * linear_cross_entropy(x, weight, bias, labels, chunk_bytes=chunk(1, 2, dtype))
    dweight, dbias = torch.autograd.grad(loss, [weight, bias])
    assert dweight.flatten().tolist() == [-258.0, 258.0]
    assert dbias.tolist() == [-256.0, 256.0]
    given, options = (x, weight.detach(), bias.detach(), labels), (512, IGNORE, 0.0, 1)
    saved = op.linear_cross_entropy_fwd(*given, *options)
    grads = op.linear_cross_entropy_bwd(saved[0], *given, *options, *saved[1:], True, True, True)
    assert [g.dtype for g in grads] == [dtype] * 3  # as its fake says


# --- labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [2, 1000])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_ignored_rows_reach_neither_loss_nor_gradient(backend, poison, chunk_rows):
    results = []
    for dirty in (False, True):
        given = inputs(grad=False)
        if dirty:
            given[0][LABELS == IGNORE] = poison
        given = [t.requires_grad_() for t in given]
        loss = linear_cross_entropy(*given, LABELS, chunk_bytes=chunk(chunk_rows))
        results.append(gradients(loss, given))
    assert_equal(*results)
    assert not results[1][1][LABELS == IGNORE].any()
    assert results[1][1][LABELS != IGNORE].any(1).all()


@pytest.mark.parametrize("ignore_index", [-1, 0, 3])
def test_ignore_index(backend, ignore_index):
    labels = LABELS.where(LABELS != IGNORE, ignore_index)
    given = inputs()
    actual = linear_cross_entropy(*given, labels, ignore_index=ignore_index)
    expected = F.cross_entropy(F.linear(*given), labels, ignore_index=ignore_index)
    for a, e in zip(gradients(actual, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(a, e)


def test_the_number_of_labels_may_be_given(backend):
    given = inputs()
    expected = gradients(linear_cross_entropy(*given, LABELS), given)
    assert_equal(gradients(linear_cross_entropy(*given, LABELS.int(), labelled=5), given), expected)
    every = torch.arange(7) % 6
    expected = gradients(linear_cross_entropy(*given, every), given)
    assert_equal(gradients(linear_cross_entropy(*given, every, labelled=7), given), expected)
    assert composed._labelled_rows(every, 7, IGNORE) is None  # every row is labelled: no search and no copy


# --- what is asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [3, 1000])
@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_gradients_that_are_asked_for_are_computed(monkeypatch, asked, chunk_rows):
    from fastbert.backends.aten import linear

    given = inputs()
    expected = gradients(linear_cross_entropy(*given, LABELS), given)[1:]
    products, launch, add = [], linear.linear_bwd, composed.add_product

    def spy(dy, saved, needs):
        products.append(needs)
        assert (saved.x is None) == (not needs.dweight)
        assert (saved.weight is None) == (not needs.dx)
        return launch(dy, saved, needs)

    monkeypatch.setattr(linear, "linear_bwd", spy)
    monkeypatch.setattr(
        composed, "add_product", lambda *args: products.append((False, True, False)) or add(*args)
    )
    frozen = [t.detach().requires_grad_(a) for t, a in zip(given, asked, strict=True)]
    with dispatch.use_backend(linear_cross_entropy="aten"):
        linear_cross_entropy(*frozen, LABELS, chunk_bytes=chunk(chunk_rows)).backward()
    assert {any(n[:2]) for n in products} <= {asked[0] or asked[1]}
    assert all(n[:2] == asked[:2] for n in products if any(n[:2]))
    assert products or asked[2]
    for t, a, e in zip(frozen, asked, expected, strict=True):
        assert (t.grad is None) == (not a)
        if a:
            torch.testing.assert_close(t.grad, e)


def test_no_bias(backend):
    x, weight, _ = inputs()
    for chunk_bytes in (None, chunk(2)):
        loss = linear_cross_entropy(x, weight, None, LABELS, chunk_bytes=chunk_bytes)
        expected = F.cross_entropy(x @ weight.T, LABELS)
        for a, e in zip(gradients(loss, [x, weight]), gradients(expected, [x, weight]), strict=True):
            torch.testing.assert_close(a, e)


# --- dtypes, strides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", HALF, ids=name)
@pytest.mark.parametrize("chunk_rows", [2, 1000])
def test_autocast_casts_as_pytorch_does(autocast, chunk_rows):
    given = inputs(70, 32, 50)
    labels = torch.arange(70) % 50
    with torch.autocast("cpu", autocast):
        loss = linear_cross_entropy(*given, labels, chunk_bytes=chunk(chunk_rows, 50, autocast))
        expected = F.cross_entropy(F.linear(*given).float(), labels)
    assert loss.dtype == torch.float32
    for a, e in zip(gradients(loss, given), gradients(expected, given), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, e, rtol=0.05, atol=0.02 * e.abs().max().item())


@pytest.mark.parametrize("chunk_rows", [7, 1000])
@pytest.mark.parametrize("need_dx", [True, False])
@pytest.mark.parametrize("pinned", [None, "linear", "linear_cross_entropy"])
def test_a_weight_in_training_stays_in_float32_under_autocast(chunk_rows, need_dx, pinned):
    """Its gradients are those of the rounded weight, not rounded; another backend may serve backward."""
    with dispatch.use_backend(**({} if pinned is None else {pinned: "reference"})):
        check_a_weight_in_training(
            chunk_rows, need_dx, "cpu" in BACKENDS and pinned != "linear_cross_entropy"
        )


def check_a_weight_in_training(chunk_rows: int, need_dx: bool, wide: bool) -> None:
    x, weight, bias = inputs(70, 32, 50)
    x.requires_grad_(need_dx)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    bias.data.copy_(narrow[2])
    labels = torch.arange(70) % 50
    chunk_bytes = chunk(chunk_rows, 50, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, bias, labels, chunk_bytes=chunk_bytes)
    expected = linear_cross_entropy(*narrow, labels, chunk_bytes=chunk_bytes)
    assert torch.equal(loss, expected)
    leaves = (weight, bias, x)[: 2 + need_dx]
    found = torch.autograd.grad(loss, leaves, retain_graph=True)
    for a, e in zip(found, torch.autograd.grad(expected, narrow[1:] + narrow[:need_dx]), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a.bfloat16(), e)
    assert found[0]._base is None, "autograd adds to no view in place"
    assert torch.equal(found[0], found[0].bfloat16().float()) != wide
    with dispatch.use_backend(linear_cross_entropy="reference"):
        others = torch.autograd.grad(loss, leaves)
    for a, e in zip(others, found, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, e, rtol=2**-6, atol=1e-4)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the extension is missing")
@pytest.mark.parametrize(
    ("dtype", "leads", "pairs", "slow", "expected"),
    [
        (torch.float32, True, False, True, True),
        (torch.float32, False, False, True, False),
        (torch.bfloat16, True, False, False, True),
        (torch.bfloat16, True, True, False, False),
        (torch.bfloat16, True, False, True, False),
        (torch.float16, True, False, False, False),
    ],
)
def test_who_multiplies_the_logits_on_a_cpu(dtype, leads, pairs, slow, expected, monkeypatch, noted):
    """PyTorch's libraries where they are faster; a wide weight is cast for them."""
    monkeypatch.setattr(cpu_linear, "mkl_leads", lambda transposed=False: leads)
    monkeypatch.setattr(cpu_linear, "by_pairs", lambda dtype: pairs)
    monkeypatch.setattr(aten_linear, "bf16_is_slow", lambda: slow)
    seen = noted(aten_linear, "linear_fwd", lambda inputs, *_: inputs.x.dtype)
    monkeypatch.setattr(cpu_linear, "_FEWEST_ROWS", 0)
    given, labels = inputs(70, 32, 50), torch.arange(70) % 50
    with (
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
        dispatch.use_backend(linear_cross_entropy="cpu"),
    ):
        loss = linear_cross_entropy(*given, labels)
    assert seen == ([dtype] if expected else [])
    truth = linear_cross_entropy_ref(*(t.detach().double() for t in given), labels)
    torch.testing.assert_close(loss.double(), truth, rtol=2**-6, atol=0)


def test_small_probabilities_survive_under_a_loss_scale(backend):
    """In float16, 1 / 3000 / 256 rounds to 0; times GradScaler's 2**16 it does not."""
    given = inputs(256, 16, 3000, torch.float16)
    given[1].data.mul_(0.1)
    labels = torch.arange(256)
    wide = [t.detach().double().requires_grad_() for t in given]
    eager = [t.detach().requires_grad_() for t in given]
    truth = torch.autograd.grad(2**16 * linear_cross_entropy_ref(*wide, labels), wide)
    usual = torch.autograd.grad(2**16 * F.cross_entropy(F.linear(*eager).float(), labels), eager)
    for chunk_rows in (100, 1000):
        loss = linear_cross_entropy(*given, labels, chunk_bytes=chunk(chunk_rows, 3000, torch.float16))
        for a, u, t in zip(torch.autograd.grad(2**16 * loss, given), usual, truth, strict=True):
            errors = [(g.double() - t).abs().mean().item() for g in (a, u)]
            assert errors[0] <= 1.01 * errors[1]


# --- bad inputs ---------------------------------------------------------------------------------------------

X, W, B = inputs(grad=False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"x: expected shape \(rows, in\) with in >= 1, got \(4,\)"),
        ({"x": X.bfloat16()}, TypeError, "weight: expected x's dtype torch.bfloat16, got torch.float32"),
        ({"weight": W[:, :3]}, ValueError, r"weight: expected shape \(classes, 4\), got \(6, 3\)"),
        ({"bias": B[:5]}, ValueError, r"bias: expected shape \(6,\), got \(5,\)"),
        ({"bias": B.double()}, TypeError, "bias: expected x's dtype torch.float32, got torch.float64"),
        ({"labels": LABELS[:3]}, ValueError, r"labels: expected shape \(7,\), got \(3,\)"),
        ({"labels": LABELS.clamp(min=6)}, ValueError, "labels: label 6 is out of range for 6 classes"),
        ({"ignore_index": -1}, ValueError, "labels: label -100 is out of range"),
        ({"ignore_index": None}, TypeError, "ignore_index: expected an integer, got None"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: .*\[0, 1\], got 1.5"),
        ({"labelled": 8}, ValueError, "labelled: expected None or an integer from 0 to 7, got 8"),
        ({"labelled": 4}, ValueError, "labelled: 4, but labels has 5 other than -100"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes: expected an integer >= 1, got 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_inputs(change, error, message):
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{"x": X, "weight": W, "bias": B, "labels": LABELS, **change})


# --- classes brought to a multiple --------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, False)])
def test_added_classes_change_neither_loss_nor_gradients(biased, rows, needs):
    """6 classes as 8, in one part and in several; what is kept for backward has them too."""
    x, weight, bias = inputs(dtype=torch.bfloat16, grad=False)
    given = op.LossInputs(x, weight, bias if biased else None, LABELS, 5, IGNORE, 0.0, rows)
    needs = op.LinearNeeds(needs[0], needs[1], needs[2] and biased)
    found = []
    for multiple in (1, 8):
        forward, backward = composed.chunked(composed.linear, composed.cross_entropy, multiple)
        loss, lse, count, logits = forward(given, True)
        if rows == 100:
            assert logits.shape == (5, 6)
            assert logits.stride(0) == (6 if multiple == 1 else 8)
        again = logits.dim() == 1
        kept = given._replace(
            x=x if again or needs.dweight else None, weight=weight if again or needs.dx else None
        )
        grads = backward(torch.ones(()), kept, lse, count, logits, needs)
        assert [g.shape for g in grads] == [
            t.shape if needed else (0,) for t, needed in zip((x, weight, bias), needs, strict=True)
        ]
        found.append([loss, lse, *grads])
    for plain, wide in zip(*found, strict=True):
        tolerance = (1e-5, 1e-6) if plain.dtype == torch.float32 else (0.02, 1e-3)
        torch.testing.assert_close(wide, plain, rtol=tolerance[0], atol=tolerance[1])
