"""The Triton attention's backward: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.backends import reference
from fastbert.backends import triton as backend
from tests.support import launchers
from tests.support.triton_attention_inputs import (
    INF,
    LOWEST,
    at_strides,
    far_bits,
    forward_args,
    lazy,
    randn,
    strided,
)
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    HugeStrides,
    assert_bit_equal,
    in_float64,
    kernels_of,
    needs_lazy_memory,
)

kernels = kernels_of("attention_backward")
makers = kernels_of("attention_places")
slots = pytest.importorskip("fastbert.kernels.attention_slots")
tuning = pytest.importorskip("fastbert.kernels.tuning")
pytestmark = [pytest.mark.usefixtures("checked_memory"), pytest.mark.sweep]
NAMES = ("dq", "dk", "dv", "dbias", "dgate")
WANTED = tuple(f"need_{name}" for name in NAMES)


def cut(*tiles: tuple[int, int], chunk: int | None = None):
    """A `configs_for` that always cuts like this: (queries, keys) of dq, of dk and dv, of dbias."""

    def configs_for(headdim, *_):
        block_d = max(16, 1 << (headdim - 1).bit_length())
        return kernels.Configs(
            *(kernels.Config(m, n, min(chunk or block_d, block_d), 4, 1) for m, n in tiles)
        )

    return configs_for


# Small tiles, so that short sequences have many: high, wide, equal.
CUTS = {
    "high-wide": cut((32, 16), (16, 32), (16, 32)),
    "wide-high": cut((16, 32), (32, 16), (32, 16)),
    "chunks": cut((16, 16), (16, 16), (16, 16), chunk=16),
    "two-words": cut((16, 64), (16, 64), (16, 64)),
}


SLOW = ("wide-high", "two-words")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CUTS])
def tiles(request, monkeypatch):
    monkeypatch.setattr(kernels, "configs_for", CUTS[request.param])


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "configs_for", CUTS["high-wide"])


def backward_args(lengths, need_dbias=None, need_dgate=None, **options):
    """Arguments of `attention_bwd` in its order, from `forward_args`; out and lse are the reference's."""
    args = forward_args(lengths, **options)
    return with_outputs({"dout": randn(*args["q"].shape, dtype=args["q"].dtype, seed=9), **args})


def with_outputs(args):
    """out, lse and the saved bits for these inputs, and all gradients asked for."""
    made = ("dout", "out", "lse", "keep_bits", *WANTED)
    inputs = {k: v for k, v in args.items() if k not in made}
    inputs |= {"return_probs": False, "save_bits": inputs["dropout_p"] > 0}
    out, lse, _, keep_bits = launchers.attention_fwd(reference, *inputs.values())
    saved = inputs.pop("save_bits")
    del inputs["return_probs"]
    qkv = {name: inputs.pop(name) for name in "qkv"}
    given = {"need_dbias": inputs["bias"] is not None, "need_dgate": inputs["gate"] is not None}
    wanted = dict.fromkeys(WANTED, True) | given
    keep_bits = keep_bits if saved else None
    return {"dout": args["dout"], **qkv, "out": out, "lse": lse, **inputs, "keep_bits": keep_bits, **wanted}


def run(args):
    return launchers.attention_bwd(kernels, *args.values())


def truth(args):
    return launchers.attention_bwd(reference, *in_float64(args).values())


