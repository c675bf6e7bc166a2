"""csrc/cuda/attention_backward*.cu as nvcc compiles them for sm_90a, in the PTX emulator."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from fastbert.backends import reference
from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE, AttentionNeeds, Window
from fastbert.ops.attention_places import places_ref
from fastbert.runtime import dispatch
from fastbert.testing.op_cases import attention as attention_cases
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.support.attention_calls import (
    HALF,
    HEADDIMS,
    NAMES,
    SEED,
    Call,
    Kernels,
    assert_bit_equal,
    broken_rules,
    drawn,
    made,
    sequences,
)
from tests.support.attention_gradients import *  # noqa: F403 (tests)
from tests.support.cpu_truth import randn
from tests.support.triton_attention_inputs import at_strides

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")


@pytest.fixture
def without_hopper(monkeypatch):
    """Calls that the kernels for sm_90a would take are passed to the other kernels too."""
    monkeypatch.setattr(launchers, "HOPPER", False)
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", False)


@pytest.fixture
def call(emulated, kernels_only, without_hopper):
    """Makes a `Call` of the kernels for sm_80; no call may go to the next backend."""
    return Kernels(emulated.backend, 32).call


@pytest.fixture(params=("sm_80-32", "sm_80-64", "sm_80-128", "hopper-64"))
def kernels(request, emulated, kernels_only, monkeypatch):
    """All kernels; no call may go to others."""
    name, _, headdim = request.param.partition("-")
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", name == "hopper")
    yield Kernels(emulated.backend, int(headdim), hopper=name == "hopper")
    assert emulated.launches
    assert all(("hopper" in launch.kernel) == (name == "hopper") for launch in emulated.launches)


ONE_WIDTH = pytest.mark.parametrize("kernels", ("sm_80-32", "hopper-64"), indirect=True)


EVERY_KERNEL = [
    case
    for headdim in HEADDIMS
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, capacity=3),
        AttentionCase((140, 9), 1, headdim, causal=True, dropout_p=0.25, gate=True),
        AttentionCase((66, 65), 2, headdim, bias="shared", masked=True, dropout_p=0.1, causal=True),
        AttentionCase((150, 20), 2, headdim, window=(9, 70), kv_heads=1, bias="shared", gate=True),
    )
]


@pytest.mark.parametrize("schedule", ("late", "early"))
def test_every_kernel(emulated, without_hopper, schedule):
    emulated.schedule = schedule
    for case, dtype in itertools.product(EVERY_KERNEL, HALF.values()):
        assert broken_rules(case, dtype) == []
    # which have no backward here, or files of their own
    others = re.compile("hopper|forward_float|attention_short")
    ours = {name for name in emulated.library.names if "attention" in name and not others.search(name)}
    assert {launch.kernel for launch in emulated.launches} >= ours


@pytest.mark.parametrize("case", [c for c in CASES if c.headdim >= 32 and not c.probs], ids=repr)
def test_error_rule(emulated, without_hopper, case):
    """Forward and backward."""
    assert broken_rules(case, torch.bfloat16) == []
    assert emulated.launches


# --- exact results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", (0.0, 0.25))
def test_every_order_and_both_kinds_of_bits_give_the_same_gradients(emulated, kernels, p):
    extras = kernels.extras(bias=randn(1, 1, 140, 140), gate=randn(1), causal=True)
    inputs = kernels.call((140, 33), nheads=1, p=p, **extras).inputs
    inputs = inputs._replace(q=(inputs.q.float() * 8).bfloat16())  # a second walk over the keys
    found = []
    for saved in (False, True) if p else (False,):
        own = Call(emulated.backend, inputs, saved=saved)
        for emulated.schedule, emulated.seed in (("late", 0), ("early", 1), ("late", 2)):
            found.append(own.run())
    for again in found[1:]:
        assert_bit_equal(again, found[0])


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@ONE_WIDTH
def test_uniform_attention_is_exact(kernels, dtype):
    """Queries of 0: dv is a mean of small integers, dk is 0."""
    extras = kernels.extras(gate=torch.tensor([0.5, -1.0]))
    own = kernels.call((64, 8, 256), dtype=dtype, softmax_scale=0.25, **extras)
    k, v = ((2 * t).round() for t in own.inputs[1:3])
    inputs = own.inputs._replace(q=torch.zeros_like(k), k=k, v=v)
    own = Call(own.backend, inputs, tolerance=own.tolerance)
    own.dout = (2 * own.dout).round()
    dq, dk, dv, *_ = own.check()
    truth = own.truth()
    assert torch.equal(dv.double(), truth[2].to(dtype).double())
    assert (dk == 0).all()
    torch.testing.assert_close(dq.double(), truth[0], rtol=0.01, atol=0.04)


@pytest.mark.parametrize(
    "length", (1, 2, 7, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 191, 192, 193, 300)
)
@pytest.mark.parametrize("kernels", ("hopper-64",), indirect=True)
def test_lengths(kernels, length):
    """Alone, and between two neighbours; plain and with both kinds of bits."""
    dtype = list(HALF.values())[length % 2]
    kernels.call((length,), nheads=1, dtype=dtype).check()
    own = kernels.call((5, length, 3), nheads=1, dtype=dtype, p=0.2, slack=length % 3)
    found = own.check()
    own.bits = None
    assert_bit_equal(own.run(), found)


# --- masks, scales, extremes --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(itertools.product([1, 3], [1, 2], [1, 70], [1, 70])), ids=str)
@pytest.mark.parametrize("multiprocessors", [0, 100])
def test_bias_broadcasts(call, monkeypatch, shape, multiprocessors):
    """dbias in one part, and in one part per sequence and head that share it."""
    monkeypatch.setattr(device, "multiprocessors", lambda _: multiprocessors)
    call((70, 3, 1), bias=randn(*shape), gate=randn(2), causal=shape[0] == 1, p=0.2).check()


@pytest.mark.parametrize("dtype", [torch.float64, *HALF.values()], ids=str)
def test_bias_and_gate_in_another_dtype(call, dtype):
    bias, gate = randn(1, 2, 9, 9).bfloat16().to(dtype), randn(2).bfloat16().to(dtype)
    own = call((9, 7), bias=bias, gate=gate)
    wide = own.on(bias=bias.float(), gate=gate.float())
    assert_bit_equal(own.run(), wide.run())


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [(0, 0, 0.5), (-1, 2**32 - 1, 0.25), (2**62 + 12345, 2**31, 0.75), (-(2**63), 2**31 - 1, 0.125)],
)
def test_dropout_bits_are_the_definitions(kernels, seed, offset, p):
    """dv of a dout that is an identity are the bits."""
    options = {"p": p, "offset": offset, "seed": torch.tensor([seed])}
    own, size = kernels.call((9, 32, 130), **options), kernels.headdim
    inputs = own.inputs._replace(q=torch.zeros_like(own.inputs.q))  # every probability 1 / length
    dout = torch.zeros_like(inputs.q)
    for start, n in sequences(inputs):
        rows = min(n, size)
        dout[start : start + rows] = n * torch.eye(size)[:rows].unsqueeze(1)
    keep = drawn(inputs)
    for saved in (False, True):
        dv = Call(own.backend, inputs, dout, saved, own.tolerance).check()[2]
        for b, (start, n) in enumerate(sequences(inputs)):
            rows = min(n, size)
            bits = keep[b, :, :rows, :n].permute(2, 0, 1).float()
            found = dv[start : start + n, :, :rows].float()
            torch.testing.assert_close(found, bits / (1 - p), rtol=0.01, atol=0)


def test_a_seed_without_dropout_is_not_read(call):
    own = call((18, 5))
    expected = own.run()
    own.inputs = own.inputs._replace(seed=torch.tensor([7]))
    own.bits = torch.zeros(1, dtype=torch.int32)
    assert_bit_equal(own.run(), expected)


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [511, 2048])
def test_long_sequences(call, length):
    long = length > 2000
    call((length,), nheads=1, headdim=32 if long else 64, causal=long, p=0.1).check()


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("others", [False, True])
def test_what_backward_returns(call, needs, others):
    own = call((20, 3), bias=randn(2, 1, 1, 20), gate=randn(2), capacity=40, p=0.3)
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


def test_offsets_beyond_2_to_31_elements(call, monkeypatch):
    own = call((3, 1, 2), nheads=3, bias=randn(3, 3, 3, 3), p=0.3, gate=randn(3))
    expected, near = own.run(), own.inputs
    for strides in ((32, 2**30 + 64, 1), (2**30 + 64, 40, 1)):
        own.inputs = near._replace(**{name: at_strides(getattr(near, name), *strides) for name in "qkv"})
        assert_bit_equal(own.run(), expected)
    for strides in ((3, 2**30 + 7, 9, 1), (2**31 + 9, 64, 2**30 + 3, 1)):
        own.inputs = near._replace(bias=at_strides(near.bias, *strides))
        assert_bit_equal(own.run(), expected)
    # bits as if max_seqlen were 2**34 would need a max_seqlen that is: words as of 2**31 - 1
    near, slots_of = near._replace(bias=None), launchers._slots
    own = own.on(bias=None)
    expected = own.run()
    own.inputs = near._replace(max_seqlen=2**31 - 1)
    # a tile of 64 keys reads two words of a row
    bits = torch.nn.functional.pad(own.bits, (0, 1))
    own.bits, own.places = at_strides(bits, 6 * 2**26, 2**26, 1), places_ref(near.cu_seqlens, 6, 3)
    monkeypatch.setattr(launchers, "_slots", lambda inputs, places: slots_of(near, places))
    assert_bit_equal(own.run(), expected)


def test_a_nan_stays_where_it_belongs(call):
    own = call((70, 20))
    clean = own.run()
    own.dout[3, 1, 5] = math.nan
    dirty = own.run()
    assert dirty[0][3, 1].isnan().all()
    assert dirty[1][:70, 1].isnan().all()
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[70:], e[70:])
        assert torch.equal(a[:, 0], e[:, 0])
    assert torch.equal(dirty[0][4:70, 1], clean[0][4:70, 1])


# --- windows and shared heads -------------------------------------------------------------------------------

# At the edges of tiles, and between. Queries of 250 see one, two or more tiles of keys.
WINDOWS = ((64, 64), (0, 1), (20, 0), (63, 5), (130, -1), (-1, 64))


@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(kernels, window, p):
    """Two heads of q read one of k and v; the sequence between the two is NaN."""
    inputs = kernels.call((250, 3, 70), p=p, window=Window(*window)).inputs
    k, v = (t[:, :1].contiguous() for t in inputs[1:3])
    own = Call(kernels.backend, inputs._replace(k=k, v=v), tolerance=kernels.call((1,)).tolerance)
    clean = own.check()
    own.bits = None
    assert_bit_equal(own.run(), clean)
    for t in (*own.inputs[:3], own.dout, own.out, own.lse.t()):
        t[250:253] = math.nan
    rest = [*range(250), *range(253, 323)]
    for a, e in zip(own.run()[:3], clean[:3], strict=True):
        assert torch.equal(a[rest], e[rest])


@pytest.mark.parametrize("window", ((64, 64), (70, 3), (5, 66)), ids=str)
def test_dv_of_an_identity_is_the_window(kernels, window):
    """Queries of 0: P is 1 / n, and dout has n for the query's own dimension."""
    size, length = kernels.headdim, 200
    own = kernels.call((length,), nheads=1, window=Window(*window))
    q = torch.zeros_like(own.inputs.q)
    distance = torch.arange(length) - torch.arange(length)[:, None]
    sees = (distance >= -window[0]) & (distance <= window[1])
    for first in range(0, length, size):
        rows, dout = min(size, length - first), torch.zeros_like(q)
        counts = sees[first : first + rows].sum(1, keepdim=True)
        dout[first : first + rows, 0] = (counts * torch.eye(size)[:rows]).to(q)
        dv = own.on(dout, q=q).run()[2]
        found = dv[:, 0, :rows].float()
        torch.testing.assert_close(found, sees[first : first + rows].t().float(), rtol=0.01, atol=0)


