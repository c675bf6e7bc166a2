"""csrc/cuda/attention_backward*.cu as nvcc compiles them for sm_80 in the PTX emulator."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.ops.attention import AttentionNeeds
from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_places import places_ref
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.support.cpu_truth import randn
from tests.support.cuda_attention_calls import (
    HALF,
    HEADDIMS,
    NAMES,
    Call,
    assert_bit_equal,
    made,
    sequences,
)
from tests.support.triton_sanitizer import lazy_rows

pytest_plugins = ("tests.support.ptx_fixtures",)


@pytest.fixture(autouse=True)
def without_hopper(monkeypatch):
    """Calls that test_cuda_attention_backward_hopper.py is about go to these kernels too."""
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", False)


@pytest.fixture
def call(emulated, kernels_only):
    """Makes a `Call` of these kernels; no call may go to the next backend."""
    return lambda *args, **options: Call(emulated.backend, *args, **options)


EVERY_KERNEL = [
    case
    for headdim in (32, 64, 128)
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, capacity=3),
        AttentionCase((140, 9), 1, headdim, causal=True, dropout_p=0.25, gate=True),
        AttentionCase((66, 65), 2, headdim, bias="shared", masked=True, dropout_p=0.1, causal=True),
    )
]


def broken_rules(case, dtype):
    rows = testing.run_case(case, "cuda", dtype)
    return [(r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", EVERY_KERNEL, ids=repr)
def test_every_kernel(emulated, case, dtype, schedule):
    emulated.schedule = schedule
    assert broken_rules(case, dtype) == []
    launched = {launch.kernel for launch in emulated.launches}
    for part in ("forward", "dq", "dkdv", *(("dbias",) if case.bias else ())):
        assert any(part in name for name in launched), part


def test_every_kernel_is_launched(emulated):
    for dtype in HALF.values():
        for case in EVERY_KERNEL:
            testing.run_case(case, "cuda", dtype)
    ours = {name for name in emulated.library.names if "attention" in name and "hopper" not in name}
    assert {launch.kernel for launch in emulated.launches} >= ours


@pytest.mark.parametrize("case", [c for c in CASES if c.headdim >= 32 and not c.probs], ids=repr)
def test_error_rule(emulated, case):
    assert broken_rules(case, torch.bfloat16) == []
    assert emulated.launches


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_warps_gives_the_same_bits(emulated, seed):
    case = AttentionCase((140, 66), 1, 64, causal=True, dropout_p=0.25, bias="shared")
    found = []
    for schedule in ("late", "early"):
        emulated.schedule, emulated.seed = schedule, seed
        inputs = case.inputs(torch.bfloat16, "cpu")
        wanted = [inputs[name].requires_grad_() for name in ("q", "k", "v")]
        with dispatch.use_backend(attention="cuda"):
            out = case.call(**inputs)
            out = out[0] if isinstance(out, tuple) else out
            found.append(torch.autograd.grad(out, wanted, torch.ones_like(out)))
    for late, early in zip(*found, strict=True):
        assert torch.equal(late, early)


# --- exact results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("saved", [False, True])
def test_drawn_and_saved_bits_give_the_same_gradients(emulated, call, saved, headdim):
    bias = randn(1, 2, 70, 70)
    own = call(made((70, 3), headdim=headdim, p=0.3, bias=bias, gate=randn(2)), saved=saved)
    first = own.check()
    for emulated.schedule, emulated.seed in (("early", 1), ("late", 2)):
        assert_bit_equal(own.run(), first)
    assert_bit_equal(call(own.inputs, saved=not saved).run(), first)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_uniform_attention_is_exact(call, dtype):
    inputs = made((64, 8, 32), gate=torch.tensor([2.0, -0.5]), dtype=dtype, softmax_scale=0.25)
    k, v = ((2 * t).round() for t in inputs[1:3])
    own = call(inputs._replace(q=torch.zeros_like(k), k=k, v=v))
    own.dout = (2 * own.dout).round()
    dq, dk, dv, _, _ = own.run()
    truth = own.truth()
    assert torch.equal(dv.double(), truth[2].to(dtype).double())
    assert (dk == 0).all()
    torch.testing.assert_close(dq.double(), truth[0], rtol=0.01, atol=0.04)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_query_that_sees_one_key_has_no_gradient(call, dtype, headdim):
    """Sequences of one token and first rows of a causal mask: delta from the rounded `out` is inexact."""
    for saved in (False, True):
        inputs = made((1, 40, 1, 1), headdim=headdim, dtype=dtype, causal=True, p=0.5, gate=randn(2))
        dq, dk, *_ = call(inputs, saved=saved).check()
        assert (dq[[0, 1, 41, 42]].abs() < 1e-6).all()
        assert (dk[[0, 41, 42]].abs() < 1e-6).all()
        assert dq[2:41].abs().max() > 0.1


# --- masks, scales, extremes --------------------------------------------------------------------------------


def test_rows_without_an_allowed_key(call):
    bias = randn(2, 2, 70, 70)
    bias[0, 0, 3] = -math.inf
    bias[:, 1, :, :64] = -math.inf  # a whole tile of keys before the first allowed one
    bias[1, 0, :, 17:] = -math.inf
    bias[1, 1] = -math.inf
    dq, dk, dv, dbias, _ = call(made((70, 23), bias=bias)).check()
    for gradient in (dq[3, 0], dq[70:, 1], dk[70:, 1], dv[70:, 1], dbias[0, 0, 3], dbias[1, 1]):
        assert (gradient == 0).all()


def test_a_mask_of_the_lowest_number_is_not_minus_infinity(call):
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(1, 1, 40, 40)
    bias[..., 4, :] = lowest  # uniform; log 40 is lost in its lse
    bias[..., 5, 1:] = lowest  # one key
    bias[..., 6, :30] = lowest
    own = call(made((40, 17), bias=bias))
    found, expected = own.run(), own.run(reference)  # float64 loses none of them
    for name, a, e in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0.02, atol=0.02, msg=lambda m, n=name: f"{n}: {m}")
    assert found[0][4].abs().max() > 0.01


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.01, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_softmax_scale(call, scale, with_bias):
    call(made((19, 5), softmax_scale=scale, bias=randn(1, 2, 19, 19) if with_bias else None)).check()


def test_an_lse_that_is_slightly_wrong_cancels(call):
    """As if large scores had been rounded differently: P is divided by its own sum."""
    for bias in (None, randn(2, 2, 70, 70)):
        own = call(made((70, 2), gate=randn(2), bias=bias))
        own.lse = own.lse + 0.25 * randn(*own.lse.shape)
        own.check()


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_scores_do_not_overflow(call, scale, with_bias):
    """lse is near 900: exp without it would be infinite or 0."""
    inputs = made((33,), nheads=1, softmax_scale=scale, bias=torch.zeros(1, 1, 33, 33) if with_bias else None)
    keys = (scale * (28 + 0.1 * inputs.k.float())).bfloat16()
    own = call(inputs._replace(q=torch.ones_like(inputs.q), k=keys))
    assert own.lse.min() > 800
    own.check(0.25)  # dS sums to 0, and is rounded before it meets keys of 28


@pytest.mark.parametrize("shape", list(itertools.product([1, 3], [1, 2], [1, 70], [1, 70])), ids=str)
@pytest.mark.parametrize("multiprocessors", [0, 100])
def test_bias_broadcasts(call, monkeypatch, shape, multiprocessors):
    """dbias in one part, and in one part per sequence and head that share it."""
    monkeypatch.setattr(device, "multiprocessors", lambda _: multiprocessors)
    call(made((70, 3, 1), bias=randn(*shape), gate=randn(2), causal=shape[0] == 1, p=0.2)).check()


@pytest.mark.parametrize("dtype", [torch.float64, *HALF.values()], ids=str)
def test_bias_and_gate_in_another_dtype(call, dtype):
    bias, gate = randn(1, 2, 9, 9).bfloat16().to(dtype), randn(2).bfloat16().to(dtype)
    own = call(made((9, 7), bias=bias, gate=gate))
    wide = call(own.inputs._replace(bias=bias.float(), gate=gate.float()))
    assert_bit_equal(own.run(), wide.run())


def test_a_gate_of_0_has_a_gradient(call):
    grads = call(made((40, 9), gate=torch.tensor([0.0, 2.0]), capacity=70, p=0.3)).check()
    assert grads[4][0].abs() > 0.1
    assert all((gradient[:, 0] == 0).all() for gradient in grads[:3])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("headdim", [32, 128])
@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [(0, 0, 0.5), (-1, 2**32 - 1, 0.25), (2**62 + 12345, 2**31, 0.75), (-(2**63), 2**31 - 1, 0.125)],
)
def test_dropout_bits_are_the_definitions(call, seed, offset, p, saved, headdim):
    """dv of a dout that is an identity are the bits."""
    inputs = made((9, 32, 70), headdim=headdim, p=p, offset=offset, seed=torch.tensor([seed]))
    inputs = inputs._replace(q=torch.zeros_like(inputs.q))  # every probability 1 / length
    dout = torch.zeros_like(inputs.q)
    for start, n in sequences(inputs):
        rows = min(n, headdim)
        dout[start : start + rows] = n * torch.eye(headdim)[:rows].unsqueeze(1)
    dv = call(inputs, dout, saved=saved).check()[2]
    keep = keep_mask(inputs.seed, offset, inputs.cu_seqlens[:-1], 2, 70, p)
    for b, (start, n) in enumerate(sequences(inputs)):
        rows = min(n, headdim)
        bits = keep[b, :, :rows, :n].permute(2, 0, 1).float()
        torch.testing.assert_close(dv[start : start + n, :, :rows].float(), bits / (1 - p), rtol=0.01, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_bits_that_are_not_defined_are_not_used(call, causal, headdim):
    """Bits past a sequence, and those of keys that a causal mask hides, may have any value."""
    lengths = (40, 0, 9, 65)
    options = {"bias": randn(4, 2, 70, 70), "gate": randn(2), "causal": causal, "offset": 2**31 + 5}
    own = call(made(lengths, headdim=headdim, capacity=5, slack=5, p=0.3, **options))
    drawn = call(own.inputs, saved=False).run()
    assert_bit_equal(own.run(), drawn)
    keys = torch.arange(96)
    defined = torch.zeros(sum(lengths) + 5, 96, dtype=torch.bool)
    for start, n in sequences(own.inputs):
        defined[start : start + n] = (keys < n) & ((keys <= torch.arange(n)[:, None]) | (not causal))
    defined = (defined.unflatten(1, (3, 32)).long() << keys[:32]).sum(-1)
    defined = torch.where(defined >= 2**31, defined - 2**32, defined).int()
    noise = torch.randint(-(2**31), 2**31, own.bits.shape, generator=torch.Generator().manual_seed(1)).int()
    bits = own.bits
    own.bits = bits & defined | noise & ~defined
    assert_bit_equal(own.run(), drawn)
    own.bits = ~bits  # they are read at all
    assert not any(torch.equal(a, b) for a, b in zip(own.run(), drawn, strict=True))


def test_a_seed_without_dropout_is_not_read(call):
    own = call(made((18, 5)))
    expected = own.run()
    own.inputs = own.inputs._replace(seed=torch.tensor([7]))
    own.bits = torch.zeros(1, dtype=torch.int32)
    assert_bit_equal(own.run(), expected)


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [511, 2048])
def test_long_sequences(call, length):
    long = length > 2000
    call(made((length,), nheads=1, headdim=32 if long else 64, causal=long, p=0.1)).check()


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0), ()], ids=str)
@pytest.mark.parametrize("capacity", [0, 150, 700])
def test_empty_sequences_and_capacity(call, lengths, capacity):
    grads = call(made(lengths, capacity=capacity, gate=randn(2))).check()
    assert all((gradient[sum(lengths) :] == 0).all() for gradient in grads[:3])


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0), ()], ids=str)
def test_empty_sequences_and_a_bias(call, lengths):
    longest = max(lengths, default=0)
    for shape in ((len(lengths), 1, longest, longest), (1, 1, 1, 1)):
        call(made(lengths, capacity=4, bias=randn(*shape))).check()


def test_no_rows(call):
    grads = call(made((0, 0), slack=3, bias=randn(1, 2, 3, 3), gate=randn(2))).run()
    assert [tuple(t.shape) for t in grads] == [(0, 2, 32)] * 3 + [(1, 2, 3, 3), (2,)]
    assert all((gradient == 0).all() for gradient in grads)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("others", [False, True])
def test_what_backward_returns(call, needs, others):
    own = call(made((20, 3), bias=randn(2, 1, 1, 20), gate=randn(2), capacity=40, p=0.3))
    every = own.run()
    own.need = AttentionNeeds(*needs, others, others)
    grads = own.run()
    for need, a, every_a, e in zip(own.need, grads, every, own.run(reference), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert torch.equal(a, every_a) if need else a.shape == (0,)
    # dq, dk and dv all three: side by side, as q, k and v are
    aside = grads[:3] if all(needs) else ()
    assert all(a.stride() == own.inputs.q.stride() for a in aside)
    assert all(a.is_contiguous() for a in grads[len(aside) :])


def test_strided_inputs_with_poisoned_gaps(call):
    own = call(made((70, 2, 5), bias=randn(3, 2, 70, 70)))
    expected, nan = own.run(), math.nan
    wide = [torch.full((2, 77, 3, 40), nan, dtype=torch.bfloat16) for _ in range(3)]
    views = [w[:, :, 1, 8:].transpose(0, 1) for w in wide]
    views = [view.copy_(t) for view, t in zip(views, own.inputs[:3], strict=True)]
    ends = own.inputs.cu_seqlens.repeat_interleave(2)
    ends[1::2] = 99
    bias = own.inputs.bias.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    own.inputs = own.inputs._replace(q=views[0], k=views[1], v=views[2], cu_seqlens=ends[::2], bias=bias)
    lse = torch.full((2, 90), nan)
    lse[:, :77] = own.lse
    own.lse = lse[:, :77]
    for name in ("dout", "out"):  # not at a multiple of 16 bytes
        memory = torch.full((77 * 64 + 1,), nan, dtype=torch.bfloat16)
        setattr(own, name, memory[1:].view(77, 2, 32).copy_(getattr(own, name)))
    assert_bit_equal(own.run(), expected)


def far(t: torch.Tensor, *strides: int) -> torch.Tensor:
    """The same values in memory that is mapped where it is touched."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    memory = lazy_rows(1, extent, extent, t.dtype).reshape(-1)
    return memory.as_strided(t.shape, strides).copy_(t)


