"""The Triton embedding: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends import triton as backend
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.embedding import embedding
from fastbert.runtime import dispatch
from fastbert.testing import known
from fastbert.testing.op_cases.embedding import EmbeddingCase
from tests.support.graphed_models import Graphed, lengths_batch, shared
from tests.support.launchers import embedding_fwd
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    HugeStrides,
    assert_bit_equal,
    assert_repeats,
    far,
    fuzz_tests,
    in_float64,
    kernels_of,
    needs_lazy_memory,
    normal,
    padded,
    set_backends,
)

kernels = kernels_of("embedding")
pytestmark = pytest.mark.usefixtures("checked_memory")
ONE_BLOCK = ("ONE_BLOCK",)


def check(case: EmbeddingCase, dtype: torch.dtype, seed: int = 0) -> None:
    """The error rule, with more room.

    Dropout scales the floor of float32 as it scales y. With few elements eager's error may be small by luck:
    then twice eager's error and 4 floors are allowed.
    """
    (row,) = testing.run_case(case, "triton", dtype, DEVICE, backward=False, seed=seed)
    if row.passed:
        return
    elements = case.tokens * case.hidden
    few = elements < 1000
    if "mean error" in row.reason:
        assert few, row.reason
        assert row.mean_error <= row.eager_mean_error * (1 + 4 / elements**0.5), row.reason
    else:
        assert few or dtype == torch.float32, row.reason
        floor = case.floor(case.inputs(dtype, DEVICE, seed), "y") / (1 - case.dropout_p)
        floor = floor * (4 if few else 1) if dtype == torch.float32 else 0.0
        allowed = (2 if few else testing.chance_allowance(elements)) * row.eager_max_error + floor
        assert row.max_error <= allowed, row.reason


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


@pytest.mark.parametrize("width", [*range(1, 35), 63, 64, 65, 127, 128, 129, 384, 768, 1024, 1025])
def test_widths(width):
    check(EmbeddingCase(3, 5, width, dropout_p=0.25), DTYPES[width % 3])


# Around the tile heights: 64 tokens of 16 columns, one of 1024
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129])
def test_token_counts(tokens):
    check(EmbeddingCase(tokens, 9, 16), DTYPES[tokens % 3])


@pytest.mark.parametrize("width", [kernels.ONE_BLOCK, kernels.ONE_BLOCK + 4])
def test_tokens_wider_than_one_block(width):
    check(EmbeddingCase(2, 3, width), torch.bfloat16)


def test_column_blocks_by_the_error_rule(hidden):
    for dtype in DTYPES:
        check(EmbeddingCase(9, 5, hidden, dropout_p=0.1), dtype)


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


def test_exact_on_small_integers():
    # z is ±c + m in a row: z - mean and 1 / rstd are powers of two, so that every step is exact
    signs = torch.tensor([1.0, -1.0], device=DEVICE).repeat(8)
    ids, ones = torch.tensor([2, 0], device=DEVICE), torch.ones(16, device=DEVICE)
    word = torch.stack([-signs * 3, signs * 7, signs])
    args = {
        "input_ids": ids,
        "inputs_embeds": None,
        "word": word,
        "position_ids": torch.tensor([1, 0], device=DEVICE),
        "position": torch.stack([-signs, signs]),
        "token_type_ids": torch.tensor([0, 1], device=DEVICE),
        "segment": torch.stack([5 * ones, -3 * ones]),
        "ln_weight": torch.arange(16.0, device=DEVICE),
        "ln_bias": torch.arange(16.0, device=DEVICE) - 5,
        "eps": 0.0,
        "dropout_p": 0.0,
        "seed": None,
        "offset": 0,
        "save": True,
    }
    x_hat = torch.stack([signs, -signs])
    z = torch.stack([signs * 2 + 5, -signs * 4 - 3])
    stats = torch.tensor([5.0, -3.0], device=DEVICE), torch.tensor([0.5, 0.25], device=DEVICE)
    assert_bit_equal(run(args), (x_hat * args["ln_weight"] + args["ln_bias"], z, *stats))


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


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [(0, 0, 0.5), (-1, 2**32 - 1, 0.25), (2**62 + 12345, 2**31, 0.9), (-(2**63), 2**31 - 1, 0.5)],
)
def test_dropout_comes_last_and_its_bits_are_the_definitions(seed, offset, p, hidden):
    args = forward_args(67, hidden, p=0.0)
    seed = torch.tensor([seed], device=DEVICE)
    dropped = args | {"dropout_p": p, "seed": seed, "offset": offset}
    y, *stats = run(args)
    keep = keep_mask_2d(seed, offset, 67, hidden, p)
    scale = torch.tensor(1 / (1 - p), dtype=torch.float32, device=DEVICE)
    assert_bit_equal(run(dropped), (torch.where(keep, y * scale, 0.0), *stats))


def test_a_seed_is_not_launched_without_dropout(monkeypatch):
    launched = []
    monkeypatch.setattr(kernels, "launch", lambda *args, **config: launched.append(args))
    seed = torch.tensor([5], device=DEVICE)
    for p in (0.0, 0.5):
        run(forward_args(3, 20, p=0.0) | {"dropout_p": p, "seed": seed})
    assert [any(a is seed for a in args) for args in launched] == [False, True]


# --- layouts ------------------------------------------------------------------------------------------------


def test_strided_tables_with_poisoned_padding(hidden):
    args = forward_args(9, hidden)
    pads = {"word": 7, "position": 11, "segment": 3}
    assert_bit_equal(run(args | {name: padded(args[name], pad) for name, pad in pads.items()}), run(args))


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


@pytest.mark.sweep
@needs_lazy_memory
def test_offsets_beyond_2_to_31_elements(monkeypatch, hidden):
    args = forward_args(3, hidden, torch.bfloat16)
    args["input_ids"][:] = torch.tensor([12, 0, 11])
    args["position_ids"][:] = torch.tensor([0, 6, 5])
    args["token_type_ids"][:] = torch.tensor([2, 2, 0])
    expected = run(args)
    far_args = args | {name: far(args[name]) for name in ("word", "position", "segment")}
    monkeypatch.setattr(kernels, "torch", HugeStrides())
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    actual = run(far_args)
    assert actual[0].stride(0) > 2**30
    assert_bit_equal(actual, expected)


def test_token_tiles_are_on_the_grid_axis_that_has_no_limit(monkeypatch):
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **config: grids.append(grid))
    x, vector = torch.empty((2**22, 16), device="meta"), torch.empty(16, device="meta")
    rest = (None, None, None, None, vector, vector, 1e-12, 0.0, None, 0, False)
    embedding_fwd(kernels, None, x, None, *rest)
    assert grids == [(2**22 // 64,)]


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


def test_no_tokens(hidden):
    saved = run(forward_args(0, hidden))
    assert [tuple(t.shape) for t in saved] == [(0, hidden), (0, hidden), (0,), (0,)]


@pytest.mark.sweep
def test_repeats_are_bit_equal_without_atomics(checked_memory):
    args = forward_args(133, 70, torch.bfloat16)
    assert_repeats(checked_memory, lambda: run(args))


def test_forward_here_and_backward_by_another_backend(monkeypatch):
    set_backends(monkeypatch, "embedding", "triton", "reference")
    monkeypatch.delattr(backend, "embedding_bwd")
    args = forward_args(9, 32, p=0.0)
    names = ("position_ids", "position", "token_type_ids", "segment")

    def grads():
        leaves = [args[name].clone().requires_grad_() for name in ("word", "ln_weight", "ln_bias")]
        y = embedding(args["input_ids"], *leaves, **{name: args[name] for name in names})
        return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)

    actual = grads()
    key = ("embedding", "triton", torch.float32), actual[0].device
    assert list(known.found) == [key]  # only forward was checked, and it passed
    assert known.found[key].passed
    with dispatch.use_backend("reference"):
        for a, e in zip(actual, grads(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


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


test_fuzz, test_fuzz_long = fuzz_tests(check, fuzzed_cases(), 100, 2000)


# --- ids that a table does not have -------------------------------------------------------------------------

TABLES = {
    "input_ids": ("word", "token id"),
    "position_ids": ("position", "position"),
    "token_type_ids": ("segment", "token type"),
}
ROWS = {"word": 7, "position": 5, "segment": 3}


@pytest.fixture
def bad_ids():
    """Nothing is told before and after a test."""
    cells = kernels.bad_ids(DEVICE).cells
    cells.zero_()
    yield cells
    cells.zero_()


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
    """So the gradient of its token is NaN too, and the others' is not."""
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
    """Its replays do not call the launcher: it looks itself, by each way to a replay."""
    g = Graphed(shared())
    device = g.model.device
    given = lengths_batch([3, 4])
    g.check(**given)
    g.check(**given)
    for call in (
        lambda: g.graphed(**given),
        lambda: g.graphed(**given, packed=True),
        lambda: g.graphed.forward_packed(torch.tensor([5, 6]), torch.tensor([0, 2], dtype=torch.int32), 2),
    ):
        kernels.bad_ids(device).cells[:2] = torch.tensor([1, 77])
        with pytest.raises(IndexError, match="token id 77 of an earlier call"), torch.no_grad():
            call()
    g.check(**given)
