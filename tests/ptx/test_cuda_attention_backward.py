"""csrc/cuda/attention_backward*.cu as nvcc compiles them for sm_80 and sm_90a, in the PTX emulator."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.ops.attention import AttentionNeeds
from fastbert.ops.attention_places import places_ref
from fastbert.runtime import dispatch
from fastbert.testing.op_cases import attention as attention_cases
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.ptx.emulator.cudart import Emulation
from tests.support.cpu_truth import randn
from tests.support.cuda_attention_calls import (
    HALF,
    HEADDIMS,
    NAMES,
    SEED,
    Call,
    assert_bit_equal,
    drawn,
    made,
    sequences,
)
from tests.support.triton_sanitizer import lazy_rows

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")


@pytest.fixture
def without_hopper(monkeypatch):
    """Calls that the kernels for sm_90a would take go to the others too."""
    monkeypatch.setattr(launchers, "HOPPER", False)
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", False)


@pytest.fixture
def call(emulated, kernels_only, without_hopper):
    """Makes a `Call` of the kernels for sm_80; no call may go to the next backend."""
    return lambda *args, **options: Call(emulated.backend, *args, **options)


class Kernels(NamedTuple):
    """The kernels for one architecture and width of heads."""

    emulated: Emulation
    hopper: bool
    headdim: int

    def call(self, lengths, dout=None, saved=True, **options) -> Call:
        """A call of them on drawn inputs."""
        inputs = made(lengths, headdim=self.headdim, **options)
        half = 0.012 if inputs.q.dtype == torch.bfloat16 else 0.002
        return Call(self.emulated.backend, inputs, dout, saved, half if self.hopper else 0.03)

    def extras(self, **options) -> dict:
        """Options that only the kernels for sm_80 have."""
        return {} if self.hopper else options


@pytest.fixture(params=("sm_80-32", "sm_80-64", "sm_80-128", "hopper-64"))
def kernels(request, emulated, kernels_only, monkeypatch):
    """All kernels; no call may go to others."""
    name, _, headdim = request.param.partition("-")
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", name == "hopper")
    yield Kernels(emulated, name == "hopper", int(headdim))
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
    )
]


def broken_rules(case, dtype):
    rows = testing.run_case(case, "cuda", dtype)
    return [(case, dtype, r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("schedule", ("late", "early"))
def test_every_kernel(emulated, without_hopper, schedule):
    emulated.schedule = schedule
    for case, dtype in itertools.product(EVERY_KERNEL, HALF.values()):
        assert broken_rules(case, dtype) == []
    ours = {name for name in emulated.library.names if "attention" in name and "hopper" not in name}
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
    extras = kernels.extras(gate=torch.tensor([2.0, -0.5]))
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


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_a_query_that_sees_one_key_has_no_gradient(kernels, dtype):
    """Sequences of one token and first rows of a causal mask: delta from the rounded `out` is inexact.

    1 / (1 - p) is no power of 2.
    """
    extras = kernels.extras(causal=True, gate=randn(2))
    alone = [0, 41, 42] if kernels.hopper else [0, 1, 41, 42]
    for saved in (False, True):
        dq, dk, *_ = kernels.call((1, 40, 1, 1), saved=saved, dtype=dtype, p=0.3, **extras).check()
        assert (dq[alone].abs() < 1e-6).all()
        assert (dk[[0, 41, 42]].abs() < 1e-6).all()
        assert dq[2:41].abs().max() > 0.1


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


@ONE_WIDTH
def test_softmax_scale(kernels):
    for scale in (0.01, 1.0) if kernels.hopper else (-0.7, 0.0, 0.01, 3.0):
        for bias in (None, randn(1, 2, 70, 70)):
            extras = kernels.extras(bias=bias)
            kernels.call((19, 70), softmax_scale=scale, **extras).check(0.03)


@ONE_WIDTH
def test_an_lse_that_is_slightly_wrong_cancels(kernels):
    """As if large scores had been rounded differently: P is divided by its own sum."""
    for bias in (None, randn(2, 2, 130, 130)):
        own = kernels.call((70, 130), **kernels.extras(gate=randn(2), bias=bias))
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


def test_bits_that_are_not_defined_are_not_used(kernels):
    """Bits past a sequence, and those of keys that a causal mask hides, may have any value."""
    lengths, columns = (40, 0, 9, 65), torch.arange(96)
    for causal in (False,) if kernels.hopper else (False, True):
        extras = kernels.extras(bias=randn(4, 2, 70, 70), gate=randn(2), causal=causal)
        own = kernels.call(lengths, capacity=5, slack=5, p=0.3, offset=2**31 + 5, **extras)
        expected, bits = own.run(), own.bits
        defined = torch.zeros(sum(lengths) + 5, 96, dtype=torch.bool)
        for start, n in sequences(own.inputs):
            seen = (columns <= torch.arange(n)[:, None]) | (not causal)
            defined[start : start + n] = (columns < n) & seen
        defined = (defined.unflatten(1, (3, 32)).long() << columns[:32]).sum(-1)
        defined = torch.where(defined >= 2**31, defined - 2**32, defined).int()
        noise = torch.randint(-(2**31), 2**31, bits.shape, generator=torch.Generator().manual_seed(1)).int()
        own.bits = bits & defined | noise & ~defined
        assert_bit_equal(own.run(), expected)
        own.bits = ~bits  # they are read at all
        assert not any(torch.equal(a, b) for a, b in zip(own.run()[:3], expected, strict=False))


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
def test_empty_sequences_and_capacity(call, lengths):
    for capacity in (0, 150, 700):
        grads = call(made(lengths, capacity=capacity, gate=randn(2))).check()
        assert all((gradient[sum(lengths) :] == 0).all() for gradient in grads[:3])
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


@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize(("p", "saved"), ((0.0, False), (0.25, False), (0.25, True)))
def test_neighbours_and_unused_cells_may_be_poison(kernels, p, saved, bad):
    """Tiles reach into the next sequence, and into rows after the last one."""
    lengths = (70, 40, 129) if kernels.hopper else (18, 3, 17)
    end, bias = sum(lengths), randn(3, 2, max(lengths), max(lengths))
    extras = kernels.extras(bias=bias, gate=randn(2))
    own = kernels.call(lengths, saved=saved, capacity=90, p=p, **extras)
    own.need = own.need._replace(dgate=False)  # it is one sum over all rows
    clean = own.run()
    poisoned = torch.ones(end + 90, dtype=torch.bool)
    poisoned[: lengths[0]] = poisoned[end - lengths[2] : end] = False
    for t in (*own.inputs[:3], own.dout, own.out):
        t[poisoned] = bad
    own.lse[:, poisoned] = bad
    bias[1] = bad
    bias[2, :, lengths[2] :] = bad
    bias[2, :, :, lengths[2] :] = bad
    dirty = own.run()
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[~poisoned], e[~poisoned])
        assert (a[end:] == 0).all()
        assert math.isinf(bad) or a[lengths[0] : end - lengths[2]].isnan().all()
    if not kernels.hopper:
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


def test_a_table_of_places_is_read(kernels):
    extras = kernels.extras(gate=randn(2), causal=True)
    own = kernels.call((20, 130, 33, 0), capacity=150, p=0.1, saved=False, **extras)
    expected = own.run()
    own.places = places_ref(own.inputs.cu_seqlens, 333, 130)
    assert_bit_equal(own.run(), expected)
    ends = torch.zeros_like(own.inputs.cu_seqlens)  # the places say it all
    own.inputs = own.inputs._replace(cu_seqlens=ends)
    assert_bit_equal(own.run(), expected)


# --- what goes elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["headdim", "address", "row", "head", "float32"])
def test_calls_for_the_next_backend(call, monkeypatch, change):
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    inputs = made((9, 4), headdim=24 if change == "headdim" else 32, dtype=dtype)
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
    assert asked == [("cuda", "attention_bwd training", torch.device("cpu"), dtype), 7]


def test_the_entry_refuses_what_it_cannot_serve(call, monkeypatch):
    monkeypatch.setattr(launchers, "readable", lambda *tensors, dtypes: True)
    with pytest.raises(RuntimeError, match="headdim 32, 64 or 128"):
        call(made((9, 4), headdim=24)).run()
    with pytest.raises(RuntimeError, match="bfloat16 or float16"):
        call(made((9, 4), dtype=torch.float32)).run()


# --- the kernels for sm_90a alone ---------------------------------------------------------------------------

ON_HOPPER = (
    AttentionCase((128, 127, 129), 1, 64, packed_qkv=True),
    AttentionCase((300, 70), 1, 64, packed_qkv=True, dropout_p=0.1),
    AttentionCase((512,), 1, 64, dropout_p=0.1),
    AttentionCase((64, 1, 65, 0, 7), 2, 64, capacity=70, dropout_p=0.25),
    AttentionCase((40, 9), 2, 64, sharpness=16.0, dropout_p=0.5),
    AttentionCase((130, 33), 2, 64, sharpness=8.0),
)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", ON_HOPPER, ids=repr)
def test_error_rule_of_hopper(emulated, case, dtype):
    """Forward and backward, as a self-check on a GPU runs it."""
    assert broken_rules(case, dtype) == []
    names = {launch.kernel for launch in emulated.launches}
    assert any("dq_hopper_kernel" in name for name in names)
    assert any("dkdv_hopper_kernel" in name for name in names)


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
    assert whole.shape == (73, 3, 2, 64)
    for i, grad in enumerate(aside[:3]):
        assert grad._base is whole
        assert grad.data_ptr() == whole[:, i].data_ptr()
    own.inputs = own.inputs._replace(**{name: getattr(own.inputs, name).clone() for name in "qkv"})
    apart = own.run()
    assert all(grad.is_contiguous() for grad in apart)
    assert_bit_equal(apart, aside)


NEEDS = AttentionNeeds(True, True, True, False, False)


def test_which_calls_hopper_serves(emulated, monkeypatch):
    inputs, serves = made((9,), headdim=64), launchers.hopper_serves_backward
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


def test_a_causal_mask_is_for_the_other_kernels(emulated):
    Call(emulated.backend, made((70,), 1, 64, causal=True)).run()
    assert not any("hopper" in launch.kernel for launch in emulated.launches)


def test_self_checks_reach_hopper():
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
def test_refusals_of_hopper(emulated, options, changes, message):
    call = Call(emulated.backend, made((9,), 1, 64))
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
