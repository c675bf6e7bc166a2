"""csrc/cuda/linear*.cu as nvcc compiles them for sm_90a, with their host code, in the PTX emulator.

What only gated products have is in test_cuda_linear_gated.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten, cuda
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import ACTIVATIONS, GATES, activate_ref, gradient_ref, halves, slope_ref
from fastbert.ops.feed_forward import FeedForwardNeeds, FeedForwardSaved
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
from fastbert.testing.op_cases import feed_forward as feed_forward_cases
from fastbert.testing.op_cases import linear as linear_cases
from fastbert.testing.op_cases.linear import LinearCase
from tests.support.cpu_truth import (
    HALF,
    assert_rounds_to,
    assert_same_bits,
    assert_same_values,
    randn,
    strided_rows,
)
from tests.support.cuda_draws import whole_numbers

BF16 = torch.bfloat16


@pytest.fixture
def aten_follows(emulated, monkeypatch):
    """The next backend after `cuda` is `aten`."""
    for op in ("linear", "feed_forward"):
        monkeypatch.setitem(TABLE["cpu"], op, ("cuda", "aten", "reference"))
    monkeypatch.setattr(dispatch, "_resolved", {})


# --- tiles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("gated", (None, *GATES))
@pytest.mark.parametrize("plan", ((16, 1), (32, 1), (32, 2), (64, 1), (64, 3), (128, 1), (128, 2)), ids=str)
def test_every_forward_tile(emulated, linear, kernels_only, plan, gated, schedule):
    """Integers, so that the result is exact; rows and columns past a tile, depth past the ring's slots.

    The bias of activated columns is 128 higher, where activations but tanh return their argument.
    """
    emulated.schedule = schedule
    for dtype, columns, emulated.seed in ((BF16, 133, 1), (torch.float16, 72 if gated else 137, 2)):
        rows, depth, out = plan[0] + 3, 296, columns if gated is None else 2 * columns
        x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, out))
        bias = whole_numbers(out, dtype=dtype, most=1, seed=3)
        (bias if gated is None else halves(bias, gated)[0]).add_(128)
        residual = whole_numbers(rows, columns, dtype=dtype, seed=4)
        z = x.float() @ weight.float().T + bias.float()
        truth = activate_ref(z, "relu", gated)
        # in the epilogue, and in the pass that adds parts
        for activation in ("gelu", "silu", "relu"):
            given = LinearInputs(x, weight, bias, activation, gated=gated)
            y, pre = linear.linear_fwd_with(plan, given._replace(residual=residual), True)
            assert_same_values(pre, z.to(dtype))
            assert_same_values(y, (truth + residual.float()).to(dtype))
            y, none = linear.linear_fwd_with(plan, given, False)
            assert_same_values(y, truth.to(dtype))
            assert none.shape == (0,)
        for activation in ("relu",) if gated else ("relu", None):
            given = LinearInputs(x, weight, None, activation, residual, gated)
            y, _ = linear.linear_fwd_with(plan, given, False)
            truth = activate_ref(x.float() @ weight.float().T, activation, gated)
            assert_same_values(y, (truth + residual.float()).to(dtype))


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize(("tile", "slots"), ((16, 9), (32, 8), (64, 6)))
def test_a_block_with_a_multiprocessor_to_itself_has_a_longer_ring(emulated, linear, tile, slots, schedule):
    """Few steps and many blocks have the short one; depth up to and past the longer one's slots."""
    emulated.schedule = schedule

    def product(rows, depth, out, parts=1, gated=None):
        columns = out if gated is None else 2 * out
        x, weight = (whole_numbers(n, depth, dtype=BF16, most=1, seed=n) for n in (rows, columns))
        given = LinearInputs(x, weight, activation=gated and "gelu", gated=gated)
        y, _ = linear.linear_fwd_with((tile, parts), given, False)
        if gated is None:
            assert_same_values(y, (x.float() @ weight.float().T).bfloat16())
        # that of the product: with parts another one adds them
        return emulated.launches[-min(parts, 2)].shared_bytes // ((tile + 128) * 64 * 2)

    for depth in (200, 64 * slots - 56, 64 * slots + 16, 64 * (2 * slots + 1)):
        assert product(tile + 3, depth, 137) == slots
    assert product(5, 192, 8) == 4
    assert product(5, 7 * 64, 8, parts=2) == 4
    assert product(5, 8 * 64, 8, parts=2) == slots
    if tile == 16:
        # 132 multiprocessors
        assert product(12 * tile, 256, 11 * 128) == slots
        assert product(12 * tile + 1, 256, 11 * 128) == 4
        # a gated tile has 64 columns of the result
        assert product(2 * tile, 64 * slots, 66 * 64, gated="first") == slots
        assert product(2 * tile, 64 * slots, 66 * 64 + 1, gated="first") == 4


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("plan", ((64, 1), (64, 2), (128, 1), (128, 2)), ids=str)
def test_every_backward_tile(emulated, linear, plan, schedule):
    emulated.schedule = schedule
    rows, depth, out = 131, 136, 200
    for dtype in HALF:
        dy, x, weight = (
            whole_numbers(*size, dtype=dtype, most=1, seed=i)
            for i, size in enumerate(((rows, out), (rows, depth), (out, depth)))
        )
        plans = plan, (128, plan[1])
        found = linear.linear_bwd_with(plans, dy, LinearSaved(x, weight), LinearNeeds())
        truths = dy.float() @ weight.float(), dy.float().T @ x.float(), dy.float().sum(0)
        for grad, truth in zip(found, truths, strict=True):
            assert_same_values(grad, truth.to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", (*linear_cases.CASES, *feed_forward_cases.CASES), ids=repr)
def test_error_rule(emulated, case, dtype):
    rows = testing.run_case(case, "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []


# --- activations and epilogues ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "gated"),
    [(None, None), *itertools.product(ACTIVATIONS, (None, *GATES))],
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tile", (16, 64, 128))
def test_every_activation(linear, kernels_only, tile, dtype, activation, gated):
    """With bias, residual and pre, in one part and in two; cheap GELU by its own largest error."""
    out = 44 if gated is None else 88
    x, weight = randn(37, 136, dtype=dtype), randn(out, 136, dtype=dtype, seed=1) / 8
    bias, residual = randn(out, dtype=dtype, seed=2), randn(37, 44, dtype=dtype, seed=3)
    z = x.double() @ weight.double().T + bias.double()
    truth = activate_ref(z, activation, gated) + residual.double()
    loose = 2e-3 * 2**20 if activation == "gelu" else 16
    if gated:  # times the other half
        loose *= halves(z, gated)[1].abs().max().item()
    for parts in (1, 2):
        given = (tile, parts), LinearInputs(x, weight, bias, activation, residual, gated)
        y, pre = linear.linear_fwd_with(*given, True)
        assert_rounds_to(y, truth, loose, "y")
        if activation:
            assert_rounds_to(pre, z, 16, "pre")
        unsaved = linear.linear_fwd_with(*given, False)
        assert_same_bits(unsaved[0], y, "without pre")
        assert unsaved[1].shape == (0,)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("gated", (None, "second"))
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (32, 2), (16, 1), (64, 2)), ids=str)
def test_gelu_obeys_the_error_rule_in_every_kernel(
    linear, kernels_only, monkeypatch, plan, gated, exact, dtype
):
    monkeypatch.setattr(launchers, "EXACT_GELU", exact)
    case = LinearCase(72, 128, 208, "gelu", gated=gated)
    inputs = case.inputs(dtype, "cpu")
    x, weight, bias = (inputs[k] for k in ("x", "weight", "bias"))
    y, pre = linear.linear_fwd_with(plan, LinearInputs(x, weight, bias, "gelu", gated=gated), True)
    truth = case.oracle(**{k: v if v is None else v.double() for k, v in inputs.items()})
    assert testing.error_rule.compare(y, case.eager(**inputs), truth, dtype)[-1] == ""
    assert_rounds_to(pre, x.double() @ weight.double().T + bias.double(), 16, "pre")


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_exact_gelu_is_correctly_rounded(linear, monkeypatch, dtype):
    """By a product with the unit matrix, so that the activation's argument is known."""
    monkeypatch.setattr(launchers, "EXACT_GELU", True)
    z = torch.linspace(-6, 6, 128 * 40).view(-1, 8).to(dtype)
    y, pre = linear.linear_fwd(LinearInputs(z, torch.eye(8, dtype=dtype), activation="gelu"), True)
    assert_same_bits(pre, z)
    wrong = (y != activate_ref(z.double(), "gelu").to(dtype)).double().mean().item()
    assert wrong <= 1e-3


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", (40, 300))
def test_error_rule_of_exact_gelu(emulated, kernels_only, monkeypatch, rows, dtype):
    monkeypatch.setattr(launchers, "EXACT_GELU", True)
    rows = testing.run_case(LinearCase(rows, 64, 72, "gelu", residual=True), "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []


@pytest.mark.parametrize(("tile", "gated"), ((16, None), (128, None), (16, "first")))
def test_many_tiles(linear, kernels_only, tile, gated):
    """Groups of row tiles, the last one not full; several columns of tiles."""
    rows, out = 20 * tile + 1, 257 if gated is None else 322
    x, weight = whole_numbers(rows, 40, dtype=BF16, most=1), whole_numbers(out, 40, dtype=BF16, most=1)
    given = LinearInputs(x, weight, activation=gated and "relu", gated=gated)
    y, _ = linear.linear_fwd_with((tile, 1), given, False)
    assert_same_values(y, activate_ref(x.float() @ weight.float().T, given.activation, gated).bfloat16())


# --- backward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "gated"), ((None, None), ("gelu", None), ("silu", "second")))
def test_backward_makes_only_what_is_wanted(linear, kernels_only, activation, gated):
    out = 24 if gated is None else 48
    dy, x, weight, pre = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((20, 24), (20, 40), (out, 40), (20, out)))
    )
    pre = pre if activation else None
    full = linear.linear_bwd(dy, LinearSaved(x, weight, pre, activation, gated), LinearNeeds())
    g = gradient_ref(dy.double(), pre.double(), activation, gated) if activation else dy.double()
    for a, truth in zip(full, (g @ weight.double(), g.T @ x.double(), g.sum(0)), strict=True):
        assert (a.double() - truth).abs().max() < 0.02 * truth.abs().max()
    for need in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        saved = LinearSaved(x if need[1] else None, weight if need[0] else None, pre, activation, gated)
        for a, b, wanted in zip(linear.linear_bwd(dy, saved, LinearNeeds(*need)), full, need, strict=True):
            assert_same_bits(a, b if wanted else dy.new_empty(0))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (64, 2)), ids=str)
