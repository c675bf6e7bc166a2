"""The C++ pack and unpack: every element size, width and mask, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fastbert.backends import cpu
from fastbert.ops.packing import DTYPES
from fastbert.runtime import loader
from tests.support.cpu_truth import assert_same_bits

_C = loader.extension


def bits(rows, inner, dtype, gap=0, seed=0):
    """(rows, inner) of random bytes, all kinds of NaN included, with `gap` elements between rows."""
    g = torch.Generator().manual_seed(seed)
    size = rows * (inner + gap) * dtype.itemsize
    raw = torch.randint(2 if dtype == torch.bool else 256, (size,), generator=g, dtype=torch.uint8)
    return raw.view(dtype).view(rows, inner + gap)[:, :inner]


def some(rows, share, seed=0):
    """Strictly increasing indices of about this share of `rows`."""
    return (torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < share).nonzero().flatten()


def there_and_back(x, indices):
    packed = cpu.packing_fwd(x, indices)
    assert_same_bits(packed, x[indices], "pack")
    back = cpu.packing_bwd(packed, indices, x.shape[0])
    expected = torch.zeros(x.shape, dtype=x.dtype)
    expected[indices] = x[indices]
    assert_same_bits(back, expected, "unpack")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_of_every_type(dtype, guarded):
    for inner in range(1, 70):
        for gap in (0, 3):
            for share in (0.0, 0.5, 1.0):
                there_and_back(bits(19, inner, dtype, gap), some(19, share, inner))


@pytest.mark.parametrize("share", (0.0, 0.02, 0.5, 0.98, 1.0))
@pytest.mark.parametrize(
    ("rows", "inner"), ((1, 768), (2, 1), (85, 768), (86, 768), (1000, 768), (70001, 1), (70001, 3))
)
def test_masks_of_every_density(rows, share, inner, guarded):
    """Runs begin, end and break at every place of a task; some tasks have no index."""
    there_and_back(bits(rows, inner, torch.bfloat16), some(rows, share))


@pytest.mark.parametrize(("rows", "inner"), ((0, 5), (4, 0), (0, 0)))
def test_nothing_to_copy(rows, inner, guarded):
    none = torch.empty(0, dtype=torch.int64)
    x = torch.empty(rows, inner)
    assert cpu.packing_fwd(x, none).shape == (0, inner)
    assert cpu.packing_bwd(x[:0], none, rows).shape == (rows, inner)
    if rows:
        assert cpu.packing_fwd(x, torch.arange(rows)).shape == (rows, inner)


@pytest.mark.parametrize("inner", (1, 6))
def test_strides(inner):
    """Expanded and overlapping rows, a column whose elements are far apart, indices with gaps."""
    indices = torch.stack([some(40, 0.5), some(40, 0.5) * 0 - 7], 1)[:, 0]
    memory = torch.randn(400)
    for x in (
        memory[:inner].expand(40, inner),
        memory.as_strided((40, inner), (2, 1)),
        memory.view(40, 10)[:, 3 : 3 + inner],
        memory[: 40 * inner].view(inner, 40).t()[:, :1],
    ):
        assert_same_bits(cpu.packing_fwd(x, indices), x[indices])
        expected = torch.zeros(50, x.shape[1])
        expected[indices] = x[: len(indices)]
        assert_same_bits(cpu.packing_bwd(x[: len(indices)], indices, 50), expected)


@pytest.mark.parametrize(
    ("indices", "found"),
    (
        ([0, 1, 10], "10 at 2"),
        ([-1, 1, 2], "-1 at 0"),
        ([2, 2, 3], "2 at 1"),
        ([0, 5, 4], "4 at 2"),
        ([0, 2**40, 3], f"{2**40} at 1"),
    ),
)
def test_bad_indices_are_refused_before_memory_is_read(indices, found):
    """The op checks them as well, but not under torch.compile."""
    indices = torch.tensor(indices)
    message = rf"indices: expected strictly increasing positions in \[0, 10\), got {found}"
    with pytest.raises(ValueError, match=message):
        cpu.packing_fwd(torch.ones(10, 4), indices)
    with pytest.raises(ValueError, match=message):
        cpu.packing_bwd(torch.ones(3, 4), indices, 10)


@pytest.mark.parametrize("inner", (1, 5, 300))
def test_any_number_of_threads_gives_the_same_bits(inner, threads):
    assert _C.has_team(), "PyTorch's OpenMP pool was not found: the kernels would never run in parallel"
    rows = 400_000 // inner
    x, indices = bits(rows, inner, torch.float32), some(rows, 0.7)
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        there_and_back(x, indices)
