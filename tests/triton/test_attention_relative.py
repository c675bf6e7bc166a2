"""Scores of distances in the Triton attention equal the same scores as a dense bias."""

from __future__ import annotations

import pytest
import torch

from fastbert.backends import triton as backend
from fastbert.ops.attention import attention
from fastbert.ops.attention_inputs import AttentionNeeds, Window
from fastbert.ops.attention_relative import RelativeScores, dense_scores
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
from tests.support.attention_calls import made
from tests.support.triton_attention_inputs import at_strides, randn
from tests.support.triton_fixtures import (
    DEVICE,
    assert_bit_equal,
    assert_repeats,
    kernels_of,
    needs_lazy_memory,
)
from tests.triton import test_attention, test_attention_backward

kernels, backward = kernels_of("attention"), kernels_of("attention_backward")
pytestmark = [pytest.mark.usefixtures("checked_memory", "small_tiles"), pytest.mark.sweep]

# around one tile and two of 16 and of 32
LENGTHS, SLACK, CAPACITY, NHEADS = (1, 17, 0, 35), 5, 2, 2
TOTAL, SIZE = sum(LENGTHS) + CAPACITY, max(LENGTHS) + SLACK
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "config_for", test_attention.CUTS["32x16"])
    monkeypatch.setattr(backward, "configs_for", test_attention_backward.CUTS["high-wide"])