def test_tiles_outside_the_window_are_not_read(kernels):
    own = kernels.call((450,), nheads=1, window=Window(10, 10), p=0.1)
    clean = own.run()
    for t in (*own.inputs[:3], own.dout, own.out, own.lse.t()):
        t[:64] = t[384:] = math.nan
    for a, e in zip(own.run()[:3], clean[:3], strict=True):
        assert torch.equal(a[192:256], e[192:256])
        assert a[:64].isnan().all()


@pytest.mark.parametrize("nheads", (4, 6))
@pytest.mark.parametrize("window", (EVERYWHERE, Window(30, 9)), ids=str)
def test_gradients_of_shared_heads_are_sums(kernels, nheads, window):
    """Over the heads of q that read them, each with its own bias, gate and bits."""
    extras = {} if kernels.hopper else {"bias": randn(1, nheads, 150, 150), "gate": randn(nheads)}
    inputs = kernels.call((150, 9), nheads=nheads, p=0.2, capacity=3, window=window, **extras).inputs
    k, v = (t[:, ::2].contiguous() for t in inputs[1:3])
    own = Call(kernels.backend, inputs._replace(k=k, v=v), tolerance=kernels.call((1,)).tolerance)
    grads = own.check()
    assert all((grad[159:] == 0).all() for grad in grads[:3])
    if not kernels.hopper:
        own.need = own.need._replace(dq=False)
        assert all(map(torch.equal, own.run()[1:], grads[1:]))


