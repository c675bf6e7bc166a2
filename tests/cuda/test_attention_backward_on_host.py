"""The CUDA attention's backward, compiled for the host: its threads are fibers whose order is drawn.

Each launch draws another order, and whether asynchronous copies land late or early. Shared memory and outputs
start as NaN. Forward is the reference's.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from fastbert.backends import cuda, reference
from fastbert.backends.cuda import attention as launcher
from fastbert.ops.attention import AttentionInputs, AttentionNeeds
from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_places import places_ref
from fastbert.testing import triton_interpreter
from fastbert.testing.op_cases.attention import CASES, AttentionCase
from tests.support.cuda_draws import check_gradients, drawn_case

pytest_plugins = ("tests.support.cpu_fixtures", "tests.support.cuda_fixtures")
pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("cuda_on_host", "guarded", "kernels_only")]
HALF = (torch.bfloat16, torch.float16)
HEADDIMS = (32, 64, 128)
NAMES = ("dq", "dk", "dv", "dbias", "dgate")
SEED = torch.tensor([0x123456789ABCDEF])
INF, LOWEST = math.inf, torch.finfo(torch.float32).min


@pytest.fixture
def cuda_on_host(cuda_on_host, monkeypatch):
    """The `cuda` backend on the host, with the reference's forward."""
    monkeypatch.setattr(cuda, "attention_fwd", lambda *args: reference.attention_fwd(*args[:3]))
    return cuda


def randn(*shape, dtype=torch.float32, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def made(lengths, nheads=2, headdim=32, dtype=torch.bfloat16, capacity=0, slack=0, p=0.0, **options):
    """Inputs whose q, k, v are views of one packed tensor; `options` replace the defaults."""
    total = sum(lengths) + capacity
    q, k, v = randn(total, 3, nheads, headdim, dtype=dtype, seed=5).unbind(1)
    size, seed = max(lengths, default=0) + slack, SEED if p > 0 else None
    inputs = AttentionInputs(
        *(q, k, v, ends_of(lengths), size, headdim**-0.5, False, None, None, p, seed, 11)
    )
    return inputs._replace(**options)


def needs_of(inputs) -> AttentionNeeds:
    return AttentionNeeds(True, True, True, inputs.bias is not None, inputs.gate is not None)


class Call:
    """A call of backward: what forward made of the inputs, dout, and which gradients."""

    def __init__(self, inputs, dout=None, need=None, saved=True):
        self.inputs, self.need = inputs, need or needs_of(inputs)
        self.out, self.lse, _, bits = reference.attention_fwd(inputs, False, inputs.dropout_p > 0)
        self.bits = bits if saved and inputs.dropout_p > 0 else None
        self.dout = randn(*inputs.q.shape, dtype=inputs.q.dtype, seed=9) if dout is None else dout
        self.places = None

    def run(self, backend=launcher):
        args = self.dout, self.inputs, self.out, self.lse, self.bits, self.need
        return backend.attention_bwd(*args, self.places)

    def truth(self):
        """The gradients in float64, without an `out` that was rounded."""
        wide = self.inputs._replace(
            **{
                name: None if t is None else t.double()
                for name, t in self.inputs._asdict().items()
                if name in ("q", "k", "v", "bias", "gate")
            }
        )
        out, lse, _, bits = reference.attention_fwd(wide, False, wide.dropout_p > 0)
        bits = bits if wide.dropout_p > 0 else None
        return reference.attention_bwd(self.dout.double(), wide, out, lse, bits, self.need)

    def check(self, tolerance=0.03):
        """Every gradient is near the truth, relative to the largest."""
        grads = self.run()
        for name, a, e in zip(NAMES, grads, self.truth(), strict=True):
            assert a.shape == e.shape, name
            scale = max(1.0, e.abs().max().item()) if e.numel() else 1.0
            torch.testing.assert_close(
                a.double(), e, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
        return grads


def assert_bit_equal(a, b):
    for name, x, y in zip(NAMES, a, b, strict=True):
        assert torch.equal(x, y), name


# --- the error rule -----------------------------------------------------------------------------------------


SERVED = [c for c in CASES if c.headdim in HEADDIMS and not c.probs]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(c, HALF[i % 2], id=f"{c.id}-{HALF[i % 2]}") for i, c in enumerate(SERVED)],
)
def test_cases(case, dtype):
    if sum(n * n for n in case.lengths) * case.nheads > 60_000:
        case = AttentionCase(case.lengths[:1], 1, case.headdim, packed_qkv=case.packed_qkv)
    check_gradients(case, dtype)


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_at_the_tiles_edges(headdim, causal):
    lengths = (63, 0, 64, 1, 65) if headdim < 128 else (31, 33, 65)
    check_gradients(AttentionCase(lengths, 1, headdim, causal=causal, capacity=70), HALF[causal])