def test_gradient_between_the_products(linear, kernels_only, plan, activation, dtype):
    """g and its column sums, at a row past a tile and one past 64."""
    rows, out, inner = (129 if plan[0] == 128 else 67), 72, 136
    dy, weight = randn(rows, out, dtype=dtype), randn(out, inner, dtype=dtype, seed=1) / 8
    pre = randn(rows, inner, dtype=dtype, seed=2)
    g, dbias = linear.inner_gradient(dy, weight, pre, activation, True, plan)
    truth = (dy.double() @ weight.double()) * slope_ref(pre.double(), activation)
    # the cheap slope is off by at most 7.1e-5 or 1.8e-5
    loose = (1e-4 * 2**20 if dtype == BF16 else 3e-5 * 2**20) * 4 if activation == "gelu" else 64
    assert_rounds_to(g, truth, loose, "g")
    assert_rounds_to(dbias, truth.sum(0), loose * 4, "dbias")
    again, none = linear.inner_gradient(dy, weight, pre, activation, False, plan)
    assert_same_bits(again, g, "without dbias")
    assert none.shape == (0,)


@pytest.mark.parametrize("activation", ("gelu", "relu"))
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (64, 2)), ids=str)
@pytest.mark.parametrize("rows", (1, 63, 64, 65, 130))
def test_column_sums_count_every_row_once(linear, kernels_only, rows, plan, activation):
    """Where the slope is 1, in the epilogue (GELU) and in a pass of its own."""
    dy, weight = (
        whole_numbers(n, m, dtype=torch.float16, most=most) for n, m, most in ((rows, 80, 1), (80, 40, 2))
    )
    g, dbias = linear.inner_gradient(dy, weight, 20 * torch.ones(rows, 40).half(), activation, True, plan)
    truth = dy.float() @ weight.float()
    assert_same_values(g, truth.half())
    assert_same_values(dbias, truth.sum(0).half())


