"""The Triton rotary: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import strategies as st

from tests.cpu import test_rotary as on_cpu
from tests.support.triton_fixtures import DEVICE, DTYPES, fuzz_tests, kernels_of, needs_lazy_memory
from tests.support.triton_sanitizer import lazy_rows

kernels = kernels_of("rotary")
pytestmark = pytest.mark.usefixtures("checked_memory")
POSITIONS = 9  # of the tables
assert_right = functools.partial(on_cpu.assert_right, kernels=kernels)


def inputs_of(*sizes, **options):
    return [t.to(DEVICE) for t in on_cpu.inputs_of(*sizes, **options)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_and_heads(dtype, interleaved):
    """Around powers of two, whole heads and parts of heads, and heads of one block and of several."""
    for half, rest, heads in ((1, 0, 1), (1, 3, 2), (4, 0, 3), (5, 1, 5), (16, 0, 65), (40, 48, 17)):
        integer = torch.int64 if rest else torch.int32
        assert_right(*inputs_of(3, heads, 2 * half + rest, half, dtype, integer), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_strides(interleaved):
    """Heads before rows, one row or head for all, overlapping rows."""
    _, *tables = inputs_of(5, 3, 7, 3)
    memory = torch.randn(400, device=DEVICE)
    for strides in ((7, 40, 1), (0, 8, 1), (9, 0, 1), (1, 2, 1)):
        assert_right(memory.as_strided((5, 3, 7), strides), *tables, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_position_outside_the_tables_is_not_read(interleaved):
    """The sanitizer reports a read outside them. The row's rotated columns are NaN, all else is as before."""
    for integer in (torch.int32, torch.int64):
        x, cos, sin, positions = inputs_of(6, 3, 10, 4, integer=integer)
        expected = kernels.rotary_fwd(x, cos, sin, positions, interleaved)
        bad = positions.clone()
        bad[[1, 4, 5]] = torch.tensor([-1, POSITIONS, 2**31 - 1], dtype=integer, device=DEVICE)
        y = kernels.rotary_fwd(x, cos, sin, bad, interleaved)
        assert y[[1, 4, 5], :, :8].isnan().all()
        expected[[1, 4, 5], :, :8] = 0
        assert torch.equal(y.nan_to_num(nan=0.0), expected)


def test_a_nan_stays_in_its_pair():
    x, *tables = inputs_of(3, 2, 12, 5)
    for interleaved in (False, True):
        clean = kernels.rotary_fwd(x, *tables, interleaved)
        spoiled = x.clone()
        spoiled[1, 1, 2] = torch.nan
        y = kernels.rotary_fwd(spoiled, *tables, interleaved)
        pair = [2, 3] if interleaved else [2, 7]
        assert y[1, 1, pair].isnan().all()
        y[1, 1, pair] = clean[1, 1, pair]
        assert torch.equal(y, clean)


def test_no_heads():
    x, *tables, positions = inputs_of(4, 2, 8, 4)
    assert kernels.rotary_bwd(x[:, :0], *tables, positions, True).shape == (4, 0, 8)


@pytest.mark.sweep
@needs_lazy_memory
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_heads_and_results_beyond_2_to_31_elements(interleaved, monkeypatch):
    """Of a result of many heads the first ones of each row are computed."""
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    x, *tables = inputs_of(5, 4, 10, 4, torch.float16)
    expected = kernels.rotary_fwd(x, *tables, interleaved)
    heads = lazy_rows(4, 50, 2**30, x.dtype).copy_(x.transpose(0, 1).flatten(1))
    rows = lazy_rows(5, 40, 2**30, x.dtype).copy_(x.flatten(1))
    for far in (heads.unflatten(1, (5, 10)).transpose(0, 1), rows.unflatten(1, (4, 10))):
        assert torch.equal(kernels.rotary_fwd(far, *tables, interleaved), expected)
    many, launch = 2**26, kernels.launch
    y = lazy_rows(5, many * 10, many * 10, x.dtype).view(5, many, 10)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: y)
    monkeypatch.setattr(kernels, "launch", lambda k, grid, *args, **c: launch(k, (grid[0], 1), *args, **c))
    assert kernels.rotary_fwd(x[:, :1].expand(5, many, 10), *tables, interleaved) is y
    assert torch.equal(y[:, :4], expected[:, :1].expand(5, 4, 10))


def check(rows, heads, half, rest, dtype, interleaved):
    assert_right(*inputs_of(rows, heads, 2 * half + rest, half, dtype, seed=rows), interleaved)


test_fuzz, test_fuzz_long = fuzz_tests(
    check,
    st.tuples(
        *(st.integers(1, 6), st.integers(1, 40), st.integers(1, 70), st.integers(0, 30)),
        *(st.sampled_from(DTYPES), st.booleans()),
    ),
    30,
    400,
)
