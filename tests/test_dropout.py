"""The dropout bits are Philox4x32-10's, and depend on nothing but their coordinates."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.dropout import keep_mask_2d, philox_keep, philox_words, threshold

# Known answers of the algorithm's authors (Random123, kat_vectors, philox4x32 10): counter, key, words.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def as_seed(key):
    """The int64 whose low and high 32 bits are the two words of the key."""
    value = key[0] | key[1] << 32
    return torch.tensor([value - 2**64 if value >= 2**63 else value])


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    group, row, plane, offset = counter
    cols = (group << 2) + torch.arange(4)
    got = philox_words(as_seed(key), offset, torch.tensor(plane), torch.tensor(row), cols)
    assert got.tolist() == list(words)


def test_each_coordinate_and_each_bit_of_the_seed_matters():
    rows, cols = torch.arange(8).unsqueeze(1), torch.arange(8).unsqueeze(0)
    base = philox_words(torch.tensor([5]), 2, torch.tensor(1), rows, cols)
    assert base.unique().numel() == 64
    for other in (
        philox_words(torch.tensor([5 + 2**40]), 2, torch.tensor(1), rows, cols),
        philox_words(torch.tensor([6]), 2, torch.tensor(1), rows, cols),
        philox_words(torch.tensor([5]), 3, torch.tensor(1), rows, cols),
        philox_words(torch.tensor([5]), 2, torch.tensor(2), rows, cols),
        philox_words(torch.tensor([5]), 2, torch.tensor(1), rows + 8, cols),
        philox_words(torch.tensor([5]), 2, torch.tensor(1), rows, cols + 8),
    ):
        assert not (base == other).any()


def test_a_tile_of_the_mask_is_the_mask_of_the_tile():
    seed = torch.tensor([99])
    whole = keep_mask_2d(seed, 7, 20, 37, 0.4)
    tile = philox_keep(seed, 7, 0, torch.arange(5, 12).unsqueeze(1), torch.arange(3, 30).unsqueeze(0), 0.4)
    assert torch.equal(whole[5:12, 3:30], tile)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_p(p):
    mask = keep_mask_2d(torch.tensor([123]), 0, 400, 1000, p)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs((~mask).double().mean().item() - p) < 4 * deviation


def test_thresholds():
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**31
    assert threshold(0.25) == 2**30
    assert threshold(1 - 2**-40) == 2**32 - 1  # never 2**32, which 32 bits cannot hold
    assert keep_mask_2d(torch.tensor([1]), 0, 4, 4, 0.0).all()


def test_the_seed_counts_by_value_not_by_address():
    a, b = torch.tensor([17]), torch.tensor([3, 17])[1:]
    assert a.data_ptr() != b.data_ptr()
    assert torch.equal(keep_mask_2d(a, 1, 9, 9, 0.3), keep_mask_2d(b, 1, 9, 9, 0.3))