@pytest.mark.parametrize("lengths", [(511,), (513, 512), (2048,)], ids=str)
def test_long_sequences(lengths):
    many = sum(lengths) > 2000
    causal = many  # half of the tiles
    Call(made(lengths, nheads=1, headdim=32 if many else 64, causal=causal, p=0.1)).check()


@pytest.mark.parametrize("part", range(8))
def test_fuzz(part):
    """32 shapes per part, 256 in all, by the error rule."""
    rng = random.Random(part)
    for i in range(32):
        case, dtype = drawn_case(rng), rng.choice(HALF)
        try:
            check_gradients(case, dtype, seed=100 * part + i, strict=False)
        except AssertionError as error:
            raise AssertionError(f"{case.id} {dtype} seed {100 * part + i}: {error}") from None


# --- exact results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("saved", [False, True])
def test_repeats_are_bit_equal_in_every_order_of_threads(headdim, saved):
    bias = randn(1, 2, 70, 70)
    call = Call(made((70, 3), headdim=headdim, p=0.3, bias=bias, gate=randn(2)), saved=saved)
    first = call.check()
    for _ in range(6):
        assert_bit_equal(call.run(), first)
    assert_bit_equal(Call(call.inputs, saved=not saved).run(), first)


@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_are_bit_equal_in_every_order_of_threads(causal):
    call = Call(made((200,), nheads=1, p=0.1, causal=causal))
    first = call.check()
    for _ in range(4):
        assert_bit_equal(call.run(), first)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_uniform_attention_is_exact(dtype):
    inputs = made((64, 8, 32), gate=torch.tensor([2.0, -0.5]), dtype=dtype, softmax_scale=0.25)
    k, v = ((2 * t).round() for t in inputs[1:3])
    call = Call(inputs._replace(q=torch.zeros_like(k), k=k, v=v))
    call.dout = (2 * call.dout).round()
    dq, dk, dv, _, _ = call.run()
    truth = call.truth()
    assert torch.equal(dv.double(), truth[2].to(dtype).double())
    assert (dk == 0).all()
    torch.testing.assert_close(dq.double(), truth[0], rtol=0.01, atol=0.04)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_query_that_sees_one_key_has_no_gradient(dtype, headdim):
    """Sequences of one token and first rows of a causal mask: delta from the rounded `out` is inexact."""
    for saved in (False, True):
        inputs = made((1, 40, 1, 1), headdim=headdim, dtype=dtype, causal=True, p=0.5, gate=randn(2))
        dq, dk, *_ = Call(inputs, saved=saved).check()
        assert (dq[[0, 1, 41, 42]].abs() < 1e-6).all()
        assert (dk[[0, 41, 42]].abs() < 1e-6).all()
        assert dq[2:41].abs().max() > 0.1


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.5}, {"bias": "sequence"}, {"gate": True, "causal": True}]
)
def test_a_sharp_softmax(dtype, options):
    """dS is a small difference of large numbers: its error is that of delta."""
    for sharpness in (4.0, 32.0):
        check_gradients(AttentionCase((70, 20), 2, 32, sharpness=sharpness, **options), dtype)


# --- masks, scales, extremes --------------------------------------------------------------------------------


def test_rows_without_an_allowed_key():
    bias = randn(2, 2, 70, 70)
    bias[0, 0, 3] = -INF
    bias[:, 1, :, :64] = -INF  # a whole tile of keys before the first allowed one
    bias[1, 0, :, 17:] = -INF
    bias[1, 1] = -INF
    dq, dk, dv, dbias, _ = Call(made((70, 23), bias=bias)).check()
    for gradient in (dq[3, 0], dq[70:, 1], dk[70:, 1], dv[70:, 1], dbias[0, 0, 3], dbias[1, 1]):
        assert (gradient == 0).all()