def test_bias_gradient_of_many_rows(linear):
    """More rows than blocks of the pass, and a second block of columns."""
    dy = whole_numbers(301, 520, dtype=torch.float16)
    dbias = linear.linear_bwd(dy, LinearSaved(None, None), LinearNeeds(False, False))[2]
    assert_same_values(dbias, dy.float().sum(0).half())


# --- inputs that lie oddly, hostile numbers -----------------------------------------------------------------


@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (64, 2), (32, 1), (16, 1)), ids=str)
@pytest.mark.parametrize(("gap", "gated"), ((8, None), (16, None), (24, None), (8, "first")))
def test_rows_among_poison(linear, kernels_only, gap, gated, plan):
    """NaN behind each row of x, weight and residual; rows of residual that are not aligned."""
    sizes = (35, 72, gap), (56 if gated is None else 112, 72, gap), (35, 56, gap - 5)
    x, weight, residual = (strided_rows(*size[:2], BF16, size[2], seed=i)[0] for i, size in enumerate(sizes))
    given = LinearInputs(x, weight, None, gated and "silu", residual, gated)
    y, _ = linear.linear_fwd_with(plan, given, False)
    z = x.double() @ weight.double().T
    scale = 64 if gated is None else 64 * z.abs().max().item()
    assert_rounds_to(y, activate_ref(z, given.activation, gated) + residual.double(), scale)
    if plan[0] >= 64 and gated is None:
        dy, plans = randn(35, 56, dtype=BF16, seed=3), ((plan[0], 1), (128, 1))
        dx, dweight, _ = linear.linear_bwd_with(
            plans, dy, LinearSaved(x, weight), LinearNeeds(True, True, False)
        )
        assert_rounds_to(dx, dy.double() @ weight.double(), 64)
        assert_rounds_to(dweight, dy.double().T @ x.double(), 64)


