"""The CUDA attention's forward, compiled for the host: its threads are fibers whose order is drawn.

Each launch draws another order, and whether asynchronous copies land late or early. Shared memory and outputs
start as NaN.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import attention as launcher
from fastbert.ops.attention import AttentionInputs, attention_ref
from fastbert.ops.attention_grid import keep_mask, unpack_bits
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import CASES, AttentionCase

pytest_plugins = ("tests.support.cpu_fixtures", "tests.support.cuda_fixtures")
pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("cuda_on_host", "guarded")]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADDIMS = (32, 64, 128)
SEED = torch.tensor([0x123456789ABCDEF])


def ends_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def made(
    lengths,
    nheads=1,
    headdim=32,
    dtype=torch.bfloat16,
    *,
    capacity=0,
    slack=0,
    scale=None,
    causal=False,
    bias=None,
    gate=None,
    p=0.0,
    seed=SEED,
    offset=9,
    random_seed=0,
) -> AttentionInputs:
    """Inputs whose q, k, v are views of one packed tensor."""
    g = torch.Generator().manual_seed(random_seed)
    total = sum(lengths) + capacity
    q, k, v = torch.randn(total, 3, nheads, headdim, generator=g).to(dtype).unbind(1)
    scale = headdim**-0.5 if scale is None else scale
    size = max(lengths, default=0) + slack
    return AttentionInputs(
        q, k, v, ends_of(lengths), size, scale, causal, bias, gate, p, seed if p > 0 else None, offset
    )


def forward(inputs: AttentionInputs, save_bits=None):
    """out, lse and the saved bits."""
    out, lse, probs, bits = launcher.attention_fwd(
        inputs, False, inputs.dropout_p > 0 if save_bits is None else save_bits
    )
    assert probs.shape == (0,)
    return out, lse, bits


def drawn(inputs: AttentionInputs):
    """The mask of dropout by its definition, (batch, nheads, S, S); None without dropout."""
    if inputs.dropout_p == 0:
        return None
    return keep_mask(
        inputs.seed,
        inputs.offset,
        inputs.cu_seqlens[:-1],
        inputs.q.shape[1],
        inputs.max_seqlen,
        inputs.dropout_p,
    )


def truth(inputs: AttentionInputs):
    """(out, lse, bound) in float64; the bound is what rounding P and out to the dtype may cost."""
    q, k, v, cu_seqlens, size, scale, causal, bias, gate, p, _, _ = inputs
    wide = [t.double() for t in (q, k, v)]
    bias64, gate64 = (None if t is None else t.double() for t in (bias, gate))
    keep = drawn(inputs)
    options = dict(softmax_scale=scale, causal=causal, bias=bias64, gate=gate64, dropout_p=p, keep_mask=keep)
    out, lse, _ = attention_ref(*wide, cu_seqlens, size, **options)
    options["gate"] = None if gate is None else gate64.abs()
    size_of_terms, *_ = attention_ref(*wide[:2], wide[2].abs(), cu_seqlens, size, **options)
    eps = torch.finfo(q.dtype).eps
    scores = wide[0].norm(dim=-1).max() * wide[1].norm(dim=-1).max() * abs(scale) if q.numel() else 0.0
    rounding = eps / 2 * (size_of_terms * 1.01 + out.abs() * (1 + eps))
    # float's own part, and fp16's numbers below 2^-14
    largest = max(v.double().abs().flatten().tolist(), default=0.0)
    noise = 1e-6 * (1 + scores) * size_of_terms + 1e-7 * largest * size / (1 - p)
    if gate is not None:
        noise = noise * (1 + gate64.abs().unsqueeze(-1))
    return out, lse, rounding + noise


def check(inputs: AttentionInputs, exact_bits=True):
    out, lse, bits = forward(inputs)
    expected, expected_lse, bound = truth(inputs)
    end = int(inputs.cu_seqlens[-1])
    assert out.shape == inputs.q.shape
    assert out.dtype == inputs.q.dtype
    assert out.is_contiguous()
    assert (out[end:] == 0).all()
    assert (lse[:, end:] == 0).all()
    error = (out.double() - expected).abs()
    assert out.isfinite().all(), "NaN or infinity"
    assert (error <= bound).all(), f"error {(error / bound).max():.3g} times what rounding allows"
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=4e-6)
    if inputs.dropout_p > 0 and exact_bits:
        check_bits(inputs, bits)
    return out, lse, bits


def check_bits(inputs: AttentionInputs, bits):
    size, nheads = inputs.max_seqlen, inputs.q.shape[1]
    assert bits.shape == (nheads, inputs.q.shape[0], -(-size // 32))
    assert bits.dtype == torch.int32
    keep = drawn(inputs)
    for b, (start, end) in enumerate(
        zip(inputs.cu_seqlens.tolist(), inputs.cu_seqlens[1:].tolist(), strict=False)
    ):
        n = end - start
        found, wanted = unpack_bits(bits[:, start:end], n), keep[b, :, :n, :n]
        if inputs.causal:
            found, wanted = found.tril(), wanted.tril()
        assert torch.equal(found, wanted), f"bits of sequence {b}"


# --- the error rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case, dtype):
    """Gradients too: they are made of this backend's out, lse and saved bits."""
    rows = testing.run_case(case, "cuda", dtype, "cpu")
    assert [f"{r.quantity}: {r.reason}" for r in rows if not r.passed] == []


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_cases_of_every_head(kernels_only, headdim, dtype):
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, lse=True),
        AttentionCase((70, 33), 2, headdim, packed_qkv=True, dropout_p=0.1, gate=True),
        AttentionCase((65, 64), 1, headdim, causal=True, bias="shared", masked=True, lse=True),
        AttentionCase((70, 40), 2, headdim, bias="keys", masked=True, dropout_p=0.25, capacity=3),
        AttentionCase((130,), 1, headdim, sharpness=16.0),
    ):
        rows = testing.run_case(case, "cuda", dtype, "cpu", backward=False)
        assert [f"{case.id} {r.quantity}: {r.reason}" for r in rows if not r.passed] == []


