"""The Triton embedding's backward: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.testing.op_cases.embedding import EmbeddingCase
from tests.support.launchers import embedding_bwd
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    assert_bit_equal,
    fuzz,
    kernels_of,
    needs_lazy_memory,
    normal,
)
from tests.support.triton_sanitizer import lazy_rows

kernels = kernels_of("embedding")
pytestmark = [pytest.mark.usefixtures("checked_memory"), pytest.mark.sweep]
ONE_BLOCK = ("BWD_ONE_BLOCK",)
WORDS, POSITIONS, SEGMENTS = 13, 7, 3  # heights of the tables, so that none can be swapped unseen


@pytest.fixture
def short_chunks(monkeypatch):
    """Make chunks so short that small tables have runs with whole chunks and with parts of chunks."""
    monkeypatch.setattr(kernels, "CHUNK", 4)


def arguments(tokens, hidden, dtype=torch.float32, *, p=0.25, seed=7):
    """Arguments of `embedding_bwd` that ask for everything."""
    g = torch.Generator().manual_seed(seed)
    randn = normal(g, dtype)

    def ids(high):
        return torch.randint(high, (tokens,), generator=g).to(DEVICE)

    z = randn(tokens, hidden, scale=2.0, shift=0.5)
    mean = z.float().mean(1)
    var = (z.float() - mean[:, None]).square().mean(1)
    return {
        "dy": randn(tokens, hidden),
        "z": z,
        "ln_weight": randn(hidden, scale=0.3, shift=1.0),
        "mean": mean,
        "rstd": (var + 1e-5).rsqrt(),
        "input_ids": ids(WORDS),
        "position_ids": ids(POSITIONS),
        "token_type_ids": ids(SEGMENTS),
        "word_rows": WORDS,
        "position_rows": POSITIONS,
        "segment_rows": SEGMENTS,
        "padding_idx": 3,
        "dropout_p": p,
        "seed": torch.tensor([99], device=DEVICE) if p else None,
        "offset": 11,
        "need_dinputs_embeds": True,
        "need_dln": True,
    }


def run(args):
    return embedding_bwd(kernels, *args.values())


def assert_right(args):
    """Shapes, dtypes and values are the reference's, except for rounding in float32."""
    actual, expected = run(args), embedding_bwd(reference, *args.values())
    coarse = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[args["dy"].dtype]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.dtype, a.shape) == (e.dtype, e.shape), i
        torch.testing.assert_close(a, e, rtol=1e-4 + coarse, atol=2e-5 + coarse / 16)


def failures(case: EmbeddingCase, dtype: torch.dtype, seed: int = 0) -> list[str]:
    rows = testing.run_case(case, "triton", dtype, DEVICE, seed=seed)
    present = 2 + (case.position + case.segment + 1)
    assert len(rows) == present + 1
    return [f"{r.quantity}: {r.reason}" for r in rows if not r.passed]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_runs_of_many_chunks_by_the_error_rule(dtype):
    """600 tokens with two ids, 300 per position, in chunks of the normal length."""
    assert kernels.CHUNK == 128
    assert failures(EmbeddingCase(600, 2, 20), dtype) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_wide_tokens_by_the_error_rule(dtype, hidden, short_chunks):
    assert failures(EmbeddingCase(41, 5, hidden, padding_idx=1, dropout_p=0.1), dtype) == []


def sums_by_id(ids, rows, chunk, monkeypatch):
    """(the gradient of a table for the rows `dz` = [1, 2, 3, ...] x [1, -2], its exact value)."""
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    ids = torch.tensor(ids, device=DEVICE)
    numbers = torch.arange(1.0, len(ids) + 1, device=DEVICE)
    dz = torch.stack([numbers, -2 * numbers], 1)
    expected = torch.zeros(rows, 2, device=DEVICE).index_add_(0, ids, dz)
    return kernels._table_bwd(dz, ids, rows, -1, torch.float32), expected


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_runs_at_every_place_of_a_chunk(chunk, monkeypatch):
    """Runs of all lengths up to two chunks and one token, from every place in a chunk, in one table."""
    lengths = []
    for place in range(chunk):
        for length in range(2 * chunk + 2):
            lengths += [(place - sum(lengths)) % chunk, length]  # the first run moves the second to its place
    ids = [row for row, length in enumerate(lengths) for _ in range(length)]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    actual, expected = sums_by_id([ids[i] for i in order], len(lengths), chunk, monkeypatch)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("rows", "row"), [(1, 0), (6, 4), (6, 5)])
@pytest.mark.parametrize("tokens", [63, 64, 65])
def test_a_run_that_is_everything(rows, row, tokens, monkeypatch):
    assert torch.equal(*sums_by_id([row] * tokens, rows, 16, monkeypatch))


@pytest.mark.parametrize("chunk", [4, 12])
def test_more_than_a_tile_holds(chunk, monkeypatch):
    """More chunks per run, tokens per chunk, tokens beside chunks, and columns than a tile holds."""
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    args = arguments(150, 300, p=0.0)
    args["input_ids"][:115] = 12
    assert_right(args)


