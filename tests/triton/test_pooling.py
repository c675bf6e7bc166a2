"""The Triton pooling: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert.backends import reference
from fastbert.ops.pooling import MODES
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    assert_repeats,
    far,
    fuzz,
    kernels_of,
    needs_lazy_memory,
    packed,
)

kernels = kernels_of("pooling")
pytestmark = pytest.mark.usefixtures("checked_memory")


def assert_right(hidden, ends, mode):
    actual, expected = (m.pooling_fwd(hidden, ends, mode) for m in (kernels, reference))
    assert (actual.dtype, actual.shape) == (torch.float32, expected.shape)
    if mode == "mean":
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    else:
        assert torch.equal(actual.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_edges_of_tiles(mode, integer):
    """Lengths and widths around a tile, and sequences without tokens."""
    for width in (1, 15, 16, 17, 128, 129, 300):
        block_m, _ = kernels.config(width)
        lengths = [0, 1, block_m - 1, block_m, block_m + 1, 0, 2 * block_m + 3, 0]
        assert_right(*packed(lengths, width, integer=integer, tail=3), mode)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_strided_rows_with_poisoned_padding(mode):
    hidden, ends = packed([4, 0, 20], 24)
    wide = torch.full((24, 40), torch.nan, device=DEVICE)
    wide[:, 8:32] = hidden
    assert torch.equal(
        kernels.pooling_fwd(wide[:, 8:32], ends, mode), kernels.pooling_fwd(hidden, ends, mode)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_is_alone(mode):
    """NaN in one sequence changes no other. Its maximum is NaN, as is its mean."""
    hidden, ends = packed([30, 70, 5], 20)
    alone = kernels.pooling_fwd(hidden[30:100], ends[1:3] - 30, mode)
    hidden[[0, 1, 33, 104]] = hidden[[0, 1, 33, 104]].index_fill(
        1, torch.tensor([3], device=DEVICE), torch.nan
    )
    together = kernels.pooling_fwd(hidden, ends, mode)
    kept = [c for c in range(20) if c != 3]
    assert torch.equal(together[1, kept], alone[0, kept])
    assert_right(hidden, ends, mode)
    if mode != "cls":
        assert together[:, 3].isnan().all()


def test_all_of_one_sign():
    hidden, ends = packed([5, 40], 16)
    assert_right(-hidden.abs() - 1, ends, "max")
    assert_right(torch.full_like(hidden, -torch.inf), ends, "max")


def test_sums_in_float32():
    hidden = torch.full((4096, 2), 1.0 + 2.0**-7, dtype=torch.bfloat16, device=DEVICE)
    ends = torch.tensor([0, 4096], dtype=torch.int32, device=DEVICE)
    assert torch.equal(kernels.pooling_fwd(hidden, ends, "mean"), hidden[:1].float())


def test_nothing_to_pool():
    hidden, ends = packed([0, 0], 8)
    for mode in MODES:
        assert torch.equal(kernels.pooling_fwd(hidden, ends, mode), torch.zeros(2, 8, device=DEVICE))
        assert kernels.pooling_fwd(hidden, ends[:1], mode).shape == (0, 8)


@pytest.mark.sweep
@needs_lazy_memory
def test_offsets_beyond_2_to_31_elements():
    """The last rows begin beyond 32-bit offsets, in one sequence and in two."""
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    hidden = far(torch.arange(100).reshape(5, 20).half())
    for ends in ([0, 5], [0, 1, 4, 5]):
        assert_right(hidden, torch.tensor(ends, dtype=torch.int32), "max")
        assert_right(hidden, torch.tensor(ends, dtype=torch.int32), "cls")
        assert_right(hidden, torch.tensor(ends, dtype=torch.int32), "mean")


@pytest.mark.sweep
def test_repeats_are_bit_equal_without_atomics(checked_memory):
    hidden, ends = packed([100, 3, 57], 40)
    before = hidden.clone()
    assert_repeats(checked_memory, lambda: [kernels.pooling_fwd(hidden, ends, "mean")])
    assert torch.equal(hidden, before)


@pytest.mark.sweep
@fuzz(100)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=8),
    st.integers(1, 150),
    st.sampled_from(MODES),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)
def test_fuzz(lengths, width, mode, dtype, tail):
    assert_right(*packed(lengths, width, dtype, tail), mode)