def assert_close(actual, args, tolerance=2e-5):
    """All gradients are close to the float64 reference's."""
    for name, a, e in zip(NAMES, actual, truth(args), strict=True):
        assert a.shape == e.shape, name
        scale = max(1.0, e.abs().max().item()) if e.numel() else 1.0
        torch.testing.assert_close(
            a.double(), e, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- exact results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("saved", [False, True])
def test_a_query_that_sees_one_key_has_no_gradient(tiles, dtype, saved):
    """Sequences of one token and first rows of a causal mask: delta from the rounded `out` is inexact."""
    options = {"dropout_p": 0.5, "seed": torch.tensor([7], device=DEVICE), "gate": randn(2)}
    args = backward_args((1, 40, 1, 1), causal=True, dtype=dtype, **options)
    if not saved:
        args["keep_bits"] = None
    dq, dk, *_ = run(args)
    assert (dq[[0, 1, 41, 42]].abs() < 1e-6).all()
    assert (dk[[0, 41, 42]].abs() < 1e-6).all()
    assert dq[2:41].abs().max() > 0.1


# --- masks, scales, extremes --------------------------------------------------------------------------------


def test_rows_without_an_allowed_key(tiles):
    bias = randn(2, 2, 40, 40)
    bias[0, 0, 3] = -INF
    bias[:, 1, :, :20] = -INF  # whole blocks of keys before the first allowed one
    bias[1, 0, :, 17:] = -INF
    bias[1, 1] = -INF
    args = backward_args((40, 23), bias=bias)
    grads = run(args)
    assert_close(grads, args)
    dq, dk, dv, dbias, _ = grads
    for gradient in (dq[3, 0], dq[40:, 1], dk[40:, 1], dv[40:, 1], dbias[0, 0, 3], dbias[1, 1]):
        assert (gradient == 0).all()


def test_a_mask_of_the_lowest_number_is_not_minus_infinity(small_tiles):
    bias = torch.zeros(1, 1, 40, 40, device=DEVICE)
    bias[..., 4, :] = LOWEST  # uniform; log 40 is lost in its lse
    bias[..., 5, 1:] = LOWEST  # one key
    bias[..., 6, :30] = LOWEST
    args = backward_args((40, 17), bias=bias)
    grads, expected = run(args), launchers.attention_bwd(reference, *args.values())
    # float64 loses none of them
    for name, a, e in zip(NAMES, grads, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert grads[0][4].abs().max() > 0.01


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.01, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_softmax_scale(small_tiles, scale, with_bias):
    bias = randn(1, 2, 19, 19) if with_bias else None
    args = backward_args((19, 5), softmax_scale=scale, bias=bias)
    assert_close(run(args), args)


def test_an_lse_that_is_slightly_wrong_cancels(small_tiles):
    """As if large scores had been rounded differently: P is divided by its own sum."""
    for options in ({}, {"bias": randn(2, 2, 33, 33)}):
        args = backward_args((33, 2), gate=randn(2), **options)
        moved = args | {"lse": args["lse"] + 0.25 * randn(*args["lse"].shape)}
        assert_close(run(moved), args)


@pytest.mark.parametrize("scale", [1.0, -1.0])  # folded into exp2's factor, and not
def test_large_scores_do_not_overflow(small_tiles, scale):
    """lse is near 900: exp without it would be infinite or 0."""
    args = backward_args((33,), nheads=1, softmax_scale=scale)
    args["q"] = torch.ones_like(args["q"])
    args["k"] = scale * (56 + 0.1 * args["k"])
    args = with_outputs(args)
    assert args["lse"].min() > 800
    assert_close(run(args), args, 1e-2)


SHAPES = itertools.product([1, 3], [1, 2], [1, 33], [1, 33])


# half of the shapes: any three sizes occur in every combination
@pytest.mark.parametrize("shape", [s for s in SHAPES if sum(n > 1 for n in s) % 2], ids=str)
def test_bias_broadcasts(small_tiles, monkeypatch, shape):
    """dbias in one part, and in one part per sequence and head that share it."""
    for multiprocessors in (0, 100) if shape == (1, 1, 1, 33) else (100,):
        device = tuning.Device("cpu", (0, 0), multiprocessors)
        monkeypatch.setattr(kernels.tuning, "device_of", lambda _, device=device: device)
        args = backward_args((33, 3, 1), bias=randn(*shape), gate=randn(2), causal=shape[0] == 1)
        assert_close(run(args), args)


def test_a_gate_of_0_has_a_gradient(small_tiles):
    options = {"dropout_p": 0.3, "seed": torch.tensor([7], device=DEVICE)}
    args = backward_args((40, 9), gate=torch.tensor([0.0, 2.0], device=DEVICE), capacity=40, **options)
    grads = run(args)
    assert_close(grads, args)
    assert grads[4][0].abs() > 0.1
    assert all((gradient[:, 0] == 0).all() for gradient in grads[:3])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles_", CUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_saved_bits_and_drawn_ones_are_one(monkeypatch, tiles_, causal):
    """Bits past a sequence, and those of keys that a causal mask hides, may have any value."""
    monkeypatch.setattr(kernels, "configs_for", CUTS[tiles_])
    lengths = (40, 0, 9, 65)
    options = {"dropout_p": 0.3, "seed": torch.tensor([5], device=DEVICE), "offset": 2**31 + 5}
    options |= {"bias": randn(4, 2, 70, 70), "gate": randn(2), "causal": causal, "capacity": 5, "slack": 5}
    args = backward_args(lengths, **options)
    drawn = run(args | {"keep_bits": None})
    assert_bit_equal(run(args), drawn)
    keys, start = torch.arange(96, device=DEVICE), 0
    defined = torch.zeros(sum(lengths) + 5, 96, dtype=torch.bool, device=DEVICE)
    for n in lengths:
        rows = torch.arange(n, device=DEVICE)[:, None]
        defined[start : start + n] = (keys < n) & ((keys <= rows) | (not causal))
        start += n
    defined = (defined.unflatten(1, (3, 32)).long() << keys[:32]).sum(-1)
    defined = torch.where(defined >= 2**31, defined - 2**32, defined).int()
    noise = torch.randint(-(2**31), 2**31, args["keep_bits"].shape, device=DEVICE).int()
    assert_bit_equal(run(args | {"keep_bits": args["keep_bits"] & defined | noise & ~defined}), drawn)
    other = run(args | {"keep_bits": ~args["keep_bits"]})  # they are read at all
    assert not any(torch.equal(a, b) for a, b in zip(other, drawn, strict=True))


@needs_lazy_memory
@pytest.mark.parametrize("cut_", ["high-wide", "two-words"])
def test_bits_beyond_2_to_31_words(monkeypatch, cut_):
    monkeypatch.setattr(kernels, "configs_for", CUTS[cut_])
    options = {"dropout_p": 0.3, "seed": torch.tensor([5], device=DEVICE), "bias": randn(3, 3, 3, 3)}
    args = backward_args((3, 1, 2), nheads=3, **options)
    expected = run(args)
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    assert_bit_equal(run(args | {"keep_bits": far_bits(args["keep_bits"])}), expected)


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0), ()], ids=str)
@pytest.mark.parametrize("capacity", [0, 150])
def test_empty_sequences_and_capacity(small_tiles, lengths, capacity):
    longest = max(lengths, default=0)
    for bias in (None, randn(len(lengths), 1, longest, longest), randn(1, 1, 1, 1)):
        args = backward_args(lengths, capacity=capacity, gate=randn(2), bias=bias)
        grads = run(args)
        assert_close(grads, args)
        assert all((gradient[sum(lengths) :] == 0).all() for gradient in grads[:3])