def scores_of(which, columns=21, dtype=torch.float32, rises=True, positions=False):
    """Scores of some queries, keys or distances alone ("q", "k", "b"), among rows and columns of NaN."""

    def rows(seed):
        memory = torch.full((NHEADS, TOTAL + 2, columns + 3), float("nan"), dtype=dtype, device=DEVICE)
        memory[:, 1:-1, 1:-2] = randn(NHEADS, TOTAL, columns, dtype=dtype, seed=seed)
        rows = memory[:, 1:-1, 1:-2].transpose(0, 1)
        rows[sum(LENGTHS) :] = float("nan")
        return rows

    # with positions the table ends within the distances, at columns 63 and 127 if there are 190
    reach = 32 if positions else SIZE + 3
    distance = torch.arange(-reach, reach + 1)
    index = (columns // 2 + distance).clamp(0, columns - 1) if rises else (distance * 7) % columns
    return RelativeScores(
        index.to(torch.int32).to(DEVICE),
        rows(11) if "q" in which else None,
        rows(12) if "k" in which else None,
        randn(NHEADS, columns, dtype=dtype, seed=13) if "b" in which else None,
        positions_of().to(DEVICE) if positions else None,
    )


def positions_of():
    """Any, some of them equal; in the last sequence they rise, with a gap: whole tiles share a column."""
    found = torch.randint(0, 90, (len(LENGTHS), SIZE), generator=torch.Generator().manual_seed(9))
    found[-1] = torch.arange(SIZE) + 90 * (torch.arange(SIZE) >= 16)
    return found


def inputs_of(dtype=torch.float32, **options):
    inputs = made(LENGTHS, NHEADS, 16, dtype, capacity=CAPACITY, slack=SLACK, device=DEVICE, **options)
    return inputs._replace(gate=torch.tensor([1.5, -0.5], device=DEVICE))


def with_dense(inputs, relative):
    """(the inputs with the scores in their bias, that bias, its leaves)."""
    leaves = [None if t is None else t.float().nan_to_num().requires_grad_() for t in relative[1:4]]
    whole = RelativeScores(relative.columns, *leaves, relative.positions)
    dense = dense_scores(whole, inputs.cu_seqlens, inputs.max_seqlen, inputs.q)
    bias = dense if inputs.bias is None else dense + inputs.bias
    return inputs._replace(bias=bias.detach()), dense, [leaf for leaf in leaves if leaf is not None]


def forward_of(inputs, *relative, probs=True):
    return kernels.attention_fwd(inputs, probs, False, None, *relative)[:3]


# Masks, scales and options; each with some terms, which all occur with rising columns and any columns.
CALLS = [
    ("q", {}),
    ("k", {"causal": True}),
    ("b", {"softmax_scale": -0.3}),
    ("qk", {"window": Window(9, 20)}),
    ("qkb", {"bias": (1, 1, 1, SIZE), "p": 0.3}),
    ("kb", {"bias": (4, 2, SIZE, SIZE)}),
]


def options_of(options):
    shape = options.get("bias")
    return options | ({} if shape is None else {"bias": randn(*shape, seed=7)})


@pytest.mark.parametrize(("rises", "positions"), [(True, False), (False, True)], ids=["near", "positions"])
@pytest.mark.parametrize(("which", "options"), CALLS, ids=lambda v: v if isinstance(v, str) else "")
def test_forward(which, options, rises, positions):
    inputs = inputs_of(**options_of(options))
    relative = scores_of(which, rises=rises, positions=positions)
    out, lse, probs = forward_of(inputs, relative)
    expected = forward_of(with_dense(inputs, relative)[0])
    for found, truth in zip((out, lse, probs), expected, strict=True):
        torch.testing.assert_close(found, truth, **CLOSE)
    assert_bit_equal(forward_of(inputs, relative, probs=False)[:2], (out, lse))


@pytest.mark.parametrize("positions", [False, True], ids=["near", "positions"])
@pytest.mark.parametrize(("which", "options"), CALLS, ids=lambda v: v if isinstance(v, str) else "")
def test_backward(which, options, positions):
    inputs, rises = inputs_of(**options_of(options)), "q" in which
    columns = (190 if rises else 66) if positions else 21
    relative = scores_of(which, columns, rises=rises, positions=positions)
    plain, dense, leaves = with_dense(inputs, relative)
    need = AttentionNeeds(True, True, True, inputs.bias is not None, True)
    wanted = [t is not None for t in relative[1:4]]
    out, lse, _ = forward_of(inputs, relative, probs=False)
    dout = randn(*out.shape, seed=4)
    grads = backward.attention_bwd(dout, inputs, out, lse, None, need, None, relative, wanted)
    own = need._replace(dbias=True)
    expected = backward.attention_bwd(dout, plain, out, lse, None, own)
    for found, truth in zip((*grads[:3], grads[4]), (*expected[:3], expected[4]), strict=True):
        torch.testing.assert_close(found, truth, **CLOSE)
    if inputs.bias is not None:
        torch.testing.assert_close(grads[3], expected[3].sum_to_size(inputs.bias.shape), **CLOSE)
    truths = torch.autograd.grad(dense, leaves, expected[3].sum_to_size(dense.shape))
    found = [grad for grad, needed in zip(grads[5:], wanted, strict=True) if needed]
    for grad, truth in zip(found, truths, strict=True):
        assert truth.abs().max() > 0.01
        assert (grad.shape, grad.dtype) == (truth.shape, torch.float32)
        torch.testing.assert_close(grad, truth, **CLOSE)
    assert all(needed or grad.shape == (0,) for grad, needed in zip(grads[5:], wanted, strict=True))


@pytest.mark.parametrize("positions", [False, True], ids=["near", "positions"])
@pytest.mark.parametrize("shape", [None, (1, 1, SIZE, SIZE), (4, 1, 1, SIZE)], ids=str)
def test_each_gradient_alone(shape, positions):
    inputs = inputs_of(bias=None if shape is None else randn(*shape))
    relative = scores_of("qkb", columns=70, positions=positions)
    out, lse, _ = forward_of(inputs, relative, probs=False)
    given, none = (out, inputs, out, lse, None), AttentionNeeds(False, False, False, False, False)
    every = backward.attention_bwd(*given, none._replace(dbias=shape is not None), None, relative, (1, 1, 1))
    for wanted in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 0, 0)]:
        need = none._replace(dbias=shape is not None and sum(wanted) == 1)
        found = backward.attention_bwd(*given, need, None, relative, wanted)
        for grad, truth, needed in zip(found[3:], every[3:], (need.dbias, 0, *wanted), strict=True):
            assert grad.shape == (truth.shape if needed else (0,))
            # the bias is a sum over sequences first where neither rows nor positions need dS
            torch.testing.assert_close(grad, truth if needed else grad, **CLOSE)
    assert (every[5][sum(LENGTHS) :] == 0).all()
    assert (every[6][sum(LENGTHS) :] == 0).all()


def test_nothing_is_read_past_the_last_row():
    """Tiles reach beyond the last sequence, and beyond the memory of its scores."""
    inputs = made((3, 19), 1, 16, torch.float32, device=DEVICE)
    rows, positions = randn(22, 1, 41), torch.arange(38).reshape(2, 19).to(DEVICE)
    columns = torch.arange(41, dtype=torch.int32, device=DEVICE)
    relative = RelativeScores(columns, rows, rows, None, positions)
    expected = forward_of(with_dense(inputs, relative)[0])
    for found, truth in zip(forward_of(inputs, relative), expected, strict=True):
        torch.testing.assert_close(found, truth, **CLOSE)


def test_half_precision_and_terms_of_other_dtypes():
    inputs, relative = inputs_of(torch.bfloat16), scores_of("qkb", dtype=torch.bfloat16)
    wide = RelativeScores(relative.columns, *(t.double() for t in relative[1:4]))
    assert_bit_equal(forward_of(inputs, wide), forward_of(inputs, relative))


