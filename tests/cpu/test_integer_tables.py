"""The C++ embedding on tables of 8-bit and 4-bit integers: every size, stride and instruction set."""

from __future__ import annotations

import pytest
import torch

from fastbert.backends import cpu, reference
from fastbert.ops import integer_table
from fastbert.runtime import loader
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, in_float64, randn
from tests.support.launchers import embedding_fwd

DTYPES = (torch.float32, *HALF)
ROWS = 19


def table(hidden, bits, gap=3):
    """(integers between other bytes, scales between NaNs); no row has a neighbour's scale."""
    integers, scale = integer_table.rounded(randn(ROWS, hidden, seed=hidden), bits)
    words = integers if bits == 8 else integer_table.packed(integers)
    memory = torch.full((ROWS * (words.shape[1] + gap) + 64,), 91, dtype=words.dtype)
    view = memory[32 : 32 + ROWS * (words.shape[1] + gap)].view(ROWS, -1)[:, : words.shape[1]]
    view.copy_(words)
    scales = torch.full((ROWS + 8,), float("nan"))[4:-4]
    scales.copy_(scale * torch.linspace(0.5, 2.0, ROWS))
    return view, scales


def args_of(tokens, hidden, bits, dtype, position=True, segment=True):
    words, scale = table(hidden, bits)
    ids, types = (torch.randint(n, (tokens,), generator=torch.Generator().manual_seed(n)) for n in (ROWS, 2))
    places = torch.arange(tokens) if position else None
    rows = randn(tokens, hidden, dtype=dtype, seed=2) if position else None
    kinds = (types, randn(2, hidden, dtype=dtype, seed=3)) if segment else (None, None)
    norm = 1 + 0.5 * randn(hidden, dtype=dtype, seed=4), randn(hidden, dtype=dtype, seed=5)
    return [ids, None, words, places, rows, *kinds, *norm, 1e-5, 0.0, None, 0, scale]


def check(tokens, hidden, bits, dtype, **tables):
    args = args_of(tokens, hidden, bits, dtype, **tables)
    y, z, mean, rstd = embedding_fwd(cpu, *args, True)
    truth = embedding_fwd(reference, *in_float64(*args), True)
    assert (y.dtype, z.dtype) == (dtype, dtype)
    # Two elements may be nearly constant: rstd magnifies the rounding of z
    scale = truth[3].max().item() ** 2 * truth[1].abs().max().item() + 1 if tokens else 1.0
    for name, found, right, noise in zip(
        ("y", "z", "mean", "rstd"), (y, z, mean, rstd), truth, (2 * scale, 1.0, 1.0, scale), strict=True
    ):
        assert_rounds_to(found, right, noise, name)
    assert_same_bits(embedding_fwd(cpu, *args, False)[0], y, "y without save")


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_hidden_size(isa, dtype, bits, guarded):
    for hidden in (*range(1, 70), 384, 1000):
        check(5, hidden, bits, dtype, position=hidden % 3 > 0, segment=hidden % 2 > 0)


@pytest.mark.parametrize("bits", (8, 4))
def test_tokens(isa, bits, guarded):
    for tokens in (0, 1, 33, 130):
        check(tokens, 33, bits, torch.float32)


@pytest.mark.parametrize("bits", (8, 4))
def test_the_row_is_the_integers_times_their_scale(isa, bits):
    """Without other tables z is exact, with the integers of both ends in each column."""
    hidden, most = 37, integer_table.MOST[bits]
    args = args_of(ROWS, hidden, bits, torch.float32, position=False, segment=False)
    integers = torch.arange(ROWS * hidden).reshape(ROWS, hidden) % (2 * most + 1) - most
    integers = integers.to(torch.int8)
    args[0], args[2] = torch.arange(ROWS), integers if bits == 8 else integer_table.packed(integers)
    z = embedding_fwd(cpu, *args, True)[1]
    assert_same_bits(z, integers.float() * args[-1][:, None])


@pytest.mark.parametrize("bits", (8, 4))
def test_ids_out_of_range_are_refused(bits):
    args = args_of(4, 9, bits, torch.float32)
    args[0][2] = ROWS
    with pytest.raises(ValueError, match=f"input_ids: id {ROWS} is out of range for a table of {ROWS}"):
        embedding_fwd(cpu, *args, True)


def test_what_the_extension_refuses():
    y, ids, word, scale = torch.empty(1, 4), torch.tensor([0]), torch.zeros(1, 4), torch.ones(1)
    a = [t.data_ptr() for t in (word, ids, scale, y)]

    def call(bits, address):
        norm = (a[0], 0, a[0], 0, 1e-5, 0, 0, 0, 1.0)
        given = (a[0], 4, 1, a[1]), (0, 0, 0, 0), (0, 0, 0, 0)
        loader.extension.cpu_embedding_fwd(0, 1, 4, *given, *norm, a[3], 0, 0, 0, bits, address, 1)

    call(0, 0)
    call(4, a[2])
    for bits in (-1, 1, 16):
        with pytest.raises(ValueError, match="word_bits: expected 0, 4 or 8"):
            call(bits, a[2])
    with pytest.raises(ValueError, match="word_scale: expected an address"):
        call(8, 0)
