"""The Triton pooling's backward: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.ops.pooling import MODES, pooling, pooling_ref
from fastbert.testing import known
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    assert_bit_equal,
    assert_repeats,
    far,
    fuzz,
    kernels_of,
    needs_lazy_memory,
    packed,
    set_backends,
)
from tests.support.triton_sanitizer import lazy_rows

kernels = kernels_of("pooling")
pytestmark = pytest.mark.usefixtures("checked_memory")


def upstream(ends, width, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ends.shape[0] - 1, width, generator=g).to(DEVICE)


def run(dy, hidden, ends, mode):
    return kernels.pooling_bwd(dy, hidden, kernels.pooling_fwd(hidden, ends, mode), ends, mode)


def assert_right(hidden, ends, mode):
    """Against autograd in float64, rounded once; rows behind the last sequence are NaN and get zeros."""
    dy = upstream(ends, hidden.shape[1])
    actual = run(dy, hidden, ends, mode)
    wide = hidden.double().requires_grad_()
    (truth,) = torch.autograd.grad(pooling_ref(wide, ends, mode), wide, dy.double())
    assert (actual.dtype, actual.shape, actual.is_contiguous()) == (hidden.dtype, hidden.shape, True)
    error = (actual.double() - truth).abs()
    step = testing.rounding_step(truth, hidden.dtype)
    assert (error <= step * (1.01 if hidden.dtype == torch.float32 else 0.51)).all()
    assert not actual[int(ends[-1]) :].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_edges_of_tiles(mode, integer):
    """Lengths and widths around a tile, sequences without tokens, and a tail of several tiles."""
    for width in (1, 15, 16, 17, 128, 129, 300):
        block_m, _ = kernels.config(width)
        lengths = [0, 1, block_m - 1, block_m, block_m + 1, 0, 2 * block_m + 3, 0]
        assert_right(*packed(lengths, width, integer=integer, tail=block_m + 2), mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_share_the_gradient(dtype):
    hidden, ends = packed([70, 1, 33, 0, 2], 20, dtype)
    hidden = hidden.sign()  # of the numbers ±1 about half are the largest
    assert_right(hidden, ends, "max")
    assert_right(torch.zeros_like(hidden), ends, "max")
    assert_right(torch.full_like(hidden, -torch.inf), ends, "max")


def test_ties_are_exact():
    hidden = torch.tensor([[1.0], [3.0], [3.0], [-1.0], [3.0], [3.0]], device=DEVICE)
    ends = torch.tensor([0, 4, 6], dtype=torch.int32, device=DEVICE)
    dy = torch.tensor([[5.0], [8.0]], device=DEVICE)
    expected = torch.tensor([[0.0], [2.5], [2.5], [0.0], [4.0], [4.0]], device=DEVICE)
    assert torch.equal(run(dy, hidden, ends, "max"), expected)


def test_a_nan_is_no_largest():
    """No element equals a y of NaN: its gradient is 0, as the contract says, not NaN."""
    hidden, ends = packed([30, 70, 5], 20)
    clean = run(upstream(ends, 20), hidden, ends, "max")
    hidden[[33, 104], 3] = torch.nan
    dirty = run(upstream(ends, 20), hidden, ends, "max")
    assert not dirty[30:, 3].any()
    clean[30:, 3] = 0
    assert torch.equal(dirty, clean)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_only_max_reads_the_hidden_states(mode):
    """The other modes get tensors without elements in memory, so that the sanitizer reports any read."""
    hidden, ends = packed([4, 0, 20], 24)
    dy = upstream(ends, 24)
    expected = run(dy, hidden, ends, mode)
    nothing = torch.full((1,), torch.nan, device=DEVICE)
    blind = kernels.pooling_bwd(dy, nothing.expand(24, 24), nothing.expand(3, 24), ends, mode)
    assert torch.equal(blind, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_strided_rows_with_poisoned_padding(mode):
    hidden, ends = packed([4, 0, 20], 24)
    dy = upstream(ends, 24)
    y = kernels.pooling_fwd(hidden, ends, mode)

    def inside(t, pad):
        wide = torch.full((t.shape[0], 24 + pad), torch.nan, device=DEVICE)
        wide[:, 3:27] = t
        return wide[:, 3:27]

    strided = kernels.pooling_bwd(inside(dy, 5), inside(hidden, 8), inside(y, 11), ends, mode)
    assert torch.equal(strided, kernels.pooling_bwd(dy, hidden, y, ends, mode))


def test_nothing_to_pool():
    hidden, ends = packed([0, 0], 8, tail=37)
    for mode in MODES:
        assert torch.equal(run(upstream(ends, 8), hidden, ends, mode), torch.zeros(37, 8, device=DEVICE))
        none = ends[:1]
        assert torch.equal(run(upstream(none, 8), hidden, none, mode), torch.zeros(37, 8, device=DEVICE))
        assert run(upstream(ends, 8), hidden[:0], ends, mode).shape == (0, 8)


@pytest.mark.sweep
@needs_lazy_memory
@pytest.mark.parametrize("mode", MODES)
def test_offsets_beyond_2_to_31_elements(mode, monkeypatch):
    """The last rows begin beyond 32-bit offsets: of the input, and of the result.

    For the result one column block is computed.
    """
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    hidden = far(torch.arange(100).reshape(5, 20).half())
    for ends in ([0, 5], [0, 1, 4, 5]):
        assert_right(hidden, torch.tensor(ends, dtype=torch.int32), mode)

    width, ends = 2**30, torch.tensor([0, 1, 4], dtype=torch.int32)
    launch = kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, grid, *args, **config: launch(kernel, (grid[0], 1), *args, **config)
    )
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: lazy(*shape, dtype))

    def lazy(rows, cols, dtype):
        return lazy_rows(rows, cols, cols, dtype)

    x, dy = lazy(5, width, torch.float16), lazy(2, width, torch.float32)
    x[:, :4] = torch.arange(20.0).reshape(5, 4)
    dy[:, :4] = torch.tensor([[3.0], [6.0]])
    dx = run(dy, x, ends, mode)[:, 0].tolist()
    assert dx == {"mean": [3, 2, 2, 2, 0], "cls": [3, 6, 0, 0, 0], "max": [3, 0, 0, 6, 0]}[mode]


def test_sequences_are_on_the_grid_axis_that_has_no_limit(monkeypatch):
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **config: grids.append(grid))
    x, ends = torch.empty((2**17, 16), device="meta"), torch.empty(2**17 + 1, device="meta")
    kernels.pooling_bwd(x, x, x, ends, "mean")
    assert grids == [(2**17 + 1, 1)]


@pytest.mark.sweep
def test_repeats_are_bit_equal_without_atomics(checked_memory):
    hidden, ends = packed([100, 3, 57], 40, torch.bfloat16)
    inputs = upstream(ends, 40), hidden
    before = [t.clone() for t in inputs]
    assert_repeats(checked_memory, lambda: [run(*inputs, ends, mode) for mode in MODES])
    assert_bit_equal(inputs, before)


def test_training_is_served_by_the_table(monkeypatch):
    set_backends(monkeypatch, "pooling", "triton", "reference")
    served = []
    launch = kernels.pooling_bwd
    monkeypatch.setattr(kernels, "pooling_bwd", lambda *args: served.append(1) or launch(*args))
    hidden, ends = packed([9, 4], 16)
    hidden.requires_grad_()
    dy = upstream(ends, 16)
    (grad,) = torch.autograd.grad(pooling(hidden, ends, "mean"), hidden, dy.expand(2, 16))
    assert len(served) > 1  # the self-check's and this one
    assert all(v.passed for v in known.found.values())
    assert torch.equal(grad, run(dy, hidden.detach(), ends, "mean"))


@pytest.mark.sweep
@fuzz(30)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=8),
    st.integers(1, 150),
    st.sampled_from(MODES),
    st.sampled_from(DTYPES),
    st.integers(0, 30),
    st.booleans(),
)
def test_fuzz(lengths, width, mode, dtype, tail, ties):
    hidden, ends = packed(lengths, width, dtype, tail)
    assert_right(hidden.round() if ties else hidden, ends, mode)
