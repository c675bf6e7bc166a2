"""Dropout of `attention` is Philox's: known bits in every layout, at every address."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from fastbert.ops.attention import attention
from fastbert.ops.dropout import philox_keep
from tests.support.attention_inputs import (
    BACKENDS,
    PLAIN,
    assert_near,
    assert_same,
    ends,
    grads_of,
    qkv,
    serving,
)


def _dropped(lengths, max_seqlen, p, seed, offset=0, nheads=2):
    """The op's dropout mask: scores are equal and v holds unit vectors, so out shows the kept cells."""
    n = max(lengths)
    q = torch.zeros(sum(lengths), nheads, n)
    v = torch.cat([torch.eye(n)[:length] for length in lengths]).unsqueeze(1).expand(-1, nheads, -1)
    return attention(q, q, v.contiguous(), ends(lengths), max_seqlen, dropout_p=p, seed=seed, offset=offset)


@pytest.mark.parametrize("backend", [*BACKENDS, "grid"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1234, -5, 2**62 + 17])
def test_dropout_bits_are_the_golden_ones(backend, p, seed):
    lengths = [6, 0, 13, 16]
    seed = torch.tensor([seed])
    with serving(backend):
        out = _dropped(lengths, 16, p, seed, 2**32 - 3)
    start = 0
    for n in lengths:
        rows, cols = torch.arange(start, start + n).unsqueeze(1), torch.arange(n)
        for head in range(2):
            keep = philox_keep(seed, 2**32 - 3, head, rows, cols, p)
            cells = out[start : start + n, head]
            assert torch.equal(cells[:, :n] != 0, keep)
            assert not cells[:, n:].any()
            assert torch.allclose(cells[:, :n], keep / (n * (1 - p)), rtol=1e-6, atol=0)
        start += n


@pytest.mark.parametrize("backend", PLAIN)
def test_dropout_does_not_depend_on_max_seqlen_or_layout_or_address(backend):
    inputs = qkv(12, 2, 8)
    seed = torch.tensor([77])
    moved = torch.tensor([1, 2, 77])[2:]
    options = {"dropout_p": 0.3, "offset": 4}

    def run(max_seqlen, seed):
        out = attention(*inputs, ends([6, 6]), max_seqlen, seed=seed, **options)
        return (out, *grads_of(out, inputs))

    with serving(backend):
        expected = run(6, seed)
        padded = attention(*(t.reshape(2, 6, 2, 8) for t in inputs), seed=seed, **options)
        out = padded.reshape(12, 2, 8)
        assert_same((out, *grads_of(out, inputs)), expected)
        assert_same(run(6, moved), expected)
        for max_seqlen in (7, 33):
            for a, e in zip(run(max_seqlen, seed), expected, strict=True):
                if backend == "grid":  # longer rows are summed in another order
                    assert_near(a, e, 1e-6)
                else:
                    assert torch.equal(a, e)
        assert not torch.equal(run(6, torch.tensor([78]))[0], expected[0])
        assert not torch.equal(
            attention(*inputs, ends([6, 6]), 6, seed=seed, dropout_p=0.3, offset=5), expected[0]
        )


@pytest.mark.parametrize("backend", PLAIN)
def test_dropout_probability_zero_ignores_the_seed_and_probs_are_before_dropout(backend):
    inputs = [t.detach() for t in qkv(12, 2, 8)]
    with serving(backend):
        plain = attention(*inputs, ends([5, 7]), 7)
        assert torch.equal(attention(*inputs, ends([5, 7]), 7, dropout_p=0, seed=torch.tensor([1])), plain)
        probs = attention(*inputs, ends([5, 7]), 7, return_probs=True)[1]
        dropped = attention(
            *inputs, ends([5, 7]), 7, return_probs=True, dropout_p=0.5, seed=torch.tensor([1])
        )[1]
    torch.testing.assert_close(probs, dropped, rtol=1e-6, atol=0)  # dropout may compute them in another way


def test_dropout_rate_and_mean():
    out = _dropped([64] * 16, 64, 0.25, torch.tensor([3]))
    kept = (out != 0).double().mean().item()
    assert abs(kept - 0.75) < 4 * (0.75 * 0.25 / out.numel()) ** 0.5
    assert abs(out.double().sum(-1).mean().item() - 1) < 0.01


def test_checkpointing_draws_the_same_mask():
    from torch.utils.checkpoint import checkpoint

    inputs = qkv(12, 2, 8)

    def run(q, k, v):
        return attention(q, k, v, ends([5, 7]), 7, dropout_p=0.3, seed=torch.tensor([5])).tanh()

    expected = run(*inputs)
    actual = checkpoint(run, *inputs, use_reentrant=False)
    assert_same((actual, *grads_of(actual, inputs)), (expected, *grads_of(expected, inputs)))
