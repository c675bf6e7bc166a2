"""The C++ linear with a gated activation: panels of two halves, epilogue and gradient, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert import testing
from fastbert.backends import cpu
from fastbert.backends.cpu import linear as launcher
from fastbert.ops.activation import ACTIVATIONS, GATES, halves, joined
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.runtime import loader
from tests.cpu.test_linear import gradient
from tests.support.cpu_checks import on_each_isa
from tests.support.cpu_truth import HALF, activation64, assert_same_bits, randn, strided_rows

DTYPES = (torch.float32, *HALF)
_C = loader.extension

# rows, depth, columns of a half: parts of panels and of vectors, several passes over the depth, odd depths
SHAPES = (
    *((7, 20, half) for half in (1, 15, 16, 17, 31, 32, 33, 64, 65)),
    (1, 1, 3),
    (13, 257, 40),
    (5, 1, 100),
    (9, 2051, 70),
    (170, 64, 1100),
)


@pytest.fixture(autouse=True)
def every_product_on_our_kernels(monkeypatch):
    """Compute products of few rows here too, which are otherwise left to `aten` without panels."""
    monkeypatch.setattr(launcher, "_FEWEST_ROWS", 0)


def product(x, weight, bias, activation, residual, gated, panels):
    y, pre = cpu.linear_fwd(LinearInputs(x, weight, bias, activation, residual, gated, panels), True)
    alone, nothing = cpu.linear_fwd(LinearInputs(x, weight, bias, activation, residual, gated, panels), False)
    assert_same_bits(alone, y)
    assert nothing.shape == (0,)
    return y, pre


def assert_gates(y, pre, inputs, activation, gated):
    """`y` against float64 within a rounding step and some roundings of float32; pre as without a gate."""
    x, weight, bias, residual = (None if t is None else t.double() for t in inputs)
    z, magnitude = x @ weight.T, x.abs() @ weight.T.abs()
    if bias is not None:
        z, magnitude = z + bias, magnitude + bias.abs()
    (active, other), (of_active, of_other) = halves(z, gated), halves(magnitude, gated)
    act, slope = activation64(active, activation)
    truth = act * other + (0 if residual is None else residual)
    off = (slope.abs() + 0.1) * of_active * other.abs() + act.abs() * of_other + truth.abs()
    step = testing.rounding_step(truth, y.dtype) if y.dtype in HALF else 0.0
    excess = (y.double() - truth).abs() - step - 2**-19 * off
    assert torch.isfinite(y).all()
    assert (excess <= 0).all(), f"off by {excess.max().item():.3g} more than allowed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", GATES)
def test_every_size(every_isa, dtype, gated, guarded):
    """Weights in panels, row by row, and with columns stored one after the other, among NaNs: the same."""
    for i, (rows, depth, half) in enumerate(SHAPES):
        x, _ = strided_rows(rows, depth, dtype, 5, seed=1)
        weight, _ = strided_rows(2 * half, depth, dtype, 3, seed=2)
        weight *= depth**-0.5
        bias = randn(2 * half, dtype=dtype, seed=4) if i % 3 else None
        residual = strided_rows(rows, half, dtype, 7, seed=3)[0] if i % 2 else None
        activation = [*ACTIVATIONS][i % len(ACTIVATIONS)]
        packed = cpu.linear_panels(weight, gated=True)
        given = x, weight, bias, activation, residual, gated
        y, pre = product(*given, packed)
        assert_gates(y, pre, (x, weight, bias, residual), activation, gated)
        # the panels change no sum
        assert_same_bits(pre, cpu.linear_fwd(LinearInputs(x, weight, bias), False)[0])
        # as b itself, its rows and then its columns one after the other
        for b in (weight.t(), weight.t().contiguous()):
            saved = torch.full_like(pre, math.nan)
            again = launcher._product(x, b, half, bias, activation, residual, saved, gated=gated)
            assert_same_bits(again, y)
            assert_same_bits(saved, pre)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", GATES)
def test_the_gradient(isa, activation, gated):
    for dtype in DTYPES:
        for rows, columns in ((1, 1), (3, 17), (40, 32), (2049, 5), (300, 67)):
            dy, pre = randn(rows, columns, dtype=dtype), 2 * randn(rows, 2 * columns, dtype=dtype, seed=1)
            active, other = (t.double() for t in halves(pre, gated))
            act, slope = activation64(active, activation)
            truth = joined(dy.double() * other * slope, dy.double() * act, gated)
            g, dbias = gradient(dy, pre, activation, gated=gated)
            assert_same_bits(gradient(dy, pre, activation, False, gated)[0], g)
            step = testing.rounding_step(truth, dtype) if dtype in HALF else 0.0
            size = joined((dy * halves(pre, gated)[1]).double().abs(), dy.double().abs(), gated)
            assert ((g.double() - truth).abs() <= step + 2**-19 * (truth.abs() + size)).all()
            # of the numbers before they are rounded
            assert ((dbias - truth.sum(0)).abs() <= 2**-18 * (truth.abs() + size).sum(0)).all()


@pytest.mark.parametrize("rows", (0, 1, 5, 300))
def test_backward_is_the_products_of_the_gradient(every_isa, rows, guarded):
    x, weight = randn(rows, 24), randn(90, 24, seed=1)
    dy, pre = randn(rows, 45, seed=2), randn(rows, 90, seed=3)
    g, dbias = gradient(dy, pre, "gelu", gated="second")
    found = cpu.linear_bwd(dy, LinearSaved(x, weight, pre, "gelu", "second"), LinearNeeds())
    for a, e in zip(found, (g.double() @ weight.double(), g.T.double() @ x.double(), dbias), strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=1e-5, atol=1e-4)
    for i in range(3):
        need = [i == j for j in range(3)]
        alone = cpu.linear_bwd(dy, LinearSaved(x, weight, pre, "gelu", "second"), LinearNeeds(*need))
        assert [t.numel() > 0 for t in alone] == [
            n and t.numel() > 0 for n, t in zip(need, found, strict=True)
        ]
        assert_same_bits(alone[i], found[i])


def test_panels_serve_every_instruction_set():
    for dtype in DTYPES:
        weight = randn(90, 101, dtype=dtype)
        packed = [
            panels
            for w in (weight, weight.t().contiguous().t())
            for panels in on_each_isa(lambda w=w: cpu.linear_panels(w, gated=True), "avx2", "avx512")
        ]
        for other in packed[1:]:
            assert_same_bits(other, packed[0])
        # a panel is 32 columns of each half, then zeros
        lines = packed[0].view(2, -1, 64, 2).transpose(2, 3) if dtype == torch.bfloat16 else packed[0]
        rows = lines.reshape(2, 102, 2, 32)
        expected = torch.zeros(2, 102, 2, 32, dtype=dtype)
        for panel, half in ((p, h) for p in (0, 1) for h in (0, 1)):
            part = weight[45 * half + 32 * panel : 45 * half + min(32 * panel + 32, 45)]
            expected[panel, :101, half, : len(part)] = part.t()
        assert_same_bits(rows.contiguous(), expected)


def test_panels_for_the_other_kind_of_call_are_refused():
    """Their sizes are equal."""
    x, weight = randn(3, 20), randn(128, 20)
    for gated, maker in (("first", r"panel_maker\(…, gated=True\)"), (None, r"panel_maker\(…\)")):
        packed = cpu.linear_panels(weight, gated=gated is None)
        with pytest.raises(ValueError, match=rf"panels: expected what {maker} makes of weight \(128, 20\)"):
            cpu.linear_fwd(LinearInputs(x, weight, activation="gelu", gated=gated, panels=packed), False)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (
            lambda: _C.cpu_linear_panels_size(5, 3, True),
            "columns: expected an even number with a gate, got 3",
        ),
        (
            lambda: _C.cpu_linear_activation_bwd(1, 1, 1, 8, 8, 1, 8, 0, 1, 3),
            "gate: expected code 0, 1 or 2, got 3",
        ),
        (
            lambda: _C.cpu_linear_activation_bwd(1, 1, 1, 8, 8, 1, 0, 0, 1, 1),
            "g: expected an address, got none",
        ),
        (lambda: _C.cpu_linear_activation_bwd(1, 1, 1, 8, 0, 0, 8, 0, 1, 1), "pre: expected an address"),
    ),
)
def test_the_extension_refuses_what_would_crash(call, message):
    with pytest.raises(ValueError, match=message):
        call()
