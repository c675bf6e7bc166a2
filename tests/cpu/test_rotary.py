"""The C++ rotary against float64: every width, both pairings, strides, threads, positions out of range."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends import cpu
from fastbert.ops.rotary import rotary_ref
from fastbert.runtime import loader
from tests.support.cpu_truth import assert_same_bits

_C = loader.extension
HALF = (torch.bfloat16, torch.float16)


def inputs_of(rows, heads, headdim, half, dtype=torch.float32, integer=torch.int32, positions=9, seed=0):
    """Heads of a wider product, tables whose rows all differ, and positions in no order."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads + 1, headdim, generator=g).to(dtype)[:, :heads]
    angles = 10 * torch.rand(positions, half, generator=g)
    return x, angles.cos(), angles.sin(), torch.randint(positions, (rows,), generator=g).to(integer)


def assert_right(x, cos, sin, positions, interleaved, kernels=cpu):
    """Both directions; half a step from rounding, and what float32 loses of the two products."""
    for launch, sign in ((kernels.rotary_fwd, 1), (kernels.rotary_bwd, -1)):
        y = launch(x, cos, sin, positions, interleaved)
        assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
        truth = rotary_ref(x.double(), cos.double(), sign * sin.double(), positions, interleaved)
        bound = 2**-24 * 3 * x.double().abs().amax() + 0.505 * testing.rounding_step(truth, x.dtype)
        assert ((y.double() - truth).abs() <= bound).all()
        assert_same_bits(y[..., 2 * cos.shape[1] :], x[..., 2 * cos.shape[1] :])


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
def test_every_width(interleaved, dtype, isa, guarded):
    """Every remainder of a vector, alone and after whole ones, with and without columns that are copied."""
    for half in (*range(1, 19), 31, 32, 33, 64, 65):
        for rest in (0, 1, 5):
            integer = torch.int64 if rest else torch.int32
            inputs = inputs_of(3, 2, 2 * half + rest, half, dtype, integer, seed=half)
            assert_right(*inputs, interleaved)


@pytest.mark.parametrize("interleaved", (False, True))
def test_strides(interleaved, isa, guarded):
    """Heads before rows, one row or head for all, overlapping rows."""
    _, *tables = inputs_of(5, 3, 7, 3)
    memory = torch.randn(400)
    for strides in ((7, 40, 1), (0, 8, 1), (9, 0, 1), (1, 2, 1)):
        assert_right(memory.as_strided((5, 3, 7), strides), *tables, interleaved)


def test_copied_columns_keep_their_bits(isa):
    """Signalling NaN and subnormal numbers too."""
    raw = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(16, 64, 64)
    _, *tables = inputs_of(16, 64, 64, 1)
    for dtype in HALF:
        for launch in (cpu.rotary_fwd, cpu.rotary_bwd):
            y = launch(raw.view(dtype), *tables, False)
            assert torch.equal(y.view(torch.int16)[..., 2:], raw[..., 2:])


def test_a_row_depends_on_nothing_else(isa):
    x, cos, sin, positions = inputs_of(40, 2, 12, 5)
    whole = cpu.rotary_fwd(x, cos, sin, positions, False)
    x[7], x[9] = torch.nan, torch.inf
    spoiled = cpu.rotary_fwd(x, cos, sin, positions, False)
    kept = [row for row in range(40) if row not in (7, 9)]
    assert torch.equal(spoiled[kept], whole[kept])
    assert spoiled[7].isnan().all()


@pytest.mark.parametrize("interleaved", (False, True))
def test_any_number_of_threads_gives_the_same_bits(interleaved, threads, guarded):
    """More rows than tasks, a last task of few rows, and an output large enough for fresh pages."""
    assert _C.has_team(), "PyTorch's OpenMP pool was not found: the kernels would never run in parallel"
    for rows, heads in ((1, 700), (257, 40), (5003, 30)):
        inputs = inputs_of(rows, heads, 64, 32)
        torch.set_num_threads(1)
        expected = cpu.rotary_fwd(*inputs, interleaved)
        assert_right(*(t[-9:] if t.shape[0] == rows else t for t in inputs), interleaved)
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            assert torch.equal(cpu.rotary_fwd(*inputs, interleaved), expected)


@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
@pytest.mark.parametrize("bad", (9, -1, 2**31 - 1))
def test_positions_out_of_range_are_refused_before_memory_is_read(bad, integer):
    """The op checks them as well, but not under torch.compile."""
    *others, positions = inputs_of(6, 2, 8, 4, integer=integer)
    positions[5] = bad
    for launch in (cpu.rotary_fwd, cpu.rotary_bwd):
        with pytest.raises(ValueError, match=f"positions: position {bad} is out of range for tables of 9"):
            launch(*others, positions, False)
