"""csrc/cuda/linear*.cu compiled for the host: every tile, layout, epilogue and tail, against float64."""

from __future__ import annotations

import ctypes
import mmap
import random

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten, cuda
from fastbert.backends.cuda import feed_forward
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import ACTIVATIONS, CODES, activate_ref, slope_ref
from fastbert.ops.feed_forward import FeedForwardNeeds
from fastbert.runtime import dispatch, loader
from fastbert.testing.op_cases import feed_forward as feed_forward_cases
from fastbert.testing.op_cases import linear as linear_cases
from tests.support.cpu_truth import (
    assert_rounds_to,
    assert_same_bits,
    assert_same_values,
    randn,
    strided_rows,
)
from tests.support.cuda_draws import check_drawn_products, steps, whole_numbers

HALF = (torch.bfloat16, torch.float16)
_C = loader.extension

pytest_plugins = ("tests.support.cpu_fixtures", "tests.support.cuda_fixtures")
pytestmark = pytest.mark.skipif(_C is None, reason=str(loader.missing))


@pytest.fixture
def on_host(emulated_extension, cuda_on_host, monkeypatch, fresh_dispatch):
    """The `cuda` backend on the host; the extension."""
    monkeypatch.setattr(cuda.device, "multiprocessors", lambda device: 3)
    return emulated_extension


@pytest.fixture
def exact_gelu(monkeypatch):
    """As with FASTBERT_EXACT_GELU=1."""
    monkeypatch.setattr(launchers, "EXACT_GELU", True)


# --- the error rule -----------------------------------------------------------------------------------------


def broken_rules(case, dtype, seed=0):
    rows = testing.run_case(case, "cuda", dtype, seed=seed)
    assert len(rows) >= 2
    return [(r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", linear_cases.CASES, ids=repr)
def test_error_rule(on_host, case, dtype):
    assert broken_rules(case, dtype) == []


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", feed_forward_cases.CASES, ids=repr)
def test_error_rule_of_feed_forward(on_host, case, dtype):
    assert broken_rules(case, dtype) == []


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", (40, 300))
def test_error_rule_of_exact_gelu(on_host, kernels_only, exact_gelu, rows, dtype):
    case = linear_cases.LinearCase(rows, 64, 72, "gelu", residual=True)
    assert broken_rules(case, dtype) == []


# --- every tile, layout and part ----------------------------------------------------------------------------

# Rows, in, out: less than a tile, one, one and a bit; depths of one step, of the ring's slots, of more.
SHAPES = (
    (1, 8, 1),
    (5, 24, 40),
    (16, 64, 128),
    (33, 104, 129),
    (65, 200, 250),
    (130, 264, 136),
    (193, 40, 257),
)


FORWARD = [
    (shape, tile, parts)
    for shape in SHAPES
    for tile in (16, 32, 64, 128)
    for parts in (1, 2, 3)
    if parts <= steps(shape[1], tile) and (parts != 2 or shape[0] < 100)
]


@pytest.mark.parametrize(("shape", "tile", "parts"), FORWARD)
def test_forward_is_exact_for_small_integers(on_host, kernels_only, guarded, shape, tile, parts):
    rows, depth, out = shape
    dtype = HALF[(rows + tile // 16 + parts) % 2]
    x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, out))
    bias = whole_numbers(out, dtype=dtype, most=9)
    residual = whole_numbers(rows, out, dtype=dtype, most=9, seed=3)
    product = x.float() @ weight.float().T
    fwd = launchers.linear_fwd_with
    for activation, b, r, save in (
        ("relu", bias, residual, True),
        (None, bias, None, True),
        (None, None, residual, False),
        (None, None, None, False),
    ):
        y, pre = fwd((tile, parts), x, weight, b, activation, r, save)
        z = product if b is None else product + b.float()
        truth = activate_ref(z, activation) + (0 if r is None else r.float())
        assert_same_values(y, truth.to(dtype), f"y of {activation}")
        assert pre.shape == (z.shape if activation else (0,))
        if activation:
            assert_same_values(pre, z.to(dtype), "pre")


@pytest.mark.parametrize("activation", (None, *ACTIVATIONS))
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tile", (16, 64, 128))
def test_every_activation(on_host, kernels_only, guarded, tile, dtype, activation):
    """With bias, residual and pre, in one part and in two; cheap GELU by its own largest error."""
    x, weight = randn(37, 136, dtype=dtype), randn(44, 136, dtype=dtype, seed=1) / 8
    bias, residual = randn(44, dtype=dtype, seed=2), randn(37, 44, dtype=dtype, seed=3)
    z = x.double() @ weight.double().T + bias.double()
    truth = activate_ref(z, activation) + residual.double()
    loose = 2e-3 * 2**20 if activation == "gelu" else 16
    for parts in (1, 2):
        plan = tile, parts
        y, pre = launchers.linear_fwd_with(plan, x, weight, bias, activation, residual, True)
        assert_rounds_to(y, truth, loose, "y")
        if activation:
            assert_rounds_to(pre, z, 16, "pre")
        unsaved = launchers.linear_fwd_with(plan, x, weight, bias, activation, residual, False)
        assert_same_bits(unsaved[0], y, "without pre")
        assert unsaved[1].shape == (0,)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (16, 1), (64, 2)), ids=str)
