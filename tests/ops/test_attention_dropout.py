"""Dropout of `attention` is Philox's: known bits in every layout, at every address."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from fastbert.ops.attention import attention
from tests.support.attention_inputs import PLAIN, assert_near, grads_of, qkv, serving
from tests.support.inputs import ends_of
from tests.support.ops import assert_equal


@pytest.mark.sweep_of("triton")
@pytest.mark.parametrize("backend", PLAIN)
def test_dropout_does_not_depend_on_max_seqlen_or_layout_or_address(backend):
    inputs = qkv(12, 2, 8)
    seed = torch.tensor([77])
    moved = torch.tensor([1, 2, 77])[2:]
    options = {"dropout_p": 0.3, "offset": 4}

    def run(max_seqlen, seed):
        out = attention(*inputs, ends_of([6, 6]), max_seqlen, seed=seed, **options)
        return (out, *grads_of(out, inputs))

    with serving(backend):
        expected = run(6, seed)
        padded = attention(*(t.reshape(2, 6, 2, 8) for t in inputs), seed=seed, **options)
        out = padded.reshape(12, 2, 8)
        assert_equal((out, *grads_of(out, inputs)), expected)
        assert_equal(run(6, moved), expected)
        for max_seqlen in (7, 33):
            for a, e in zip(run(max_seqlen, seed), expected, strict=True):
                if backend == "grid":  # longer rows are summed in another order
                    assert_near(a, e, 1e-6)
                else:
                    assert torch.equal(a, e)
        assert not torch.equal(run(6, torch.tensor([78]))[0], expected[0])
        assert not torch.equal(
            attention(*inputs, ends_of([6, 6]), 6, seed=seed, dropout_p=0.3, offset=5), expected[0]
        )


@pytest.mark.parametrize("backend", PLAIN)
def test_dropout_probability_zero_ignores_the_seed_and_probs_are_before_dropout(backend):
    inputs = [t.detach() for t in qkv(12, 2, 8)]
    with serving(backend):
        plain = attention(*inputs, ends_of([5, 7]), 7)
        assert torch.equal(attention(*inputs, ends_of([5, 7]), 7, dropout_p=0, seed=torch.tensor([1])), plain)
        probs = attention(*inputs, ends_of([5, 7]), 7, return_probs=True)[1]
        dropped = attention(
            *inputs, ends_of([5, 7]), 7, return_probs=True, dropout_p=0.5, seed=torch.tensor([1])
        )[1]
    torch.testing.assert_close(probs, dropped, rtol=1e-6, atol=0)  # dropout may compute them in another way