@pytest.mark.parametrize("shape", ((1, 2, 150, 1), (2, 1, 1, 150), (1, 1, 1, 1)), ids=str)
def test_bias_broadcasts_beside_a_window(call, shape):
    inputs = call((150, 9), bias=randn(*shape), window=Window(20, 7)).inputs
    k, v = (t[:, 1:].contiguous() for t in inputs[1:3])
    call((1,)).on(**inputs._replace(k=k, v=v)._asdict()).check()


# --- what goes elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["headdim", "address", "row", "head", "float32"])
def test_calls_for_the_next_backend(call, monkeypatch, change):
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    own = call((9, 4), headdim=24 if change == "headdim" else 32, dtype=dtype)
    rows = {"address": (4, 8, 8), "row": (0, 4, 8), "head": (0, 8, 4)}
    if change in rows:
        shift, row_pad, head_pad = rows[change]
        head = 32 + head_pad
        memory = torch.zeros(8 + 13 * (2 * head + row_pad), dtype=torch.bfloat16)
        q = memory[shift:].as_strided((13, 2, 32), (2 * head + row_pad, head, 1)).copy_(own.inputs.q)
        own.inputs = own.inputs._replace(q=q)
    asked = []
    following = lambda *which: asked.append(which) or (lambda *args: asked.append(len(args)))  # noqa: E731
    monkeypatch.setattr(dispatch, "next_function", following)
    own.run()
    assert asked == [("cuda", "attention_bwd training", torch.device("cpu"), dtype), 7]


