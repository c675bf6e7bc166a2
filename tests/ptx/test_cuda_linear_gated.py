"""Gated products of csrc/cuda/linear*.cu as nvcc compiles them for sm_80, in the PTX emulator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten, cuda
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import ACTIVATIONS, GATES, activate_ref, gradient_ref, halves
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
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
def linear(emulated):
    """The launchers of linear, and the pass over the gradient."""
    names = ("linear_fwd", "linear_fwd_with", "linear_bwd", "linear_bwd_with", "gradient")
    return SimpleNamespace(**{name: emulated.launcher(getattr(launchers, name)) for name in names})


def high_bias(out: int, gated: str, dtype: torch.dtype) -> torch.Tensor:
    """Small integers; 128 more for activated columns, where activations but tanh return their argument."""
    bias = whole_numbers(out, dtype=dtype, most=1, seed=3)
    halves(bias, gated)[0].add_(128)
    return bias


# --- tiles and epilogues ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("plan", ((16, 1), (32, 1), (32, 2), (64, 1), (64, 3), (128, 1), (128, 2)), ids=str)
def test_every_tile(emulated, linear, kernels_only, plan, gated, schedule):
    """Integers, so that the result is exact; rows and columns past a tile, depth past the ring's slots."""
    emulated.schedule = schedule
    for dtype, columns, emulated.seed in ((BF16, 133, 1), (torch.float16, 72, 2)):
        rows, depth = plan[0] + 3, 296
        x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, 2 * columns))
        bias = high_bias(2 * columns, gated, dtype)
        residual = whole_numbers(rows, columns, dtype=dtype, seed=4)
        z = x.float() @ weight.float().T + bias.float()
        active, other = halves(z, gated)
        truth = active * other
        # in the epilogue, and in the pass that adds parts
        for activation in ("gelu", "silu", "relu"):
            given = LinearInputs(x, weight, bias, activation, gated=gated)
            y, pre = linear.linear_fwd_with(plan, given._replace(residual=residual), True)
            assert_same_values(pre, z.to(dtype))
            assert_same_values(y, (truth + residual.float()).to(dtype))
            y, none = linear.linear_fwd_with(plan, given, False)
            assert_same_values(y, truth.to(dtype))
            assert none.shape == (0,)
        y, pre = linear.linear_fwd_with(plan, LinearInputs(x, weight, activation="relu", gated=gated), True)
        z = x.float() @ weight.float().T
        assert_same_values(y, activate_ref(z, "relu", gated).to(dtype))


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tile", (16, 128))
def test_every_activation(linear, kernels_only, tile, dtype, activation, gated):
    """In one part and in two; cheap GELU by its own largest error."""
    x, weight = randn(37, 136, dtype=dtype), randn(72, 136, dtype=dtype, seed=1) / 8
    bias, residual = randn(72, dtype=dtype, seed=2), randn(37, 36, dtype=dtype, seed=3)
    z = x.double() @ weight.double().T + bias.double()
    truth = activate_ref(z, activation, gated) + residual.double()
    # times the other half
    loose = halves(z, gated)[1].abs().max().item() * (2e-3 * 2**20 if activation == "gelu" else 16)
    for parts in (1, 2):
        given = LinearInputs(x, weight, bias, activation, residual, gated)
        y, pre = linear.linear_fwd_with((tile, parts), given, True)
        assert_rounds_to(y, truth, loose, "y")
        assert_rounds_to(pre, z, 16, "pre")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("plan", ((128, 1), (64, 1), (32, 2)), ids=str)
def test_gelu_obeys_the_error_rule_in_every_kernel(linear, kernels_only, monkeypatch, plan, exact, dtype):
    monkeypatch.setattr(launchers, "EXACT_GELU", exact)
    case = LinearCase(72, 128, 208, "gelu", gated="second")
    inputs = case.inputs(dtype, "cpu")
    x, weight, bias = (inputs[k] for k in ("x", "weight", "bias"))
    y, _ = linear.linear_fwd_with(plan, LinearInputs(x, weight, bias, "gelu", gated="second"), False)
    truth = case.oracle(**{k: v if v is None else v.double() for k, v in inputs.items()})
    assert testing.error_rule.compare(y, case.eager(**inputs), truth, dtype)[-1] == ""


def test_many_tiles(linear, kernels_only):
    """Groups of row tiles, the last one not full; several columns of tiles."""
    x, weight = whole_numbers(321, 40, dtype=BF16, most=1), whole_numbers(322, 40, dtype=BF16, most=1)
    y, _ = linear.linear_fwd_with(
        (16, 1), LinearInputs(x, weight, high_bias(322, "first", BF16), "gelu", gated="first"), False
    )
    active, other = halves(x.float() @ weight.float().T + high_bias(322, "first", BF16).float(), "first")
    assert_same_values(y, (active * other).bfloat16())