@pytest.mark.parametrize("stride", (45, 48))
@pytest.mark.parametrize("out", (40, 43))
@pytest.mark.parametrize("offset", (0, 1, 3))
def test_residual_and_bias_at_any_address(linear, kernels_only, offset, out, stride):
    memory = whole_numbers(40 * 48 + 8, dtype=torch.float16)
    residual = memory[offset : offset + 20 * stride].view(20, stride)[:, :out]
    bias = memory[offset : offset + out]
    x, weight = (whole_numbers(n, 16, dtype=torch.float16, seed=n) for n in (20, out))
    truth = x.float() @ weight.float().T + bias.float() + residual.float()
    for plan in ((128, 1), (32, 1)):
        y, _ = linear.linear_fwd_with(plan, LinearInputs(x, weight, bias, residual=residual), False)
        assert_same_values(y, truth.half())


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("activation", (None, *ACTIVATIONS))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_is_not_finite_stays_in_its_row(linear, monkeypatch, dtype, activation, exact):
    monkeypatch.setattr(launchers, "EXACT_GELU", exact)
    bad = (float("nan"), float("inf"), -float("inf"))
    x = randn(20, 16, dtype=dtype)
    # far behind the last row: tiles copy that one again
    x[17:20, 0] = torch.tensor(bad, dtype=dtype)
    weight = torch.zeros(24, 16, dtype=dtype)
    weight[:, 0] = 1
    y, pre = linear.linear_fwd(LinearInputs(x, weight, activation=activation), True)
    assert torch.isfinite(y[:17]).all()
    assert torch.isnan(y[17]).all()
    high = {"tanh": 1.0}.get(activation, bad[1])
    assert (y[18] == high).all()
    low = {None: bad[2], "tanh": -1.0, "gelu": 0.0, "relu": 0.0}.get(activation)
    if low is not None:
        assert (y[19].float() - low).nan_to_num(0.0).abs().max() < 1e-6
    if activation:
        g, _ = linear.gradient(torch.ones_like(y), pre, activation, True, False)
        assert torch.isfinite(g[:17]).all()
        # relu: as in PyTorch
        assert (g[17] == 1).all() if activation == "relu" else torch.isnan(g[17]).all()
        assert (g[18] == (0.0 if activation == "tanh" else 1.0)).all()
        assert (g[19] == 0).all()


