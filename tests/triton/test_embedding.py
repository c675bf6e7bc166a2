"""The Triton embedding: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.ops.embedding import embedding
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.embedding import EmbeddingCase
from tests.support.graphed_models import Graphed, lengths_batch, shared
from tests.support.launchers import embedding_fwd
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    assert_bit_equal,
    fuzz_tests,
    in_float64,
    kernels_of,
    lucky_yardstick,
    normal,
    padded,
)

kernels = kernels_of("embedding")
pytestmark = pytest.mark.usefixtures("checked_memory")
ONE_BLOCK = ("ONE_BLOCK",)


def check(case: EmbeddingCase, dtype: torch.dtype, seed: int = 0) -> None:
    """The error rule, with more room: dropout scales the floor of float32 as it scales y."""
    (row,) = testing.run_case(case, "triton", dtype, DEVICE, backward=False, seed=seed)
    elements = case.tokens * case.hidden
    if row.passed or lucky_yardstick(row, case, dtype, seed, elements):
        return
    assert elements >= 1000, row.reason
    assert dtype == torch.float32, row.reason
    assert "mean error" not in row.reason, row.reason
    floor = case.floor(case.inputs(dtype, DEVICE, seed), "y") / (1 - case.dropout_p)
    assert row.max_error <= testing.chance_allowance(elements) * row.eager_max_error + floor, row.reason


def forward_args(tokens, hidden, dtype=torch.float32, *, p=0.25, eps=1e-12, save=True):
    """Arguments of `embedding_fwd`; tables of different heights, so that none can be swapped unseen."""
    g = torch.Generator().manual_seed(7)
    randn = normal(g, dtype)

    def ids(high):
        return torch.randint(high, (tokens,), generator=g).to(DEVICE)

    return {
        "input_ids": ids(13),
        "inputs_embeds": None,
        "word": randn(13, hidden),
        "position_ids": ids(7),
        "position": randn(7, hidden, scale=0.5),
        "token_type_ids": ids(3),
        "segment": randn(3, hidden, scale=2.0),
        "ln_weight": randn(hidden, scale=0.3, shift=1.0),
        "ln_bias": randn(hidden, scale=0.2),
        "eps": eps,
        "dropout_p": p,
        "seed": torch.tensor([99], device=DEVICE) if p else None,
        "offset": 11,
        "save": save,
    }


def run(args):
    return embedding_fwd(kernels, *args.values())


# --- the error rule -----------------------------------------------------------------------------------------


WIDTHS = [*range(1, 35), 63, 64, 65, 127, 128, 129, 384, kernels.ONE_BLOCK, kernels.ONE_BLOCK + 4, 1025, 768]


@pytest.mark.sweep
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width):
    """Around the tile heights too: 64 tokens of 16 columns, one of 1024."""
    check(EmbeddingCase({16: 65, 17: 64, 18: 129}.get(width, 3), 5, width, dropout_p=0.25), DTYPES[width % 3])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_outputs_are_correctly_rounded(dtype):
    args = forward_args(64, 768, dtype, p=0.0)
    expected = embedding_fwd(reference, *in_float64(args).values())
    actual = run(args)
    for which in (0, 1):
        assert (actual[which] == expected[which].to(dtype)).double().mean() >= 0.999


def test_variance_of_a_large_mean(hidden):
    # E[z²] - E[z]² in float32 would lose all digits here
    args = forward_args(5, hidden, p=0.0) | {"eps": 1e-5}
    args["segment"] += 5000
    actual, expected = run(args), embedding_fwd(reference, *in_float64(args).values())
    torch.testing.assert_close(actual[3].double(), expected[3], rtol=2e-4, atol=0)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=0, atol=5e-3)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_eps(eps, hidden):
    args = forward_args(2, hidden, p=0.0, eps=eps)
    for a, e in zip(run(args), embedding_fwd(reference, *args.values()), strict=True):
        torch.testing.assert_close(a, e)


def test_a_nan_stays_with_its_token():
    args = forward_args(70, 20, p=0.0)
    clean = run(args)
    args["word"][3, 5] = float("nan")
    dirty = run(args)
    hit = args["input_ids"] == 3
    assert hit.any()
    assert dirty[0][hit].isnan().all()
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[~hit], b[~hit])


# --- layouts ------------------------------------------------------------------------------------------------


def test_embeds_in_place_of_ids(hidden):
    args = forward_args(67, hidden)
    embeds = padded(args["word"][args["input_ids"]], 5)
    assert_bit_equal(run(args | {"input_ids": None, "word": None, "inputs_embeds": embeds}), run(args))


def test_ids_of_any_strides():
    """Ids with gaps between them, and one id for all tokens."""
    args = forward_args(6, 20, p=0.0)
    names = ("position_ids", "position", "token_type_ids", "segment")
    norm = args["ln_weight"], args["ln_bias"]
    one = args["token_type_ids"][:1]
    wide = torch.full((6, 3), 12, device=DEVICE)
    wide[:, 0] = args["input_ids"]
    with dispatch.use_backend("triton"):
        tables = {name: args[name] for name in names} | {"token_type_ids": one}
        y = embedding(wide[:, 0], args["word"], *norm, **tables)
        tables["token_type_ids"] = one.repeat(6)
        assert torch.equal(y, embedding(args["input_ids"], args["word"], *norm, **tables))


# --- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "without",
    [(), ("position",), ("segment",), ("position", "segment")],
    ids=lambda names: "+".join(names) or "all",
)
def test_what_forward_returns(without, save, hidden):
    args = forward_args(9, hidden, torch.bfloat16, save=save)
    ids = {"position": "position_ids", "segment": "token_type_ids"}
    args |= dict.fromkeys([*without, *(ids[name] for name in without)])
    actual, expected = run(args), embedding_fwd(reference, *args.values())
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("which", ["ln_weight", "ln_bias"])
def test_norm_vectors_in_float32_beside_half_tables(dtype, which):
    args = forward_args(4, 50, dtype)
    assert_bit_equal(run(args | {which: args[which].float()}), run(args))


# --- fuzz ---------------------------------------------------------------------------------------------------


@st.composite
def fuzzed_cases(draw):
    dtype = draw(st.sampled_from(DTYPES))
    narrowest = 1 if dtype == torch.float32 else 16  # narrower rows can have almost no variance
    case = EmbeddingCase(
        tokens=draw(st.integers(1, 80)),
        vocab=draw(st.integers(1, 40)),
        hidden=draw(st.integers(narrowest, 100)),
        position=draw(st.booleans()),
        segment=draw(st.booleans()),
        inputs_embeds=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )
    return case, dtype, draw(st.integers(0, 2**20))


test_fuzz, test_fuzz_long = fuzz_tests(check, fuzzed_cases(), 40, 2000)


# --- ids that a table does not have -------------------------------------------------------------------------

TABLES = {
    "input_ids": ("word", "token id"),
    "position_ids": ("position", "position"),
    "token_type_ids": ("segment", "token type"),
}
ROWS = {"word": 7, "position": 5, "segment": 3}


def between_nan(rows: int, hidden: int) -> torch.Tensor:
    """A table, with rows of NaN before and behind it in the same memory."""
    g = torch.Generator().manual_seed(rows)
    memory = torch.full((rows + 20, hidden), float("nan"))
    memory[10:-10] = torch.randn(rows, hidden, generator=g)
    return memory.to(DEVICE)[10:-10]


def embedded(hidden: int, ids: dict[str, torch.Tensor], save: bool = False) -> torch.Tensor:
    tables = {name: between_nan(rows, hidden) for name, rows in ROWS.items()}
    norm = torch.ones(hidden, device=DEVICE)
    pairs = [t for name in TABLES for t in (ids[name].to(DEVICE), tables[TABLES[name][0]])]
    word, rest = pairs[:2], pairs[2:]
    args = (word[0], None, word[1], *rest, norm, norm, 1e-5, 0.0, None, 0)
    y, z, mean, rstd = embedding_fwd(kernels, *args, save)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (y, z, mean, rstd) if save else y


def assert_spoiled(y: torch.Tensor, expected: torch.Tensor, token: int) -> None:
    """`y` is `expected`, but for one token, which is NaN."""
    others = torch.arange(len(y), device=DEVICE) != token
    assert torch.equal(y[others], expected[others])
    assert y[token].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, "rows", 2**62, -(2**63)])
@pytest.mark.parametrize("name", TABLES)
def test_an_id_that_its_table_does_not_have(name, bad, dtype, bad_ids):
    """Its token is NaN; the next call names it, and the one after that is as ever."""
    rows = ROWS[TABLES[name][0]]
    bad = rows if bad == "rows" else bad
    if dtype == torch.int32 and not -(2**31) <= bad < 2**31:
        pytest.skip("no int32")
    right = {n: torch.arange(9, dtype=dtype) % ROWS[table] for n, (table, _) in TABLES.items()}
    expected = embedded(24, right)
    assert not bad_ids.any()
    assert not expected.isnan().any()
    wrong = {n: ids.clone() for n, ids in right.items()}
    wrong[name][4] = bad
    assert_spoiled(embedded(24, wrong), expected, 4)
    with pytest.raises(IndexError, match=f"{name}: {TABLES[name][1]} {bad} of an earlier call"):
        embedded(24, right)
    assert torch.equal(embedded(24, right), expected)


def test_bad_ids_of_all_tables_and_wide_tokens(bad_ids, monkeypatch):
    """Each table is named in turn; columns in several blocks."""
    monkeypatch.setattr(kernels, "ONE_BLOCK", 16)
    monkeypatch.setattr(kernels, "WIDE_BLOCK", 16)
    right = {n: torch.tensor([0, ROWS[table] - 1, 1]) for n, (table, _) in TABLES.items()}
    wrong = {n: torch.tensor([-5, 99, 1]) for n in TABLES}
    y = embedded(40, wrong)
    assert y[:2].isnan().all()
    for name in TABLES:
        with pytest.raises(IndexError, match=f"{name}.* 99 of"):
            kernels.bad_ids(DEVICE).check()
    kernels.bad_ids(DEVICE).check()
    assert torch.equal(y[2], embedded(40, right)[2])


@pytest.mark.parametrize("name", TABLES)
def test_the_saved_statistics_of_a_bad_id_are_nan(name, bad_ids):
    """So the gradient of its token is NaN too, and other gradients are not."""
    ids = {n: torch.arange(6) % ROWS[table] for n, (table, _) in TABLES.items()}
    expected = embedded(24, ids, save=True)
    ids[name][2] = 99
    y, z, mean, rstd = embedded(24, ids, save=True)
    for actual, right in ((y, expected[0]), (rstd.unsqueeze(1), expected[3].unsqueeze(1))):
        assert_spoiled(actual, right, 2)
    others = torch.arange(6, device=DEVICE) != 2
    assert torch.equal(z[others], expected[1][others])
    assert torch.equal(mean[others], expected[2][others])


def test_a_table_without_rows(bad_ids):
    right = {n: torch.zeros(2, dtype=torch.int64) for n in TABLES}
    for name, (table, what) in TABLES.items():
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(ROWS, table, 0)
            with pytest.raises(IndexError, match=f"{name}: {what}s of a table without rows"):
                embedded(24, right)


def test_a_graphed_model_tells_of_bad_ids(bad_ids):
    """Its replays do not call the launcher: it looks itself, by each way to a replay, the first and later."""
    g = Graphed(shared())
    device = g.model.device
    given = lengths_batch([3, 4])
    g.check(**given)
    g.check(**given)
    calls = (
        lambda: g.graphed(**given),
        lambda: g.graphed(**given, packed=True),
        lambda: g.graphed.forward_packed(torch.tensor([5, 6]), torch.tensor([0, 2], dtype=torch.int32), 2),
    )
    for call in calls * 2:
        with torch.no_grad():
            call()
            kernels.bad_ids(device).cells[:2] = torch.tensor([1, 77])
            with pytest.raises(IndexError, match="token id 77 of an earlier call"):
                call()
    g.check(**given)
