"""The Triton pooling: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.ops.pooling import MODES, pooling_ref
from tests.support.triton_fixtures import DEVICE, DTYPES, fuzz, kernels_of, needs_lazy_memory, packed
from tests.support.triton_sanitizer import lazy_rows

kernels = kernels_of("pooling")
pytestmark = pytest.mark.usefixtures("checked_memory")
# Modes without a sum
EXACT = ("cls", "max", "lasttoken")


def upstream(ends, width, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ends.shape[0] - 1, width, generator=g).to(DEVICE)


def backward(dy, hidden, ends, mode):
    return kernels.pooling_bwd(dy, hidden, kernels.pooling_fwd(hidden, ends, mode), ends, mode)


def assert_forward(hidden, ends, mode):
    actual, expected = (m.pooling_fwd(hidden, ends, mode) for m in (kernels, reference))
    assert (actual.dtype, actual.shape) == (torch.float32, expected.shape)
    if mode not in EXACT:
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=4e-6, equal_nan=True)
    else:
        assert torch.equal(actual.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))


def assert_right(hidden, ends, mode):
    """Backward against autograd in float64, rounded once; rows behind the last sequence get zeros."""
    assert_forward(hidden, ends, mode)
    dy = upstream(ends, hidden.shape[1])
    actual = backward(dy, hidden, ends, mode)
    wide = hidden.double().requires_grad_()
    (truth,) = torch.autograd.grad(pooling_ref(wide, ends, mode), wide, dy.double())
    assert (actual.dtype, actual.shape, actual.is_contiguous()) == (hidden.dtype, hidden.shape, True)
    error = (actual.double() - truth).abs()
    step = testing.rounding_step(truth, hidden.dtype)
    # float32: a rounding per operation, which is two for weights and roots
    limit = 1.01 if mode in (*EXACT, "mean") else 2.02
    assert (error <= step * (limit if hidden.dtype == torch.float32 else 0.51)).all()
    assert not actual[int(ends[-1]) :].any()


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_edges_of_tiles(mode, integer):
    """Lengths and widths around a tile, sequences without tokens, and a tail of several tiles."""
    for width in (1, 16, 17, 129, 300):
        block_m, _ = kernels.config(width)
        lengths = [0, 1, block_m - 1, block_m, block_m + 1, 0, 2 * block_m + 3, 0]
        assert_right(*packed(lengths, width, integer=integer, tail=block_m + 2), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_stays_in_its_sequence(mode):
    """Its maximum is NaN, as is its mean. No element equals that maximum: the gradient is 0, not NaN."""
    hidden, ends = packed([30, 70, 5], 20)
    dy = upstream(ends, 20)
    y, clean = kernels.pooling_fwd(hidden, ends, mode), backward(dy, hidden, ends, mode)
    hidden[[30, 33, 99, 100, 104], 3] = torch.nan
    assert_forward(hidden, ends, mode)
    spoiled = kernels.pooling_fwd(hidden, ends, mode)
    kept = [c for c in range(20) if c != 3]
    assert torch.equal(spoiled[:, kept], y[:, kept])
    assert spoiled[1:, 3].isnan().all()
    assert torch.equal(spoiled[0], y[0])
    if mode == "max":
        clean[30:, 3] = 0
    assert torch.equal(backward(dy, hidden, ends, mode), clean)


def test_all_of_one_sign():
    hidden, ends = packed([5, 40], 16)
    assert_right(-hidden.abs() - 1, ends, "max")


def test_sums_in_float32():
    hidden = torch.full((4096, 2), 1.0 + 2.0**-7, dtype=torch.bfloat16, device=DEVICE)
    ends = torch.tensor([0, 4096], dtype=torch.int32, device=DEVICE)
    assert torch.equal(kernels.pooling_fwd(hidden, ends, "mean"), hidden[:1].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_share_the_gradient(dtype):
    hidden, ends = packed([70, 1, 33, 0, 2], 20, dtype)
    hidden = hidden.sign()  # of the numbers ±1 about half are the largest
    assert_right(hidden, ends, "max")
    assert_right(torch.zeros_like(hidden), ends, "max")
    assert_right(torch.full_like(hidden, -torch.inf), ends, "max")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "max"])
def test_only_max_reads_the_hidden_states_in_backward(mode):
    """The other modes get tensors without elements in memory, so that the sanitizer reports any read."""
    hidden, ends = packed([4, 0, 20], 24)
    dy = upstream(ends, 24)
    expected = backward(dy, hidden, ends, mode)
    nothing = torch.full((1,), torch.nan, device=DEVICE)
    blind = kernels.pooling_bwd(dy, nothing.expand(24, 24), nothing.expand(3, 24), ends, mode)
    assert torch.equal(blind, expected)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_pool(mode):
    hidden, ends = packed([0, 0], 8, tail=37)
    for none in (ends, ends[:1]):
        y = kernels.pooling_fwd(hidden, none, mode)
        assert torch.equal(y, torch.zeros(len(none) - 1, 8, device=DEVICE))
        assert torch.equal(backward(y, hidden, none, mode), torch.zeros(37, 8, device=DEVICE))
        assert backward(y, hidden[:0], none, mode).shape == (0, 8)


@pytest.mark.sweep
@needs_lazy_memory
@pytest.mark.parametrize("mode", MODES)
def test_results_beyond_2_to_31_elements(mode, monkeypatch):
    """Of backward, whose rows have no gaps: five rows of 2**30 columns. One column block is computed."""
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
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
    dx = backward(dy, x, ends, mode)[:, 0].tolist()
    of_root = torch.tensor(6 / 3**0.5).half().item()
    assert (
        dx
        == {
            "mean": [3, 2, 2, 2, 0],
            "cls": [3, 6, 0, 0, 0],
            "max": [3, 0, 0, 6, 0],
            "lasttoken": [3, 0, 0, 6, 0],
            "mean_sqrt_len_tokens": [3, of_root, of_root, of_root, 0],
            "weightedmean": [3, 1, 2, 3, 0],
        }[mode]
    )


@pytest.mark.sweep
@fuzz(40)
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
