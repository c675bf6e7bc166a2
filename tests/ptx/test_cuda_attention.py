"""csrc/cuda/attention*.cu and their host code, as nvcc compiles them for sm_90a, emulated."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.backends.extension import attention as attention_args
from fastbert.ops.attention_inputs import CAUSAL, Window
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.support.attention_calls import (
    HALF,
    HEADDIMS,
    SEED,
    broken_rules,
    check_bits,
    check_forward,
    ends_of,
    made,
    sequences,
)
from tests.support.cpu_truth import assert_same_bits, randn

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

TIGHT = (1e-5, 1e-6)  # of sums of float32: relative to their terms, absolute
HEADS = pytest.mark.parametrize(("nheads", "headdim"), ((2, 64), (3, 32)))  # sm_90a pairs heads of 32
KINDS = ((torch.bfloat16, 0.0), (torch.float16, 0.25), (torch.float32, 0.0))  # dtype, dropout_p
NAMES = ["dtype", "batch", "nheads", "headdim", "total", "max_seqlen", "kv_heads", "cu_seqlens"]
NAMES += [f"{t}{n}" for t in "qkv" for n in ("", "_row", "_head")]
NAMES += [
    "softmax_scale",
    "left",
    "right",
    "bias",
    *(f"bias_{n}" for n in ("batch", "head", "row")),
    "gate",
    "seed",
]


def changed(args, **changes):
    """Arguments of the entry point, some of them by name."""
    values = dict(zip(NAMES, args, strict=False))
    assert values.keys() >= changes.keys()
    return (*(values | changes).values(), *args[len(NAMES) :])


def running(emulated, hopper):
    """Inputs to out, lse and the saved bits, by the kernels for sm_80 or by the one for sm_90a."""

    def run(inputs, save_bits=None):
        save_bits = inputs.dropout_p > 0 if save_bits is None else save_bits
        if hopper:
            out, lse, probs, bits = emulated.launcher(launchers.forward)(inputs, save_bits, True)
        else:
            out, lse, probs, bits = emulated.backend.attention_fwd(inputs, False, save_bits)
        assert (probs.shape, out.dtype) == ((0,), inputs.q.dtype)
        if emulated.launches:
            kernels = ("attention_hopper",) if hopper else ("attention_forward", "attention_short")
            assert any(name in emulated.launches[-1].kernel for name in kernels)
        return out, lse, bits

    return run


@pytest.fixture
def forward(emulated, kernels_only, monkeypatch):
    """The kernels for sm_80; no call may go to the next backend."""
    monkeypatch.setattr(launchers, "HOPPER", False)
    return running(emulated, hopper=False)


@pytest.fixture
def hopper(emulated):
    """The kernel for sm_90a: heads of 64, or of 32 without dropout, no bias."""
    return running(emulated, hopper=True)


@pytest.fixture(params=("sm_80", "hopper"))
def both(request):
    """Each of the two."""
    return request.getfixturevalue({"sm_80": "forward"}.get(request.param, request.param))


@pytest.fixture(params=("sm_80", "hopper", "float32"))
def each(request):
    """Each of the two, and the kernels for float32, without dropout."""
    run = request.getfixturevalue("hopper" if request.param == "hopper" else "forward")
    wide = lambda inputs: {n: getattr(inputs, n).float() for n in "qkv"} | {"dropout_p": 0.0}  # noqa: E731
    return run if request.param != "float32" else lambda inputs: run(inputs._replace(**wide(inputs)))


@pytest.fixture(
    params=(("sm_80", torch.bfloat16), ("hopper", torch.bfloat16), ("sm_80", torch.float32)), ids=str
)
def typed(request):
    """(each of the two and the kernels for float32, the dtype)."""
    each, dtype = request.param
    return request.getfixturevalue({"sm_80": "forward"}.get(each, each)), dtype


# Every kernel: each head with nothing, with dropout, with a bias.
EVERY_KERNEL = [
    case
    for headdim in HEADDIMS
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, lse=True, capacity=3),
        AttentionCase((140, 9), 1, headdim, causal=True, dropout_p=0.25, gate=True),
        AttentionCase((66, 65), 2, headdim, bias="shared", masked=True, dropout_p=0.1, causal=True),
        AttentionCase((130,), 1, headdim, bias="keys", sharpness=8.0, lse=True),
        AttentionCase((150, 20), 2, headdim, window=(9, 70), kv_heads=1, bias="shared", dropout_p=0.25),
    )
]


@pytest.mark.parametrize("schedule", ("late", "early"))
def test_every_kernel(emulated, forward, schedule):
    """The cases of `CASES` run in half precision and with backward in test_cuda_attention_backward.py."""
    emulated.schedule = schedule
    for case, dtype in itertools.product(EVERY_KERNEL, HALF.values()):
        assert broken_rules(case, dtype, backward=False) == []
    wide = (c for c in CASES if c.headdim >= 32 and not c.probs)
    for case in (*EVERY_KERNEL, *wide):
        assert broken_rules(replace(case, dropout_p=0.0), torch.float32, backward=False) == []
    ours = {name for name in emulated.library.names if "attention_forward" in name}
    assert len(ours) == 30
    assert {launch.kernel for launch in emulated.launches} == ours


# A sequence of sm_90a has a second walk over its keys.
@pytest.mark.parametrize(("nheads", "headdim", "p"), ((1, 64, 0.0), (1, 64, 0.25), (3, 32, 0.0)))
@pytest.mark.parametrize("lengths", ((300, 66), (450,)), ids=str)
def test_every_order_of_warps_gives_the_same_bits(emulated, each, lengths, nheads, headdim, p):
    inputs, found = made(lengths, nheads, headdim, p=p), []
    for emulated.schedule, emulated.seed in (("late", 0), ("early", 1), ("late", 2), ("early", 3)):
        found.append(each(inputs))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b)


# --- lengths and places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize(("dtype", "p"), KINDS, ids=str)
@pytest.mark.parametrize(
    "lengths", [(), (0, 0), (1,), (63, 64, 65), (0, 1, 0), (127, 128, 129), (513,)], ids=str
)
def test_lengths(forward, lengths, dtype, p, headdim):
    check_forward(forward, made(lengths, 1 + (sum(lengths) < 200), headdim, dtype, p=p, capacity=66, slack=1))


@pytest.mark.parametrize(
    ("each", "count"),
    [("sm_80", n) for n in (31, 32, 33, 1023, 1024, 1100)]
    + [("hopper", n) for n in (31, 126, 127, 128, 300)]
    + [("float32", 33)],
    indirect=["each"],
)
def test_many_sequences(each, count):
    """The search for a place has one round, two or three."""
    draw = random.Random(count)
    lengths = [draw.choice((0,) * (count // 20) + (1, 5, 70)) for _ in range(count)]
    check_forward(each, made(lengths, 1, 64, capacity=3), TIGHT)


@HEADS
@pytest.mark.parametrize("capacity", (1, 63, 64, 65, 127, 128, 129, 300))
def test_rows_after_the_last_sequence_are_zero(each, capacity, nheads, headdim):
    for lengths in ((), (0,), (64,), (127,), (128,), (1, 0)):
        check_forward(each, made(lengths, nheads, headdim, capacity=capacity, slack=1), TIGHT)


@pytest.mark.parametrize("remainder", (0, 1, 31))
def test_every_sum_of_lengths(each, remainder):
    """The slots of a sequence depend on the rows before it."""
    lengths = [n for n in range(1, 132) if n % 33 == remainder] + [3] * 70
    random.Random(remainder).shuffle(lengths)
    check_forward(each, made(lengths, 1, 64), TIGHT)


def test_nothing_to_do(emulated, both):
    for lengths in ((), (0, 0)):
        shapes = [t.shape for t in both(made(lengths, 2, 64, p=0.5))]
        assert shapes == [(0, 2, 64), (2, 0), (2, 0, 0)]
    assert emulated.launches == []


@pytest.mark.slow
def test_more_slots_than_an_axis_holds(forward):
    check_forward(forward, made([0] * 66000 + [5], 1, 32, capacity=2))


# --- scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "p"), KINDS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 2, 67, 67), (3, 2, 67, 67), (3, 1, 1, 67), (1, 1, 67, 1), (1, 1, 1, 1)], ids=str
)
def test_bias(forward, shape, dtype, p):
    bias, lengths = randn(*shape), (66, 0, 30)
    check_forward(forward, made(lengths, 2, 64, dtype, bias=bias, p=p, slack=1))
    narrow = made(lengths, 2, 32, dtype, bias=bias.bfloat16(), p=p, slack=1, causal=True)
    check_forward(forward, narrow)


def test_bias_with_strides(forward):
    inputs = made((70, 9), 3, bias=randn(2, 3, 73, 75)[:, :, 1:71, 2:72])
    for bias in (inputs.bias, inputs.bias.mT):
        out = check_forward(forward, inputs._replace(bias=bias))[0]
        assert torch.equal(out, forward(inputs._replace(bias=bias.contiguous()))[0])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_masks_of_lowest_values_and_infinities(forward, dtype):
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(2, 1, 70, 70)
    bias[0, :, 3] = -math.inf  # a row without a key
    bias[0, :, 4, :64] = -math.inf  # nothing in the first tile
    bias[0, :, 5, 64:] = -math.inf
    bias[1, :, :, 7:] = lowest
    bias[1, :, 2] = lowest  # equal for all keys: the mean
    inputs = made((70, 66), 2, 64, dtype, bias=bias)
    out, lse, _ = check_forward(forward, inputs)
    assert (out[3] == 0).all()
    assert (lse[:, 3] == -math.inf).all()
    torch.testing.assert_close(out[72].float(), inputs.v[70:].float().mean(0), rtol=0, atol=4e-3)


@pytest.mark.parametrize("scale", (0.0, -0.2, -30.0, 3.0))
@pytest.mark.parametrize(("dtype", "p"), KINDS, ids=str)
def test_scales(forward, scale, dtype, p):
    check_forward(forward, made((65, 70), 2, 32, dtype, p=p, softmax_scale=scale, causal=p > 0))


@pytest.mark.parametrize("step", (0.5, 4.0, 30.0, 2000.0, -4.0, -2000.0))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_scores_that_grow_from_tile_to_tile(forward, step, bias, dtype):
    """Below 2^8 the maximum that is subtracted stays, above it follows; some rows grow and others do not."""
    inputs = made((330,), 1, 32, dtype, softmax_scale=1.0)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    g = torch.Generator().manual_seed(7)
    # Which rows have growing scores: any of the first 128, then the upper eight of each warp's 16 alone.
    q[:128, 0, 0] = torch.randint(0, 2, (128,), generator=g).half()
    q[128:, 0, 0] = torch.arange(128, 330).div(8, rounding_mode="floor").remainder(2).half()
    q[:, 0, 1], k[:, 0, 1] = torch.rand(2, 330, generator=g).half()
    k[:, 0, 0] = torch.arange(330).div(64, rounding_mode="floor") * step
    check_forward(forward, inputs._replace(q=q, k=k, bias=torch.zeros(1, 1, 1, 330) if bias else None))


def test_scores_of_minus_infinity(each):
    """A first tile of them, behind which scores count, however low; and nothing else."""
    inputs = made((130,), 1, 64)
    q, k = torch.zeros(130, 1, 64).bfloat16(), torch.zeros(130, 1, 64).bfloat16()
    q[:, 0, 0] = 1.0
    k[:64, 0, 0], k[64:, 0, 0] = -math.inf, -(2.0**15)
    out, lse, _ = each(inputs._replace(q=q, k=k))
    expected = inputs.v[64:].double().mean(0)
    assert (out.double() - expected).abs().max() < 0.01
    torch.testing.assert_close(lse, torch.full((1, 130), math.log(66) - 2.0**12), rtol=1e-6, atol=0)
    k[:, 0, 0] = -math.inf
    out, lse, _ = each(inputs._replace(q=q, k=k))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("dtype", "p"), KINDS, ids=str)
def test_gate(forward, dtype, p):
    inputs = made((66, 3), 3, dtype=dtype, gate=torch.tensor([0.0, -1.5, 2.0]), p=p)
    check_forward(forward, inputs)
    check_forward(forward, inputs._replace(gate=inputs.gate.bfloat16(), bias=randn(2, 1, 1, 66)))


# --- memory -------------------------------------------------------------------------------------------------


def check_neighbours(run, inputs, poison, bias=None):
    """Other sequences, rows after the last one, gaps between rows, and cells of the bias past a length."""
    clean, (_, nheads, headdim) = run(inputs._replace(bias=bias)), inputs.q.shape
    end = int(inputs.cu_seqlens[-1])
    for kept, (start, n) in enumerate(sequences(inputs)):
        rows, tensors, dirty = slice(start, start + n), [], None
        for t in inputs[:3]:
            memory = t.new_full((t.shape[0] + 2, nheads * headdim + 8), poison)
            inside = memory[1:-1, :-8].unflatten(1, (nheads, headdim))
            inside[rows] = t[rows]
            tensors.append(inside)
        if bias is not None:
            dirty = torch.full_like(bias, poison)
            dirty[kept, :, :n, :n] = bias[kept, :, :n, :n]
        found = run(inputs._replace(q=tensors[0], k=tensors[1], v=tensors[2], bias=dirty))
        assert_same_bits(found[0][rows], clean[0][rows])
        assert_same_bits(found[1][:, rows], clean[1][:, rows])
        assert torch.equal(found[2], clean[2])
        assert (found[0][end:] == 0).all()
        assert (found[1][:, end:] == 0).all()


@pytest.mark.parametrize("poison", (math.nan, math.inf))
@pytest.mark.parametrize(("dtype", "p"), KINDS, ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_outside_a_sequence_gets_in(forward, poison, dtype, p, causal):
    inputs = made((40, 66, 30), dtype=dtype, capacity=70, p=p, causal=causal, slack=5)
    for bias in (None, randn(3, 2, inputs.max_seqlen, inputs.max_seqlen)):
        check_neighbours(forward, inputs, poison, bias)


@HEADS
@pytest.mark.parametrize("name", "qkv")
def test_a_nan_stays_in_its_rows(each, nheads, headdim, name):
    """And in its head, also where another's keys and values are in the same tiles."""
    inputs = made((200, 9), nheads, headdim)
    clean = each(inputs)
    for head in range(nheads):
        dirty = inputs._replace(**{name: getattr(inputs, name).clone()})
        getattr(dirty, name)[5, head] = math.nan
        out, lse, _ = each(dirty)
        rows = slice(5, 6) if name == "q" else slice(200)
        assert out[rows, head].isnan().all()
        out[rows, head] = clean[0][rows, head]
        if name != "v":
            assert lse[head, rows].isnan().all()
            lse[head, rows] = clean[1][head, rows]
        assert_same_bits(out, clean[0])
        assert_same_bits(lse, clean[1])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_strides(forward, dtype):
    """Other strides for each of q, k, v: heads before rows, gaps, a shared row."""
    base = made((66, 20), 2, 64, dtype)
    q = base.q.transpose(0, 1).contiguous().transpose(0, 1)
    k = torch.full((86, 3, 80), math.nan, dtype=dtype)[:, :2, 8:72]
    k.copy_(base.k)
    v = base.v[:, :1].expand(86, 2, 64)  # both heads read one
    found = check_forward(forward, base._replace(q=q, k=k, v=v))
    for a, b in zip(found, forward(base._replace(v=v.contiguous())), strict=True):
        assert_same_bits(a, b)