@pytest.mark.parametrize(("tile", "slots"), ((16, 9), (32, 8), (64, 6)))
def test_a_block_with_a_multiprocessor_to_itself_has_a_longer_ring(emulated, linear, tile, slots):
    """132 multiprocessors; a tile has 64 columns of the result."""

    def product(rows, columns):
        x, weight = (whole_numbers(n, 64 * slots, dtype=BF16, most=1, seed=n) for n in (rows, 2 * columns))
        linear.linear_fwd_with((tile, 1), LinearInputs(x, weight, activation="gelu", gated="first"), False)
        return emulated.launches[-1].shared_bytes // ((tile + 128) * 64 * 2)

    assert product(tile, 66 * 64) == slots
    if tile == 16:
        assert product(2 * tile, 66 * 64) == slots
        assert product(2 * tile, 66 * 64 + 1) == 4


# --- backward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient(linear, kernels_only, activation, dtype, gated):
    """More rows than warps, and a second block of columns."""
    dy, pre = randn(19, 264, dtype=dtype), randn(19, 528, dtype=dtype, seed=1)
    truth = gradient_ref(dy.double(), pre.double(), activation, gated)
    g, dbias = linear.gradient(dy, pre, activation, True, True, gated)
    assert_rounds_to(g, truth, 64, "g")
    assert_rounds_to(dbias, truth.sum(0), 256, "dbias")
    only, none = linear.gradient(dy, pre, activation, True, False, gated)
    assert_same_bits(only, g)
    assert none.shape == (0,)


def test_bias_gradient_of_many_rows(linear, kernels_only):
    """More rows than blocks of the pass; where the slope is 1."""
    dy = whole_numbers(601, 16, dtype=torch.float16)
    pre = torch.cat(
        (torch.full((601, 16), 32.0), whole_numbers(601, 16, dtype=torch.float32, seed=1)), 1
    ).half()
    dbias = linear.linear_bwd(dy, LinearSaved(None, None, pre, "relu", "first"), LinearNeeds(False, False))[2]
    da, db = (dy.float() * pre[:, 16:].float()).sum(0), 32 * dy.float().sum(0)
    assert_same_values(dbias, torch.cat((da, db)).half())


@pytest.mark.parametrize(
    "needs", ((True, True, True), (True, False, False), (False, True, False), (False, False, True))
)
def test_backward_makes_only_what_is_wanted(linear, kernels_only, needs):
    dy, x, weight, pre = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((20, 24), (20, 40), (48, 40), (20, 48)))
    )
    g = gradient_ref(dy.double(), pre.double(), "silu", "second")
    truths = g @ weight.double(), g.T @ x.double(), g.sum(0)
    saved = LinearSaved(x if needs[1] else None, weight if needs[0] else None, pre, "silu", "second")
    grads = linear.linear_bwd(dy, saved, LinearNeeds(*needs))
    for found, truth, wanted in zip(grads, truths, needs, strict=True):
        if wanted:
            assert (found.double() - truth).abs().max() < 0.02 * truth.abs().max()
        else:
            assert found.shape == (0,)


# --- inputs that lie oddly, hostile numbers -----------------------------------------------------------------


@pytest.mark.parametrize("plan", ((128, 1), (64, 2), (16, 1)), ids=str)
def test_rows_among_poison(linear, kernels_only, plan):
    """NaN behind each row of x, weight and residual; rows of residual that are not aligned."""
    x, weight, residual = (
        strided_rows(rows, columns, BF16, space, seed=i)[0]
        for i, (rows, columns, space) in enumerate(((35, 72, 8), (112, 72, 24), (35, 56, 3)))
    )
    y, _ = linear.linear_fwd_with(
        plan, LinearInputs(x, weight, activation="silu", residual=residual, gated="first"), False
    )
    z = x.double() @ weight.double().T
    assert_rounds_to(y, activate_ref(z, "silu", "first") + residual.double(), 64 * z.abs().max().item())


@pytest.mark.parametrize("activation", ("gelu", "silu", "relu"))
def test_what_is_not_finite_stays_in_its_row_and_column(linear, kernels_only, activation):
    x, weight = randn(20, 16, dtype=BF16), randn(48, 16, dtype=BF16, seed=1)
    x[18, 0] = weight[9, 0] = weight[24 + 11, 0] = float("nan")
    y, pre = linear.linear_fwd(LinearInputs(x, weight, activation=activation, gated="first"), True)
    bad = torch.zeros(20, 24, dtype=torch.bool)
    bad[18] = bad[:, 9] = bad[:, 11] = True
    assert torch.equal(torch.isnan(y), bad)
    g, _ = linear.gradient(torch.ones_like(y), pre, activation, True, False, "first")
    both = torch.cat((bad, bad), 1)
    assert torch.isfinite(g[~both]).all()
    assert torch.isnan(g[18]).sum() >= 24