def test_no_rows():
    args = backward_args((0, 0), slack=3, bias=randn(1, 2, 3, 3), gate=randn(2))
    grads = run(args)
    assert [tuple(t.shape) for t in grads] == [(0, 2, 16)] * 3 + [(1, 2, 3, 3), (2,)]
    assert all((gradient == 0).all() for gradient in grads)


# For every pair of gradients: both, one, and neither.
NEEDS = [(1, 1, 1, 1, 1), (1, 0, 0, 0, 1), (0, 1, 0, 1, 0), (0, 0, 1, 0, 1), (0, 0, 0, 1, 1), (1, 1, 0, 0, 0)]
NEEDS += [(0, 1, 1, 0, 0), (1, 0, 1, 1, 0), (0, 0, 1, 0, 0), (0, 0, 0, 0, 1)]


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "".join(map(str, needs)))
def test_what_backward_returns(small_tiles, monkeypatch, needs):
    dtype = DTYPES[NEEDS.index(needs) % 3]
    options = {"bias": randn(2, 1, 1, 20), "gate": randn(2), "capacity": 40}
    if needs[2]:
        options |= {"dropout_p": 0.3, "seed": torch.tensor([5], device=DEVICE)}
    args = backward_args((20, 3), dtype=dtype, **options)
    args["q"] = args["q"].transpose(0, 1).contiguous().transpose(0, 1)
    every, launched, original = run(args), [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append(a[0]), original(*a, **k)))
    args |= dict(zip(WANTED, map(bool, needs), strict=True))
    grads = run(args)
    expected = launchers.attention_bwd(reference, *args.values())
    for need, a, every_a, e in zip(needs, grads, every, expected, strict=True):
        assert (a.dtype, a.shape, a.is_contiguous()) == (e.dtype, e.shape, True)
        assert torch.equal(a, every_a) if need else a.shape == (0,)
    assert len({t.untyped_storage().data_ptr() for t in grads if t.numel()}) == sum(needs)
    keys, bias = int(needs[1] or needs[2]), needs[3]
    queries = 2 if needs[0] and dtype in HALF else 1
    assert [kernel.fn.__name__[15:] for kernel in launched] == [
        *["dq_kernel"] * queries,
        *["dkdv_kernel"] * keys,
        *["dbias_kernel"] * bias,
    ]