def test_cheap_gelu_obeys_the_error_rule_in_every_kernel(on_host, kernels_only, plan, dtype):
    case = linear_cases.LinearCase(72, 128, 200, "gelu")
    inputs = case.inputs(dtype, "cpu")
    args = (inputs[k] for k in ("x", "weight", "bias"))
    y, pre = launchers.linear_fwd_with(plan, *args, "gelu", None, True)
    truth = case.oracle(**{k: v if v is None else v.double() for k, v in inputs.items()})
    assert testing.error_rule.compare(y, case.eager(**inputs), truth, dtype)[-1] == ""
    x, weight, bias = (inputs[k].double() for k in ("x", "weight", "bias"))
    assert_rounds_to(pre, x @ weight.T + bias, 16, "pre")


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_exact_gelu_is_correctly_rounded(on_host, exact_gelu, dtype):
    """By a product with the unit matrix, so that the activation's argument is known."""
    z = torch.linspace(-6, 6, 128 * 40).view(-1, 8).to(dtype)
    y, pre = launchers.linear_fwd(z, torch.eye(8, dtype=dtype), None, "gelu", None, True)
    assert_same_bits(pre, z)
    wrong = (y != activate_ref(z.double(), "gelu").to(dtype)).double().mean().item()
    assert wrong <= 1e-3


BACKWARD = [
    (shape, tile, parts)
    for shape in ((1, 8, 8), (7, 24, 40), (130, 72, 136), (65, 264, 200))
    for tile in (64, 128)
    for parts in (1, 2)
    if parts <= min(steps(shape[2], tile), steps(shape[0], 128))
]


@pytest.mark.parametrize(("shape", "tile", "parts"), BACKWARD)
def test_backward_is_exact_for_small_integers(on_host, kernels_only, guarded, shape, tile, parts):
    rows, inputs, out = shape
    dtype = HALF[(rows + tile // 64) % 2]
    dy, x, weight, pre = (
        whole_numbers(*size, dtype=dtype, most=1, seed=i)
        for i, size in enumerate(((rows, out), (rows, inputs), (out, inputs), (rows, out)))
    )
    for activation in (None, "relu"):
        g = dy.float() * (slope_ref(pre.float(), "relu") if activation else 1)
        truth = g @ weight.float(), g.T @ x.float(), g.sum(0)
        grads = launchers.linear_bwd_with(
            ((tile, parts), (128, parts)),
            dy,
            x,
            weight,
            pre if activation else None,
            activation,
            True,
            True,
            True,
        )
        for name, actual, expected in zip(("dx", "dweight", "dbias"), grads, truth, strict=True):
            assert_same_values(actual, expected.to(dtype), f"{name} of {activation}")


@pytest.mark.parametrize("activation", (None, "gelu"))
def test_backward_makes_only_what_is_wanted(on_host, kernels_only, guarded, activation):
    dy, x, weight, pre = (
        randn(*size, dtype=torch.bfloat16, seed=i)
        for i, size in enumerate(((20, 24), (20, 40), (24, 40), (20, 24)))
    )
    pre = pre if activation else None
    full = launchers.linear_bwd(dy, x, weight, pre, activation, True, True, True)
    for need in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        found = launchers.linear_bwd(
            dy, x if need[1] else None, weight if need[0] else None, pre, activation, *need
        )
        for name, a, b, wanted in zip(("dx", "dweight", "dbias"), found, full, need, strict=True):
            assert_same_bits(a, b if wanted else dy.new_empty(0), name)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (64, 2)), ids=str)
