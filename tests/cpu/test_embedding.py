"""The C++ embedding: every dtype, instruction set, odd size and stride, against the reference in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.backends import aten, cpu, reference
from fastbert.ops.dropout import keep_mask_2d
from tests.support.cpu_checks import assert_same_on_any_threads
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, in_float64, randn, strided_rows
from tests.support.launchers import embedding_bwd, embedding_fwd

DTYPES = (torch.float32, *HALF)
SEED = torch.tensor([-0x123456789ABCDEF])
OFFSET = 2**32 - 7
WORDS, POSITIONS, TYPES, PAD = 23, 9, 3, 4
NAMES = ("dword", "dposition", "dsegment", "dinputs_embeds", "dln_weight", "dln_bias")


def randint(high, count, seed=0):
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))


class Batch:
    """Inputs of one call. Tables and embeddings have NaNs around their rows, and in rows that no id names."""

    def __init__(
        self, tokens, hidden, dtype, embeds=False, position=True, segment=True, p=0.0, param_dtype=None
    ):
        self.tokens, self.hidden, self.dtype, self.p = tokens, hidden, dtype, p
        self.seed = SEED if p else None
        self.memories = []
        self.word = self.table(WORDS, 5, 1)
        self.embeds = self.table(tokens, 3, 2) if embeds else None
        self.position = self.table(POSITIONS, 1, 3) if position else None
        self.segment = self.table(TYPES, 7, 4) if segment else None
        self.ids, self.position_ids, self.types = (
            randint(n, tokens, seed) for n, seed in ((WORDS, 5), (POSITIONS, 6), (TYPES, 7))
        )
        tables = (self.word, self.ids), (self.position, self.position_ids), (self.segment, self.types)
        for table, ids in tables:
            if table is not None:
                named = torch.zeros(table.shape[0], dtype=torch.bool).index_fill(0, ids, True)
                table[~named] = float("nan")
        self.weight = 1 + 0.5 * randn(hidden, dtype=param_dtype or dtype, seed=8)
        self.bias = randn(hidden, dtype=param_dtype or dtype, seed=9)
        self.dy = randn(tokens, hidden, dtype=dtype, seed=10)
        self.before = [m.clone() for m in self.memories]

    def table(self, rows, gap, seed):
        view, memory = strided_rows(rows, self.hidden, self.dtype, gap, seed)
        self.memories.append(memory)
        return view

    def args(self):
        embeds = self.embeds is not None
        return (
            None if embeds else self.ids,
            self.embeds,
            None if embeds else self.word,
            None if self.position is None else self.position_ids,
            self.position,
            None if self.segment is None else self.types,
            self.segment,
        )

    def forward(self, save=True, backend=cpu):
        inputs = (*self.args(), self.weight, self.bias, 1e-5, self.p, self.seed, OFFSET)
        return embedding_fwd(backend, *(in_float64(*inputs) if backend is reference else inputs), save)

    def backward(self, z, mean, rstd, padding_idx=PAD, backend=cpu, dy=None, sizes=None, need_dln=True):
        embeds = self.embeds is not None
        sizes = sizes or (
            0 if embeds else WORDS,
            0 if self.position is None else POSITIONS,
            0 if self.segment is None else TYPES,
        )
        ids = (
            t if n else None for t, n in zip((self.ids, self.position_ids, self.types), sizes, strict=True)
        )
        dy = self.dy if dy is None else dy
        saved = (dy, z, self.weight, mean, rstd, *ids, *sizes, padding_idx, self.p, self.seed, OFFSET)
        saved = in_float64(*saved) if backend is reference else saved
        return dict(zip(NAMES, embedding_bwd(backend, *saved, embeds, need_dln), strict=True))


def both_ways(tokens, hidden, dtype, options):
    """Forward and backward of the backend, each output against float64."""
    batch = Batch(tokens, hidden, dtype, **options)
    y, z, mean, rstd = batch.forward()
    truth = batch.forward(backend=reference)
    assert (y.dtype, z.dtype, mean.dtype, rstd.dtype) == (dtype, dtype, torch.float32, torch.float32)
    # if a row is nearly constant (such as two elements), rstd magnifies the rounding of z
    scale = truth[3].max().item() ** 2 * truth[1].abs().max().item() + 1 if tokens else 1.0
    assert_rounds_to(y, truth[0], 2 * scale, "y")
    assert_rounds_to(z, truth[1], 1.0, "z")
    assert_rounds_to(mean, truth[2], 1.0, "mean")
    assert_rounds_to(rstd, truth[3], scale, "rstd")
    unsaved = batch.forward(save=False)
    assert_same_bits(unsaved[0], y, "y without save")
    assert [t.shape for t in unsaved[1:]] == [(0,)] * 3

    grads, truth = (batch.backward(z, mean, rstd, backend=b) for b in (cpu, reference))
    scale = rstd.max().item() ** 2 * (1 + z.double().abs().max().item()) * 8 if tokens else 1.0
    for name, grad in grads.items():
        sums = 1.0 if name == "dinputs_embeds" else 2 * max(tokens, 1) ** 0.5
        assert grad.dtype == (torch.float32 if "ln" in name else dtype), name
        assert_rounds_to(grad, truth[name], scale * sums, name)
    for memory, copy in zip(batch.memories, batch.before, strict=True):
        assert_same_bits(memory, copy, "an input was written")


OPTIONS = (
    {},
    {"p": 0.25, "param_dtype": torch.float32},
    {"embeds": True, "p": 0.5},
    {"position": False},
    {"segment": False, "param_dtype": torch.float32},
    {"embeds": True, "position": False, "segment": False},
)


# --- results ----------------------------------------------------------------------------------------------


SIZES = {  # (tokens, hidden)
    "every hidden size": [(5, n) for n in range(1, 131) for _ in range(2)],
    "large hidden sizes": [(6, n) for n in (384, 768, 1000, 4097) for _ in OPTIONS],
    "tokens": [(n, 33) for n in (0, 1, 2, 3, 4, 31, 32, 33, 65, 130, 1031) for _ in OPTIONS],
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_size(isa, dtype, sizes, guarded):
    for i, size in enumerate(SIZES[sizes]):
        both_ways(*size, dtype, OPTIONS[i % 6])


@pytest.mark.parametrize("count", (1, 2, 31, 32, 33, 63, 64, 65, 4000))
@pytest.mark.parametrize("hidden", (5, 31, 64, 100))
def test_sums_of_any_number_of_tokens(isa, count, hidden):
    """dz is an output too, so that its sums can be checked without its rounding."""
    batch = Batch(count, hidden, torch.float32, embeds=True)
    batch.types = torch.zeros(count, dtype=torch.int64)
    z, (mean, rstd) = randn(count, hidden), randn(2, count, seed=1).abs() + 0.5
    grads = batch.backward(z, mean, rstd, sizes=(0, 0, 2))
    dz = grads["dinputs_embeds"].double()
    truth = dz.sum(0)
    # float sums of 32 terms are off by 31 roundings at most; the double sums of those are exact enough
    assert ((grads["dsegment"][0] - truth).abs() <= 32 * 2**-24 * dz.abs().sum(0)).all()
    assert not grads["dsegment"][1].any()


def test_sums_of_many_tokens_are_closer_than_torchs(isa):
    batch = Batch(8000, 64, torch.float32, embeds=True)
    batch.types = batch.types.clamp_max(1)
    z, (mean, rstd) = randn(8000, 64), randn(2, 8000, seed=1).abs() + 0.5
    errors = []
    for backend in (cpu, aten):
        grads = batch.backward(z, mean, rstd, backend=backend)
        dz = grads["dinputs_embeds"].double()
        truth = dz.new_zeros(TYPES, 64).index_add_(0, batch.types, dz)
        errors.append((grads["dsegment"] - truth).abs().mean())
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_table_of_more_than_32_mib(isa, dtype, guarded):
    """Memory of that size is requested in batches; every row is written, most of them with zeros."""
    rows, hidden, tokens = 2**25 // 768 // dtype.itemsize + 1000, 768, 40
    ids = torch.cat([randint(rows, tokens - 2), torch.tensor([0, rows - 1])])
    z, dy = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype, seed=1)
    stats = torch.zeros(tokens), torch.ones(tokens)
    args = dy, z, torch.ones(hidden), *stats, ids, None, None, rows, 0, 0, -1, 0.0, None, 0, True, False
    dword, _, _, dz, *_ = embedding_bwd(cpu, *args)
    assert ids.unique().numel() == tokens
    assert_same_bits(dword[ids], dz)
    dword[ids] = 0
    assert not dword.any()


# --- ids, layouts, poison ---------------------------------------------------------------------------------


def test_ids_that_do_not_lie_side_by_side(isa):
    """The op passes broadcast ids on as they are: all share one element."""
    batch = Batch(12, 40, torch.float32)
    expanded = torch.tensor([2]).expand(12)
    gaps = torch.stack([batch.ids, batch.ids + 1], 1)[:, 0]
    batch.word.nan_to_num_(), batch.position.nan_to_num_()
    results = []
    for ids, positions in ((gaps, expanded), (gaps.clone(), expanded.clone())):
        batch.ids, batch.position_ids = ids, positions
        y, z, mean, rstd = batch.forward()
        results.append((y, z, mean, rstd, *batch.backward(z, mean, rstd).values()))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_expanded_and_overlapping_tables(isa):
    batch = Batch(12, 10, torch.float32)
    batch.word = randn(100).as_strided((WORDS, 10), (3, 1))
    batch.position = randn(1, 10, seed=1).expand(POSITIONS, 10)
    y = batch.forward()[0]
    batch.word, batch.position = batch.word.clone(), batch.position.clone()
    assert_same_bits(y, batch.forward()[0])
    dy = randn(1, 10, seed=2).expand(12, 10)  # all rows share one memory
    saved = batch.forward()[1:]
    strided, plain = (batch.backward(*saved, dy=t) for t in (dy, dy.clone()))
    for name, grad in strided.items():
        assert_same_bits(grad, plain[name], name)


@pytest.mark.parametrize("bad", (-1, 2**40, None))
@pytest.mark.parametrize("which", ("input_ids", "position_ids", "token_type_ids"))
def test_ids_out_of_range_are_refused_before_memory_is_read(which, bad):
    """The op checks them as well, but not under torch.compile."""
    batch = Batch(7, 8, torch.float32)
    saved = batch.forward()[1:]
    ids = {"input_ids": batch.ids, "position_ids": batch.position_ids, "token_type_ids": batch.types}[which]
    size = {"input_ids": WORDS, "position_ids": POSITIONS, "token_type_ids": TYPES}[which]
    ids[6] = bad = size if bad is None else bad
    message = f"{which}: id {bad} is out of range for a table of {size}"
    with pytest.raises(ValueError, match=message):
        batch.forward()
    with pytest.raises(ValueError, match=message):
        batch.backward(*saved)


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_row_reaches_its_own_tokens_alone(isa, bad, dtype):
    batch = Batch(40, 50, dtype)
    clean = batch.forward()
    row = int(batch.ids[3])
    batch.word[row, 17] = bad
    hit = batch.ids == row
    y, z, mean, rstd = batch.forward()
    assert y[hit].isnan().all()
    for a, b in zip((y, z, mean, rstd), clean, strict=True):
        assert_same_bits(a[~hit], b[~hit])
    grads, before = batch.backward(z, mean, rstd), batch.backward(*clean[1:])
    named = torch.arange(WORDS) == row
    assert grads["dword"][named].isnan().all()
    assert_same_bits(grads["dword"][~named], before["dword"][~named])
    touched = torch.zeros(POSITIONS, dtype=torch.bool).index_fill(0, batch.position_ids[hit], True)
    assert grads["dposition"][touched].isnan().all()
    assert_same_bits(grads["dposition"][~touched], before["dposition"][~touched])


def test_the_padding_row_is_zero_whatever_its_tokens_hold(isa):
    batch = Batch(40, 50, torch.float32)
    saved = batch.forward()[1:]
    batch.ids[:35] = PAD  # more than are summed in float
    batch.dy[7] = float("nan")
    full, skipped = (batch.backward(*saved, padding_idx=row)["dword"] for row in (-1, PAD))
    assert full[PAD].isnan().all()
    assert not skipped[PAD].any()
    others = torch.arange(WORDS) != PAD
    assert_same_bits(full[others], skipped[others])


def test_only_what_is_asked_for(isa, guarded):
    batch = Batch(9, 20, torch.float32)
    saved = batch.forward()[1:]
    full = batch.backward(*saved)
    for sizes in itertools.product(*((n, 0) for n in (WORDS, POSITIONS, TYPES))):
        for need_dln in (False, True):
            grads = batch.backward(*saved, sizes=sizes, need_dln=need_dln)
            for name, size in zip(NAMES, (*sizes, 0, need_dln, need_dln), strict=True):
                if size:
                    assert_same_bits(grads[name], full[name], name)
                else:
                    assert grads[name].shape == (0,), name


# --- dropout ----------------------------------------------------------------------------------------------


def test_dropped_elements_are_zero_whatever_they_were(isa):
    embeds, weight = torch.full((16, 64), float("nan")), torch.ones(64)
    keep = keep_mask_2d(SEED, 1, 16, 64, 0.5)
    args = None, embeds, None, *(None,) * 4, weight, weight, 1e-5, 0.5, SEED, 1, False
    y = embedding_fwd(cpu, *args)[0]
    assert (y[~keep] == 0).all()
    assert y[keep].isnan().all()


# --- determinism, threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, dtype):
    batch = Batch(1111, 200, dtype, p=0.1)

    def call():
        saved = batch.forward()
        return (*saved, *batch.backward(*saved[1:]).values())

    assert_same_on_any_threads(call, repeats=30)


@pytest.mark.parametrize("count", (1, 2, 3))
def test_tables_of_many_rows_are_shared_out(isa, count, threads):
    """Threads share whole rows if there are enough, else columns: the same sums."""
    torch.set_num_threads(count)
    tokens, hidden = 900, 260
    z, dy = randn(tokens, hidden), randn(tokens, hidden, seed=1)
    stats = torch.zeros(tokens), torch.ones(tokens)
    wide, narrow = randint(5000, tokens, 2), randint(3, tokens, 3)
    args = dy, z, torch.ones(hidden), *stats, wide, None, narrow, 5000, 0, 3, -1, 0.0, None, 0, True, False
    dword, _, dsegment, dz, *_ = embedding_bwd(cpu, *args)
    for grad, ids in ((dword, wide), (dsegment, narrow)):
        truth = dz.new_zeros(grad.shape, dtype=torch.float64).index_add_(0, ids, dz.double())
        assert_rounds_to(grad, truth, 16.0)