@pytest.mark.parametrize("plan", ((16, 2), (64, 1), (128, 1)), ids=str)
def test_every_schedule_returns_the_same_bits(emulated, linear, kernels_only, plan):
    x, weight, residual, dy = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((70, 264), (144, 264), (70, 72), (70, 72)))
    )
    first = None
    for emulated.schedule, emulated.seed in (("late", 0), ("early", 1), ("late", 2)):
        y, pre = linear.linear_fwd_with(
            plan, LinearInputs(x, weight, activation="gelu", residual=residual, gated="second"), True
        )
        found = y, pre, *linear.linear_bwd(dy, LinearSaved(x, weight, pre, "gelu", "second"), LinearNeeds())
        first = first or found
        for a, b in zip(found, first, strict=True):
            assert_same_bits(a, b)


# --- which calls it takes -----------------------------------------------------------------------------------


def test_the_next_backend_takes_the_rest(linear, monkeypatch):
    """Depths and backward's columns that are no multiple of 8; many rows where our products are slower."""
    monkeypatch.setitem(TABLE["cpu"], "linear", ("cuda", "aten", "reference"))
    monkeypatch.setattr(dispatch, "_resolved", {})
    x, weight, dy, pre = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((512, 16), (24, 16), (512, 12), (512, 24)))
    )
    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(launchers, "product", None)
        without_kernels.setattr(cuda.device, "has_group_products", lambda device: True)
        for own_x, own_weight in ((x, weight), (x[:3, :12], weight[:, :12])):
            given = LinearInputs(own_x, own_weight, activation="gelu", gated="first"), True
            for a, b in zip(linear.linear_fwd(*given), aten.linear_fwd(*given), strict=True):
                assert_same_bits(a, b)
        given = dy, LinearSaved(x, weight, pre, "gelu", "first"), LinearNeeds()
        for a, b in zip(linear.linear_bwd(*given), aten.linear_bwd(*given), strict=True):
            assert_same_bits(a, b)
    made = []
    monkeypatch.setattr(launchers, "product", lambda *given, **_: made.append(given[0]))
    linear.linear_fwd(LinearInputs(x[:511], weight, activation="gelu", gated="first"), False)
    assert made == [launchers.FORWARD]


def test_no_rows(linear):
    x, weight = torch.empty(0, 16, dtype=BF16), randn(48, 16, dtype=BF16)
    y, pre = linear.linear_fwd(LinearInputs(x, weight, activation="gelu", gated="first"), True)
    assert (y.shape, pre.shape) == ((0, 24), (0, 48))
    dx, dweight, dbias = linear.linear_bwd(y, LinearSaved(x, weight, pre, "gelu", "first"), LinearNeeds())
    assert (dx.shape, dweight.shape, dbias.shape) == ((0, 16), (48, 16), (48,))
    assert not dweight.any()
    assert not dbias.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"gate": 3}, "gate: expected code 0, 1 or 2, got 3"),
        ({"activation": 0}, "gate: needs a forward product with an activation"),
        ({"layout": 1}, "gate: needs a forward product"),
        ({"slope_at": 16}, "gate: needs a forward product"),
        ({"parts": 2}, "partial: an address"),
        ({"activation": 3}, "partial: an address"),
        ({"columns": 1 << 30, "depth": 8}, "less than 2\\*\\*31"),
    ),
    ids=str,
)
def test_refusals(emulated, changes, message):
    at = randn(16, 16, dtype=BF16).data_ptr()
    own = {
        **{"dtype": 1, "layout": 0, "rows": 16, "columns": 8, "depth": 16, "a": at, "a_stride": 16},
        **{"b": at, "b_stride": 16, "bias": 0, "activation": 1, "exact": False, "residual": 0},
        **{"residual_stride": 0, "slope_at": 0, "c": at, "pre": 0, "sums": 0, "partial": 0},
        **{"tile_rows": 64, "parts": 1, "gate": 1, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    with pytest.raises((ValueError, RuntimeError), match=message):
        cuda.device.extension.cuda_linear_product(*(own | changes).values())
    assert emulated.launches == []


@pytest.mark.parametrize(
    ("changes", "message"),
    (({"pre": 0}, "pre: "), ({"activation": 0}, "gate: needs pre and an activation")),
    ids=str,
)
def test_refusals_of_the_gradient(emulated, changes, message):
    at = randn(16, 16, dtype=BF16).data_ptr()
    own = {"dtype": 1, "rows": 2, "columns": 8, "dy": at, "pre": at, "activation": 1, "exact": True}
    own |= {"g": at, "sums": 0, "parts": 1, "gate": 1, "device": 0, "stream": 0}
    with pytest.raises((ValueError, RuntimeError), match=message):
        cuda.device.extension.cuda_linear_gradient(*(own | changes).values())
    assert emulated.launches == []