@HEADS
def test_a_sequence_does_not_depend_on_its_batch(each, nheads, headdim):
    inputs = made((70, 140, 9), nheads, headdim)
    out, lse, _ = each(inputs)
    for start, n in sequences(inputs):
        rows = slice(start, start + n)
        q, k, v = (t[rows] for t in inputs[:3])
        alone = inputs._replace(q=q, k=k, v=v, cu_seqlens=ends_of([n]), max_seqlen=n)
        found = each(alone)
        assert_same_bits(found[0], out[rows])
        assert_same_bits(found[1], lse[:, rows])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (1e-60, 0.1, 0.4999, 0.5, 0.75, 1 - 2**-16, 1 - 2**-20))
@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64))
def test_dropout_bits(both, p, seed):
    for offset in (0, 2**32 - 1):
        inputs = made((3, 70), 2, 64, p=p, seed=torch.tensor([seed]), offset=offset, slack=70)
        check_bits(inputs, both(inputs)[2])


def test_saved_bits_change_nothing(forward, both):
    for run, bias in ((both, None), (forward, randn(2, 1, 1, 150))):
        inputs = made((70, 150), 2, 64, p=0.25, bias=bias)
        (out, lse, bits), again = run(inputs), run(inputs, save_bits=False)
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


# --- windows and shared heads -------------------------------------------------------------------------------