# --- lengths and places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize(
    "lengths",
    [
        (1,),
        (63,),
        (64,),
        (65,),
        (0, 1, 0),
        (0, 0, 0, 1),
        (127, 128, 129),
        (2, 0, 64, 0, 63, 65),
        (191, 192, 193),
    ],
    ids=str,
)
def test_lengths(kernels_only, lengths, p, headdim):
    check(made(lengths, 2 if sum(lengths) < 200 else 1, headdim, p=p, capacity=1, slack=1))


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("length", (511, 512, 513))
def test_bert_lengths(kernels_only, length, causal):
    check(made((length,), 1, 64, causal=causal))


@pytest.mark.parametrize("p", (0.0, 0.1))
def test_two_thousand_tokens(kernels_only, p):
    check(made((2048,), 1, 32, torch.float16, causal=True, p=p))


@pytest.mark.parametrize("remainder", (0, 1, 31))
def test_every_sum_of_lengths(kernels_only, remainder):
    """The slots of a sequence depend on the rows before it."""
    lengths = [n for n in range(1, 132) if n % 33 == remainder] + [3] * 70
    random.Random(remainder).shuffle(lengths)
    check(made(lengths, 1, 32))


@pytest.mark.parametrize("batch", (31, 32, 33, 1023, 1024, 1100))
def test_many_sequences(kernels_only, batch):
    """The search for a place has one round, two or three."""
    draw = random.Random(batch)
    lengths = [draw.choice((0,) * (batch // 20) + (1, 5, 70)) for _ in range(batch)]
    check(made(lengths, 1, 32, capacity=3))


@pytest.mark.parametrize("capacity", (1, 63, 64, 65, 200))
@pytest.mark.parametrize("lengths", [(), (0,), (63,), (64,), (1, 0)], ids=str)
def test_rows_after_the_last_sequence_are_zero(kernels_only, lengths, capacity):
    check(made(lengths, 2, 64, capacity=capacity, slack=1))


def test_nothing_to_do(kernels_only):
    for lengths in ((), (0, 0)):
        inputs = made(lengths, 2, 64, p=0.5)
        out, lse, bits = forward(inputs)
        assert out.shape == (0, 2, 64)
        assert lse.shape == (2, 0)
        assert bits.shape == (2, 0, 0)


@pytest.mark.slow
def test_more_slots_than_an_axis_holds(kernels_only):
    lengths = [0] * 66000 + [5]
    check(made(lengths, 1, 32, capacity=2))


# --- scores -------------------------------------------------------------------------------------------------


def some_bias(kind, batch, nheads, size, random_seed=1):
    shape = {
        "shared": (1, nheads, size, size),
        "sequence": (batch, nheads, size, size),
        "keys": (batch, 1, 1, size),
        "rows": (1, 1, size, 1),
        "one": (1, 1, 1, 1),
    }[kind]
    return torch.randn(*shape, generator=torch.Generator().manual_seed(random_seed))


@pytest.mark.parametrize("p", (0.0, 0.5))
@pytest.mark.parametrize("kind", ("shared", "sequence", "keys", "rows", "one"))
def test_bias(kernels_only, kind, p):
    lengths = (66, 0, 30)
    bias = some_bias(kind, 3, 2, 67)
    check(made(lengths, 2, 64, bias=bias, p=p, slack=1))
    check(made(lengths, 2, 32, torch.float16, bias=bias.to(torch.bfloat16), p=p, slack=1, causal=True))


def test_bias_with_strides(kernels_only):
    size = 70
    wide = torch.randn(2, 3, size + 3, size + 5)
    inputs = made((70, 9), 3, 32, bias=wide[:, :, 1 : size + 1, 2 : size + 2])
    out = check(inputs)[0]
    assert torch.equal(out, forward(inputs._replace(bias=inputs.bias.contiguous()))[0])
    assert torch.equal(
        forward(inputs._replace(bias=inputs.bias.mT))[0],
        forward(inputs._replace(bias=inputs.bias.mT.contiguous()))[0],
    )


def test_masks_of_lowest_values_and_infinities(kernels_only):
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(2, 1, 70, 70)
    bias[0, :, 3] = -math.inf  # a row without a key
    bias[0, :, 4, :64] = -math.inf  # nothing in the first tile
    bias[0, :, 5, 64:] = -math.inf
    bias[1, :, :, 7:] = lowest
    bias[1, :, 2] = lowest  # equal for all keys: the mean
    inputs = made((70, 66), 2, 64, bias=bias)
    out, lse, _ = check(inputs)
    assert (out[3] == 0).all()
    assert (lse[:, 3] == -math.inf).all()
    expected = inputs.v[70:].float().mean(0)
    torch.testing.assert_close(out[72].float(), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("scale", (0.0, -0.2, -30.0, 3.0))
def test_scales(kernels_only, scale):
    inputs = made((65, 70), 2, 32, scale=scale)
    check(inputs)
    check(inputs._replace(dropout_p=0.25, seed=SEED, causal=True))


@pytest.mark.parametrize("step", (0.5, 4.0, 30.0, 2000.0, -4.0, -2000.0))
@pytest.mark.parametrize("bias", (False, True))
def test_scores_that_grow_from_tile_to_tile(kernels_only, step, bias):
    """Below 2^8 the maximum that is subtracted stays, above it follows; some rows grow and others do not."""
    inputs = made((330,), 1, 32, torch.float16, scale=1.0)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    # Which rows have growing scores: any of the first 128, then the upper eight of each warp's 16 alone.
    q[:128, 0, 0] = torch.randint(0, 2, (128,)).half()
    q[128:, 0, 0] = torch.arange(128, 330).div(8, rounding_mode="floor").remainder(2).half()
    q[:, 0, 1] = torch.rand(330).half()
    k[:, 0, 0] = torch.arange(330).div(64, rounding_mode="floor") * step
    k[:, 0, 1] = torch.rand(330).half()
    check(inputs._replace(q=q, k=k, bias=torch.zeros(1, 1, 1, 330) if bias else None))


def test_whole_numbers_are_exact(kernels_only):
    """Equal scores of 2^n keys: out is the mean, and lse is n log 2, to the bit."""
    for n in (1, 64, 128):
        inputs = made((n,), 1, 64, torch.float16)
        v = torch.randint(-64, 65, inputs.v.shape, generator=torch.Generator().manual_seed(n)).half()
        out, lse, _ = forward(inputs._replace(q=torch.zeros_like(inputs.q), v=v))
        assert torch.equal(out, v.double().mean(0, keepdim=True).half().expand_as(out))
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(n)), rtol=1e-7, atol=0)


@pytest.mark.parametrize("p", (0.0, 0.25))
def test_gate(kernels_only, p):
    gate = torch.tensor([0.0, -1.5, 2.0])
    check(made((66, 3), 3, 32, gate=gate, p=p))
    check(made((66, 3), 3, 32, gate=gate.bfloat16(), p=p, bias=some_bias("keys", 2, 3, 66)))


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", (math.nan, math.inf))
@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_outside_a_sequence_gets_in(kernels_only, poison, p, causal):
    """Other sequences, rows after the last one, gaps between rows, and cells of the bias past a length."""
    lengths, headdim = (40, 66, 30), 32
    inputs = made(lengths, 2, headdim, capacity=70, p=p, causal=causal, slack=5)
    cells = some_bias("sequence", 3, 2, inputs.max_seqlen)
    for bias in (None, cells):
        clean = forward(inputs._replace(bias=bias))
        for kept in range(3):
            start, end = inputs.cu_seqlens[kept : kept + 2].tolist()
            tensors = []
            for t in inputs[:3]:
                memory = t.new_full((t.shape[0] + 2, 2, headdim + 8), poison)
                memory[1 + start : 1 + end, :, :headdim] = t[start:end]
                tensors.append(memory[1:-1, :, :headdim])
            dirty = bias
            if bias is not None:
                n = lengths[kept]
                dirty = torch.full_like(cells, poison)
                dirty[kept, :, :n, :n] = bias[kept, :, :n, :n]
            found = forward(inputs._replace(q=tensors[0], k=tensors[1], v=tensors[2], bias=dirty))
            assert torch.equal(found[0][start:end], clean[0][start:end])
            assert torch.equal(found[1][:, start:end], clean[1][:, start:end])
            assert (found[0][-70:] == 0).all()
            assert (found[1][:, -70:] == 0).all()


def test_a_nan_stays_in_its_rows(kernels_only):
    inputs = made((66, 66), 2, 64)
    clean = forward(inputs)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[70, 0, 3] = math.nan
    out, lse, _ = forward(inputs._replace(q=q))
    assert out[70, 0].isnan().all()
    assert lse[0, 70].isnan()
    out[70, 0], lse[0, 70] = clean[0][70, 0], clean[1][0, 70]
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])
    k[3, 1, 0] = math.nan
    out, lse, _ = forward(inputs._replace(k=k))
    assert out[:66, 1].isnan().all()
    assert lse[1, :66].isnan().all()
    assert torch.equal(out[66:], clean[0][66:])
    assert torch.equal(out[:, 0], clean[0][:, 0])


