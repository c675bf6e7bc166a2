"""The C++ attention: every instruction set, dtype, odd length, layout and number of threads."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.backends import cpu
from tests.support.cpu_attention import (
    DTYPES,
    backward,
    check,
    everything,
    forward,
    inputs_of,
    own_dtype,
    randn,
    some_bias,
    strided_qkv,
)
from tests.support.cpu_checks import assert_same_on_any_threads


def options_of(lengths, nheads, slack=0):
    """All options at once."""
    size = max(lengths) + slack
    return dict(
        slack=slack,
        causal=True,
        bias=some_bias(len(lengths), nheads, size, lengths),
        gate=torch.tensor([1.5, -0.5, 0.0, 2.0])[:nheads],
        p=0.25,
        scale=0.3,
    )


# --- results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_reads_the_bits_that_it_is_given(every_isa, dtype):
    """Saved bits give what drawn bits give. Bits of cells without a key do not matter."""
    lengths = (3, 0, 26, 1, 70, 129)
    (q, k, v), _ = strided_qkv(229, 2, 24, dtype, 2)
    dout, options = randn(231, 2, 24, dtype=dtype, seed=9), options_of(lengths, 2, slack=40)
    out, lse, _, bits = cpu.attention_fwd(inputs_of(q, k, v, lengths, **options), False, True)
    assert (bits.dtype, tuple(bits.shape)) == (torch.int32, (2, 231, 6))
    drawn = backward(dout, q, k, v, out, lse, lengths, **options)
    noise = torch.randint(-(2**31), 2**31, bits.shape, generator=torch.Generator().manual_seed(1)).int()
    keys = torch.arange(6 * 32)
    start = 0
    for n in lengths:
        row = (keys >= n).unflatten(0, (6, 32)).long() << keys[:32]  # cells past the sequence
        other = torch.where(row.sum(-1) >= 2**31, row.sum(-1) - 2**32, row.sum(-1)).int()
        bits[:, start : start + n] ^= noise[:, start : start + n] & other
        start += n
    bits[:, start:] = noise[:, start:]
    for actual, e in zip(
        backward(dout, q, k, v, out, lse, lengths, **options, keep_bits=bits), drawn, strict=True
    ):
        assert torch.equal(actual.nan_to_num(), e.nan_to_num())
    flipped = backward(dout, q, k, v, out, lse, lengths, **options, keep_bits=~bits)
    assert not any(torch.equal(actual, e) for actual, e in zip(flipped[:3], drawn[:3], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_gradient_alone_has_the_same_bits(every_isa, dtype):
    lengths = (3, 0, 26, 1, 70)
    (q, k, v), _ = strided_qkv(100, 2, 24, dtype, 2)
    dout, options = randn(102, 2, 24, dtype=dtype, seed=9), options_of(lengths, 2)
    out, lse, _ = forward(q, k, v, lengths, **options)
    args = dout, q, k, v, out, lse, lengths
    every = backward(*args, **options)
    alone = options | {"bias": None, "gate": None}
    few = forward(q, k, v, lengths, **alone)[:2]
    plain = backward(*args[:4], *few, lengths, **alone)
    for needs in itertools.product((True, False), repeat=3):
        for given, expected in ((options, every), (alone, plain)):
            grads = backward(
                *args[:4], *((out, lse) if given is options else few), lengths, **given, needs=needs
            )
            for need, actual, e in zip((*needs, True, True), grads, expected, strict=True):
                assert torch.equal(actual, e) if need else actual.shape == (0,)


LENGTHS = {
    "every length": tuple(range(1, 131)),
    "every length, every option": tuple(range(1, 131, 3)),
    "full windows": (511, 512),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("headdim", (16, 64))
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_length(every_isa, dtype, headdim, lengths, guarded):
    options = options_of(LENGTHS[lengths], 2) if "option" in lengths else {}
    check(LENGTHS[lengths], 2 if options else 1, headdim, dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("headdim", (1, 7, 8, 15, 17, 20, 31, 33, 48, 80, 128, 130))
def test_every_head_dimension(every_isa, dtype, headdim, guarded):
    lengths = (1, 5, 64, 0, 17, 65)
    check(lengths, 2, headdim, dtype)
    check(lengths, 2, headdim, dtype, **options_of(lengths, 2, slack=3))


@pytest.mark.parametrize("n", (1, 2, 6, 7, 8, 16, 17, 24, 25, 63, 64, 65, 128, 129))
def test_a_sequence_alone_is_as_in_a_batch(every_isa, n):
    (q, k, v), _ = strided_qkv(n + 131, 2, 20, own_dtype(), 0)
    dout = randn(n + 131, 2, 20, dtype=own_dtype(), seed=9)
    whole = everything(q, k, v, dout, (n, 131))
    alone = everything(q[:n], k[:n], v[:n], dout[:n], (n,))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(alone[name], whole[name][:n]), name
    assert torch.equal(alone["lse"], whole["lse"][:, :n])
    assert torch.equal(alone["probs"][0], whole["probs"][0, :, :n, :n])


@pytest.mark.parametrize("heads", (1, 3, 4))
def test_each_head_is_as_if_alone(every_isa, heads):
    (q, k, v), _ = strided_qkv(40, heads, 24, own_dtype(), 0)
    dout = randn(40, heads, 24, dtype=own_dtype(), seed=9)
    whole = everything(q, k, v, dout, (33, 7))
    for h in range(heads):
        one = slice(h, h + 1)
        alone = everything(q[:, one], k[:, one], v[:, one], dout[:, one].contiguous(), (33, 7))
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(alone[name], whole[name][:, one]), name
        assert torch.equal(alone["lse"], whole["lse"][one])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_strides_of_q_k_and_v_are_their_own(every_isa, order, guarded):
    dtype = own_dtype()
    forms = (
        lambda seed: randn(30, 2, 16, dtype=dtype, seed=seed),
        lambda seed: randn(2, 30, 16, dtype=dtype, seed=seed).transpose(0, 1),
        lambda seed: randn(60, 5, 40, dtype=dtype, seed=seed)[::2, 1:4:2, 7:23],
    )
    q, k, v = (forms[i](seed) for seed, i in enumerate(order))
    dout = randn(30, 2, 16, dtype=dtype, seed=9)
    strided = everything(q, k, v, dout, (13, 17))
    plain = everything(*(t.contiguous() for t in (q, k, v)), dout, (13, 17))
    for name, t in plain.items():
        assert torch.equal(strided[name], t), name


def test_offsets_beyond_int32(every_isa):
    step, dtype = 2**31 // 16 + 64, torch.bfloat16 if every_isa == "avx512_bf16" else torch.float16
    try:
        storage = torch.empty(16 * step + 1024, dtype=dtype)  # mapped where it is written
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not to be had: {error}")
    plain = [randn(17, 2, 16, dtype=dtype, seed=s) for s in range(3)]
    dout = randn(17, 2, 16, dtype=dtype, seed=9)
    expected = everything(*plain, dout, (1, 16))
    far = [storage.as_strided((17, 2, 16), (step, 16, 1), 64 * i) for i in range(3)]
    for view, t in zip(far, plain, strict=True):
        view.copy_(t)
    for i in range(3):  # one at a time, then all
        for chosen in ((i,), range(3)):
            mixed = [far[j] if j in chosen else plain[j] for j in range(3)]
            for name, t in everything(*mixed, dout, (1, 16)).items():
                assert torch.equal(t, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", (0.0, -0.7, 2.5))
def test_softmax_scale(every_isa, dtype, scale, guarded):
    check((9, 30), 2, 16, dtype, scale=scale, noise=1e-5)


# --- batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", ((), (0,), (0, 0, 0), (0, 1, 0), (0, 7, 0, 0, 2)), ids=str)
@pytest.mark.parametrize("capacity", (0, 4))
def test_empty_sequences(every_isa, lengths, capacity, guarded):
    for slack in (0, 3):
        check(lengths, 2, 16, torch.float32, capacity=capacity, slack=slack)
        size = max(lengths, default=0) + slack
        bias = randn(len(lengths), 1, 1, size, seed=5)
        check(lengths, 2, 16, torch.bfloat16, capacity, slack=slack, bias=bias, gate=torch.ones(2), p=0.1)


def test_many_sequences(every_isa, guarded):
    lengths = tuple(1 + i % 3 for i in range(10_000))
    check(lengths, 1, 4, torch.float32, gate=torch.ones(1), noise=1e-5)


# --- determinism, threads, processes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "nheads"),
    (((119,), 1), ((120,), 1), ((121,), 2), ((240, 241, 7), 1), ((500,), 1), ((9,) * 40, 2)),
    ids=str,
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_any_number_of_threads_gives_the_same_bits(every_isa, lengths, nheads, dtype):
    """With few sequences and heads, threads share the queries of one sequence."""
    total = sum(lengths)
    (q, k, v), _ = strided_qkv(total, nheads, 20, dtype, 0)
    dout = randn(total, nheads, 20, dtype=dtype, seed=9)
    for options in ({}, options_of(lengths, nheads)):
        assert_same_on_any_threads(
            lambda options=options: everything(q, k, v, dout, lengths, **options).values(),
            repeats=25 if lengths == (121,) else 0,
        )


def test_one_long_sequence_is_right_on_three_threads(every_isa, threads, guarded):
    torch.set_num_threads(3)
    check((131,), 1, 16, torch.float32)
    check((250, 3), 1, 16, torch.bfloat16, **options_of((250, 3), 1))