# At the edges of tiles of 64 and of blocks of 128, and between. In the sequence of 250 rows the last block of
# sm_90a has two groups, of which one or both see the last tile, which ends in NaN.
WINDOWS = ((64, 64), (0, 1), (20, 0), (63, 5), (130, -1), (-1, 64), CAUSAL)


@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(typed, window, p):
    run, dtype = typed
    p = 0.0 if dtype == torch.float32 else p
    inputs = made((250, 3, 70), 2, 64, dtype, p=p, window=Window(*window))
    k, v = (t[:, :1].contiguous() for t in inputs[1:3])  # both heads of q read it
    inputs = inputs._replace(k=k, v=v)
    clean = check_forward(run, inputs)
    for t in inputs[:3]:
        t[250:253] = math.nan
    rest = [*range(250), *range(253, 323)]
    for a, b in zip(run(inputs)[:2], clean[:2], strict=True):
        a, b = (t if t.dim() == 3 else t.t() for t in (a, b))
        assert_same_bits(a[rest].contiguous(), b[rest].contiguous())


def test_windows_of_more_tiles_than_the_rings_have(typed):
    """Also where the last tile of a block is that of one group alone."""
    for lengths, window in (((720,), (200, 190)), ((660, 70), (310, 65))):
        check_forward(typed[0], made(lengths, 1, 64, typed[1], window=Window(*window)))