def test_gradient_between_the_products(on_host, kernels_only, guarded, plan, activation, dtype):
    """g and its column sums, at a row past a tile and one past 64."""
    rows, out, inner = (129 if plan[0] == 128 else 67), 72, 136
    dy, weight = randn(rows, out, dtype=dtype), randn(out, inner, dtype=dtype, seed=1) / 8
    pre = randn(rows, inner, dtype=dtype, seed=2)
    g, dbias = feed_forward.inner_gradient(dy, weight, pre, activation, True, plan)
    truth = (dy.double() @ weight.double()) * slope_ref(pre.double(), activation)
    # the cheap slope is off by at most 7.1e-5 or 1.8e-5
    loose = (1e-4 * 2**20 if dtype == torch.bfloat16 else 3e-5 * 2**20) * 4 if activation == "gelu" else 64
    assert_rounds_to(g, truth, loose, "g")
    assert_rounds_to(dbias, truth.sum(0), loose * 4, "dbias")
    again, none = feed_forward.inner_gradient(dy, weight, pre, activation, False, plan)
    assert_same_bits(again, g, "without dbias")
    assert none.shape == (0,)


@pytest.mark.parametrize("activation", ("gelu", "relu"))
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (64, 2)), ids=str)
@pytest.mark.parametrize("rows", (1, 63, 64, 65, 130))
def test_column_sums_count_every_row_once(on_host, kernels_only, guarded, rows, plan, activation):
    """Where the slope is 1, in the epilogue (GELU) and in a pass of its own."""
    dy, weight = (
        whole_numbers(rows, 80, dtype=torch.float16, most=1),
        whole_numbers(80, 40, dtype=torch.float16),
    )
    g, dbias = feed_forward.inner_gradient(
        dy, weight, 20 * torch.ones(rows, 40).half(), activation, True, plan
    )
    truth = dy.float() @ weight.float()
    assert_same_values(g, truth.half())
    assert_same_values(dbias, truth.sum(0).half())


def test_bias_gradient_of_many_rows(on_host, guarded):
    """More rows than blocks of the pass, and a second block of columns."""
    dy = whole_numbers(301, 520, dtype=torch.float16)
    dbias = launchers.linear_bwd(dy, None, None, None, None, False, False, True)[2]
    assert_same_values(dbias, dy.float().sum(0).half())


# --- inputs that lie oddly, hostile numbers -----------------------------------------------------------------


@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (64, 2), (32, 1), (16, 1)), ids=str)
@pytest.mark.parametrize("gap", (8, 16, 24))
def test_rows_among_poison(on_host, kernels_only, guarded, gap, plan):
    """NaN behind each row of x, weight and residual; rows of residual that are not aligned."""
    dtype = torch.bfloat16
    x, x_memory = strided_rows(35, 72, dtype, gap, seed=1)
    weight, weight_memory = strided_rows(50, 72, dtype, gap, seed=2)
    residual, residual_memory = strided_rows(35, 50, dtype, gap - 5, seed=3)
    before = [m.clone() for m in (x_memory, weight_memory, residual_memory)]
    y, _ = launchers.linear_fwd_with(plan, x, weight, None, None, residual, False)
    assert_rounds_to(y, x.double() @ weight.double().T + residual.double(), 64)
    for memory, copy in zip((x_memory, weight_memory, residual_memory), before, strict=True):
        assert_same_bits(memory, copy, "an input was written")