def test_scores_of_rows_past_a_sequence_may_overflow():
    """exp of the last query's scores is infinite, where its own lse is not subtracted."""
    inputs, relative = inputs_of(), scores_of("q")
    query = relative.query.nan_to_num() + 300.0
    relative = relative._replace(query=query)
    out, lse, _ = forward_of(inputs, relative)
    need = AttentionNeeds(True, True, True, False, True)
    grads = backward.attention_bwd(out, inputs, out, lse, None, need, None, relative, (True, False, False))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("sizes", [((0, 0), 3), ((0, 0), 0), ((), 0)], ids=str)
def test_no_tokens(sizes):
    lengths, capacity = sizes
    inputs = made(lengths, 2, 16, torch.float32, capacity=capacity, device=DEVICE)
    relative = RelativeScores(
        torch.zeros(1, dtype=torch.int32, device=DEVICE), randn(capacity, 2, 3), None, randn(2, 3)
    )
    out, lse, _ = forward_of(inputs, relative, probs=False)
    need = AttentionNeeds(True, True, True, False, False)
    grads = backward.attention_bwd(out, inputs, out, lse, None, need, None, relative, (True, False, True))
    assert [tuple(grad.shape) for grad in grads[5:]] == [(capacity, 2, 3), (0,), (2, 3)]
    assert all((grad == 0).all() for grad in (out, lse, *grads))


@needs_lazy_memory
def test_offsets_beyond_2_to_31_elements(monkeypatch):
    inputs, relative = inputs_of(), scores_of("qkb", positions=True)
    expected = forward_of(inputs, relative, probs=False)
    for strides in ((2**30 + 64, 40, 1), (64, 2**31 + 64, 1)):
        near = tuple(t[:, :, :].contiguous() for t in relative[1:3])
        far = RelativeScores(relative.columns, *(at_strides(t, *strides) for t in near), *relative[3:])
        torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
        assert_bit_equal(forward_of(inputs, far, probs=False), expected)


@pytest.mark.parametrize("positions", [False, True], ids=["near", "positions"])
def test_bits_repeat_without_atomics(checked_memory, positions):
    inputs, relative = inputs_of(torch.bfloat16), scores_of("qkb", positions=positions)
    need = AttentionNeeds(True, True, True, False, False)

    def run():
        out, lse, _ = forward_of(inputs, relative, probs=False)
        return out, *backward.attention_bwd(out, inputs, out, lse, None, need, None, relative, (1, 1, 1))

    assert_repeats(checked_memory, run)


# --- the op -------------------------------------------------------------------------------------------------


def called(monkeypatch, relative, headdim=16, train=False, **options):
    """Whether the launchers get the scores; the op's result is that of the dense bias."""
    seen, original = [], backend.attention.attention_fwd
    monkeypatch.setattr(backend, "attention_fwd", lambda *args: (seen.append(len(args)), original(*args))[1])
    q = randn(TOTAL, NHEADS, headdim).requires_grad_(train)
    given = q, q, q, made(LENGTHS, device=DEVICE).cu_seqlens, SIZE
    with dispatch.use_backend(attention="triton"):
        out = attention(*given, relative=relative, **options)
        bias = dense_scores(relative, given[3], SIZE, q)
        expected = attention(*given, bias=bias, **options)
    torch.testing.assert_close(out, expected, **CLOSE)
    return seen[0] == 5


def test_which_calls_get_a_dense_bias(monkeypatch):
    relative = scores_of("qb")
    relative = relative._replace(query=relative.query.nan_to_num())
    placed = scores_of("b", positions=True)
    assert called(monkeypatch, relative)
    assert called(monkeypatch, placed)
    assert called(monkeypatch, relative, train=True)
    assert called(monkeypatch, placed, train=True)
    assert called(monkeypatch, relative, headdim=72)
    assert not called(monkeypatch, relative, headdim=72, train=True)
    assert not called(monkeypatch, relative, headdim=kernels.MAX_HEADDIM + 8)


def test_calls_with_scores_are_ranked_apart(monkeypatch):
    """Where a backend ranks first that does not read them, such calls take the next one's kernel."""
    lines = {"attention": ("aten", "triton", "reference"), "attention relative": ("triton", "reference")}
    monkeypatch.setitem(TABLE, DEVICE.type, TABLE[DEVICE.type] | lines)
    monkeypatch.setattr(dispatch, "_resolved", {})
    monkeypatch.setattr(dispatch, "SELF_CHECKED", ())
    calls, original = [], backend.attention_fwd
    monkeypatch.setattr(backend, "attention_fwd", lambda *args: (calls.append(args), original(*args))[1])
    q, relative = randn(TOTAL, NHEADS, 16), scores_of("b")
    given = q, q, q, made(LENGTHS, device=DEVICE).cu_seqlens, SIZE
    out = attention(*given, relative=relative)
    assert len(calls) == 1
    bias = dense_scores(relative, given[3], SIZE, q)
    torch.testing.assert_close(out, attention(*given, bias=bias), **CLOSE)
    assert len(calls) == 1
