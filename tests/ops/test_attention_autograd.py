"""`attention` under autograd and torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fastbert.backends.aten import attention as aten_attention
from fastbert.ops.attention import AttentionInputs, attention, attention_ref
from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_inputs import CAUSAL, AttentionNeeds
from fastbert.ops.attention_relative import RelativeScores, dense_scores
from tests.support.attention_inputs import DOUBLE, PLAIN, assert_near, grads_of, qkv, serving
from tests.support.inputs import ends_of
from tests.support.ops import assert_equal


@pytest.mark.parametrize("option", ["", "positions", "return_probs"])
def test_scores_of_distances_equal_their_dense_bias(option):
    """Also where the serving backend does not read them, or the reference computes probabilities."""
    given, table = qkv(7, 2, 3), torch.randn(2, 9, requires_grad=True)
    places = torch.tensor([[0, 2, 3, 4], [0, 1, 4, 5]]) if option == "positions" else None
    relative = RelativeScores(torch.arange(9, dtype=torch.int32), bias=table, positions=places)
    found = []
    for scores in ({"relative": relative}, {"bias": dense_scores(relative, None, 4, given[0])}):
        out = attention(*given, ends_of([4, 3]), 4, return_probs=option == "return_probs", **scores)
        out = out if torch.is_tensor(out) else out[1]
        found.append((out, *torch.autograd.grad(out.square().sum(), (*given[:2], table))))
    for own, dense in zip(*found, strict=True):
        torch.testing.assert_close(own, dense, rtol=1e-5, atol=1e-6)


def test_probs_are_differentiable_and_lse_is_not():
    q, k, v = qkv(7, 2, 3, torch.float64)
    gate = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    seed = torch.tensor([4])

    def function(q, k, v, gate):
        out, probs = attention(
            q, k, v, ends_of([4, 3]), 4, gate=gate, dropout_p=0.4, seed=seed, return_probs=True
        )
        return out, probs

    assert torch.autograd.gradcheck(function, (q, k, v, gate))
    out, lse, probs = attention(q, k, v, ends_of([4, 3]), 4, return_lse=True, return_probs=True)
    assert not lse.requires_grad
    assert probs.requires_grad
    with torch.no_grad():
        for backend in PLAIN:
            dtype, tolerance = (torch.float64, 1e-12) if backend in DOUBLE else (torch.float32, 1e-6)
            with serving(backend):
                served = attention(
                    *(t.to(dtype) for t in (q, k, v)), ends_of([4, 3]), 4, return_lse=True, return_probs=True
                )
            for a, e in zip(served, (out, lse, probs), strict=True):
                assert torch.allclose(a.double(), e, rtol=0, atol=tolerance)
    assert not attention(q, k, v, ends_of([4, 3]), 4, return_lse=True)[1].requires_grad
    assert torch.allclose(
        probs.sum(-1), (torch.arange(4) < torch.tensor([[4], [3]])).double().unsqueeze(1).expand(2, 2, 4)
    )


def _compiled_body(q, k, v, cu_seqlens, max_seqlen, bias, gate, seed):
    q = (
        q.transpose(0, 1).contiguous().transpose(0, 1)
    )  # Inductor may change the strides after a permuting producer
    p = 0.0 if seed is None else 0.25
    out, lse = attention(
        q * 1,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        bias=bias,
        gate=gate,
        dropout_p=p,
        seed=seed,
        offset=2,
        return_lse=True,
    )
    return out * 2, lse


def _same_compiled(function, dropout: bool, lengths):
    inputs = qkv(sum(lengths) + 2, 3, 16, seed=len(lengths))
    longest = max(lengths)
    bias = torch.randn(len(lengths), 1, 1, longest, requires_grad=True)
    gate = torch.rand(3, requires_grad=True)
    args = (*inputs, ends_of(lengths), longest, bias, gate, torch.tensor([11]) if dropout else None)
    wanted = (*inputs, bias, gate)
    expected, actual = _compiled_body(*args), function(*args)
    assert_equal((*actual, *grads_of(actual[0], wanted)), (*expected, *grads_of(expected[0], wanted)))
    assert not actual[1].requires_grad


@pytest.mark.sweep
@pytest.mark.parametrize("dropout", [False, True])
def test_compiled_equals_eager(dropout):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(_compiled_body, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 4, 7, 9], [6, 13, 0, 8, 2], [4, 11, 5, 30, 5, 8, 10], [19, 6, 17, 4, 12, 5]):
        _same_compiled(function, dropout, lengths)
    assert counter.frame_count == 1  # one graph for all lengths


@pytest.mark.sweep
def test_inductor_equals_eager():
    torch._dynamo.reset()
    _same_compiled(torch.compile(_compiled_body, fullgraph=True, dynamic=True), True, [6, 13, 0, 8, 2])


@pytest.mark.sweep
def test_compiled_probs_and_padded_layout():
    torch._dynamo.reset()

    def function(q, k, v):
        return attention(q, k, v, return_lse=True, return_probs=True)

    inputs = [torch.randn(2, 5, 2, 16, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    expected, actual = function(*inputs), compiled(*inputs)
    for a, e in zip(
        (*actual, *grads_of(actual[2], inputs[:2])),
        (*expected, *grads_of(expected[2], inputs[:2])),
        strict=True,
    ):
        assert_near(a, e, 1e-6)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_grid_reads_nothing_on_the_host(dropout_p):
    """Fake tensors have no values: reading one, which on a GPU would synchronise, raises."""
    with FakeTensorMode():
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        with pytest.raises(DataDependentOutputException):
            cu_seqlens[1].item()
        q, k, v = (torch.empty(9, 2, 16, dtype=torch.bfloat16) for _ in range(3))
        bias, gate = torch.empty(3, 1, 1, 5), torch.empty(2)
        seed = torch.empty(1, dtype=torch.int64) if dropout_p else None
        options = (cu_seqlens, 5, 0.25, CAUSAL, bias, gate, dropout_p, seed, 0)
        save = dropout_p > 0
        grid = AttentionInputs(q, k, v, *options)
        out, lse, probs, keep_bits = aten_attention._grid_fwd(grid, True, save)
        args, needs = (out, grid, out, lse), AttentionNeeds(*(True,) * 5)
        grads = aten_attention._grid_bwd(*args, None, needs)
        assert not save or aten_attention._grid_bwd(*args, keep_bits, needs)[0].shape == q.shape
        keep = keep_mask(seed, 0, cu_seqlens[:-1], 2, 5, dropout_p) if dropout_p else None
        by_ref = attention_ref(q, k, v, *options[:3], True, bias, gate, dropout_p, keep)
    assert (keep_bits.dtype, tuple(keep_bits.shape)) == (torch.int32, (2, 9, 1) if save else (0,))
    for result in ((out, lse, probs), by_ref):
        assert [tuple(t.shape) for t in result] == [(9, 2, 16), (2, 9), (3, 2, 5, 5)]
        assert [t.dtype for t in result] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v, bias, gate)]
