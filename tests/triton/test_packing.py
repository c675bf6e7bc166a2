"""The Triton pack and unpack: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert.backends import reference
from fastbert.ops.packing import DTYPES
from tests.support.triton_fixtures import DEVICE, fuzz_tests, kernels_of

kernels = kernels_of("packing")
pytestmark = pytest.mark.usefixtures("checked_memory")


def random_bits(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern, NaNs included; bool is 0 or 1."""
    g = torch.Generator().manual_seed(rows + inner)
    if dtype == torch.bool:
        return torch.randint(2, (rows, inner), generator=g).bool().to(DEVICE)
    shape = (rows, inner * dtype.itemsize)
    return torch.randint(256, shape, generator=g, dtype=torch.uint8).view(dtype).to(DEVICE)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def chosen(rows: int, total: int, seed: int = 0) -> torch.Tensor:
    """`total` of `rows` positions, strictly increasing."""
    g = torch.Generator().manual_seed(seed)
    return torch.randperm(rows, generator=g)[:total].sort().values.to(DEVICE)


def assert_right(x: torch.Tensor, packed: torch.Tensor, indices: torch.Tensor) -> None:
    """pack of `x` and unpack of `packed` are the reference's, bit for bit."""
    rows = x.shape[0]
    for function, args in (("packing_fwd", (x, indices)), ("packing_bwd", (packed, indices, rows))):
        actual, expected = getattr(kernels, function)(*args), getattr(reference, function)(*args)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(bits(actual), bits(expected)), function


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_arrives(dtype):
    assert_right(random_bits(50, 24, dtype), random_bits(31, 24, dtype), chosen(50, 31))


# Around the tile heights: 128 rows of up to 16 columns, 4 of 512 and more; and column blocks of 512
@pytest.mark.parametrize(
    ("rows", "inner"),
    [(1, 1), (127, 1), (128, 3), (129, 16), (300, 17), (9, 511), (4, 512), (5, 513), (3, 1250)],
)
def test_edges_of_tiles(rows, inner):
    for total in sorted({1, (rows + 1) // 2, rows}):
        indices = chosen(rows, total, seed=rows)
        assert_right(random_bits(rows, inner, torch.int16), random_bits(total, inner, torch.int16), indices)


# Every number of steps of the search; the first row, the last, or none is kept
@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33])
def test_search(total):
    for indices in (
        torch.arange(total, device=DEVICE),
        torch.arange(total, device=DEVICE) + 40 - total,
        chosen(40, total, seed=1),
    ):
        assert_right(random_bits(40, 5, torch.int32), random_bits(total, 5, torch.int32), indices)


def test_nothing_kept_and_nothing_there():
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for rows, inner in ((5, 8), (0, 8), (5, 0)):
        x = torch.ones(rows, inner, device=DEVICE)
        assert tuple(kernels.packing_fwd(x, none).shape) == (0, inner)
        assert torch.equal(kernels.packing_bwd(x[:0], none, rows), torch.zeros_like(x))


def test_one_column_of_a_matrix():
    wide = random_bits(60, 40, torch.int16)  # its stride within a row is not 1, which is allowed
    assert_right(wide.t()[:1].t()[:, :1], wide[:20, 5:6], chosen(60, 20))


@st.composite
def fuzzed_batches(draw):
    kept = draw(st.lists(st.booleans(), min_size=1, max_size=300))
    indices = torch.tensor(kept).nonzero().flatten().to(DEVICE)
    return len(kept), draw(st.integers(1, 70)), draw(st.sampled_from(DTYPES)), indices


def check(rows, inner, dtype, indices) -> None:
    assert_right(random_bits(rows, inner, dtype), random_bits(len(indices), inner, dtype), indices)


test_fuzz, test_fuzz_long = fuzz_tests(check, fuzzed_batches(), 50, 2000)


def finished(y: torch.Tensor) -> torch.Tensor:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return y


def is_spoiled(row: torch.Tensor) -> bool:
    """Whether a row shows at once that it is no data."""
    if row.dtype == torch.bool:
        return not row.any().item()
    if row.dtype.is_floating_point:
        return row.isnan().all().item()
    return (row == torch.iinfo(row.dtype).min).all().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("bad", [-1, 50, 2**31, -(2**63), 2**62])
def test_pack_of_an_index_out_of_range(dtype, bad, bad_ids):
    """Nothing is read for it; its row is no data; the next call names it, and the one after is as ever."""
    memory = random_bits(90, 24, dtype)
    x, indices = memory[20:70], chosen(50, 31)
    expected = kernels.packing_fwd(x, indices)
    assert not finished(bad_ids).any()
    wrong = indices.clone()
    wrong[7] = bad
    y = finished(kernels.packing_fwd(x, wrong))
    others = torch.arange(31, device=DEVICE) != 7
    assert torch.equal(bits(y[others]), bits(expected[others]))
    assert is_spoiled(y[7])
    with pytest.raises(IndexError, match=f"indices: position {bad} of an earlier call is not in the padded"):
        kernels.packing_fwd(x, indices)
    assert torch.equal(bits(kernels.packing_fwd(x, indices)), bits(expected))


@pytest.mark.sweep
@pytest.mark.parametrize("inner", [3, 700])
@pytest.mark.parametrize(("at", "bad"), [(0, -1), (0, -(2**63)), (-1, 200), (-1, 2**40)])
def test_unpack_of_an_index_out_of_range(inner, at, bad, bad_ids):
    """Its row is left out, and no other is touched."""
    packed, indices = random_bits(9, inner, torch.int16), chosen(198, 9) + 1
    wrong = indices.clone()
    wrong[at] = bad
    expected = kernels.packing_bwd(packed, indices, 200)
    expected[indices[at]] = 0
    assert not finished(bad_ids).any()
    assert torch.equal(finished(kernels.packing_bwd(packed, wrong, 200)), expected)
    with pytest.raises(IndexError, match=f"indices: position {bad} of an earlier call"):
        kernels.packing_bwd(packed, indices, 200)
    kernels.packing_bwd(packed, indices, 200)


def test_more_indices_than_rows(bad_ids):
    """Those of tiles without a row of the output are looked at too."""
    x = random_bits(300, 2, torch.int32)
    y = finished(kernels.packing_bwd(x, torch.arange(300, device=DEVICE).clamp_max(297), 298))
    assert not bad_ids.any()
    assert torch.equal(y, x[:298])
    indices = torch.arange(200, device=DEVICE).clamp_max(2)
    indices[150] = 3
    finished(kernels.packing_bwd(x[:200], indices, 3))
    with pytest.raises(IndexError, match="indices: position 3 of"):
        kernels.bad_ids(DEVICE).check()


def test_indices_of_no_rows(bad_ids):
    x, indices = random_bits(2, 8, torch.int32), torch.tensor([0, 1], device=DEVICE)
    for call in (lambda: kernels.packing_fwd(x[:0], indices), lambda: kernels.packing_bwd(x, indices, 0)):
        with pytest.raises(IndexError, match="indices: positions of a padded batch without rows"):
            call()
