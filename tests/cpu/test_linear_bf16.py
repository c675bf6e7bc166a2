"""The C++ linear's product of pairs of bf16: its tiles, runs, odd depths and copies, against float64.

What it shares with the other instruction sets is in test_linear.py, whose checks these tests use.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fastbert import testing
from fastbert.backends import cpu
from fastbert.backends.cpu import linear as launcher
from fastbert.runtime import loader
from fastbert.testing.op_cases.linear import CASES, LinearCase
from tests.cpu.test_linear import (
    OPTIONS,
    WIDE_SHAPES,
    PackedCase,
    both_ways,
    check_a_wide_weight,
    check_many_rows,
    gradients,
)
from tests.support.cpu_truth import assert_same_bits, randn, strided_rows

_C = loader.extension
BF16 = torch.bfloat16

pytest_plugins = ("tests.support.cpu_fixtures",)
pytestmark = [
    pytest.mark.skipif(_C is None, reason=str(loader.missing)),
    pytest.mark.skipif(
        getattr(_C, "best_cpu_isa", str)() != "avx512_bf16", reason="this processor has no avx512_bf16"
    ),
]


@pytest.fixture(autouse=True)
def by_pairs(monkeypatch):
    """Multiply by pairs, also products of few rows."""
    monkeypatch.setattr(launcher, "_FEWEST_ROWS", 0)
    before = _C.cpu_isa()
    _C.set_cpu_isa("avx512_bf16")
    yield
    _C.set_cpu_isa(before)


def test_every_row_count(guarded):
    """Tiles of every height; blocks of 320 rows and their edges."""
    for rows in (*range(1, 15), 31, 65, 319, 320, 321, 641):
        both_ways(rows, 36 + rows % 2, 70, BF16, OPTIONS[rows % 7])


def test_every_column_count(guarded):
    for columns in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 193):
        both_ways(5, 9 + columns % 2, columns, BF16, OPTIONS[columns % 7])


def test_every_depth(guarded):
    """Odd ones, whose last element has no partner; runs of 256 and their edges."""
    for depth in (
        *range(1, 10),
        31,
        32,
        33,
        63,
        64,
        65,
        255,
        256,
        257,
        258,
        511,
        512,
        513,
        767,
        768,
        1025,
        3071,
    ):
        both_ways(7, depth, 67, BF16, OPTIONS[depth % 7])


@pytest.mark.parametrize("shape", (*WIDE_SHAPES, (40, 515, 100)), ids=str)
@pytest.mark.parametrize("activation", (None, "gelu"))
def test_a_wide_weight_is_rounded_as_it_is_read(shape, activation, guarded):
    check_a_wide_weight(BF16, shape, activation)


def test_no_number_of_rows_makes_panels_of_the_whole_weight(monkeypatch):
    check_many_rows(BF16, 700, False, monkeypatch)


def test_every_depth_of_the_gradients(guarded):
    """dweight sums over the rows, dx over the columns."""
    for size in (31, 255, 256, 257, 513, 768, 1025):
        both_ways(size, 21, 11, BF16, OPTIONS[size % 7])
        both_ways(11, 21, size, BF16, OPTIONS[size % 7])


@pytest.mark.parametrize("case", [*CASES, LinearCase(200, 801, 200, "gelu", residual=True)], ids=repr)
@pytest.mark.parametrize("packed", (False, True), ids=("", "packed"))
def test_error_rule(case, packed):
    rows = testing.run_case(PackedCase(**vars(case)) if packed else case, "cpu", BF16)
    assert len(rows) >= 3
    assert [f"{r.quantity}: {r.reason}" for r in rows if not r.passed] == []


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
        errors[isa] = (cpu.linear_fwd(x, w, None, None, -near, False, packed)[0] - rest).abs()
    assert errors["avx512_bf16"].mean() <= 1.5 * errors["avx512"].mean()
    assert errors["avx512_bf16"].max() <= 2**-20 * (x.double().abs() @ w.double().abs().T).max()


def test_it_multiplies_by_pairs():
    """A subnormal element counts as 0 in this product alone; a subnormal result is kept."""
    x = torch.tensor([[2.0**-130, 2.0**-100]], dtype=BF16)
    w = torch.tensor([[2.0**100, 0.0], [0.0, 2.0**-20], [0.0, 2.0**-33]], dtype=BF16)
    found = {}
    for isa in ("avx2", "avx512", "avx512_bf16"):
        _C.set_cpu_isa(isa)
        found[isa] = cpu.linear_fwd(x, w, None, None, None, False)[0][0].tolist()
    assert found["avx2"] == found["avx512"] == [2.0**-30, 2.0**-120, 2.0**-133]
    assert found["avx512_bf16"] == [0.0, 2.0**-120, 0.0]
    bias = torch.tensor([2.0**-130, -(2.0**-133), 3 * 2.0**-133], dtype=BF16)
    y = cpu.linear_fwd(torch.zeros_like(x), w, bias, None, None, False)[0][0]
    assert_same_bits(y, bias, "subnormal results")


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_bad_element_stays_in_its_row_and_column(bad):
    """Also the last one of an odd depth, whose partner would be the next row's first."""
    clean = randn(13, 801, dtype=BF16), randn(70, 801, dtype=BF16, seed=1), randn(13, 70, dtype=BF16, seed=2)

    def run(x, weight, dy):
        y = cpu.linear_fwd(x, weight, None, None, None, True)[0]
        return y, *gradients(dy, x, weight, None, None)[:2]

    expected = run(*clean)
    for column in (0, 300, 800):
        reached = (  # (row, column) of y, dx and dweight that the element reaches
            ((4, None), None, (None, column)),  # of x[4, column]
            ((None, 66), (None, column), None),  # of weight[66, column]
            (None, (4, None), (66, None)),  # of dy[4, 66]
        )
        for which, places in enumerate(reached):
            inputs = [t.clone() for t in clean]
            inputs[which][((4, column), (66, column), (4, 66))[which]] = bad
            for a, b, place in zip(run(*inputs), expected, places, strict=True):
                hit = torch.zeros(b.shape, dtype=torch.bool)
                if place is not None:
                    hit[tuple(slice(None) if i is None else i for i in place)] = True
                assert_same_bits(a[~hit], b[~hit], f"element of {which}, column {column}")
                assert not a[hit].isfinite().any()


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
                cpu.linear_fwd(x, weight, None, None, g, False)[0],
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
            y = cpu.linear_fwd(x, weight, None, None, None, False, packed)[0]
            assert (y == truth).double().mean() >= 0.99, (made, used)


@pytest.mark.parametrize(
    "shape", ((333, 300, 700), (40, 901, 1500), (1000, 65, 130), (5, 400, 2000)), ids=str
)
def test_any_number_of_threads_gives_the_same_bits(shape, threads):
    rows, depth, columns = shape
    x, weight, dy = (
        randn(*s, dtype=BF16, seed=i)
        for i, s in enumerate(((rows, depth), (columns, depth), (rows, columns)))
    )
    bias, first = randn(columns, dtype=BF16, seed=3), None
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        y, pre = cpu.linear_fwd(x, weight, bias, "gelu", dy, True)
        result = (y, pre, *gradients(dy, x, weight, pre, "gelu"))
        first = first or result
        for a, b in zip(first, result, strict=True):
            assert_same_bits(a, b, f"{count} threads")
    for begin, end in ((0, 1), (1, rows), (rows // 2, rows // 2 + 2)):
        part = cpu.linear_fwd(x[begin:end], weight, bias, "gelu", dy[begin:end], False)[0]
        assert_same_bits(part, first[0][begin:end], f"rows {begin} to {end}")
