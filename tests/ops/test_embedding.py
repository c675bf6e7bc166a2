"""`embedding`: gradients, compilation, layouts, dropout, ids and other bad inputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastbert import testing
from fastbert.ops.embedding import embedding, embedding_ref
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.embedding import EmbeddingCase
from tests.support.inputs import name, randn
from tests.support.ops import HALF, assert_compiled_is_eager, pinned, served

SERVED = served("embedding")


backend = pinned("embedding")


def tables(hidden=12, dtype=torch.float32, grad=False):
    """word (11), position (7), segment (2), ln_weight, ln_bias."""
    shapes = (11, hidden), (7, hidden), (2, hidden), (hidden,), (hidden,)
    return tuple(randn(*shape, dtype=dtype, grad=grad) for shape in shapes)


IDS = torch.tensor([[3, 0, 3, 10], [1, 3, 0, 0]])
POSITIONS = torch.arange(4).unsqueeze(0)  # broadcasts over the batch
TYPES = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


def run(word, position, segment, ln_weight, ln_bias, ids=IDS, positions=POSITIONS, types=TYPES, **options):
    return embedding(
        ids,
        word,
        ln_weight,
        ln_bias,
        position_ids=positions,
        position=position,
        token_type_ids=types,
        segment=segment,
        **options,
    )


def check_few_tokens(which, dtype, tokens, device="cpu", draws=24):
    """The error rule for the norm's gradients over many draws.

    In one draw, sums of so few terms depend on chance.
    """
    case, rows = EmbeddingCase(tokens, 50, 96), {"dln_weight": [], "dln_bias": []}
    for seed in range(draws):
        for row in testing.run_case(case, which, dtype, device, seed=seed):
            if row.quantity in rows:
                rows[row.quantity].append(row)
    chance = testing.chance_allowance(draws * case.hidden)
    for quantity, drawn in rows.items():
        mean, eager_mean = (sum(getattr(r, f) for r in drawn) for f in ("mean_error", "eager_mean_error"))
        worst, eager_worst = (
            torch.tensor([getattr(r, f) for r in drawn]).quantile(0.9)
            for f in ("max_error", "eager_max_error")
        )
        if dtype in HALF:
            assert mean <= chance * eager_mean, quantity
            assert worst <= chance * eager_worst, quantity
        else:
            assert worst <= chance * eager_worst + case.floor(case.inputs(dtype, "cpu"), quantity), quantity


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize(("which", "dtype"), SERVED, ids=name)
def test_norms_gradients_of_few_tokens(which, dtype, tokens):
    check_few_tokens(which, dtype, tokens)


@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_outputs_are_correctly_rounded(backend, dtype):
    word, position, segment, w, b = tables(768, dtype)
    y = run(word, position, segment, w, b)
    right = embedding_ref(
        IDS, *(t.double() for t in (word, w, b)), POSITIONS, position.double(), TYPES, segment.double()
    )
    assert (y == right.to(dtype)).double().mean() >= 0.999


def test_reference_is_what_pytorch_defines():
    word, position, segment, w, b = tables(dtype=torch.float64)
    z = F.embedding(IDS, word) + F.embedding(POSITIONS, position) + F.embedding(TYPES, segment)
    torch.testing.assert_close(
        embedding_ref(IDS, word, w, b, POSITIONS, position, TYPES, segment, eps=1e-5),
        F.layer_norm(z, (12,), w, b, 1e-5),
    )


@pytest.mark.sweep
def test_compiled_is_eager():
    seed = torch.tensor([5])

    def step(ids, types, *leaves):
        positions = torch.arange(ids.shape[0]).unsqueeze(0)
        return run(*leaves, ids.t(), positions, types.t(), padding_idx=0, dropout_p=0.2, seed=seed)

    leaves = tables(grad=True)
    assert_compiled_is_eager(
        step, lambda n: (torch.randint(11, (n, 4)), torch.randint(2, (n, 4)), *leaves), (3, 5, 7)
    )


def test_other_integers_and_a_word_that_is_not_read_change_nothing(backend):
    word, position, segment, w, b = tables()
    expected = run(word, position, segment, w, b)
    narrow = [t.int() for t in (IDS, POSITIONS, TYPES)]
    assert torch.equal(run(word, position, segment, w, b, *narrow), expected)
    embeds = F.embedding(IDS, word)
    # with inputs_embeds, `word` is not read
    assert torch.equal(run(word, position, segment, w, b, None, inputs_embeds=embeds), expected)


def test_backends_get_flat_int64_ids_and_tables_without_gaps(noted):
    from fastbert.backends import aten

    seen = noted(aten, "embedding_fwd", lambda given, *_: given)
    gaps = [t.repeat_interleave(2, -1)[..., ::2] for t in tables()]
    with dispatch.use_backend(embedding="aten"):
        run(*gaps, *(t.int() for t in (IDS, POSITIONS, TYPES)))
    input_ids, _, word, position_ids, position, token_type_ids, segment, *_ = seen[0]
    for ids in (input_ids, position_ids, token_type_ids):
        assert (ids.dtype, ids.shape) == (torch.int64, (8,))
    for table in (word, position, segment):
        assert table.stride(1) == 1


@pytest.mark.parametrize("padding_idx", [0, 3, -11])
def test_the_padding_row_gets_no_gradient(backend, padding_idx):
    leaves = tables(grad=True)
    dy = randn(2, 4, 12)
    (dword,) = torch.autograd.grad(run(*leaves, padding_idx=padding_idx), leaves[0], dy)
    (full,) = torch.autograd.grad(run(*leaves), leaves[0], dy)
    row = padding_idx % 11
    assert full[row].any()
    assert not dword[row].any()
    full[row] = 0
    assert torch.equal(dword, full)


def test_half_precision_tables_are_summed_in_float32(backend):
    """4,096 tokens share one row: a sum in bfloat16 would stop growing at 256."""
    word, w, b = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), torch.zeros(4)
    embeds = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).repeat(4096, 1)
    position = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    y = embedding(
        None,
        word,
        w,
        b,
        inputs_embeds=embeds.bfloat16(),
        position=position,
        position_ids=torch.zeros(4096, dtype=torch.int64),
    )
    dy = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.bfloat16).expand(4096, 4)
    (dposition,) = torch.autograd.grad(y, position, dy)
    assert torch.equal(dposition, torch.tensor([[4096.0, 4096.0, -4096.0, -4096.0]]).bfloat16())


@pytest.mark.parametrize("ln_dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name)
@pytest.mark.parametrize("autocast", [None, *HALF], ids=name)
def test_dtypes_of_tables_and_norm(backend, autocast, dtype, ln_dtype):
    word, position, segment, _, _ = tables(dtype=dtype, grad=True)
    w, b = randn(12, dtype=ln_dtype, grad=True), randn(12, dtype=ln_dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = run(word, position, segment, w, b)
    assert y.dtype == (dtype if autocast is None else torch.promote_types(dtype, ln_dtype))
    expected = embedding_ref(
        IDS, *(t.double() for t in (word, w, b)), POSITIONS, position.double(), TYPES, segment.double()
    )
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-3)
    leaves = word, position, segment, w
    for a, e, leaf in zip(
        torch.autograd.grad(y.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        leaves,
        strict=True,
    ):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a, e, rtol=5e-2, atol=5e-2)


WORD, POSITION, SEGMENT, W, B = tables()
E3 = torch.ones(2, 4, 12)
PLACED = {"position": POSITION, "position_ids": POSITIONS}
TYPED = {"segment": SEGMENT, "token_type_ids": TYPES}
BAD = [
    ({"input_ids": torch.tensor([3, 11])}, ValueError, "token id 11 is out of range for a vocabulary of 11"),
    ({"input_ids": None}, ValueError, "input_ids, inputs_embeds: expected exactly one of .*, got neither"),
    ({"inputs_embeds": E3}, ValueError, "expected exactly one of the two, got both"),
    ({"ln_weight": torch.ones(3)}, ValueError, r"ln_weight: expected shape \(12,\), got \(3,\)"),
    ({"position": POSITION}, ValueError, "position_ids: expected a tensor, because position is given"),
    ({"segment": SEGMENT}, ValueError, "token_type_ids: expected a tensor, because segment is given"),
    (PLACED | {"position_ids": POSITIONS + 4}, ValueError, "position_ids: id 7 .* a position table of 7"),
    (TYPED | {"token_type_ids": TYPES * 2}, ValueError, "token_type_ids: id 2 .* a segment table of 2"),
    (PLACED | {"position_ids": torch.arange(3)}, ValueError, r"position_ids: .* to \(2, 4\), got \(3,\)"),
    (PLACED | {"position": torch.ones(7, 5)}, ValueError, r"position: .*\(rows, 12\), got \(7, 5\)"),
    (PLACED | {"position": POSITION.bfloat16()}, TypeError, "position: .*float32, got torch.bfloat16"),
    (
        TYPED | {"input_ids": None, "inputs_embeds": E3.half()},
        TypeError,
        "segment: expected inputs_embeds's dtype torch.float16, got torch.float32",
    ),
    (
        {"input_ids": None, "inputs_embeds": torch.ones(2, 0)},
        ValueError,
        r"inputs_embeds: .*hidden >= 1, got \(2, 0\)",
    ),
    ({"padding_idx": 11}, ValueError, r"padding_idx: expected an integer in \[-11, 11\), got 11"),
    ({"dropout_p": 0.1}, ValueError, "seed: dropout_p > 0 needs an int64 tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m[:50] for _, _, m in BAD])
def test_bad_inputs(change, error, message):
    with pytest.raises(error, match=message):
        embedding(**{"input_ids": IDS, "word": WORD, "ln_weight": W, "ln_bias": B, **change})