@pytest.mark.parametrize("gated", (None, "second"))
@pytest.mark.parametrize("plan", ((16, 2), (64, 2), (128, 1), (128, 2)), ids=str)
def test_every_schedule_returns_the_same_bits(emulated, linear, kernels_only, plan, gated):
    out = 72 if gated is None else 144
    x, weight, residual, dy, inner = (
        randn(*s, dtype=BF16, seed=i)
        for i, s in enumerate(((70, 264), (out, 264), (70, 72), (70, 72), (264, 72)))
    )
    first = None
    for emulated.schedule, emulated.seed in (("late", 0), ("early", 1), ("late", 2)):
        given = LinearInputs(x, weight, None, "gelu", residual, gated)
        y, pre = linear.linear_fwd_with(plan, given, True)
        saved, plans = LinearSaved(x, weight, pre, "gelu", gated), (max(plan[0], 64), 1)
        found = y, pre, *linear.linear_bwd_with((plans, (128, plan[1])), dy, saved, LinearNeeds())
        if plan[0] >= 64:
            found += linear.inner_gradient(x, inner, residual, "gelu", True, plan)
        first = first or found
        for a, b in zip(found, first, strict=True):
            assert_same_bits(a, b)


# --- which calls it takes, and how they are cut -------------------------------------------------------------


def test_the_next_backend_takes_the_rest(linear, aten_follows, monkeypatch):
    """Misaligned starts and rows, depths that are no multiple of 8; the same result as `aten` itself."""
    memory = randn(4096, dtype=BF16)
    x, weight = memory[: 6 * 32].view(6, 32), memory[512 : 512 + 10 * 32].view(10, 32)
    monkeypatch.setattr(launchers, "product", None)
    for own_x, own_weight in (
        (memory[1 : 1 + 6 * 32].view(6, 32), weight),
        (memory[: 6 * 33].view(6, 33)[:, :32], weight),
        (x, memory[515 : 515 + 10 * 32].view(10, 32)),
        (x[:, :28], weight[:, :28]),
    ):
        for given in (
            LinearInputs(own_x, own_weight),
            LinearInputs(own_x, own_weight, activation="gelu", gated="first"),
        ):
            found, expected = (m.linear_fwd(given, True) for m in (linear, aten))
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b)
    dy = memory[:60].view(6, 10)  # 10 is no multiple of 8
    grads = linear.linear_bwd(dy, LinearSaved(x, weight), LinearNeeds())
    for a, b in zip(grads, (dy @ weight, dy.T @ x, dy.sum(0)), strict=True):
        assert_same_bits(a, b)
    given = dy[:, :5], LinearSaved(x, weight, dy, "gelu", "first"), LinearNeeds()
    for a, b in zip(linear.linear_bwd(*given), aten.linear_bwd(*given), strict=True):
        assert_same_bits(a, b)
    up, down, pre = memory[: 10 * 32].view(10, 32), memory[:320].view(32, 10), memory[:60].view(6, 10)
    args = x, FeedForwardSaved(x, up, down, pre, pre, "gelu"), FeedForwardNeeds(True, True, True, True)
    for a, b in zip(linear.feed_forward_bwd(*args), aten.feed_forward_bwd(*args), strict=True):
        assert_same_bits(a, b)


def test_many_rows_go_on_where_our_products_are_slower(linear, aten_follows, monkeypatch):
    """Not an exact GELU that was asked for, nor a few rows."""
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: True)
    made = []
    monkeypatch.setattr(launchers, "product", lambda *given, **_: made.append(given[0]))
    x, weight, residual = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((512, 16), (24, 16), (512, 24)))
    )
    for activation, gated in (("gelu", None), ("relu", None), ("silu", None), ("gelu", "first")):
        given = LinearInputs(x, weight, None, activation, residual[:, : 12 if gated else 24], gated), True
        for a, b in zip(linear.linear_fwd(*given), aten.linear_fwd(*given), strict=True):
            assert_same_bits(a, b)
    assert made == []
    for gated in (None, "first"):
        linear.linear_fwd(LinearInputs(x[:511], weight, activation="relu", gated=gated), False)
    monkeypatch.setattr(launchers, "EXACT_GELU", True)
    linear.linear_fwd(LinearInputs(x, weight, activation="gelu"), False)
    assert made == [launchers.FORWARD] * 3