@pytest.mark.parametrize("tile", (64, 128))
def test_backward_with_rows_among_poison(on_host, kernels_only, guarded, tile):
    dtype = torch.bfloat16
    x, _ = strided_rows(35, 72, dtype, 8, seed=1)
    weight, _ = strided_rows(56, 72, dtype, 16, seed=2)
    dy = randn(35, 56, dtype=dtype, seed=3)
    plans = (tile, 1), (128, 1)
    dx, dweight, _ = launchers.linear_bwd_with(plans, dy, x, weight, None, None, True, True, False)
    assert_rounds_to(dx, dy.double() @ weight.double(), 64)
    assert_rounds_to(dweight, dy.double().T @ x.double(), 64)


def before_a_gap(t):
    """A copy of `t` that ends where a page begins that nobody may read: reading past its end crashes."""
    page = mmap.PAGESIZE
    size = -(-t.numel() * t.itemsize // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert libc.mprotect(start + size, page, 0) == 0
    held = torch.frombuffer(memory, dtype=t.dtype, count=size // t.itemsize)
    return held[-t.numel() :].view(t.shape).copy_(t)


@pytest.mark.parametrize("tile", (16, 32, 64, 128))
def test_nothing_is_read_past_the_ends(on_host, kernels_only, tile):
    """Lines, columns and depths that a tile has and the matrices do not."""
    x, weight, dy = (
        before_a_gap(whole_numbers(*size, dtype=torch.float16, most=1, seed=i))
        for i, size in enumerate(((5, 40), (24, 40), (5, 24)))
    )
    y, _ = launchers.linear_fwd_with((tile, 1), x, weight, None, None, None, False)
    assert_same_values(y, (x.float() @ weight.float().T).half())
    if tile >= 64:
        plans = (tile, 1), (128, 1)
        dx, dweight, _ = launchers.linear_bwd_with(plans, dy, x, weight, None, None, True, True, False)
        assert_same_values(dx, (dy.float() @ weight.float()).half())
        assert_same_values(dweight, (dy.float().T @ x.float()).half())


@pytest.mark.parametrize("stride", (45, 48))
@pytest.mark.parametrize("out", (40, 43))
@pytest.mark.parametrize("offset", (0, 1, 3))
def test_residual_and_bias_at_any_address(on_host, kernels_only, offset, out, stride):
    memory = whole_numbers(40 * 48 + 8, dtype=torch.float16)
    residual = memory[offset : offset + 20 * stride].view(20, stride)[:, :out]
    bias = memory[offset : offset + out]
    x, weight = (
        whole_numbers(20, 16, dtype=torch.float16),
        whole_numbers(out, 16, dtype=torch.float16, seed=2),
    )
    truth = x.float() @ weight.float().T + bias.float() + residual.float()
    for plan in ((128, 1), (32, 1)):
        y, _ = launchers.linear_fwd_with(plan, x, weight, bias, None, residual, False)
        assert_same_values(y, truth.half())


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("activation", (None, *ACTIVATIONS))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_is_not_finite_stays_in_its_row(on_host, monkeypatch, dtype, activation, exact):
    monkeypatch.setattr(launchers, "EXACT_GELU", exact)
    bad = (float("nan"), float("inf"), -float("inf"))
    x = randn(20, 16, dtype=dtype)
    # far behind the last row: tiles copy that one again
    x[17:20, 0] = torch.tensor(bad, dtype=dtype)
    weight = torch.zeros(24, 16, dtype=dtype)
    weight[:, 0] = 1
    y, pre = launchers.linear_fwd(x, weight, None, activation, None, True)
    assert torch.isfinite(y[:17]).all()
    assert torch.isnan(y[17]).all()
    high = {"tanh": 1.0}.get(activation, bad[1])
    assert (y[18] == high).all()
    low = {None: bad[2], "tanh": -1.0, "gelu": 0.0, "relu": 0.0}.get(activation)
    if low is not None:
        assert (y[19].float() - low).nan_to_num(0.0).abs().max() < 1e-6
    if activation:
        dy = torch.ones_like(y)
        g, _ = launchers.gradient(dy, pre, activation, True, False)
        assert torch.isfinite(g[:17]).all()
        if activation != "relu":
            assert torch.isnan(g[17]).all()
        else:
            assert (g[17] == 1).all()  # as in PyTorch
        limit = 0.0 if activation == "tanh" else 1.0
        assert (g[18] == limit).all()
        assert (g[19] == 0).all()


# --- which calls it takes, and how they are cut -------------------------------------------------------------


def test_the_next_backend_takes_the_rest(on_host, monkeypatch):
    """Misaligned starts and rows, depths that are no multiple of 8; the same result as `aten` itself."""
    for op in ("linear", "feed_forward"):
        monkeypatch.setitem(dispatch.TABLE["cpu"], op, ("cuda", "aten", "reference"))
    monkeypatch.setattr(dispatch, "_resolved", {})
    memory = randn(4096, dtype=torch.bfloat16)
    x, weight = memory[: 6 * 32].view(6, 32), memory[512 : 512 + 10 * 32].view(10, 32)
    monkeypatch.setattr(launchers, "product", None)
    for own_x, own_weight in (
        (memory[1 : 1 + 6 * 32].view(6, 32), weight),
        (memory[: 6 * 33].view(6, 33)[:, :32], weight),
        (x, memory[515 : 515 + 10 * 32].view(10, 32)),
        (x[:, :28], weight[:, :28]),
    ):
        y = launchers.linear_fwd(own_x, own_weight, None, None, None, False)[0]
        assert_same_bits(y, own_x @ own_weight.T)
    dy = memory[:60].view(6, 10)  # 10 is no multiple of 8
    grads = launchers.linear_bwd(dy, x, weight, None, None, True, True, True)
    for a, b in zip(grads, (dy @ weight, dy.T @ x, dy.sum(0)), strict=True):
        assert_same_bits(a, b)
    need = FeedForwardNeeds(True, True, True, True)
    up, down, pre = memory[: 10 * 32].view(10, 32), memory[:320].view(32, 10), memory[:60].view(6, 10)
    args = x, x, up, down, pre, pre, "gelu", need
    for a, b in zip(feed_forward.feed_forward_bwd(*args), aten.feed_forward_bwd(*args), strict=True):
        assert_same_bits(a, b)


def test_many_rows_go_on_where_our_products_are_slower(on_host, monkeypatch):
    """Not an exact GELU that was asked for, nor a few rows."""
    for op in ("linear", "feed_forward"):
        monkeypatch.setitem(dispatch.TABLE["cpu"], op, ("cuda", "aten", "reference"))
    monkeypatch.setattr(dispatch, "_resolved", {})
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: True)
    made = []
    monkeypatch.setattr(launchers, "product", lambda *given, **_: made.append(given[0]))
    x, weight = randn(512, 16, dtype=torch.bfloat16), randn(24, 16, dtype=torch.bfloat16, seed=1)
    residual = randn(512, 24, dtype=torch.bfloat16, seed=2)
    for activation in ("gelu", "relu", "silu"):
        given = x, weight, None, activation, residual, True
        for a, b in zip(launchers.linear_fwd(*given), aten.linear_fwd(*given), strict=True):
            assert_same_bits(a, b)
    assert made == []
    launchers.linear_fwd(x[:511], weight, None, "relu", None, False)
    monkeypatch.setattr(launchers, "EXACT_GELU", True)
    launchers.linear_fwd(x, weight, None, "gelu", None, False)
    assert len(made) == 2


@pytest.mark.parametrize("activation", (None, "gelu"))
def test_backward_products_are_pytorchs_where_ours_are_slower(on_host, monkeypatch, guarded, activation):
    """On tensor cores that mma.sync uses by half; the pass over dy is still ours."""
    dy, x, pre = (
        randn(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate(((70, 72), (70, 40), (70, 72)))
    )
    weight = randn(72, 40, dtype=torch.bfloat16, seed=4)
    own = launchers.linear_bwd(dy, x, weight, pre, activation, True, True, True)
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: True)
    monkeypatch.setattr(launchers, "product", None)
    given = launchers.linear_bwd(dy, x, weight, pre, activation, True, True, True)
    g = dy if activation is None else launchers.gradient(dy, pre, activation, True, False)[0]
    assert_same_bits(given[2], own[2])
    for a, b, truth in zip(
        given, own, (g.double() @ weight.double(), g.double().T @ x.double()), strict=False
    ):
        assert_rounds_to(a, truth, 64)
        assert_rounds_to(b, truth, 64)
    assert [t.shape for t in launchers.linear_bwd(dy, None, weight, pre, activation, True, False, False)] == [
        (70, 40),
        (0,),
        (0,),
    ]


def test_the_gradient_between_is_a_pass_where_our_products_are_slower(on_host, monkeypatch, guarded):
    dy, down, pre = (
        randn(*s, dtype=torch.float16, seed=i) for i, s in enumerate(((70, 40), (40, 72), (70, 72)))
    )
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: True)
    monkeypatch.setattr(launchers, "product", None)
    g, dbias = feed_forward.inner_gradient(dy, down, pre, "gelu", True)
    want, want_dbias = launchers.gradient(dy @ down, pre, "gelu", True, True)
    assert_same_bits(g, want)
    assert_same_bits(dbias, want_dbias)
    truth = (dy.double() @ down.double()) * slope_ref(pre.double(), "gelu")
    assert (g.double() - truth).abs().max() < 2**-8 * truth.abs().max()


