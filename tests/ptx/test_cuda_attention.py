"""csrc/cuda/attention*.cu as nvcc compiles them for sm_80, with their host code, in the PTX emulator."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import attention as launchers
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.support.cpu_truth import assert_same_bits, randn
from tests.support.cuda_attention_calls import (
    HALF,
    HEADDIMS,
    SEED,
    check_bits,
    check_forward,
    ends_of,
    made,
    sequences,
)

pytest_plugins = ("tests.support.ptx_fixtures",)


@pytest.fixture(autouse=True)
def without_hopper(monkeypatch):
    """Calls that test_cuda_attention_hopper.py is about go to these kernels too."""
    monkeypatch.setattr(launchers, "HOPPER", False)


@pytest.fixture
def forward(emulated):
    """Inputs to out, lse and the saved bits."""

    def run(inputs, save_bits=None):
        save_bits = inputs.dropout_p > 0 if save_bits is None else save_bits
        out, lse, probs, bits = emulated.backend.attention_fwd(inputs, False, save_bits)
        assert probs.shape == (0,)
        return out, lse, bits

    return run


# Every kernel: each head with nothing, with dropout, with a bias.
EVERY_KERNEL = [
    case
    for headdim in (32, 64, 128)
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, lse=True, capacity=3),
        AttentionCase((140, 9), 1, headdim, causal=True, dropout_p=0.25, gate=True),
        AttentionCase((66, 65), 2, headdim, bias="shared", masked=True, dropout_p=0.1, causal=True),
        AttentionCase((130,), 1, headdim, bias="keys", sharpness=8.0, lse=True),
    )
]


def broken_rules(case, dtype):
    rows = testing.run_case(case, "cuda", dtype, backward=False)
    return [(r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", EVERY_KERNEL, ids=repr)
def test_every_kernel(emulated, case, dtype, schedule):
    emulated.schedule = schedule
    assert broken_rules(case, dtype) == []
    assert len(emulated.launches) == 1
    assert "attention_forward" in emulated.launches[0].kernel


def test_every_kernel_is_launched(emulated):
    for dtype in HALF.values():
        for case in EVERY_KERNEL:
            broken_rules(case, dtype)
    ours = {name for name in emulated.library.names if "attention_forward" in name}
    assert len(ours) == 18
    assert {launch.kernel for launch in emulated.launches} == ours


@pytest.mark.parametrize("case", [c for c in CASES if c.headdim >= 32 and not c.probs], ids=repr)
def test_error_rule(emulated, case):
    assert broken_rules(case, torch.bfloat16) == []
    assert emulated.launches


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_warps_gives_the_same_bits(emulated, seed):
    case = AttentionCase((140, 66), 1, 64, causal=True, dropout_p=0.25)
    inputs = case.inputs(torch.bfloat16, "cpu")
    found = []
    for schedule in ("late", "early"):
        emulated.schedule, emulated.seed = schedule, seed
        with testing.error_rule.dispatch.use_backend(attention="cuda"):
            found.append(case.call(**inputs))
    assert torch.equal(*found)
    emulated.seed = 100
    with testing.error_rule.dispatch.use_backend(attention="cuda"):
        assert torch.equal(found[0], case.call(**inputs))


# --- lengths and places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize(
    "lengths",
    [(), (0, 0), (1,), (63, 64, 65), (0, 1, 0), (127, 128, 129), (513,)],
    ids=str,
)
def test_lengths(forward, kernels_only, lengths, p, headdim):
    check_forward(forward, made(lengths, 2 if sum(lengths) < 200 else 1, headdim, p=p, capacity=66, slack=1))


def test_two_thousand_tokens(forward, kernels_only):
    check_forward(forward, made((2048,), 1, 32, torch.float16, causal=True, p=0.1))


@pytest.mark.parametrize("batch", (31, 32, 33, 1023, 1024, 1100))
def test_many_sequences(forward, kernels_only, batch):
    """The search for a place has one round, two or three."""
    draw = random.Random(batch)
    lengths = [draw.choice((0,) * (batch // 20) + (1, 5, 70)) for _ in range(batch)]
    check_forward(forward, made(lengths, 1, 32, capacity=3))


@pytest.mark.parametrize("remainder", (0, 1, 31))
def test_every_sum_of_lengths(forward, kernels_only, remainder):
    """The slots of a sequence depend on the rows before it."""
    lengths = [n for n in range(1, 132) if n % 33 == remainder] + [3] * 70
    random.Random(remainder).shuffle(lengths)
    check_forward(forward, made(lengths, 1, 32))


def test_nothing_to_do(emulated, forward):
    for lengths in ((), (0, 0)):
        shapes = [t.shape for t in forward(made(lengths, 2, 64, p=0.5))]
        assert shapes == [(0, 2, 64), (2, 0), (2, 0, 0)]
    assert emulated.launches == []


@pytest.mark.slow
def test_more_slots_than_an_axis_holds(forward, kernels_only):
    check_forward(forward, made([0] * 66000 + [5], 1, 32, capacity=2))


# --- scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (0.0, 0.5))
@pytest.mark.parametrize(
    "shape", [(1, 2, 67, 67), (3, 2, 67, 67), (3, 1, 1, 67), (1, 1, 67, 1), (1, 1, 1, 1)], ids=str
)
def test_bias(forward, kernels_only, shape, p):
    bias, lengths = randn(*shape), (66, 0, 30)
    check_forward(forward, made(lengths, 2, 64, bias=bias, p=p, slack=1))
    narrow = made(lengths, 2, 32, torch.float16, bias=bias.bfloat16(), p=p, slack=1, causal=True)
    check_forward(forward, narrow)


def test_bias_with_strides(forward, kernels_only):
    inputs = made((70, 9), 3, bias=randn(2, 3, 73, 75)[:, :, 1:71, 2:72])
    for bias in (inputs.bias, inputs.bias.mT):
        out = check_forward(forward, inputs._replace(bias=bias))[0]
        assert torch.equal(out, forward(inputs._replace(bias=bias.contiguous()))[0])


def test_masks_of_lowest_values_and_infinities(forward, kernels_only):
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(2, 1, 70, 70)
    bias[0, :, 3] = -math.inf  # a row without a key
    bias[0, :, 4, :64] = -math.inf  # nothing in the first tile
    bias[0, :, 5, 64:] = -math.inf
    bias[1, :, :, 7:] = lowest
    bias[1, :, 2] = lowest  # equal for all keys: the mean
    inputs = made((70, 66), 2, 64, bias=bias)
    out, lse, _ = check_forward(forward, inputs)
    assert (out[3] == 0).all()
    assert (lse[:, 3] == -math.inf).all()
    torch.testing.assert_close(out[72].float(), inputs.v[70:].float().mean(0), rtol=0, atol=4e-3)


@pytest.mark.parametrize("scale", (0.0, -0.2, -30.0, 3.0))
def test_scales(forward, kernels_only, scale):
    inputs = made((65, 70), softmax_scale=scale)
    check_forward(forward, inputs)
    check_forward(forward, inputs._replace(dropout_p=0.25, seed=SEED, causal=True))


@pytest.mark.parametrize("step", (0.5, 4.0, 30.0, 2000.0, -4.0, -2000.0))
@pytest.mark.parametrize("bias", (False, True))
def test_scores_that_grow_from_tile_to_tile(forward, kernels_only, step, bias):
    """Below 2^8 the maximum that is subtracted stays, above it follows; some rows grow and others do not."""
    inputs = made((330,), 1, 32, torch.float16, softmax_scale=1.0)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    g = torch.Generator().manual_seed(7)
    # Which rows have growing scores: any of the first 128, then the upper eight of each warp's 16 alone.
    q[:128, 0, 0] = torch.randint(0, 2, (128,), generator=g).half()
    q[128:, 0, 0] = torch.arange(128, 330).div(8, rounding_mode="floor").remainder(2).half()
    q[:, 0, 1], k[:, 0, 1] = torch.rand(2, 330, generator=g).half()
    k[:, 0, 0] = torch.arange(330).div(64, rounding_mode="floor") * step
    check_forward(forward, inputs._replace(q=q, k=k, bias=torch.zeros(1, 1, 1, 330) if bias else None))


@pytest.mark.parametrize("p", (0.0, 0.25))
def test_gate(forward, kernels_only, p):
    gate = torch.tensor([0.0, -1.5, 2.0])
    check_forward(forward, made((66, 3), 3, gate=gate, p=p))
    check_forward(forward, made((66, 3), 3, gate=gate.bfloat16(), p=p, bias=randn(2, 1, 1, 66)))


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", (math.nan, math.inf))
@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_outside_a_sequence_gets_in(forward, kernels_only, poison, p, causal):
    """Other sequences, rows after the last one, gaps between rows, and cells of the bias past a length."""
    inputs = made((40, 66, 30), capacity=70, p=p, causal=causal, slack=5)
    cells = randn(3, 2, inputs.max_seqlen, inputs.max_seqlen)
    for bias in (None, cells):
        clean = forward(inputs._replace(bias=bias))
        for kept, (start, n) in enumerate(sequences(inputs)):
            rows, tensors, dirty = slice(start, start + n), [], None
            for t in inputs[:3]:
                memory = t.new_full((t.shape[0] + 2, 2, 40), poison)
                memory[1:-1][rows, :, :32] = t[rows]
                tensors.append(memory[1:-1, :, :32])
            if bias is not None:
                dirty = torch.full_like(cells, poison)
                dirty[kept, :, :n, :n] = bias[kept, :, :n, :n]
            found = forward(inputs._replace(q=tensors[0], k=tensors[1], v=tensors[2], bias=dirty))
            assert torch.equal(found[0][rows], clean[0][rows])
            assert torch.equal(found[1][:, rows], clean[1][:, rows])
            assert (found[0][-70:] == 0).all()
            assert (found[1][:, -70:] == 0).all()


def test_a_nan_stays_in_its_rows(forward, kernels_only):
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


def test_strides(forward, kernels_only):
    """Other strides for each of q, k, v: heads before rows, gaps, a shared row."""
    base = made((66, 20), 2, 64)
    q = base.q.transpose(0, 1).contiguous().transpose(0, 1)
    k = torch.full((86, 3, 80), math.nan, dtype=torch.bfloat16)[:, :2, 8:72]
    k.copy_(base.k)
    v = base.v[:, :1].expand(86, 2, 64)  # both heads read one
    found = check_forward(forward, base._replace(q=q, k=k, v=v))
    for a, b in zip(found, forward(base._replace(v=v.contiguous())), strict=True):
        assert_same_bits(a, b)


def test_a_sequence_does_not_depend_on_its_batch(forward, kernels_only):
    inputs = made((70, 140, 9), 2, 64)
    out, lse, _ = forward(inputs)
    for start, n in sequences(inputs):
        rows = slice(start, start + n)
        q, k, v = (t[rows] for t in inputs[:3])
        alone = inputs._replace(q=q, k=k, v=v, cu_seqlens=ends_of([n]), max_seqlen=n)
        found = forward(alone)
        assert_same_bits(found[0], out[rows])
        assert_same_bits(found[1], lse[:, rows])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (1e-60, 0.1, 0.4999, 0.5, 0.75, 1 - 2**-16, 1 - 2**-20))
@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64))
def test_dropout_bits(forward, kernels_only, p, seed):
    for offset in (0, 2**32 - 1):
        inputs = made((3, 70), p=p, seed=torch.tensor([seed]), offset=offset, slack=70)
        check_bits(inputs, forward(inputs)[2])


def test_saved_bits_change_nothing(forward, kernels_only):
    for bias in (None, randn(2, 1, 1, 70)):
        inputs = made((70, 20), 2, 64, p=0.25, bias=bias)
        (out, lse, bits), again = forward(inputs), forward(inputs, save_bits=False)
        assert bits.numel() > 0
        assert again[2].shape == (0,)
        assert_same_bits(out, again[0])
        assert_same_bits(lse, again[1])


def test_the_seeds_value_counts_and_not_its_address(forward):
    inputs = made((70,), p=0.25)
    seeds = torch.tensor([7, int(SEED), 7])
    out = forward(inputs)[0]
    assert torch.equal(out, forward(inputs._replace(seed=seeds[1:2]))[0])
    assert not torch.equal(out, forward(inputs._replace(seed=seeds[2:]))[0])


# --- which calls it takes -----------------------------------------------------------------------------------


def test_other_calls_go_to_the_next_backend(emulated, forward, monkeypatch):
    calls, following = [], dispatch.next_function

    def counted(*args):
        calls.append(args)
        return following(*args)

    monkeypatch.setattr(dispatch, "next_function", counted)
    base = made((20,), 2, 64)

    def misplaced(t, row, head, first=0):
        memory = t.new_zeros(20 * row + 64)
        return memory[first:].as_strided(t.shape, (row, head, 1)).copy_(t)

    forward(made((20,), 2, 16))
    forward(base._replace(q=misplaced(base.q, 128, 64, 1)))
    forward(base._replace(k=misplaced(base.k, 132, 64)))
    forward(base._replace(v=misplaced(base.v, 144, 68)))
    emulated.backend.attention_fwd(base, True, False)
    assert calls == [("cuda", "attention_fwd", torch.device("cpu"), torch.bfloat16)] * 5
    forward(base._replace(v=misplaced(base.v, 144, 72, 8)))
    assert len(calls) == 5


def test_the_entry_point_refuses(emulated):
    inputs = made((20,), 2, 64)
    args, _ = launchers.attention_args(inputs)
    out = torch.zeros(20, 2, 64, dtype=torch.bfloat16)
    call = launchers.device.extension.cuda_attention_fwd

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
    emulated.register(out, *inputs[:4])
    call(args, out.data_ptr(), 0, 0, 0, 0)  # lse is not wanted
    assert torch.equal(out, emulated.backend.attention_fwd(inputs, False, False)[0])