def test_strides(kernels_only):
    """Other strides for each of q, k, v: heads before rows, gaps, a shared row."""
    base = made((66, 20), 2, 64)
    q = base.q.transpose(0, 1).contiguous().transpose(0, 1)
    k = torch.full((86, 3, 80), math.nan, dtype=torch.bfloat16)[:, :2, 8:72]
    k.copy_(base.k)
    v = base.v[:, :1].expand(86, 2, 64)  # both heads read one
    inputs = base._replace(q=q, k=k, v=v)
    out = check(inputs)
    again = forward(base._replace(v=v.contiguous()))
    assert torch.equal(out[0], again[0])
    assert torch.equal(out[1], again[1])


def test_other_calls_go_to_the_next_backend(monkeypatch):
    calls, following = [], launcher.dispatch.next_function

    def counted(*args):
        calls.append(args)
        return following(*args)

    monkeypatch.setattr(launcher.dispatch, "next_function", counted)
    base = made((20,), 2, 64)

    def misplaced(t, row, head, first=0):
        memory = t.new_zeros(20 * row + 64)
        out = memory[first:].as_strided(t.shape, (row, head, 1))
        return out.copy_(t)

    forward(made((20,), 2, 16))
    forward(base._replace(q=misplaced(base.q, 128, 64, 1)))
    forward(base._replace(k=misplaced(base.k, 132, 64)))
    forward(base._replace(v=misplaced(base.v, 144, 68)))
    launcher.attention_fwd(base, True, False)
    assert calls == [("cuda", "attention_fwd", torch.device("cpu"), torch.bfloat16)] * 5
    forward(base._replace(v=misplaced(base.v, 144, 72, 8)))
    assert len(calls) == 5