def test_a_mask_of_the_lowest_number_is_not_minus_infinity():
    bias = torch.zeros(1, 1, 40, 40)
    bias[..., 4, :] = LOWEST  # uniform; log 40 is lost in its lse
    bias[..., 5, 1:] = LOWEST  # one key
    bias[..., 6, :30] = LOWEST
    call = Call(made((40, 17), bias=bias))
    expected = call.run(reference)  # float64 loses none of them
    for name, a, e in zip(NAMES, call.run(), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0.02, atol=0.02, msg=lambda m, n=name: f"{n}: {m}")
    assert call.run()[0][4].abs().max() > 0.01


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.01, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_softmax_scale(scale, with_bias):
    Call(made((19, 5), softmax_scale=scale, bias=randn(1, 2, 19, 19) if with_bias else None)).check()


def test_an_lse_that_is_slightly_wrong_cancels():
    """As if large scores had been rounded differently: P is divided by its own sum."""
    for bias in (None, randn(2, 2, 70, 70)):
        call = Call(made((70, 2), gate=randn(2), bias=bias))
        call.lse = call.lse + 0.25 * randn(*call.lse.shape)
        call.check()


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_scores_do_not_overflow(scale, with_bias):
    """lse is near 900: exp without it would be infinite or 0."""
    inputs = made((33,), nheads=1, softmax_scale=scale, bias=torch.zeros(1, 1, 33, 33) if with_bias else None)
    keys = (scale * (28 + 0.1 * inputs.k.float())).bfloat16()
    inputs = inputs._replace(q=torch.ones_like(inputs.q), k=keys)
    call = Call(inputs)
    assert call.lse.min() > 800
    call.check(0.25)  # dS sums to 0, and is rounded before it meets keys of 28


SHAPES = list(itertools.product([1, 3], [1, 2], [1, 70], [1, 70]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("multiprocessors", [0, 100])
def test_bias_broadcasts(monkeypatch, shape, multiprocessors):
    """dbias in one part, and in one part per sequence and head that share it."""
    monkeypatch.setattr(cuda.device, "multiprocessors", lambda device: multiprocessors)
    call = Call(made((70, 3, 1), bias=randn(*shape), gate=randn(2), causal=shape[0] == 1, p=0.2))
    call.check()


@pytest.mark.parametrize("bias_dtype", [torch.float64, *HALF], ids=str)
def test_bias_and_gate_in_another_dtype(bias_dtype):
    bias, gate = randn(1, 2, 9, 9).bfloat16().to(bias_dtype), randn(2).bfloat16().to(bias_dtype)
    call = Call(made((9, 7), bias=bias, gate=gate))
    wide = Call(call.inputs._replace(bias=bias.float(), gate=gate.float()))
    assert_bit_equal(call.run(), wide.run())


def test_a_gate_of_0_has_a_gradient():
    inputs = made((40, 9), gate=torch.tensor([0.0, 2.0]), capacity=70, p=0.3)
    grads = Call(inputs).check()
    assert grads[4][0].abs() > 0.1
    assert all((gradient[:, 0] == 0).all() for gradient in grads[:3])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("headdim", [32, 128])
@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [(0, 0, 0.5), (-1, 2**32 - 1, 0.25), (2**62 + 12345, 2**31, 0.75), (-(2**63), 2**31 - 1, 0.125)],
)
def test_dropout_bits_are_the_definitions(seed, offset, p, saved, headdim):
    """dv of a dout that is an identity are the bits."""
    lengths = (9, 32, 70)
    inputs = made(lengths, headdim=headdim, p=p, offset=offset, seed=torch.tensor([seed]))
    inputs = inputs._replace(q=torch.zeros_like(inputs.q))  # every probability 1 / length
    dout = torch.zeros_like(inputs.q)
    for start, n in zip(inputs.cu_seqlens.tolist(), lengths, strict=False):
        rows = min(n, headdim)
        dout[start : start + rows] = n * torch.eye(headdim)[:rows].unsqueeze(1)
    dv = Call(inputs, dout, saved=saved).check()[2]
    keep = keep_mask(inputs.seed, offset, inputs.cu_seqlens[:-1], 2, 70, p)
    for b, (start, n) in enumerate(zip(inputs.cu_seqlens.tolist(), lengths, strict=False)):
        rows = min(n, headdim)
        bits = keep[b, :, :rows, :n].permute(2, 0, 1).float()
        torch.testing.assert_close(dv[start : start + n, :, :rows].float(), bits / (1 - p), rtol=0.01, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_bits_that_are_not_defined_are_not_used(causal, headdim):
    """Bits past a sequence, and those of keys that a causal mask hides, may have any value."""
    lengths = (40, 0, 9, 65)
    options = {"bias": randn(4, 2, 70, 70), "gate": randn(2), "causal": causal, "offset": 2**31 + 5}
    call = Call(made(lengths, headdim=headdim, capacity=5, slack=5, p=0.3, **options))
    drawn = Call(call.inputs, saved=False).run()
    assert_bit_equal(call.run(), drawn)
    keys, start = torch.arange(96), 0
    defined = torch.zeros(sum(lengths) + 5, 96, dtype=torch.bool)
    for n in lengths:
        rows = torch.arange(n)[:, None]
        defined[start : start + n] = (keys < n) & ((keys <= rows) | (not causal))
        start += n
    defined = (defined.unflatten(1, (3, 32)).long() << keys[:32]).sum(-1)
    defined = torch.where(defined >= 2**31, defined - 2**32, defined).int()
    noise = torch.randint(-(2**31), 2**31, call.bits.shape).int()
    bits = call.bits
    call.bits = bits & defined | noise & ~defined
    assert_bit_equal(call.run(), drawn)
    call.bits = ~bits  # they are read at all
    assert not any(torch.equal(a, b) for a, b in zip(call.run(), drawn, strict=True))


def test_a_seed_without_dropout_is_not_read():
    call = Call(made((18, 5)))
    expected = call.run()
    call.inputs = call.inputs._replace(seed=torch.tensor([7]))
    call.bits = torch.zeros(1, dtype=torch.int32)
    assert_bit_equal(call.run(), expected)


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0), ()], ids=str)
@pytest.mark.parametrize("capacity", [0, 150, 700])
def test_empty_sequences_and_capacity(lengths, capacity):
    grads = Call(made(lengths, capacity=capacity, gate=randn(2))).check()
    assert all((gradient[sum(lengths) :] == 0).all() for gradient in grads[:3])


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0), ()], ids=str)
def test_empty_sequences_and_a_bias(lengths):
    longest = max(lengths, default=0)
    for shape in ((len(lengths), 1, longest, longest), (1, 1, 1, 1)):
        Call(made(lengths, capacity=4, bias=randn(*shape))).check()


