"""fastbert.ops.attention_received: what it sums, its edges, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.attention import attention
from fastbert.ops.attention_received import attention_received
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention_received import AttentionReceivedCase
from tests.support.cpu_fixtures import threads  # noqa: F401
from tests.support.hostile.public_ops import PUBLIC
from tests.support.ops import backends

BACKENDS = backends("attention_received")
LENGTHS = (70, 0, 1, 24, 33)


def operands(lengths=LENGTHS, dtype=torch.float32, **options):
    case = AttentionReceivedCase(lengths, **options)
    return case.inputs(dtype, "cpu") | {"max_seqlen": max(lengths)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_the_sum_of_the_probabilities(backend):
    made = operands()
    whole = made["q"], made["k"], made["k"], made["cu_seqlens"], 70
    _, lse, probs = attention(*whole, return_lse=True, return_probs=True)
    with dispatch.use_backend(attention_received=backend):
        found = attention_received(**made | {"lse": lse})
    summed = probs.sum((1, 2))
    for i, each in enumerate(found.split(LENGTHS)):
        torch.testing.assert_close(each, summed[i, : LENGTHS[i]])
        torch.testing.assert_close(each.sum(), torch.tensor(3.0 * LENGTHS[i]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_alone_receives_the_same(backend):
    made = operands()
    with dispatch.use_backend(attention_received=backend):
        found, start = attention_received(**made), 0
        for length, each in zip(LENGTHS, found.split(LENGTHS), strict=True):
            rows = slice(start, start + length)
            alone = attention_received(
                made["q"][rows],
                made["k"][rows],
                torch.tensor([0, length], dtype=torch.int32),
                length,
                made["lse"][:, rows],
            )
            exact = backend == "cpu"
            torch.testing.assert_close(alone, each, **dict(rtol=0, atol=0) if exact else {})
            start += length


def test_threads_change_no_bit(threads):  # noqa: F811
    made, found = operands((256, 200, 31), nheads=12, headdim=64), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found += [attention_received(**made) for _ in range(5)]
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_there_gives_and_receives_nothing(backend):
    made = operands((5, 9), tail=3, blind=True)
    with dispatch.use_backend(attention_received=backend):
        found = attention_received(**made)
        assert not found[14:].any()
        torch.testing.assert_close(found[5:14].sum(), torch.tensor(24.0))
        assert attention_received(**operands((0, 0))).shape == (0,)


def test_bad_inputs():
    made = operands((5, 9))
    for change, error, words in (
        ({"lse": made["lse"].t()}, ValueError, "lse: expected shape"),
        ({"lse": made["lse"].double()}, TypeError, "lse: expected torch.float32"),
        ({"k": made["k"][:, :2]}, ValueError, "k: expected a number of heads"),
        ({"k": made["k"].bfloat16()}, TypeError, "k: expected q's dtype"),
        ({"cu_seqlens": None}, TypeError, "cu_seqlens: expected"),
        ({"max_seqlen": 8}, ValueError, "max_seqlen: expected at least"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a finite"),
    ):
        with pytest.raises(error, match=words):
            attention_received(**made | change)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the compiled CPU kernels")
def test_a_layer_that_keeps_tokens_refuses_other_numbers():
    public = PUBLIC["encoder_layer, kept"]
    base = public.args()
    found = public.function(**base)
    assert found.shape == (5, 15)
    strided = torch.cat([base["x"], base["x"] + 1], 1)[:, :15]
    assert torch.equal(public.function(**base | {"x": strided}), found)
    for change, words in public.rows:
        with pytest.raises((TypeError, ValueError), match=words):
            public.function(**base | change)