def test_the_entry_point_refuses(emulated_extension):
    inputs = made((20,), 2, 64)
    args, _ = launcher.attention_args(inputs)
    out = torch.zeros(20, 2, 64, dtype=torch.bfloat16)
    call = emulated_extension.cuda_attention_fwd

    def changed(**what):
        names = ["dtype", "batch", "nheads", "headdim", "total", "max_seqlen", "cu_seqlens"]
        names += [f"{t}{n}" for t in "qkv" for n in ("", "_row", "_head")]
        values = dict(zip(names, args, strict=False)) | what
        return (*values.values(), *args[len(names) :])

    for text, what in (
        ("dtype", {"dtype": 0}),
        ("headdim", {"headdim": 48}),
        ("multiples of 16 bytes", {"q": args[7] + 2}),
        ("multiples of 8", {"k_row": 132}),
        ("multiples of 8", {"v_head": 68}),
        ("total", {"total": 2**30}),
        ("batch", {"batch": 2**30}),
    ):
        with pytest.raises(RuntimeError, match=text):
            call(changed(**what), out.data_ptr(), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call(changed(cu_seqlens=0), out.data_ptr(), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="out"):
        call(args, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="expected 27"):
        call(args[:-1], out.data_ptr(), 0, 0, 0, 0)
    call(args, out.data_ptr(), 0, 0, 0, 0)  # lse is not wanted
    assert torch.equal(out, forward(inputs)[0])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (1e-60, 0.1, 0.4999, 0.5, 0.75, 1 - 2**-16, 1 - 2**-20))