def test_offsets_beyond_2_to_31_elements(call, monkeypatch):
    own = call(made((3, 1, 2), nheads=3, bias=randn(3, 3, 3, 3), p=0.3, gate=randn(3)))
    expected, near = own.run(), own.inputs
    for strides in ((32, 2**30 + 64, 1), (2**30 + 64, 40, 1)):
        own.inputs = near._replace(**{name: far(getattr(near, name), *strides) for name in "qkv"})
        assert_bit_equal(own.run(), expected)
    for strides in ((3, 2**30 + 7, 9, 1), (2**31 + 9, 64, 2**30 + 3, 1)):
        own.inputs = near._replace(bias=far(near.bias, *strides))
        assert_bit_equal(own.run(), expected)
    # bits as if max_seqlen were 2**34 would need a max_seqlen that is: words as of 2**31 - 1
    near, slots_of = near._replace(bias=None), launchers._slots
    own = call(near)
    expected = own.run()
    own.inputs = near._replace(max_seqlen=2**31 - 1)
    # a tile of 64 keys reads two words of a row
    bits = torch.nn.functional.pad(own.bits, (0, 1))
    own.bits, own.places = far(bits, 6 * 2**26, 2**26, 1), places_ref(near.cu_seqlens, 6, 3)
    monkeypatch.setattr(launchers, "_slots", lambda inputs, places: slots_of(near, places))
    assert_bit_equal(own.run(), expected)


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("saved", [False, True])
def test_neighbours_and_unused_cells_may_be_nan(call, headdim, saved):
    nan, bias = math.nan, randn(3, 2, 18, 18)
    inputs = made((18, 3, 17), headdim=headdim, capacity=70, bias=bias, gate=randn(2), p=0.2)
    own = call(inputs, saved=saved)
    own.need = own.need._replace(dgate=False)  # it is one sum over all rows
    clean = own.run()
    for t in (*own.inputs[:3], own.dout, own.out):
        t[18:21] = nan  # the sequence in the middle
        t[38:] = nan
    own.lse[:, 38:] = nan
    bias[1] = nan
    bias[2, :, 17:] = nan
    bias[2, :, :, 17:] = nan
    dirty = own.run()
    others = [*range(18), *range(21, 108)]
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[others], e[others])
        assert a[18:21].isnan().all()
    assert torch.equal(dirty[3][[0, 2]], clean[3][[0, 2]])