def test_the_entry_refuses_what_it_cannot_serve(call, monkeypatch):
    monkeypatch.setattr(launchers, "readable", lambda *tensors, dtypes: True)
    with pytest.raises(RuntimeError, match="headdim 32, 64 or 128"):
        call((9, 4), headdim=24).run()
    with pytest.raises(RuntimeError, match="bfloat16 or float16"):
        call((9, 4), dtype=torch.float32).run()


# --- the kernels for sm_90a alone ---------------------------------------------------------------------------

ON_HOPPER = (
    AttentionCase((128, 127, 129), 1, 64, packed_qkv=True),
    AttentionCase((300, 70), 1, 64, packed_qkv=True, dropout_p=0.1),
    AttentionCase((512,), 1, 64, dropout_p=0.1),
    AttentionCase((64, 1, 65, 0, 7), 2, 64, capacity=70, dropout_p=0.25),
    AttentionCase((40, 9), 2, 64, sharpness=16.0, dropout_p=0.5),
    AttentionCase((130, 33), 2, 64, sharpness=8.0),
    AttentionCase((300, 70), 1, 64, packed_qkv=True, window=(64, 64), dropout_p=0.1),
    AttentionCase((200, 65), 4, 64, packed_qkv=True, kv_heads=2),
    AttentionCase((150, 33), 2, 64, capacity=70, gate=True),
    AttentionCase((130, 70), 2, 64, packed_qkv=True, gate=True, dropout_p=0.25, causal=True),
    AttentionCase((130, 33), 3, 64, window=(20, -1), kv_heads=1, capacity=70, dropout_p=0.25),
)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", ON_HOPPER, ids=repr)
def test_error_rule_of_hopper(emulated, case, dtype):
    """Forward and backward, as a self-check on a GPU runs it."""
    assert broken_rules(case, dtype) == []
    names = {launch.kernel for launch in emulated.launches}
    assert any("dq_hopper_kernel" in name for name in names)
    assert any("dkdv_hopper_kernel" in name for name in names)


def test_a_closed_gate(kernels):
    """Its head's gradients are 0; that of the gate itself is what the open head's would be."""
    opened = kernels.call((70, 9), p=0.1, gate=torch.ones(2))
    expected, found = opened.check(), opened.on(gate=torch.tensor([1.0, 0.0])).check()
    assert all((grad[:, 1] == 0).all() and grad.isfinite().all() for grad in found[:3])
    assert torch.equal(found[-1], expected[-1])