@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64))
def test_dropout_bits(kernels_only, p, seed):
    for offset in (0, 2**32 - 1):
        inputs = made((3, 70), 2, 32, p=p, seed=torch.tensor([seed]), offset=offset, slack=70)
        check_bits(inputs, forward(inputs)[2])


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_dropout_drops_what_the_bits_say(kernels_only, headdim):
    """Equal scores and values of one: a row of out is the share that is kept."""
    inputs = made((130, 40), 2, headdim, torch.float16, p=0.5)
    inputs = inputs._replace(q=torch.zeros_like(inputs.q), v=torch.ones_like(inputs.v))
    out, _, bits = check(inputs)
    share = unpack_bits(bits[:, :130], 130).double().mean(-1) / 0.5
    torch.testing.assert_close(out[:130, :, 0].double().t(), share, rtol=1e-3, atol=0)


def test_saved_bits_change_nothing(kernels_only):
    for options in ({}, {"bias": some_bias("keys", 2, 2, 70)}):
        inputs = made((70, 20), 2, 64, p=0.25, **options)
        (out, lse, bits), again = forward(inputs), forward(inputs, save_bits=False)
        assert bits.numel() > 0
        assert again[2].shape == (0,)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])


def test_the_seeds_value_counts_and_not_its_address(kernels_only):
    inputs = made((70,), 1, 32, p=0.25)
    seeds = torch.tensor([7, int(SEED), 7])
    out = forward(inputs)[0]
    assert torch.equal(out, forward(inputs._replace(seed=seeds[1:2]))[0])
    assert not torch.equal(out, forward(inputs._replace(seed=seeds[2:]))[0])