def test_strided_inputs_with_poisoned_gaps(tiles):
    args = backward_args((17, 2, 5), headdim=24, bias=randn(3, 2, 17, 17))
    expected = run(args)
    poisoned = {name: strided(args[name]) for name in ("q", "v", "dout")}
    lse = torch.full((2, 30), float("nan"), device=DEVICE)
    lse[:, :24] = args["lse"]
    ends = args["cu_seqlens"].repeat_interleave(2)
    ends[1::2] = 99
    poisoned["bias"] = args["bias"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert_bit_equal(run(args | poisoned | {"lse": lse[:, :24], "cu_seqlens": ends[::2]}), expected)
    others = {name: strided(args[name]) for name in ("k", "out")}
    assert_bit_equal(run(args | others), expected)


def test_neighbours_and_unused_cells_may_be_nan(tiles):
    nan = float("nan")
    args = backward_args((18, 3, 17), capacity=9, bias=randn(3, 2, 18, 18), gate=randn(2))
    args["need_dgate"] = False  # it is one sum over all rows
    clean = run(args)
    names = ("q", "k", "v", "dout", "out", "lse", "bias")
    poisoned = {name: args[name].clone() for name in names}
    for name in names[:5]:
        poisoned[name][18:21] = nan  # the sequence in the middle
        poisoned[name][38:] = nan
    poisoned["lse"][:, 38:] = nan
    poisoned["bias"][1] = nan
    poisoned["bias"][2, :, 17:] = nan
    poisoned["bias"][2, :, :, 17:] = nan
    dirty = run(args | poisoned)
    others = [*range(18), *range(21, 47)]
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[others], e[others])
        assert a[18:21].isnan().all()
    assert torch.equal(dirty[3][[0, 2]], clean[3][[0, 2]])


@needs_lazy_memory
@pytest.mark.parametrize("far_heads", [False, True])
def test_offsets_beyond_2_to_31_elements(monkeypatch, far_heads):
    bias = randn(3, 3, 3, 3, dtype=torch.bfloat16)
    args = backward_args((3, 1, 2), nheads=3, dtype=torch.bfloat16, bias=bias, gate=randn(3))
    expected = run(args)
    strides = (64, 2**30 + 64, 1) if far_heads else (2**30 + 64, 20, 1)
    far_args = {name: at_strides(args[name], *strides) for name in ("q", "k", "v", "dout", "out")}
    bias_strides = (3, 2**30 + 7, 9, 1) if far_heads else (2**32 + 9, 64, 2**30 + 3, 7)
    far_args["bias"] = at_strides(bias, *bias_strides)
    far_args["lse"] = at_strides(args["lse"], 2**31 + 5, 1)

    class FarGradients(HugeStrides):
        def empty(self, shape, dtype, device):
            if len(shape) == 3 and shape[2] == 16:
                return lazy(shape, strides, dtype)
            return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(kernels, "torch", FarGradients())
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    actual = run(args | far_args)
    assert all(gradient.stride() == strides for gradient in actual[:3])
    assert_bit_equal(actual, expected)
    if far_heads:
        return
    keys = args | {"bias": bias[:, :, :1]}
    key_far = at_strides(bias[:, :, :1], 3, 9, 1, 2**30 + 3)
    assert_bit_equal(run(keys | {"bias": key_far}), run(keys))
    batch_far = at_strides(bias, 2**30 + 11, 9, 3, 1)
    assert_bit_equal(run(args | {"bias": batch_far}), expected)


# --- the grid -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_in_several_planes(small_tiles, monkeypatch, dtype):
    args = backward_args((50, 3, 0, 7), dtype=dtype, capacity=40)
    expected = run(args)
    monkeypatch.setattr(slots, "_MOST_ON_AXIS", 4)
    assert slots.grid(slots.slots(32, 100, 4, 50), 2)[2] > 1
    assert_bit_equal(run(args), expected)


def test_a_table_that_is_given_is_read(small_tiles, monkeypatch):
    args = backward_args((20, 7, 33), capacity=3)
    table = makers.attention_places(args["cu_seqlens"], 63, 33)
    expected = run(args)
    monkeypatch.setattr(kernels, "attention_places", None)
    args["cu_seqlens"] = torch.zeros_like(args["cu_seqlens"])  # the places say it all
    assert_bit_equal(launchers.attention_bwd(kernels, *args.values(), table), expected)


# --- the backend --------------------------------------------------------------------------------------------


def test_heads_wider_than_the_kernel_serves_go_to_aten(monkeypatch):
    from fastbert.kernels import attention as forward_kernels

    args = backward_args((9, 4), headdim=forward_kernels.MAX_HEADDIM + 8, gate=randn(2))
    monkeypatch.setattr(kernels, "launch", None)
    assert_close(launchers.attention_bwd(backend, *args.values()), args)