def test_half_precision_alone(on_host):
    assert cuda.DTYPES["linear"] == cuda.DTYPES["feed_forward"] == HALF
    with dispatch.use_backend(linear="cuda"), pytest.raises(dispatch.BackendError, match="float32"):
        dispatch.call("linear_fwd", torch.ones(8, 8), *(torch.ones(8, 8),) * 2, None, None, None, False)


def test_no_rows(on_host, guarded):
    x, weight = torch.empty(0, 16, dtype=torch.bfloat16), randn(24, 16, dtype=torch.bfloat16)
    y, pre = launchers.linear_fwd(x, weight, None, "gelu", None, True)
    assert y.shape == pre.shape == (0, 24)
    dx, dweight, dbias = launchers.linear_bwd(y, x, weight, pre, "gelu", True, True, True)
    assert dx.shape == (0, 16)
    assert (dweight == 0).all()
    assert (dbias == 0).all()


@pytest.mark.parametrize("multiprocessors", (1, 58, 132))
def test_plans(on_host, multiprocessors):
    """Every plan can run; few rows have small tiles; what fills the device has one part and large tiles."""
    plan = on_host.cuda_linear_plan
    for layout, rows, columns, depth in (
        (lay, r, c, d)
        for lay in range(3)
        for r in (1, 16, 17, 32, 33, 64, 100, 256, 4096)
        for c in (8, 768, 3072)
        for d in (8, 128, 768, 3072, 16384)
    ):
        tile, parts = plan(layout, rows, columns, depth, multiprocessors)
        assert tile in {0: (16, 32, 64, 128), 1: (64, 128), 2: (128,)}[layout]
        assert 1 <= parts <= max(1, min(32, depth // 128))
        assert tile >= 64 or rows <= tile
    assert plan(0, 16384, 3072, 768, multiprocessors) == (128, 1)
    assert plan(0, 1, 768, 768, multiprocessors)[0] == 16
    if multiprocessors == 132:
        assert plan(0, 16, 768, 3072, 132)[1] > 4
        assert plan(2, 768, 768, 16384, 132)[1] > 2


def test_scratch(on_host):
    partial, cheap = on_host.cuda_linear_partial, (CODES["gelu"], False)
    assert partial(10, 20, 1, 0, False) == partial(10, 20, 1, *cheap) == 0
    assert partial(10, 20, 3, *cheap) == 3 * 10 * 24
    assert partial(10, 20, 1, CODES["gelu"], True) == partial(10, 20, 1, CODES["silu"], False) == 10 * 24
    assert [on_host.cuda_linear_sums(rows) for rows in (1, 64, 65, 200)] == [1, 1, 2, 4]


def product_arguments(a, **changes):
    """Those of `cuda_linear_product` for a a-transposed; `changes` by name."""
    n = a.shape[0]
    own = {
        **{"dtype": 1, "layout": 0, "rows": n, "columns": n, "depth": 16, "a": a.data_ptr(), "a_stride": 16},
        **{"b": a.data_ptr(), "b_stride": 16, "bias": 0, "activation": 0, "exact": False, "residual": 0},
        **{"residual_stride": 0, "slope_at": 0, "c": a.data_ptr(), "pre": 0, "sums": 0, "partial": 0},
        **{"tile_rows": 64, "parts": 1, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    return (own | changes).values()


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"dtype": 0}, "dtype: bfloat16 or float16"),
        ({"depth": 12}, "multiple of 8"),
        ({"a_stride": 20}, "on 16 bytes"),
        ({"b_stride": 18}, "on 16 bytes"),
        ({"tile_rows": 48}, "tile_rows: 16, 32, 64 or 128"),
        ({"layout": 1, "tile_rows": 32}, "tile_rows: 128 backward, or 64 for dx"),
        ({"layout": 2, "tile_rows": 64}, "tile_rows: 128 backward"),
        ({"layout": 3}, "layout: expected 0, 1 or 2, got 3"),
        ({"parts": 2}, "partial: an address"),
        ({"parts": 2, "partial": 16}, "parts: at least one step"),
        ({"parts": 0}, "parts: at least one step"),
        ({"activation": 4}, "partial: an address"),
        ({"activation": 6}, "activation: expected code"),
        ({"slope_at": 16}, "slope_at: needs an activation"),
        ({"device": 1}, "emulated device"),
        ({"rows": -1}, "expected rows >= 0"),
        ({"rows": 1 << 40, "depth": 8}, "less than 2\\*\\*31"),
    ),
    ids=str,
)
def test_refusals(on_host, changes, message):
    a = randn(16, 16, dtype=torch.bfloat16)
    with pytest.raises((ValueError, RuntimeError), match=message):
        on_host.cuda_linear_product(*product_arguments(a, **changes))