def test_no_rows():
    grads = Call(made((0, 0), slack=3, bias=randn(1, 2, 3, 3), gate=randn(2))).run()
    assert [tuple(t.shape) for t in grads] == [(0, 2, 32)] * 3 + [(1, 2, 3, 3), (2,)]
    assert all((gradient == 0).all() for gradient in grads)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("others", [False, True])
def test_what_backward_returns(needs, others):
    options = {"bias": randn(2, 1, 1, 20), "gate": randn(2), "capacity": 40, "p": 0.3}
    call = Call(made((20, 3), **options))
    every = call.run()
    call.need = AttentionNeeds(*needs, others, others)
    grads = call.run()
    for need, a, every_a, e in zip(call.need, grads, every, call.run(reference), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert torch.equal(a, every_a) if need else a.shape == (0,)
    # dq, dk and dv all three: side by side, as q, k and v are
    aside = grads[:3] if all(needs) else ()
    assert all(a.stride() == call.inputs.q.stride() for a in aside)
    assert all(a.is_contiguous() for a in grads[len(aside) :])


def far(t: torch.Tensor, *strides: int) -> torch.Tensor:
    """The same values in memory that is mapped where it is touched."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    memory = triton_interpreter.lazy_rows(1, extent, extent, t.dtype).reshape(-1)
    return memory.as_strided(t.shape, strides).copy_(t)


def test_strided_inputs_with_poisoned_gaps():
    call = Call(made((70, 2, 5), bias=randn(3, 2, 70, 70)))
    expected, nan = call.run(), float("nan")
    wide = [torch.full((2, 77, 3, 40), nan, dtype=torch.bfloat16) for _ in range(3)]
    views = [w[:, :, 1, 8:].transpose(0, 1) for w in wide]
    views = [view.copy_(t) for view, t in zip(views, call.inputs[:3], strict=True)]
    ends = call.inputs.cu_seqlens.repeat_interleave(2)
    ends[1::2] = 99
    bias = call.inputs.bias.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    call.inputs = call.inputs._replace(q=views[0], k=views[1], v=views[2], cu_seqlens=ends[::2], bias=bias)
    lse = torch.full((2, 90), nan)
    lse[:, :77] = call.lse
    call.lse = lse[:, :77]
    for name in ("dout", "out"):  # not at a multiple of 16 bytes
        memory = torch.full((77 * 64 + 1,), nan, dtype=torch.bfloat16)
        setattr(call, name, memory[1:].view(77, 2, 32).copy_(getattr(call, name)))
    assert_bit_equal(call.run(), expected)


def test_offsets_beyond_2_to_31_elements(monkeypatch):
    options = {"p": 0.3, "gate": randn(3)}
    call = Call(made((3, 1, 2), nheads=3, bias=randn(3, 3, 3, 3), **options))
    expected = call.run()
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    near = call.inputs
    for strides in ((32, 2**30 + 64, 1), (2**30 + 64, 40, 1)):
        call.inputs = near._replace(**{name: far(getattr(near, name), *strides) for name in "qkv"})
        assert_bit_equal(call.run(), expected)
    for strides in ((3, 2**30 + 7, 9, 1), (2**31 + 9, 64, 2**30 + 3, 1)):
        call.inputs = near._replace(bias=far(near.bias, *strides))
        assert_bit_equal(call.run(), expected)
    # bits as if max_seqlen were 2**34 would need a max_seqlen that is: words as of 2**31 - 1
    near = near._replace(bias=None)
    call = Call(near)
    expected = call.run()
    call.inputs = near._replace(max_seqlen=2**31 - 1)
    call.bits, call.places = far(call.bits, 6 * 2**26, 2**26, 1), places_ref(near.cu_seqlens, 6, 3)
    monkeypatch.setattr(launcher, "_slots", lambda inputs, places: slots_of(near, places))
    assert_bit_equal(call.run(), expected)


slots_of = launcher._slots


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("saved", [False, True])
def test_neighbours_and_unused_cells_may_be_nan(headdim, saved):
    nan = float("nan")
    bias = randn(3, 2, 18, 18)
    call = Call(made((18, 3, 17), headdim=headdim, capacity=70, bias=bias, gate=randn(2), p=0.2), saved=saved)
    call.need = call.need._replace(dgate=False)  # it is one sum over all rows
    clean = call.run()
    for t in (*call.inputs[:3], call.dout, call.out):
        t[18:21] = nan  # the sequence in the middle
        t[38:] = nan
    call.lse[:, 38:] = nan
    bias[1] = nan
    bias[2, :, 17:] = nan
    bias[2, :, :, 17:] = nan
    dirty = call.run()
    others = [*range(18), *range(21, 108)]
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[others], e[others])
        assert a[18:21].isnan().all()
    assert torch.equal(dirty[3][[0, 2]], clean[3][[0, 2]])


def test_a_nan_stays_where_it_belongs():
    call = Call(made((70, 20)))
    clean = call.run()
    call.dout[3, 1, 5] = float("nan")
    dirty = call.run()
    assert dirty[0][3, 1].isnan().all()
    assert dirty[1][:70, 1].isnan().all()
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[70:], e[70:])
        assert torch.equal(a[:, 0], e[:, 0])
    assert torch.equal(dirty[0][4:70, 1], clean[0][4:70, 1])


# --- the grid -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_table_of_places_is_read(headdim):
    call = Call(made((20, 130, 33, 0), headdim=headdim, capacity=150, gate=randn(2), causal=True))
    expected = call.run()
    call.places = places_ref(call.inputs.cu_seqlens, 333, 130)
    assert_bit_equal(call.run(), expected)
    ends = torch.zeros_like(call.inputs.cu_seqlens)  # the places say it all
    call.inputs = call.inputs._replace(cu_seqlens=ends)
    assert_bit_equal(call.run(), expected)


# --- what goes elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["headdim", "address", "row", "head"])
def test_calls_for_the_next_backend(monkeypatch, change):
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
    monkeypatch.setattr(launcher.dispatch, "next_function", following)
    Call(inputs).run()
    assert asked == [("cuda", "attention_bwd training", torch.device("cpu"), torch.bfloat16), 7]


def test_the_entry_refuses_what_it_cannot_serve(emulated_extension, monkeypatch):
    call = Call(made((9, 4), headdim=24))
    monkeypatch.setattr(launcher, "readable", lambda *tensors: True)
    with pytest.raises(RuntimeError, match="headdim 32, 64 or 128"):
        call.run()
    call = Call(made((9, 4), dtype=torch.float32))
    with pytest.raises(RuntimeError, match="bfloat16 or float16"):
        call.run()
