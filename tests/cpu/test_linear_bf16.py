"""The C++ linear's product of pairs of bf16: its tiles, runs, odd depths and copies, against float64.

What it shares with the other instruction sets is in test_linear.py, whose checks these tests use.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fastbert.backends import cpu
from fastbert.backends.cpu import linear as launcher
from fastbert.ops.linear import LinearInputs
from fastbert.runtime import loader
from tests.cpu.test_linear import (
    EPILOGUES,
    SIZES,
    THREADED_SHAPES,
    WIDE_SHAPES,
    check_a_bad_element,
    check_a_wide_weight,
    check_many_rows,
    check_sizes,
    check_threads,
)
from tests.support.cpu_fixtures import using_isa
from tests.support.cpu_truth import assert_same_bits, randn, strided_rows

_C = loader.extension
BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(
    getattr(_C, "best_cpu_isa", str)() != "avx512_bf16", reason="this processor has no avx512_bf16"
)


@pytest.fixture(autouse=True)
def by_pairs(monkeypatch):
    """Multiply by pairs, also products of few rows."""
    monkeypatch.setattr(launcher, "_FEWEST_ROWS", 0)
    yield from using_isa("avx512_bf16")


@pytest.mark.parametrize("cut", SIZES)
def test_every_size(cut, guarded, threads):
    check_sizes(BF16, cut)


@pytest.mark.parametrize("shape", (*WIDE_SHAPES, (40, 515, 100)), ids=str)
@EPILOGUES
def test_a_wide_weight_is_rounded_as_it_is_read(shape, activation, gated, guarded):
    check_a_wide_weight(BF16, shape, activation, gated)


def test_no_number_of_rows_makes_panels_of_the_whole_weight(monkeypatch):
    check_many_rows(BF16, 700, False, monkeypatch)


@pytest.mark.parametrize("depth", (768, 3072, 20_001))
def test_long_sums_are_as_good_as_with_floats(depth):
    """Per element: the rounding to bf16 aside, which the float64 residual removes."""
    x, w = randn(48, depth, dtype=BF16), randn(96, depth, dtype=BF16, seed=1)
    truth = x.double() @ w.double().T
    near = truth.to(BF16)
    rest, packed = (truth - near.double()), cpu.linear_panels(w)
    errors = {}
    for isa in ("avx512", "avx512_bf16"):
        _C.set_cpu_isa(isa)
        errors[isa] = (
            cpu.linear_fwd(LinearInputs(x, w, residual=-near, panels=packed), False)[0] - rest
        ).abs()
    assert errors["avx512_bf16"].mean() <= 1.5 * errors["avx512"].mean()
    assert errors["avx512_bf16"].max() <= 2**-20 * (x.double().abs() @ w.double().abs().T).max()


def test_it_multiplies_by_pairs():
    """A subnormal element counts as 0 in this product alone; a subnormal result is kept."""
    x = torch.tensor([[2.0**-130, 2.0**-100]], dtype=BF16)
    w = torch.tensor([[2.0**100, 0.0], [0.0, 2.0**-20], [0.0, 2.0**-33]], dtype=BF16)
    found = {}
    for isa in ("avx2", "avx512", "avx512_bf16"):
        _C.set_cpu_isa(isa)
        found[isa] = cpu.linear_fwd(LinearInputs(x, w), False)[0][0].tolist()
    assert found["avx2"] == found["avx512"] == [2.0**-30, 2.0**-120, 2.0**-133]
    assert found["avx512_bf16"] == [0.0, 2.0**-120, 0.0]
    bias = torch.tensor([2.0**-130, -(2.0**-133), 3 * 2.0**-133], dtype=BF16)
    y = cpu.linear_fwd(LinearInputs(torch.zeros_like(x), w, bias), False)[0][0]
    assert_same_bits(y, bias, "subnormal results")


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_bad_element_stays_in_its_row_and_column(bad):
    """Also the last one of an odd depth, whose partner would be the next row's first."""
    for column in (0, 300, 800):
        check_a_bad_element(BF16, bad, None, 801, column)


def test_neighbours_are_not_read():
    """Rows of NaN around every operand, one element away, give the same bits as copies of their own."""
    for rows, depth, columns in ((7, 33, 70), (13, 257, 65), (6, 64, 64)):
        x, weight, g = (
            strided_rows(*shape, BF16, 1, seed=i)[0]
            for i, shape in enumerate(((rows, depth), (columns, depth), (rows, columns)))
        )
        own = [t.clone() for t in (x, weight, g)]
        results = [
            (
                cpu.linear_fwd(LinearInputs(x, weight, residual=g), False)[0],
                launcher._product(g, weight, depth),
                launcher._product(g.t(), x, depth),
            )
            for x, weight, g in ((x, weight, g), own)
        ]
        for a, b in zip(*results, strict=True):
            assert b.isfinite().all()
            assert_same_bits(a, b)


def test_panels_serve_every_instruction_set():
    """Those made under one instruction set are read under another one, also of an odd depth."""
    for depth in (37, 300):
        x, weight = randn(9, depth, dtype=BF16), randn(70, depth, dtype=BF16, seed=1)
        truth = (x.double() @ weight.double().T).to(BF16)
        for made, used in itertools.product(("avx2", "avx512", "avx512_bf16"), repeat=2):
            _C.set_cpu_isa(made)
            packed = cpu.linear_panels(weight)
            _C.set_cpu_isa(used)
            y = cpu.linear_fwd(LinearInputs(x, weight, panels=packed), False)[0]
            assert (y == truth).double().mean() >= 0.99, (made, used)


@pytest.mark.parametrize("shape", (*THREADED_SHAPES, (1000, 65, 130)), ids=str)
def test_any_number_of_threads_gives_the_same_bits(shape):
    check_threads(BF16, shape)