def test_exact_gelu_by_the_environment(monkeypatch):
    for value, exact in ((None, False), ("", False), ("0", False), ("1", True)):
        if value is None:
            monkeypatch.delenv("FASTBERT_EXACT_GELU", raising=False)
        else:
            monkeypatch.setenv("FASTBERT_EXACT_GELU", value)
        assert launchers._wants_exact_gelu() is exact
    monkeypatch.setenv("FASTBERT_EXACT_GELU", "yes")
    with pytest.raises(ValueError, match="FASTBERT_EXACT_GELU: expected 0, 1 or nothing, got 'yes'"):
        launchers._wants_exact_gelu()


# --- repeats, any shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ((16, 2), (32, 1), (64, 2), (128, 1), (128, 3)), ids=str)
def test_repeats_are_bit_equal(on_host, kernels_only, plan):
    """Each launch draws its own order of warps, and whether copies land early or late."""
    x, weight, pre = (
        randn(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate(((70, 264), (72, 264), (70, 72)))
    )
    dy = randn(70, 72, dtype=torch.bfloat16, seed=4)
    inner = randn(264, 72, dtype=torch.bfloat16, seed=5)

    def results():
        y = launchers.linear_fwd_with(plan, x, weight, None, "gelu", pre, True)
        if plan[0] < 64 or plan[1] > 2:
            return y
        plans = (plan[0], 1), (128, plan[1])
        grads = launchers.linear_bwd_with(plans, dy, x, weight, pre, "gelu", True, True, True)
        return *y, *grads, *feed_forward.inner_gradient(x, inner, pre, "gelu", True, plan)

    first = results()
    for _ in range(5):
        for a, b in zip(results(), first, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("seed", range(25))
def test_any_shape(on_host, kernels_only, guarded, seed):
    rng = random.Random(seed)
    for _ in range(20):
        check_drawn_products(rng, launchers.linear_fwd_with, launchers.linear_bwd_with)