@pytest.mark.parametrize("activation", (None, "gelu"))
def test_backward_products_are_pytorchs_where_ours_are_slower(linear, monkeypatch, activation):
    """On tensor cores that mma.sync uses by half; the pass over dy is still ours."""
    dy, x, pre, weight = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((70, 72), (70, 40), (70, 72), (72, 40)))
    )
    own = linear.linear_bwd(dy, LinearSaved(x, weight, pre, activation), LinearNeeds())
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: True)
    monkeypatch.setattr(launchers, "product", None)
    given = linear.linear_bwd(dy, LinearSaved(x, weight, pre, activation), LinearNeeds())
    g = dy if activation is None else linear.gradient(dy, pre, activation, True, False)[0]
    assert_same_bits(given[2], own[2])
    for a, b, truth in zip(
        given, own, (g.double() @ weight.double(), g.double().T @ x.double()), strict=False
    ):
        assert_rounds_to(a, truth, 64)
        assert_rounds_to(b, truth, 64)
    only_dx = linear.linear_bwd(
        dy, LinearSaved(None, weight, pre, activation), LinearNeeds(True, False, False)
    )
    assert [t.shape for t in only_dx] == [(70, 40), (0,), (0,)]


def test_the_gradient_between_is_a_pass_where_our_products_are_slower(linear, monkeypatch):
    dy, down, pre = (
        randn(*s, dtype=torch.float16, seed=i) for i, s in enumerate(((70, 40), (40, 72), (70, 72)))
    )
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: True)
    monkeypatch.setattr(launchers, "product", None)
    g, dbias = linear.inner_gradient(dy, down, pre, "gelu", True)
    want, want_dbias = linear.gradient(dy @ down, pre, "gelu", True, True)
    assert_same_bits(g, want)
    assert_same_bits(dbias, want_dbias)
    truth = (dy.double() @ down.double()) * slope_ref(pre.double(), "gelu")
    assert (g.double() - truth).abs().max() < 2**-8 * truth.abs().max()


@pytest.mark.parametrize("gated", (None, "first"))
def test_no_rows(linear, gated):
    x, weight = torch.empty(0, 16, dtype=BF16), randn(48, 16, dtype=BF16)
    y, pre = linear.linear_fwd(LinearInputs(x, weight, activation="gelu", gated=gated), True)
    assert (y.shape, pre.shape) == ((0, 24 if gated else 48), (0, 48))
    saved = LinearSaved(x, weight, pre, "gelu", gated)
    dx, dweight, dbias = linear.linear_bwd(y, saved, LinearNeeds())
    assert (dx.shape, dweight.shape, dbias.shape) == ((0, 16), (48, 16), (48,))
    assert not dweight.any()
    assert not dbias.any()


@pytest.mark.parametrize("multiprocessors", (1, 58, 132))
def test_plans(emulated, multiprocessors):
    """Every plan can run; few rows have small tiles; what fills the device has one part and large tiles."""
    plan = cuda.device.extension.cuda_linear_plan
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


GATED = {"columns": 8, "activation": 1, "gate": 1}


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
        ({"device": 1}, "device"),
        ({"rows": -1}, "expected rows >= 0"),
        ({"rows": 1 << 40, "depth": 8}, "less than 2\\*\\*31"),
        (GATED | {"gate": 3}, "gate: expected code 0, 1 or 2, got 3"),
        (GATED | {"activation": 0}, "gate: needs a forward product with an activation"),
        (GATED | {"layout": 1}, "gate: needs a forward product"),
        (GATED | {"slope_at": 16}, "gate: needs a forward product"),
        (GATED | {"parts": 2}, "partial: an address"),
        (GATED | {"activation": 3}, "partial: an address"),
        (GATED | {"columns": 1 << 30, "depth": 8}, "less than 2\\*\\*31"),
    ),
    ids=str,
)
def test_refusals(emulated, changes, message):
    at = randn(16, 16, dtype=BF16).data_ptr()
    own = {
        **{"dtype": 1, "layout": 0, "rows": 16, "columns": 16, "depth": 16, "a": at, "a_stride": 16},
        **{"b": at, "b_stride": 16, "bias": 0, "activation": 0, "exact": False, "residual": 0},
        **{"residual_stride": 0, "slope_at": 0, "c": at, "pre": 0, "sums": 0, "partial": 0},
        **{"tile_rows": 64, "parts": 1, "gate": 0, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    with pytest.raises((ValueError, RuntimeError), match=message):
        cuda.device.extension.cuda_linear_product(*(own | changes).values())
    assert emulated.launches == []