def test_the_padding_row_gets_nothing():
    args = arguments(60, 20)
    assert (args["input_ids"] == 3).any()
    dword = run(args)[0]
    assert not dword[3].any()
    without = run(args | {"padding_idx": -1})
    assert without[0][3].any()
    kept = [v for v in range(WORDS) if v != 3]
    assert torch.equal(dword[kept], without[0][kept])
    assert_bit_equal(run(args)[1:], without[1:])  # no other table has one


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "token_type_ids"])
def test_ids_that_a_table_does_not_have(name, short_chunks):
    """Nothing is written for them, and no other row gets their gradient."""
    args = arguments(40, 20)
    tables = dict(
        zip(("input_ids", "position_ids", "token_type_ids"), (WORDS, POSITIONS, SEGMENTS), strict=True)
    )
    bad = torch.tensor([-1, -(2**63), tables[name], 2**40, 2**62], device=DEVICE).repeat(3)
    wrong = args | {name: args[name].clone()}
    wrong[name][5:20] = bad
    number = list(tables).index(name)
    actual = run(wrong)
    # as if those tokens had no gradient
    spared = args | {name: args[name].clone(), "dy": args["dy"].clone()}
    spared["dy"][5:20] = 0
    torch.testing.assert_close(actual[number], run(spared)[number], rtol=1e-5, atol=1e-5)
    others = [i for i in range(6) if i != number]
    assert_bit_equal([actual[i] for i in others], [run(args)[i] for i in others])


def test_tokens_in_any_order_of_ids_and_nan_in_its_rows(short_chunks):
    args = arguments(50, 24, p=0.0)
    clean = run(args)
    args["dy"][17, 2] = float("nan")
    dirty = run(args)
    for which, name in enumerate(("input_ids", "position_ids", "token_type_ids")):
        hit = torch.zeros(clean[which].shape[0], dtype=torch.bool, device=DEVICE)
        hit[args[name][17]] = True
        if name == "input_ids":
            hit[3] = False
        assert torch.equal(clean[which][~hit], dirty[which][~hit])
        assert dirty[which][hit].isnan().all()


def test_sums_in_float32(short_chunks):
    """2,000 gradients of one token: a sum in bfloat16 would stop growing at 256."""
    dz = torch.full((2000, 16), 1.0, device=DEVICE)
    table = kernels._table_bwd(dz, torch.ones(2000, dtype=torch.int64, device=DEVICE), 2, -1, torch.bfloat16)
    assert torch.equal(table, torch.tensor([[0.0], [2000.0]], device=DEVICE).bfloat16().expand(2, 16))


def test_dz_is_not_rounded_before_it_is_summed():
    args = arguments(900, 16, torch.bfloat16, p=0.0) | {"padding_idx": -1}
    args["input_ids"][:] = 4
    wide = args | {name: args[name].double() for name in ("dy", "z", "ln_weight", "mean", "rstd")}
    truth = embedding_bwd(reference, *wide.values())
    for actual, expected in zip(run(args)[:3], truth[:3], strict=True):
        assert torch.equal(actual, expected.to(torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 95, 97, 130])
def test_token_counts(tokens):
    """Around the tile's height of 16, and around six tiles, for which there are six programs."""
    assert_right(arguments(tokens, 16, DTYPES[tokens % 3]))


@pytest.mark.parametrize("width", [1, 3, 16, 17, 31, 64, 65, 129, kernels.BWD_ONE_BLOCK + 4, 257, 768])
def test_widths(width):
    assert_right(arguments(5, width, DTYPES[width % 3]))


@needs_lazy_memory
def test_tokens_beyond_2_to_31_elements(monkeypatch):
    """The last of 2,100 tokens of 2**20 numbers; only the first columns are computed."""
    torch.use_deterministic_algorithms(False)
    dz = lazy_rows(2100, 2**20, 2**20, torch.float32)
    dz[2098:, :8] = torch.arange(16.0).reshape(2, 8)
    launch, ids = kernels.launch, torch.zeros(2100, dtype=torch.int64)
    ids[2098:] = torch.tensor([1, 2])
    monkeypatch.setattr(kernels, "table_config", lambda hidden: (256, 8))
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, grid, *args, **config: launch(kernel, (grid[0], 1), *args, **config)
    )
    table = kernels._table_bwd(dz, ids, 3, -1, torch.float32)
    assert torch.equal(table[1:, :8], torch.arange(16.0).reshape(2, 8))
    assert not table[0, :8].any()


def wanted(word=True, position=True, segment=True, embeds=True, dln=True):
    """The arguments for these needs; ids are None where their table's gradient is not needed."""
    heights = (("word", word, WORDS), ("position", position, POSITIONS), ("segment", segment, SEGMENTS))
    ids = {"word": "input_ids", "position": "position_ids", "segment": "token_type_ids"}
    needs = {f"{name}_rows": rows if want else 0 for name, want, rows in heights}
    needs |= {ids[name]: None for name, want, _ in heights if not want}
    return needs | {"need_dinputs_embeds": embeds, "need_dln": dln}


@pytest.mark.parametrize("name", ["word", "position", "segment", "embeds", "dln"])
@pytest.mark.parametrize("alone", [True, False])
def test_only_what_is_needed(name, alone, hidden):
    needs = dict.fromkeys(("word", "position", "segment", "embeds", "dln"), not alone) | {name: alone}
    dtype = torch.bfloat16 if alone else torch.float32
    assert_right(arguments(19, hidden, dtype) | wanted(**needs))


@fuzz(10)
@given(
    st.integers(1, 90),
    st.integers(8, 90),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from([1, 3, 8, 128]),
    st.integers(0, 2**20),
)
def test_fuzz(tokens, width, dtype, p, needs, chunk, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", chunk)
        assert_right(arguments(tokens, width, dtype, p=p, seed=seed) | wanted(*needs))
