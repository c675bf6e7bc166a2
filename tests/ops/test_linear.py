"""`linear`: gradients, compilation, layouts, autocast, what is computed, bad inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fastbert import testing
from fastbert.backends.aten import linear as aten_linear
from fastbert.backends.cpu import linear as cpu_linear
from fastbert.ops import linear as op
from fastbert.ops.activation import ACTIVATIONS, GATES, activate_eager, activate_ref, slope_ref
from fastbert.ops.linear import LinearInputs, linear, linear_ref, panel_maker
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.linear import LinearCase
from tests.support.inputs import name, randn
from tests.support.ops import DTYPES, HALF, pinned, served, serves

ALL = [None, *ACTIVATIONS]


SERVED = served("linear")


@pytest.fixture(autouse=True)
def no_backend_hands_over(monkeypatch):
    """Make `cpu` compute products of few rows itself, which it otherwise leaves to `aten`."""
    monkeypatch.setattr(cpu_linear, "_FEWEST_ROWS", 1)


backend = pinned("linear")


@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_gelu_is_correctly_rounded(backend, dtype):
    """At least 99.9% of the outputs for a given pre-activation, at unit scale and over the whole range."""
    eye = torch.ones(1, 1, dtype=dtype)
    for z in (
        torch.randn(100_000, generator=torch.Generator().manual_seed(0)),
        torch.linspace(-8, 8, 100_001),
    ):
        z = z.to(dtype).unsqueeze(1)
        for grad in (False, True):
            y = linear(z.clone().requires_grad_(grad), eye, None, "gelu").detach()
            right = linear_ref(z.double(), eye.double(), None, "gelu").to(dtype)
            assert (y == right).double().mean() >= 0.999
    far = torch.tensor([[-1e4], [-20.0], [0.0], [20.0], [1e4]], dtype=dtype)
    assert torch.equal(linear(far, eye, None, "gelu"), far.clamp(min=0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_activations_at_their_ends(backend, dtype, activation):
    """Huge numbers as in float64, infinities as defined; NaN stays NaN."""
    if not serves("linear", backend, dtype):
        pytest.skip("another backend's dtype")
    far = [torch.finfo(dtype).max, 0.3 * torch.finfo(dtype).max, 1e4, 300.0, 40.0, 14.0, 0.0, math.inf]
    z = torch.tensor([*far, *(-f for f in far), math.nan], dtype=dtype)
    wide = z.double().requires_grad_()
    truth = activate_ref(wide, activation)
    (slope,) = torch.autograd.grad(truth.sum(), wide)
    if activation == "gelu_tanh":  # the powers of z overflow in float64 too
        slope = torch.where(z.abs() > 100, (z > 0).double(), slope)
    if activation == "tanh":  # autograd's 1 - tanh² loses the digits in float64 too
        slope = slope_ref(z.double(), activation)
    x, eye = z.repeat(5).unsqueeze(1), torch.ones(1, 1, dtype=dtype)
    kwargs = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-30, "equal_nan": True}
    for save in (False, True):
        y, pre = op.linear_fwd(x, eye, None, activation, None, save)
        torch.testing.assert_close(y, truth.detach().to(dtype).repeat(5).unsqueeze(1), **kwargs)
    assert torch.equal(pre.nan_to_num(nan=0.5), x.nan_to_num(nan=0.5))
    dx, _, _ = op.linear_bwd(torch.ones_like(x), None, eye, pre, activation, None, True, False, False)
    torch.testing.assert_close(dx, slope.to(dtype).repeat(5).unsqueeze(1), **kwargs)


@pytest.mark.parametrize("rows", [2032, 2033, 2048, 2049, 4100])
def test_every_row_of_many_reaches_the_gradients(backend, rows):
    """The C++ backward cuts rows into at most 128 chunks; 2,048 rows fill all of them."""
    dy = torch.arange(1.0, rows + 1).sub(rows // 2).unsqueeze(1).repeat(1, 3)
    pre = torch.full((rows, 3), 30.0)  # where GELU's slope is 1
    dx, _, dbias = op.linear_bwd(dy, None, torch.eye(3), pre, "gelu", None, True, False, True)
    assert torch.equal(dx, dy)
    torch.testing.assert_close(dbias, dy.double().sum(0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", ALL)
def test_reference_is_what_pytorch_defines(activation):
    x, w, b = (randn(*s, dtype=torch.float64) for s in ((6, 5), (4, 5), (4,)))
    torch.testing.assert_close(linear_ref(x, w, b, activation), activate_eager(F.linear(x, w, b), activation))


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_is_what_pytorch_defines(backend, activation, gated):
    """In float64 by formula; by every backend forward and backward."""
    x, w, b = (randn(*s, dtype=torch.float64, grad=True) for s in ((6, 5), (8, 5), (8,)))
    left, right = F.linear(x, w, b).chunk(2, dim=-1)
    own = activate_eager(left, activation) * right, left * activate_eager(right, activation)
    expected = own[GATES.index(gated)]
    torch.testing.assert_close(linear_ref(x, w, b, activation, gated=gated), expected)
    y = linear(*(t.float() for t in (x, w, b)), activation, gated=gated)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for a, e in zip(*(torch.autograd.grad(t.sum(), (x, w, b)) for t in (y, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", HALF, ids=name)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("gated", [None, "first"])
def test_autocast_casts_as_pytorch_does(backend, autocast, x_dtype, w_dtype, gated):
    x, b = randn(3, 6, dtype=x_dtype, grad=True), randn(4, dtype=w_dtype)
    w = randn(4, 6, dtype=w_dtype, grad=True)
    with torch.autocast("cpu", autocast):
        if x_dtype == torch.float64:  # autocast does not change float64, and float64 x half is refused
            with pytest.raises(TypeError, match="weight: expected x's dtype"):
                linear(x, w, b)
            return
        y = linear(x, w, b, "gelu", gated=gated)
        expected = activate_eager(F.linear(x, w, b), "gelu", gated)
    assert y.dtype == expected.dtype == autocast
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-3)
    for a, e, leaf in zip(
        torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w)), (x, w), strict=True
    ):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a, e, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("autocast", HALF, ids=name)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("need_dx", [True, False])
def test_a_weight_in_training_stays_in_float32_under_autocast(autocast, activation, need_dx):
    """No rounded copy of it is kept for backward, and its gradient is never rounded."""
    if not serves("linear", "cpu", autocast):
        pytest.skip("the extension is missing")
    x, w, b = randn(40, 24, grad=need_dx), randn(70, 24, grad=True), randn(70, grad=True)
    b.data.copy_(b.to(autocast))  # a bias is not rounded
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast("cpu", autocast),
    ):
        y = linear(x, w, b, activation)
    assert [t for t in saved if t.shape == w.shape and t.data_ptr() != w.data_ptr()] == []
    narrow = [t.detach().to(autocast) for t in (x, w)]
    assert y.dtype == autocast
    assert torch.equal(y, linear(*narrow, b.detach().to(autocast), activation))
    dy = randn(*y.shape, dtype=autocast)
    y.backward(dy)
    if activation is None:
        truth = dy.double().T @ narrow[0].double()
        assert ((w.grad - truth).abs() <= 2**-20 * (dy.double().abs().T @ narrow[0].double().abs())).all()
        assert ((b.grad - dy.double().sum(0)).abs() <= 2**-20 * dy.double().abs().sum(0)).all()
    assert w.grad.dtype == b.grad.dtype == torch.float32
    assert not torch.equal(w.grad, w.grad.to(autocast).float())


@pytest.mark.parametrize("need", ["all", "weights"])
def test_another_backend_may_serve_backward(need):
    x, w, b = randn(40, 24, grad=need == "all"), randn(70, 24, grad=True), randn(70, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, b)
    dy = randn(*y.shape, dtype=torch.bfloat16)
    leaves = (w, b, x)[: 2 + (need == "all")]
    expected = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    for which in ("reference", "aten"):
        with dispatch.use_backend(linear=which):
            for a, e in zip(torch.autograd.grad(y, leaves, dy, retain_graph=True), expected, strict=True):
                assert a.dtype == torch.float32
                torch.testing.assert_close(a, e, rtol=2**-7, atol=1e-2)


def test_a_frozen_weight_is_cast_under_autocast():
    x, w, b = randn(40, 24, grad=True), randn(70, 24), randn(70, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, b)
    y.sum().backward()
    assert torch.equal(y, linear(x.bfloat16(), w.bfloat16(), b.bfloat16()))
    assert torch.equal(b.grad, torch.full((70,), 40.0))


def test_a_residual_of_another_dtype_is_promoted(backend):
    x, w = randn(3, 6, dtype=torch.bfloat16), randn(4, 6, dtype=torch.bfloat16)
    residual = randn(3, 4, grad=True)
    y = linear(x, w, None, None, residual)
    assert y.dtype == torch.float32
    assert torch.equal(y, linear(x, w) + residual)
    (dresidual,) = torch.autograd.grad(y.sum(), residual)
    assert torch.equal(dresidual, torch.ones_like(residual))


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        ("x", (True, False, False)),
        ("w", (False, True, False)),
        ("b", (False, False, True)),
        ("xw", (True, True, False)),
        ("r", None),
        ("", None),
    ],
)
def test_nothing_needless_is_computed_for_frozen_inputs(noted, trainable, expected):
    from fastbert.backends import aten

    def asked(dy, saved, need):
        return need, saved.x is not None, saved.weight is not None

    seen = noted(aten, "linear_bwd", asked)
    tensors = {"x": randn(3, 6), "w": randn(4, 6), "b": randn(4), "r": randn(3, 4)}
    for key in trainable:
        tensors[key].requires_grad_()
    with dispatch.use_backend(linear="aten"):
        y = linear(tensors["x"], tensors["w"], tensors["b"], "gelu", tensors["r"])
        assert y.requires_grad == bool(trainable)
        if trainable:
            y.sum().backward()
    for key, tensor in tensors.items():
        assert (tensor.grad is not None) == (key in trainable)
    if expected is None:
        assert seen == []
    else:  # x is kept only for dweight, the weight only for dx
        assert seen == [(expected, expected[1], expected[0])]


def test_pre_is_saved_only_for_an_activation_and_a_gradient(backend):
    module = dispatch.backend_module(backend)
    x, w = randn(3, 6), randn(4, 6)
    assert module.linear_fwd(LinearInputs(x, w, activation="gelu"), False)[1].shape == (0,)
    assert module.linear_fwd(LinearInputs(x, w), True)[1].shape == (0,)
    torch.testing.assert_close(module.linear_fwd(LinearInputs(x, w, activation="gelu"), True)[1], x @ w.T)
    assert module.linear_fwd(LinearInputs(x, w, activation="gelu", gated="first"), False)[1].shape == (0,)
    torch.testing.assert_close(
        module.linear_fwd(LinearInputs(x, w, activation="gelu", gated="first"), True)[1], x @ w.T
    )


# --- packed weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [None, "first"])
def test_packed_changes_nothing(backend, gated):
    """With and without gradients, bias and a residual that promotes. Panels of other backends are ignored."""
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b = (randn(*s, dtype=dtype, grad=True) for s in ((2, 20, 24), (70, 24), (70,)))
        pack = panel_maker(x.device, dtype, gated=gated is not None)
        packed = torch.zeros(3, dtype=dtype) if pack is None else pack(w.detach())
        assert (pack is None) == (backend != "cpu")
        out = 35 if gated else 70
        for residual in (None, randn(2, 20, out, dtype=dtype), randn(2, 20, out)):
            y, expected = (linear(x, w, b, "gelu", residual, p, gated) for p in (packed, None))
            assert torch.equal(y, expected)
            for a, e in zip(*(torch.autograd.grad(t.sum(), (x, w, b)) for t in (y, expected)), strict=True):
                assert torch.equal(a, e)
            with torch.no_grad():
                assert torch.equal(linear(x, w, b, "gelu", residual, packed, gated), expected)


def test_packed_is_of_the_dtype_of_the_product():
    x, w = randn(4, 24), randn(70, 24)
    pack = panel_maker(x.device, torch.bfloat16)
    if pack is None:
        pytest.skip("the backend that serves here packs nothing")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, w, panels=pack(w.bfloat16())), linear(x, w))
        with pytest.raises(TypeError, match=r"panels: expected x's dtype torch.bfloat16, got torch.float32"):
            linear(x, w, panels=pack(w))


def test_the_packer_is_that_of_the_serving_backend():
    device = torch.device("cpu")
    for which, dtype in SERVED:
        with dispatch.use_backend(linear=which):
            assert (panel_maker(device, dtype) is None) == (which != "cpu")
    assert panel_maker(device, torch.float64) is None


def test_compiled_linear_ignores_packed():
    torch._dynamo.reset()
    x, w = randn(40, 24), randn(70, 24)
    run = torch.compile(
        lambda x, w, packed: linear(x, w, panels=packed), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    assert torch.equal(run(x, w, torch.full((3,), float("nan"))), linear(x, w))


X, W, B = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x: expected shape \(\.\.\., in\).*got \(\)"),
    ({"x": X[:, :0], "weight": W[:, :0]}, ValueError, r"x: expected .* in >= 1, got \(2, 0\)"),
    ({"weight": torch.ones(4, 5)}, ValueError, r"weight: expected shape \(out, 3\), got \(4, 5\)"),
    ({"weight": W[:0]}, ValueError, r"weight: .*got \(0, 3\)"),
    ({"bias": torch.ones(3)}, ValueError, r"bias: expected shape \(4,\), got \(3,\)"),
    ({"activation": "swish"}, ValueError, "activation: expected None or one of gelu, .*got 'swish'"),
    ({"activation": "gelu", "gated": "both"}, ValueError, "gated: expected None, 'first' or .*got 'both'"),
    ({"gated": "first"}, ValueError, "activation: expected the name of one with gated='first', got None"),
    (
        {"weight": W[:3], "activation": "gelu", "gated": "second"},
        ValueError,
        "weight: expected an even number of rows with gated='second', got 3",
    ),
    (
        {"activation": "gelu", "gated": "first", "residual": torch.ones(2, 4)},
        ValueError,
        r"residual: expected shape \(2, 2\), got \(2, 4\)",
    ),
    ({"residual": torch.ones(4)}, ValueError, r"residual: expected shape \(2, 4\), got \(4,\)"),
    ({"weight": W.bfloat16()}, TypeError, "weight: expected x's dtype torch.float32, got torch.bfloat16"),
    ({"bias": B.double()}, TypeError, "bias: expected x's dtype torch.float32, got torch.float64"),
    ({"panels": W.half()}, TypeError, "panels: expected x's dtype torch.float32, got torch.float16"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_inputs(change, error, message):
    with pytest.raises(error, match=message):
        linear(**{"x": X, "weight": W, **change})


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("rows", [63, 64, 130])
def test_bfloat16_through_float32_where_that_is_faster(monkeypatch, slow, rows):
    """The processor decides which path runs. Both must be right; the float32 path rounds once."""
    monkeypatch.setattr(aten_linear, "bf16_is_slow", lambda: slow)
    for activation in (None, "gelu"):
        for row in testing.run_case(LinearCase(rows, 96, 72, activation), "aten", torch.bfloat16):
            assert row.passed, f"{row.quantity}: {row.reason}"
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=g).bfloat16() for s in ((rows, 96), (72, 96), (72,)))
    with dispatch.use_backend(linear="aten"):
        y = linear(x, w, b)
    once = F.linear(x.float(), w.float(), b.float()).bfloat16()
    if slow and rows >= 64:
        assert torch.equal(y, once)
    assert (y - once).abs().max() <= 2**-8 * once.abs().max()