def test_each_head_of_q_reads_its_head_of_k_and_v(typed):
    run, dtype = typed
    inputs = made((70, 9), 6, 64, dtype)
    k, v = (t[:, ::3].contiguous() for t in inputs[1:3])
    out, *_ = check_forward(run, inputs._replace(k=k, v=v))
    alike = inputs._replace(k=k.repeat_interleave(3, 1), v=v.repeat_interleave(3, 1))
    torch.testing.assert_close(run(alike)[0], out, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("window", ((40, 30), (100, 70)), ids=str)
def test_a_key_outside_the_window_may_be_nan(typed, window):
    run, dtype = typed
    inputs = made((300,), 1, 64, dtype, window=Window(*window))
    clean = run(inputs)
    inputs.k[150] = math.nan
    found = run(inputs)
    sees = torch.zeros(300, dtype=torch.bool)
    sees[150 - window[1] : 150 + window[0] + 1] = True
    assert found[0][sees].isnan().all()
    assert_same_bits(found[0][~sees], clean[0][~sees])
    assert_same_bits(found[1].t()[~sees], clean[1].t()[~sees])


# --- which calls it takes -----------------------------------------------------------------------------------


def test_other_calls_go_to_the_next_backend(emulated, monkeypatch, noted):
    monkeypatch.setattr(launchers, "HOPPER", False)
    calls = noted(dispatch, "next_function", lambda *args: args)

    def forward(inputs):
        return emulated.backend.attention_fwd(inputs, False, False)

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
    wide = made((20,), 2, 64, torch.float32)
    forward(wide._replace(k=misplaced(wide.k, 132, 68, 4)))
    assert len(calls) == 5
    forward(wide._replace(k=misplaced(wide.k, 134, 64)))
    forward(wide._replace(dropout_p=0.25, seed=SEED))
    assert calls[5:] == [("cuda", "attention_fwd", torch.device("cpu"), torch.float32)] * 2
    forward(wide._replace(window=Window(3, 3), k=wide.k[:, :1], v=wide.v[:, :1]))
    assert len(calls) == 7


REFUSED = (
    ("sm_80", {"dtype": 0, "seed": 16}, "dropout: expected none in float32"),
    ("sm_80", {"dtype": 0, "k_row": 386}, "multiples of 4"),
    ("sm_80", {"headdim": 48}, "headdim"),
    ("sm_80", {"q": 2}, "multiples of 16 bytes"),
    ("sm_80", {"k_row": 132}, "multiples of 8"),
    ("sm_80", {"v_head": 68}, "multiples of 8"),
    ("sm_80", {"total": 2**30}, "total"),
    ("sm_80", {"batch": 2**30}, "batch"),
    ("sm_80", {"cu_seqlens": 0}, "cu_seqlens"),
    ("sm_80", {"out": 0}, "out"),
    ("hopper", {"dtype": 0}, "dtype: expected bfloat16 or float16"),
    ("hopper", {"headdim": 16}, "headdim: expected 64, or 32"),
    ("hopper", {"headdim": 32, "right": 0}, "headdim: expected 64, or 32"),
    ("hopper", {"headdim": 32, "seed": 16}, "headdim: expected 64, or 32"),
    ("hopper", {"bias": 16}, "expected no bias"),
    ("hopper", {"softmax_scale": 0.0}, "softmax_scale > 0"),
    ("hopper", {"softmax_scale": math.nan}, "softmax_scale > 0"),
    ("hopper", {"q_head": 72}, "heads side by side"),
    ("hopper", {"k_row": 388}, "rows on 16 bytes"),
    ("hopper", {"total": 2**30}, "total, batch"),
    ("hopper", {"batch": 2**30}, "total, batch"),
    ("hopper", {"device": 1}, "no such kernel"),
)


def test_the_entry_points(request, emulated, both):
    """What they refuse; that lse may be left out."""
    which = request.node.callspec.params["both"]
    inputs, out = made((200,), 2, 64), torch.zeros(200, 2, 64, dtype=torch.bfloat16)
    args, _held = attention_args(inputs)
    names = {"sm_80": "cuda_attention_fwd", "hopper": "cuda_attention_hopper_fwd"}
    call = getattr(device.extension, names[which])
    for kernels, changes, message in REFUSED:
        if kernels == which:
            last = {"out": out.data_ptr(), "device": 0} | changes
            given = changed(args, **{k: v for k, v in changes.items() if k in NAMES})
            with pytest.raises((ValueError, RuntimeError), match=message):
                call(given, last["out"], 0, 0, last["device"], 0)
    with pytest.raises(ValueError, match="expected 29"):
        call(args[:-1], out.data_ptr(), 0, 0, 0, 0)
    emulated.register(*inputs[:4], out)
    call(args, out.data_ptr(), 0, 0, 0, 0)
    assert_same_bits(out, both(inputs)[0])


@pytest.mark.parametrize(("headdim", "p"), ((64, 0.0), (64, 0.25), (32, 0.0)))
def test_a_map_refused_to_hopper_is_for_the_other_kernel(emulated, forward, headdim, p):
    inputs = made((70, 130), 2, headdim, p=p)
    expected = forward(inputs)
    with emulated.without_maps():
        found = emulated.launcher(launchers.forward)(inputs, p > 0, True)
    assert "attention_forward" in emulated.launches[-1].kernel
    for a, b in zip((*found[:2], found[3]), expected, strict=True):
        assert_same_bits(a, b)