def test_gradients_use_the_bits_that_forward_saved():
    case = AttentionCase((70, 19), 2, 64, dropout_p=0.25, packed_qkv=True)
    inputs = case.inputs(torch.bfloat16, "cpu")
    inputs["qkv"].requires_grad_()
    grads = []
    for backend in ("cuda", "aten"):
        with dispatch.use_backend(attention=backend):
            out = case.call(**inputs)
            grads.append(torch.autograd.grad(out.float().square().sum(), inputs["qkv"])[0])
    torch.testing.assert_close(grads[0].float(), grads[1].float(), rtol=0, atol=0.1)


# --- determinism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_every_order_of_threads_gives_the_same_bits(kernels_only, headdim):
    options = dict(causal=True, p=0.25, bias=some_bias("shared", 2, 1, 140))
    for inputs in (made((140, 66), 1, headdim, **options), made((140, 66), 1, headdim)):
        first = forward(inputs)
        for _ in range(6):
            assert all(torch.equal(a, b) for a, b in zip(first, forward(inputs), strict=True))


def test_a_sequence_does_not_depend_on_its_batch(kernels_only):
    inputs = made((70, 140, 9), 2, 64, p=0.0)
    out, lse, _ = forward(inputs)
    for start, end in ((0, 70), (70, 210), (210, 219)):
        alone = inputs._replace(
            q=inputs.q[start:end],
            k=inputs.k[start:end],
            v=inputs.v[start:end],
            cu_seqlens=ends_of([end - start]),
            max_seqlen=end - start,
        )
        found = forward(alone)
        assert torch.equal(found[0], out[start:end])
        assert torch.equal(found[1], lse[:, start:end])


# --- fuzz ---------------------------------------------------------------------------------------------------


def drawn_inputs(draw: random.Random) -> AttentionInputs:
    lengths = [
        draw.choice(
            (0, 1, draw.randint(2, 20), draw.randint(40, 80), draw.randint(60, 70), draw.randint(90, 140))
        )
        for _ in range(draw.randint(1, 4))
    ]
    nheads, headdim = draw.randint(1, 2), draw.choice((32, 32, 64, 128))
    slack = draw.choice((0, 0, 1, 40))
    size = max(lengths) + slack
    bias = None
    if draw.random() < 0.4 and size > 0:
        bias = some_bias(
            draw.choice(("shared", "sequence", "keys", "rows", "one")),
            len(lengths),
            nheads,
            size,
            draw.randint(0, 2**31),
        )
        if draw.random() < 0.5:
            bias[torch.rand(bias.shape) < 0.2] = -math.inf
    return made(
        lengths,
        nheads,
        headdim,
        draw.choice(list(HALF.values())),
        capacity=draw.choice((0, 0, 1, 70)),
        slack=slack,
        scale=draw.choice((None, None, 0.5, -0.1)),
        causal=draw.random() < 0.4,
        bias=bias,
        gate=torch.randn(nheads) if draw.random() < 0.3 else None,
        p=draw.choice((0.0, 0.0, 0.1, 0.6)),
        seed=torch.tensor([draw.randint(-(2**63), 2**63 - 1)]),
        offset=draw.randint(0, 2**32 - 1),
        random_seed=draw.randint(0, 2**31),
    )


@pytest.mark.parametrize("part", range(12))
def test_fuzz(kernels_only, part):
    draw = random.Random(part)
    for i in range(45):
        inputs = drawn_inputs(draw)
        try:
            check(inputs)
        except Exception as error:
            q, _, _, ends, size, scale, causal, bias, gate, p, *_ = inputs
            what = f"{tuple(q.shape)} {q.dtype} {ends.diff().tolist()} S={size} scale={scale} causal={causal}"
            what += f" bias={None if bias is None else tuple(bias.shape)} gate={gate is not None} p={p}"
            raise AssertionError(f"fuzzed call {i}: {what}: {error}") from error
