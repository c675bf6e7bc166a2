"""Scores of distances in the C++ attention equal the same scores as a dense bias."""

from __future__ import annotations

import pytest
import torch

from fastbert.backends import cpu
from fastbert.ops.attention_inputs import AttentionNeeds
from fastbert.ops.attention_relative import RelativeScores, dense_scores
from tests.support.cpu_attention import DTYPES, inputs_of, randn
from tests.support.cpu_checks import assert_same_on_any_threads

# around one block of 24 queries and one panel of 64 keys
LENGTHS = (1, 23, 0, 65, 130)
NHEADS, HEADDIM, SLACK = 4, 20, 2


def scores_of(which, columns, dtype, rises=True):
    """Scores of some rows, keys, or distances alone ("q", "k", "b"), among rows and columns of NaN."""
    total, longest = sum(LENGTHS), max(LENGTHS) + SLACK

    def rows(seed):
        memory = torch.full((NHEADS, total + 2, columns + 3), float("nan"), dtype=dtype)
        memory[:, 1:-1, 1:-2] = randn(NHEADS, total, columns, dtype=dtype, seed=seed)
        return memory[:, 1:-1, 1:-2].transpose(0, 1)

    distance = torch.arange(1 - longest, longest)
    # Near distances have neighbouring columns, which are loaded; other columns are gathered
    near = (columns // 2 + distance).clamp(0, columns - 1)
    index = near if rises else (distance * 7) % columns
    return RelativeScores(
        index.to(torch.int32),
        rows(11) if "q" in which else None,
        rows(12) if "k" in which else None,
        randn(NHEADS, columns, seed=13) if "b" in which else None,
    )


@pytest.mark.parametrize("rises", [True, False], ids=["near", "any"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("which", "columns", "options"),
    [
        ("q", 40, {}),
        ("k", 40, {"window": (20, 9)}),
        ("b", 40, {}),
        ("b", 40, {"bias": True}),
        ("qkb", 77, {"bias": True, "p": 0.25, "gate": torch.tensor([1.5, -0.5, 0.25, 2.0])}),
        ("qk", 9, {"kv_heads": 2, "gate": torch.tensor([1.5, -0.5, 0.25, 2.0])}),
        ("qk", 1, {}),  # no pair of columns
        ("kb", 30, {"causal": True, "scale": 0.3}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_as_a_dense_bias(every_isa, dtype, which, columns, options, rises):
    options, total = dict(options), sum(LENGTHS)
    relative = scores_of(which, columns, dtype if dtype != torch.float16 else torch.float32, rises)
    heads = options.pop("kv_heads", NHEADS)
    q, dout = (randn(total, NHEADS, HEADDIM, dtype=dtype, seed=s) for s in (1, 4))
    k, v = (randn(total, heads, HEADDIM, dtype=dtype, seed=s) for s in (2, 3))
    longest = max(LENGTHS) + SLACK
    bias = randn(len(LENGTHS), NHEADS, longest, longest, seed=5) if options.pop("bias", False) else None
    inputs = inputs_of(q, k, v, LENGTHS, slack=SLACK, bias=bias, **options)
    leaves = [None if t is None else t.float().clone().requires_grad_() for t in relative[1:4]]
    dense = dense_scores(RelativeScores(relative.columns, *leaves), inputs.cu_seqlens, longest, q)
    whole = dense if bias is None else dense + bias
    plain = inputs._replace(bias=whole.detach())
    need = AttentionNeeds(True, True, True, True, inputs.gate is not None)

    def run(given, *more, needs=()):
        out, lse, probs, _ = cpu.attention_fwd(given, True, False, None, *more)
        return out, lse, probs, *cpu.attention_bwd(dout, given, out, lse, None, need, None, *more, *needs)

    wanted = [t is not None for t in leaves]
    own = need if bias is not None else need._replace(dbias=False)
    out, lse, probs, _ = cpu.attention_fwd(inputs, True, False, None, relative)
    grads = cpu.attention_bwd(dout, inputs, out, lse, None, own, None, relative, wanted)
    expected = run(plain)
    # The sum of the scores is rounded in another order
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 2e-5, "atol": 2e-5}
    for found, truth in zip((out, lse, probs, *grads[:3]), expected[:6], strict=True):
        torch.testing.assert_close(found, truth, **close)
    if bias is not None:
        torch.testing.assert_close(grads[3], expected[6], **close)
    if inputs.gate is not None:
        torch.testing.assert_close(grads[4], expected[7], rtol=1e-3, atol=1e-3)
    given = [leaf for leaf in leaves if leaf is not None]
    truths = torch.autograd.grad(dense, given, expected[6].sum_to_size(dense.shape))
    found = [grad for grad, needed in zip(grads[5:], wanted, strict=True) if needed]
    for grad, truth in zip(found, truths, strict=True):
        assert columns == 1 or truth.abs().max() > 0.01  # a row of dS has the sum 0
        torch.testing.assert_close(grad, truth, **close)
    for grad, needed in zip(grads[5:], wanted, strict=True):
        assert needed or grad.numel() == 0


def test_gradients_of_scores_alone(every_isa):
    relative = scores_of("qkb", 40, torch.float32)
    q = randn(sum(LENGTHS), NHEADS, HEADDIM, seed=1)
    inputs = inputs_of(q, q, q, LENGTHS, slack=SLACK)
    out, lse, _, _ = cpu.attention_fwd(inputs, False, False, None, relative)
    given = inputs, out, lse, None
    every = AttentionNeeds(True, True, True, False, False)
    none = AttentionNeeds(False, False, False, False, False)
    whole, alone = (cpu.attention_bwd(q, *given, n, None, relative, [True] * 3) for n in (every, none))
    assert all(torch.equal(a, b) for a, b in zip(whole[5:], alone[5:], strict=True))
    assert all(grad.numel() == 0 for grad in alone[:5])


def test_bits_do_not_depend_on_the_number_of_threads(every_isa):
    relative = scores_of("qkb", 40, torch.bfloat16)
    q = randn(sum(LENGTHS), NHEADS, HEADDIM, dtype=torch.bfloat16, seed=1)
    inputs = inputs_of(q, q, q, LENGTHS, slack=SLACK)
    need = AttentionNeeds(True, True, True, False, False)

    def call():
        out, lse, _, _ = cpu.attention_fwd(inputs, False, False, None, relative)
        return out, *cpu.attention_bwd(q, inputs, out, lse, None, need, None, relative, [True] * 3)

    assert_same_on_any_threads(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_rows", [1, 64, 100, 130])
def test_scores_by_a_table(every_isa, dtype, table_rows):
    """Each score is one sum: the same bits from any rows of the table, and on any number of threads."""
    total = 300
    memory = torch.full((total, 3 * NHEADS * HEADDIM + 5), float("nan"), dtype=dtype)
    x = memory[:, 1:-4].unflatten(1, (NHEADS, 3, HEADDIM))[:, :, 1]  # rows and heads with gaps
    x.copy_(randn(total, NHEADS, HEADDIM, dtype=dtype, seed=1))
    table = randn(table_rows, NHEADS, HEADDIM, dtype=dtype, seed=2)
    panels = cpu.table_panels(table)
    every = cpu.table_scores(x, panels, table_rows, 0, table_rows)
    exact = torch.einsum("tnd,rnd->tnr", x.double(), table.double())
    bound = torch.einsum("tnd,rnd->tnr", x.double().abs(), table.double().abs())
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert ((every.double() - exact).abs() <= unit * bound).all()
    assert every.dtype == (dtype if dtype != torch.float16 else torch.float32)
    for first, count in ((0, 1), (table_rows - 1, 1), (table_rows // 3, table_rows // 2), (63, 2)):
        if count < 1 or first + count > table_rows:
            continue
        assert_same_on_any_threads(lambda f=first, c=count: (cpu.table_scores(x, panels, table_rows, f, c),))
        found = cpu.table_scores(x, panels, table_rows, first, count)
        assert torch.equal(found, every[..., first : first + count])
