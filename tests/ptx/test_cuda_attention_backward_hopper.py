"""csrc/cuda/attention_backward_*_hopper.cu as nvcc compiles them for sm_90a, in the PTX emulator."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.ops.attention import AttentionInputs, AttentionNeeds
from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_places import places_ref
from fastbert.testing.op_cases import attention as attention_cases
from fastbert.testing.op_cases.attention import AttentionCase

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
NEEDS = AttentionNeeds(True, True, True, False, False)
NAMES = ("dq", "dk", "dv")
SEED = torch.tensor([0x123456789ABCDEF])

pytest_plugins = ("tests.support.ptx_fixtures",)
pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")


def randn(*shape, dtype=torch.float32, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(lengths, nheads=1, dtype=torch.bfloat16, capacity=0, slack=0, p=0.0, **options):
    """Inputs whose q, k, v are views of one packed tensor; `options` replace the defaults."""
    q, k, v = randn(sum(lengths) + capacity, 3, nheads, 64, dtype=dtype, seed=5).unbind(1)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    inputs = AttentionInputs(
        *(q, k, v, ends, max(lengths) + slack, 0.125, False, None, None, p, SEED if p > 0 else None, 11)
    )
    return inputs._replace(**options)


class Call:
    """A call of backward: what forward made of the inputs, and dout."""

    def __init__(self, inputs, dout=None, saved=True):
        self.inputs, self.places = inputs, None
        self.out, self.lse, _, bits = reference.attention_fwd(inputs, False, inputs.dropout_p > 0)
        self.bits = bits if saved and inputs.dropout_p > 0 else None
        self.dout = randn(*inputs.q.shape, dtype=inputs.q.dtype, seed=9) if dout is None else dout

    def run(self, emulated):
        """(dq, dk, dv) by the kernels of this file."""
        before = len(emulated.launches)
        run = emulated.launcher(launchers.attention_bwd)
        found = run(self.dout, self.inputs, self.out, self.lse, self.bits, NEEDS, self.places)
        names = [launch.kernel for launch in emulated.launches[before:]]
        assert len(names) == 2
        assert "dq_hopper_kernel" in names[0]
        assert "dkdv_hopper_kernel" in names[1]
        return found[:3]

    def truth(self):
        """The gradients in float64, without an `out` that was rounded."""
        wide = self.inputs._replace(**{name: getattr(self.inputs, name).double() for name in "qkv"})
        out, lse, _, bits = reference.attention_fwd(wide, False, wide.dropout_p > 0)
        bits = bits if wide.dropout_p > 0 else None
        return reference.attention_bwd(self.dout.double(), wide, out, lse, bits, NEEDS)[:3]

    def check(self, emulated, tolerance=None):
        """Every gradient is near the truth, relative to the largest; the rule itself: test_error_rule."""
        grads = self.run(emulated)
        tolerance = tolerance or {torch.bfloat16: 0.012, torch.float16: 0.002}[self.inputs.q.dtype]
        for name, a, e in zip(NAMES, grads, self.truth(), strict=True):
            scale = max(1.0, e.abs().max().item())
            torch.testing.assert_close(
                a.double(), e, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
        return grads


def assert_bit_equal(a, b):
    for name, x, y in zip(NAMES, a, b, strict=True):
        assert torch.equal(x, y), name


# --- the error rule, lengths --------------------------------------------------------------------------------

RULE = (
    AttentionCase((128, 127, 129), 1, 64, packed_qkv=True),
    AttentionCase((300, 70), 1, 64, packed_qkv=True, dropout_p=0.1),
    AttentionCase((512,), 1, 64, dropout_p=0.1),
    AttentionCase((64, 1, 65, 0, 7), 2, 64, capacity=70, dropout_p=0.25),
    AttentionCase((40, 9), 2, 64, sharpness=16.0, dropout_p=0.5),
    AttentionCase((130, 33), 2, 64, sharpness=8.0),
)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", RULE, ids=repr)
def test_error_rule(emulated, case, dtype):
    """Forward and backward, as a self-check on a GPU runs it."""
    rows = testing.run_case(case, "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []
    names = {launch.kernel for launch in emulated.launches}
    assert any("dq_hopper_kernel" in name for name in names)
    assert any("dkdv_hopper_kernel" in name for name in names)


LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 191, 192, 193, 300, 512)


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(emulated, length):
    """Alone, and between two neighbours; plain and with both kinds of bits."""
    dtype = list(HALF.values())[length % 2]
    Call(made((length,), dtype=dtype)).check(emulated)
    call = Call(made((5, length, 3), dtype=dtype, p=0.2, slack=length % 3))
    found = call.check(emulated)
    call.bits = None
    assert_bit_equal(call.run(emulated), found)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_a_table_of_places_and_two_heads(emulated, dtype):
    call = Call(made((66, 130, 1), nheads=2, dtype=dtype, capacity=80, p=0.1))
    found = call.check(emulated)
    call.places = places_ref(call.inputs.cu_seqlens, 277, 130)
    assert_bit_equal(call.run(emulated), found)


# --- orders and neighbours ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "saved"), ((0.25, True), (0.25, False), (0.0, False)))
def test_every_schedule_returns_the_same_bits(emulated, p, saved):
    inputs = made((200, 66), p=p)
    inputs = inputs._replace(q=(inputs.q.float() * 8).bfloat16())  # a second walk over the keys
    call, found = Call(inputs, saved=saved), []
    for schedule, seed in itertools.product(("late", "early"), range(3)):
        emulated.schedule, emulated.seed = schedule, seed
        found.append(call.run(emulated))
    for again in found[1:]:
        assert_bit_equal(again, found[0])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("p", (0.0, 0.25))
def test_neighbours_may_be_nan(emulated, bad, p):
    """Tiles reach into the next sequence, and into rows after the last one."""
    lengths = (70, 40, 129)
    call = Call(made(lengths, p=p, capacity=90))
    clean = call.run(emulated)
    poisoned = torch.ones(sum(lengths) + 90, dtype=torch.bool)
    poisoned[:70] = poisoned[110:239] = False
    tensors = [t.clone() for t in (*call.inputs[:3], call.dout, call.out)]
    for t in tensors:
        t[poisoned] = bad
    call.inputs = call.inputs._replace(q=tensors[0], k=tensors[1], v=tensors[2])
    call.dout, call.out = tensors[3:]
    call.lse = call.lse.clone()
    call.lse[:, poisoned] = bad
    for a, b in zip(call.run(emulated), clean, strict=True):
        assert torch.equal(a[~poisoned], b[~poisoned])
        assert (a[239:] == 0).all()


def test_rows_among_poison(emulated):
    """q, k and v in three tensors whose rows have gaps of NaN."""
    inputs = made((70, 9), nheads=2, p=0.1)
    clean = Call(inputs).run(emulated)
    wide = [torch.full((79, 2 * 64 + gap), float("nan"), dtype=torch.bfloat16) for gap in (8, 24, 64)]
    for t, own in zip(wide, inputs[:3], strict=True):
        t[:, :128] = own.reshape(79, 128)
    q, k, v = (t[:, :128].unflatten(1, (2, 64)) for t in wide)
    found = Call(inputs._replace(q=q, k=k, v=v)).run(emulated)
    assert_bit_equal(found, clean)
    assert all(t.is_contiguous() for t in found)


# --- exact results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_uniform_attention_is_exact(emulated, dtype):
    """Queries of 0: dv is a mean of small integers, dk is 0."""
    inputs = made((64, 8, 256), nheads=2, dtype=dtype)
    k, v = ((2 * t).round() for t in inputs[1:3])
    call = Call(inputs._replace(q=torch.zeros_like(k), k=k, v=v))
    call.dout = (2 * call.dout).round()
    _, dk, dv = call.check(emulated)
    assert torch.equal(dv, call.truth()[2].to(dtype))
    assert (dk == 0).all()


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_sequences_of_one_token_have_no_gradient(emulated, dtype):
    """delta from the rounded `out` is inexact, and 1 / (1 - p) no power of 2."""
    dq, dk, _ = Call(made((1, 40, 1, 1), nheads=2, dtype=dtype, p=0.3)).check(emulated)
    assert (dq[[0, 41, 42]].abs() < 1e-6).all()
    assert (dk[[0, 41, 42]].abs() < 1e-6).all()
    assert dq[2:41].abs().max() > 0.1


def test_an_lse_that_is_slightly_wrong_cancels(emulated):
    """As if large scores had been rounded differently: P is divided by its own sum."""
    call = Call(made((70, 130)))
    call.lse = call.lse + 0.25 * randn(*call.lse.shape)
    call.check(emulated)


@pytest.mark.parametrize("scale", (0.01, 1.0))
def test_softmax_scale(emulated, scale):
    Call(made((19, 70), softmax_scale=scale)).check(emulated, 0.03)


@pytest.mark.parametrize("saved", (False, True))
def test_dropout_bits_are_the_definitions(emulated, saved):
    """dv of a dout that is an identity are the bits."""
    lengths, p, offset = (9, 32, 130), 0.5, 2**32 - 1
    inputs = made(lengths, nheads=2, p=p, offset=offset, seed=torch.tensor([2**62 + 12345]))
    inputs = inputs._replace(q=torch.zeros_like(inputs.q))  # every probability 1 / length
    dout = torch.zeros_like(inputs.q)
    starts = inputs.cu_seqlens.tolist()[:-1]
    for start, n in zip(starts, lengths, strict=True):
        dout[start : start + min(n, 64)] = n * torch.eye(64)[: min(n, 64)].unsqueeze(1)
    dv = Call(inputs, dout, saved=saved).check(emulated)[2]
    keep = keep_mask(inputs.seed, offset, inputs.cu_seqlens[:-1], 2, 130, p)
    for b, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        rows = min(n, 64)
        bits = keep[b, :, :rows, :n].permute(2, 0, 1).float()
        torch.testing.assert_close(dv[start : start + n, :, :rows].float(), 2 * bits, rtol=0.01, atol=0)


def test_bits_that_are_not_defined_are_not_used(emulated):
    """Bits past a sequence may have any value."""
    lengths = (40, 9, 65)
    call = Call(made(lengths, capacity=5, slack=5, p=0.3))
    clean = call.run(emulated)
    columns = torch.arange(96)
    limit = torch.cat([torch.full((n,), n) for n in (*lengths, 0)] + [torch.zeros(5, dtype=torch.long)])
    defined = ((columns < limit[:, None]).unflatten(1, (3, 32)).long() << columns[:32]).sum(-1)
    defined = torch.where(defined >= 2**31, defined - 2**32, defined).int()
    noise = torch.randint(-(2**31), 2**31, call.bits.shape, generator=torch.Generator().manual_seed(1)).int()
    call.bits = (call.bits & defined) | (noise & ~defined)
    assert_bit_equal(call.run(emulated), clean)


# --- outputs, which calls it takes --------------------------------------------------------------------------


def test_gradients_lie_side_by_side_where_the_inputs_do(emulated):
    """As one (total, 3, nheads, 64) tensor, so that nobody copies them there; by all kernels."""
    call = Call(made((70,), nheads=2, capacity=3))
    aside = call.run(emulated)
    whole = aside[0]._base
    assert whole.shape == (73, 3, 2, 64)
    for i, grad in enumerate(aside):
        assert grad._base is whole
        assert grad.data_ptr() == whole[:, i].data_ptr()
    call.inputs = call.inputs._replace(**{name: getattr(call.inputs, name).clone() for name in "qkv"})
    apart = call.run(emulated)
    assert all(grad.is_contiguous() for grad in apart)
    assert_bit_equal(apart, aside)


def test_which_calls_they_serve(emulated, monkeypatch):
    inputs, serves = made((9,), nheads=2), launchers.hopper_serves_backward
    assert serves(inputs, NEEDS)
    assert serves(inputs._replace(dropout_p=0.1, seed=SEED), NEEDS)
    for i in range(3):
        assert not serves(inputs, NEEDS._replace(**{NAMES[i]: False}))
    assert not serves(inputs._replace(causal=True), NEEDS)
    assert not serves(inputs._replace(bias=torch.zeros(1, 1, 1, 9)), NEEDS)
    assert not serves(inputs._replace(gate=torch.ones(2)), NEEDS)
    for name in "qkv":
        t = getattr(inputs, name)
        heads_apart = torch.zeros(2, 9, 64, dtype=t.dtype).transpose(0, 1)
        assert not serves(inputs._replace(**{name: heads_apart}), NEEDS)
        assert not serves(inputs._replace(**{name: t[:1].expand(9, -1, -1)}), NEEDS)
    narrow = torch.zeros(9, 2, 32, dtype=torch.bfloat16)
    assert not serves(inputs._replace(q=narrow, k=narrow, v=narrow), NEEDS)
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", False)
    assert not serves(inputs, NEEDS)
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", True)
    monkeypatch.setattr(device, "is_hopper", lambda _: False)
    assert not serves(inputs, NEEDS)


def test_others_go_to_the_other_kernels(emulated):
    call = Call(made((70,), causal=True))
    emulated.launcher(launchers.attention_bwd)(call.dout, call.inputs, call.out, call.lse, None, NEEDS, None)
    assert not any("hopper" in launch.kernel for launch in emulated.launches)


def test_self_checks_reach_them():
    """With several tiles per sequence, a last one that is not full, and dropout."""
    served = [
        c
        for c in attention_cases.ON_GPU
        if c.headdim == 64 and not (c.bias or c.gate or c.causal) and max(c.lengths) > 3 * 64
    ]
    assert any(c.dropout_p > 0 and any(n % 64 for n in c.lengths) for c in served)
    assert any(c.dropout_p == 0 and any(n % 64 for n in c.lengths) for c in served)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    (
        ({"causal": True}, {}, "no causal mask"),
        ({"gate": torch.ones(1)}, {}, "no bias and no gate"),
        ({}, {"dq": 0}, "expected dq, dk and dv"),
        ({}, {"device": 1}, "no such kernel"),
        ({}, {"grad_stride": -1}, "strides >= 0"),
    ),
    ids=str,
)
def test_refusals(emulated, options, changes, message):
    call = Call(made((9,)))
    args, _held = launchers.attention_args(call.inputs._replace(**options))
    out = torch.zeros(9, 64, dtype=torch.bfloat16)
    rows = torch.zeros(2, 1, 9)
    own = {
        **{"bits": 0, "dout": call.dout.data_ptr(), "out": call.out.data_ptr(), "lse": call.lse.data_ptr()},
        **{"places": 0, "slots": 2, "dq": out.data_ptr(), "dk": out.data_ptr(), "dv": out.data_ptr()},
        **{"grad_stride": 64, "rows": rows.data_ptr(), "need_dgate": False, "dbias": 0},
        **{"dbias_shape": (0,) * 5, "hopper": True, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    with pytest.raises((ValueError, RuntimeError), match=message):
        device.extension.cuda_attention_bwd(args, *(own | changes).values())
    assert emulated.launches == []