def test_a_nan_stays_where_it_belongs(call):
    own = call(made((70, 20)))
    clean = own.run()
    own.dout[3, 1, 5] = math.nan
    dirty = own.run()
    assert dirty[0][3, 1].isnan().all()
    assert dirty[1][:70, 1].isnan().all()
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[70:], e[70:])
        assert torch.equal(a[:, 0], e[:, 0])
    assert torch.equal(dirty[0][4:70, 1], clean[0][4:70, 1])


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_table_of_places_is_read(call, headdim):
    own = call(made((20, 130, 33, 0), headdim=headdim, capacity=150, gate=randn(2), causal=True))
    expected = own.run()
    own.places = places_ref(own.inputs.cu_seqlens, 333, 130)
    assert_bit_equal(own.run(), expected)
    ends = torch.zeros_like(own.inputs.cu_seqlens)  # the places say it all
    own.inputs = own.inputs._replace(cu_seqlens=ends)
    assert_bit_equal(own.run(), expected)


# --- what goes elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["headdim", "address", "row", "head"])
def test_calls_for_the_next_backend(call, monkeypatch, change):
    inputs = made((9, 4), headdim=24 if change == "headdim" else 32)
    rows = {"address": (4, 8, 8), "row": (0, 4, 8), "head": (0, 8, 4)}
    if change in rows:
        shift, row_pad, head_pad = rows[change]
        head = 32 + head_pad
        memory = torch.zeros(8 + 13 * (2 * head + row_pad), dtype=torch.bfloat16)
        q = memory[shift:].as_strided((13, 2, 32), (2 * head + row_pad, head, 1)).copy_(inputs.q)
        inputs = inputs._replace(q=q)
    asked = []
    following = lambda *which: asked.append(which) or (lambda *args: asked.append(len(args)))  # noqa: E731
    monkeypatch.setattr(dispatch, "next_function", following)
    call(inputs).run()
    assert asked == [("cuda", "attention_bwd training", torch.device("cpu"), torch.bfloat16), 7]


def test_the_entry_refuses_what_it_cannot_serve(call, monkeypatch):
    monkeypatch.setattr(launchers, "readable", lambda *tensors: True)
    with pytest.raises(RuntimeError, match="headdim 32, 64 or 128"):
        call(made((9, 4), headdim=24)).run()
    with pytest.raises(RuntimeError, match="bfloat16 or float16"):
        call(made((9, 4), dtype=torch.float32)).run()