@pytest.mark.parametrize("kernels", ("hopper-64",), indirect=True)
def test_rows_among_poison(kernels):
    """q, k and v in three tensors whose rows have gaps of NaN."""
    own = kernels.call((70, 9), p=0.1)
    expected = own.run()
    wide = [torch.full((79, 2 * 64 + gap), math.nan, dtype=torch.bfloat16) for gap in (8, 24, 64)]
    for t, near in zip(wide, own.inputs[:3], strict=True):
        t[:, :128] = near.reshape(79, 128)
    q, k, v = (t[:, :128].unflatten(1, (2, 64)) for t in wide)
    own.inputs = own.inputs._replace(q=q, k=k, v=v)
    found = own.run()
    assert_bit_equal(found, expected)
    assert all(t.is_contiguous() for t in found[:3])


@pytest.mark.parametrize("kernels", ("hopper-64",), indirect=True)
def test_gradients_lie_side_by_side_where_the_inputs_do(kernels):
    """As one (total, 3, nheads, 64) tensor, so that no copy is made; by all kernels."""
    own = kernels.call((70,), capacity=3)
    aside = own.run()
    whole = aside[0]._base
    assert whole.shape == (73, 6, 64)
    for i, grad in enumerate(aside[:3]):
        assert grad._base is whole
        assert grad.data_ptr() == whole[:, 2 * i].data_ptr()
    own.inputs = own.inputs._replace(**{name: getattr(own.inputs, name).clone() for name in "qkv"})
    apart = own.run()
    assert all(grad.is_contiguous() for grad in apart)
    assert_bit_equal(apart, aside)


NEEDS = AttentionNeeds(True, True, True, False, False)


def test_which_calls_hopper_serves(emulated, monkeypatch):
    inputs, serves = made((9,), headdim=64), launchers.hopper_serves_backward
    assert serves(inputs, NEEDS)
    assert serves(inputs._replace(dropout_p=0.1, seed=SEED), NEEDS)
    assert serves(inputs._replace(window=Window(3, 0)), NEEDS)
    assert serves(inputs._replace(window=CAUSAL), NEEDS)
    shared = made((9,), 1, 64)
    assert serves(inputs._replace(k=shared.k, v=shared.v), NEEDS)
    for i in range(3):
        assert not serves(inputs, NEEDS._replace(**{NAMES[i]: False}))
    assert not serves(inputs._replace(bias=torch.zeros(1, 1, 1, 9)), NEEDS)
    assert serves(inputs._replace(gate=torch.ones(2)), NEEDS._replace(dgate=True))
    assert not serves(inputs._replace(gate=torch.ones(2), k=shared.k, v=shared.v), NEEDS)
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


def test_a_map_refused_to_hopper_is_for_the_other_kernels(emulated, monkeypatch):
    own = Call(emulated.backend, made((70, 9), 1, 64, p=0.25))
    with emulated.without_maps():
        found = own.run()
    assert not any("hopper" in launch.kernel for launch in emulated.launches)
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", False)
    assert_bit_equal(found, own.run())


def test_self_checks_reach_hopper():
    """With several tiles per sequence, a last one that is not full, and dropout."""
    served = [c for c in attention_cases.ON_GPU if c.headdim == 64 and not c.bias and max(c.lengths) > 3 * 64]
    assert any(c.dropout_p > 0 and any(n % 64 for n in c.lengths) for c in served)
    assert any(c.dropout_p == 0 and any(n % 64 for n in c.lengths) for c in served)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    (
        ({"bias": torch.zeros(1, 1, 9, 9)}, {}, "no bias"),
        ({}, {"dq": 0}, "expected dq, dk and dv"),
        ({}, {"device": 1}, "no such kernel"),
        ({}, {"grad_stride": -1}, "strides >= 0"),
        ({}, {"kv_grad_stride": -1}, "strides >= 0"),
    ),
    ids=str,
)
def test_refusals_of_hopper(emulated, options, changes, message):
    call = Call(emulated.backend, made((9,), 1, 64))
    args, _held = launchers.attention_args(call.inputs._replace(**options))
    out = torch.zeros(9, 64, dtype=torch.bfloat16)
    rows = torch.zeros(2, 1, 9)
    own = {
        **{"bits": 0, "dout": call.dout.data_ptr(), "out": call.out.data_ptr(), "lse": call.lse.data_ptr()},
        **{"places": 0, "slots": 2, "dq": out.data_ptr(), "dk": out.data_ptr(), "dv": out.data_ptr()},
        **{"grad_stride": 64, "kv_grad_stride": 64, "rows": rows.data_ptr(), "need_dgate": False, "dbias": 0},
        **{"dbias_shape": (0,) * 5, "hopper": True, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    with pytest.raises((ValueError, RuntimeError), match=message):
        device.extension.cuda_attention_bwd(args, *(own | changes).values())
    assert emulated.launches == []
