"""The Triton attention's backward: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends import triton as backend
from fastbert.ops.attention import attention
from fastbert.ops.attention_grid import keep_mask
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import CASES, SMALL, AttentionCase
from tests.support import launchers
from tests.support.triton_attention_inputs import (
    INF,
    LOWEST,
    at_strides,
    attention_cases,
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
    assert_repeats,
    counted,
    fuzz_tests,
    in_float64,
    kernels_of,
    needs_lazy_memory,
    set_backends,
)

kernels = kernels_of("attention_backward")
makers = kernels_of("attention_places")
slots = pytest.importorskip("fastbert.kernels.attention_slots")
tuning = pytest.importorskip("fastbert.kernels.tuning")
pytestmark = pytest.mark.usefixtures("checked_memory")
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


def check(case: AttentionCase, dtype: torch.dtype, seed: int = 0, strict: bool = True) -> None:
    """The error rule for the gradients; forward has tests of its own."""
    rows = testing.run_case(case, "triton", dtype, DEVICE, seed=seed)
    given = {"bias": case.bias, "gate": case.gate}
    names = {"dqkv"} if case.packed_qkv else {"dq", "dk", "dv"}
    names |= {f"d{name}" for name, wanted in given.items() if wanted}
    rows = [r for r in rows if r.quantity not in case.output_names]
    assert {r.quantity for r in rows} == names
    failed = [r for r in rows if not r.passed and (strict or not lucky_yardstick(r, case, dtype))]
    assert [f"{r.quantity}: {r.reason}" for r in failed] == []


def lucky_yardstick(row: testing.Row, case: AttentionCase, dtype: torch.dtype) -> bool:
    """With few elements eager's error may be small by luck: then allow twice that."""
    elements = case.nheads if row.quantity == "dgate" else sum(case.lengths) * case.nheads * case.headdim
    if elements >= 4000 or dtype == torch.float32 or not math.isfinite(row.max_error):
        return False
    step = torch.finfo(dtype).eps
    return row.max_error <= 2 * row.eager_max_error + 4 * step * max(1, case.headdim / 16) and (
        row.mean_error <= row.eager_mean_error * (1 + 8 / elements**0.5) + step / 2
    )


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


# --- the error rule -----------------------------------------------------------------------------------------


def cases_and_dtypes():
    """All. Those that take long in the interpreter, and all but one dtype of each, are slow tests."""
    for i, case in enumerate(c for c in CASES if not c.probs):
        work = sum(n * n for n in case.lengths) * case.nheads
        for j, dtype in enumerate(DTYPES):
            slow = work > 4000 or j != i % 3
            yield pytest.param(case, dtype, marks=pytest.mark.slow if slow else (), id=f"{case.id}-{dtype}")


@pytest.mark.parametrize(("case", "dtype"), list(cases_and_dtypes()))
def test_cases(case, dtype):
    check(case, dtype)


# The last block of keys and the last tile of queries have every size; each sequence has others beside it.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("first", "dtype", "causal"), [(1, torch.float32, False), (18, HALF[0], True)], ids=str
)
def test_every_length_of_small_tiles(small_tiles, first, dtype, causal):
    check(AttentionCase(tuple(range(first, first + 17)), 1, 16, causal=causal), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_length(dtype, causal):
    check(AttentionCase(tuple(range(1, 131)), 1, 16, causal=causal), dtype)


@pytest.mark.parametrize("headdim", [7, 24, 80, 128])
def test_every_head_dimension(headdim):
    check(AttentionCase((17, 20), 1, headdim), HALF[headdim // 8 % 2], strict=False)
    check(AttentionCase((19,), 1, headdim, bias="sequence", dropout_p=0.25), torch.float32)


@pytest.mark.parametrize(("causal", "bias"), [(False, "sequence"), (True, "")])
def test_all_cuts_by_the_error_rule(tiles, causal, bias):
    options = {"causal": causal, "bias": bias, "masked": bool(bias)}
    check(AttentionCase((20, 0, 16, 1), 1, 24, capacity=3, slack=5, **options), torch.float32)
    check(AttentionCase((33,), 2, 32, gate=True, dropout_p=0.3, packed_qkv=True, **options), torch.bfloat16)


# --- exact results ------------------------------------------------------------------------------------------


def test_uniform_attention_is_exact(tiles):
    args = backward_args((64, 8, 32), gate=torch.tensor([2.0, -0.5], device=DEVICE))
    args |= {"q": torch.zeros_like(args["q"]), "softmax_scale": 0.25}
    args |= {name: (args[name] * 2).round() for name in ("dout", "k", "v")}
    args = with_outputs(args)
    for name, a, e in zip(NAMES, run(args), truth(args), strict=True):
        if name in ("dv", "dk", "dbias"):
            assert torch.equal(a.double(), e), name
        else:  # 3 dP - delta, beside the rounding of P = exp(-log n)
            torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)


def test_a_bias_that_leaves_one_key_has_no_gradient_but_dv(small_tiles):
    lengths = (40, 17)
    keys = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(h)) for h in range(4)])
    keys = keys.reshape(2, 2, 40, 1).to(DEVICE)
    keys[1] %= 17
    bias = torch.full((2, 2, 40, 40), -INF, device=DEVICE).scatter(-1, keys, 1.5)
    args = backward_args(lengths, bias=bias)
    dq, dk, dv, dbias, _ = run(args)
    for gradient in (dq, dk, dbias):
        assert gradient.abs().max() < 1e-5
    start = 0
    for b, n in enumerate(lengths):
        for h in range(2):
            expected = torch.zeros(n, 16, device=DEVICE)
            expected.index_add_(0, keys[b, h, :n, 0], args["dout"][start : start + n, h])
            torch.testing.assert_close(dv[start : start + n, h], expected, rtol=1e-6, atol=1e-6)
        start += n


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


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.5}, {"bias": "sequence"}, {"gate": True, "causal": True}]
)
def test_a_sharp_softmax(small_tiles, dtype, options):
    """dS is a small difference of large numbers: its error is that of delta."""
    for sharpness in (4.0, 32.0):
        check(AttentionCase((33, 20), 2, 32, sharpness=sharpness, **options), dtype)


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
    grads, expected = (
        run(args),
        launchers.attention_bwd(reference, *args.values()),
    )  # float64 loses none of them
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


@pytest.mark.parametrize("bias_dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_bias_and_gate_in_another_dtype(small_tiles, bias_dtype):
    bias, gate = randn(1, 2, 9, 9).bfloat16().to(bias_dtype), randn(2).bfloat16().to(bias_dtype)
    args = backward_args((9, 7), bias=bias, gate=gate)
    assert_bit_equal(run(args), run(args | {"bias": bias.float(), "gate": gate.float()}))


def test_a_gate_of_0_has_a_gradient(small_tiles):
    options = {"dropout_p": 0.3, "seed": torch.tensor([7], device=DEVICE)}
    args = backward_args((40, 9), gate=torch.tensor([0.0, 2.0], device=DEVICE), capacity=40, **options)
    grads = run(args)
    assert_close(grads, args)
    assert grads[4][0].abs() > 0.1
    assert all((gradient[:, 0] == 0).all() for gradient in grads[:3])


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [(0, 0, 0.5), (-1, 2**32 - 1, 0.25), (2**62 + 12345, 2**31, 0.9), (-(2**63), 2**31 - 1, 0.1)],
)
def test_dropout_bits_are_the_definitions(small_tiles, seed, offset, p, saved):
    lengths = (9, 32, 3)
    args = backward_args(
        lengths, headdim=32, dropout_p=p, offset=offset, seed=torch.tensor([seed], device=DEVICE)
    )
    args["q"] = torch.zeros_like(args["q"])  # every probability 1 / length
    start = 0
    for n in lengths:
        args["dout"][start : start + n] = torch.eye(32, device=DEVICE)[:n].unsqueeze(1) * n  # dv = the bits
        start += n
    args = with_outputs(args)
    if not saved:
        args["keep_bits"] = None
    grads = run(args)
    assert_close(grads, args)
    keep = keep_mask(args["seed"], offset, args["cu_seqlens"][:-1], 2, 32, p)
    scale = torch.tensor(1 / (1 - p), device=DEVICE)
    start = 0
    for b, n in enumerate(lengths):
        bits = keep[b, :, :n, :n].permute(2, 0, 1)
        torch.testing.assert_close(grads[2][start : start + n, :, :n], bits * scale, rtol=1e-5, atol=0)
        start += n


@pytest.mark.sweep
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


@pytest.mark.sweep
@needs_lazy_memory
@pytest.mark.parametrize("cut_", ["high-wide", "two-words"])
def test_bits_beyond_2_to_31_words(monkeypatch, cut_):
    monkeypatch.setattr(kernels, "configs_for", CUTS[cut_])
    options = {"dropout_p": 0.3, "seed": torch.tensor([5], device=DEVICE), "bias": randn(3, 3, 3, 3)}
    args = backward_args((3, 1, 2), nheads=3, **options)
    expected = run(args)
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    assert_bit_equal(run(args | {"keep_bits": far_bits(args["keep_bits"])}), expected)


def test_a_seed_without_dropout_is_not_read(small_tiles, monkeypatch):
    args = backward_args((18, 5))
    expected, launched, original = run(args), [], kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: (launched.append(a), original(*a, **k)))
    seed = torch.tensor([7], device=DEVICE)
    assert_bit_equal(run(args | {"seed": seed}), expected)
    assert len(launched) == 2
    assert all(a is not seed for given in launched for a in given)


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0), ()], ids=str)
@pytest.mark.parametrize("capacity", [0, 150])
def test_empty_sequences_and_capacity(small_tiles, lengths, capacity):
    args = backward_args(lengths, capacity=capacity, gate=randn(2))
    grads = run(args)
    assert_close(grads, args)
    assert all((gradient[sum(lengths) :] == 0).all() for gradient in grads[:3])


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0), ()], ids=str)
def test_empty_sequences_and_a_bias(small_tiles, lengths):
    longest = max(lengths, default=0)
    for shape in ((len(lengths), 1, longest, longest), (1, 1, 1, 1)):
        args = backward_args(lengths, capacity=4, bias=randn(*shape))
        assert_close(run(args), args)


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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


def test_a_nan_stays_where_it_belongs(small_tiles):
    args = backward_args((35, 20))
    clean = run(args)
    args["dout"][3, 1, 5] = float("nan")
    dirty = run(args)
    assert dirty[0][3, 1].isnan().all()
    assert dirty[1][:35, 1].isnan().all()
    for a, e in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(a[35:], e[35:])
        assert torch.equal(a[:, 0], e[:, 0])
    assert torch.equal(dirty[0][4:35, 1], clean[0][4:35, 1])


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_repeats_are_bit_equal_without_atomics(checked_memory, small_tiles):
    options = {"dropout_p": 0.1, "seed": torch.tensor([7], device=DEVICE)}
    args = backward_args((17, 3), dtype=torch.bfloat16, bias=randn(1, 2, 1, 17), gate=randn(2), **options)
    assert_repeats(checked_memory, lambda: run(args), 1)


# --- the grid -----------------------------------------------------------------------------------------------


def test_the_grid_is_known_without_the_lengths(monkeypatch):
    grids = {}
    monkeypatch.setattr(
        kernels,
        "launch",
        lambda kernel, grid, *args, **config: grids.update({kernel.fn.__name__: math.prod(grid)}),
    )
    monkeypatch.setattr(kernels, "configs_for", cut((128, 64), (32, 64), (64, 64)))

    def launched(total, batch, max_seqlen, bias=None):
        q = torch.empty(total, 12, 64, device="meta", dtype=torch.bfloat16)
        ends = torch.empty(batch + 1, device="meta", dtype=torch.int32)  # meta: reading a value would raise
        bias = None if bias is None else torch.empty(bias, device="meta")
        lse = torch.empty(12, total, device="meta")
        places = torch.empty(slots.sections(total, batch, max_seqlen)[-1], 4, device="meta")
        rest = (0.125, False, bias, None, 0.0, None, 0, None, *[True] * 3, bias is not None, False, places)
        grids.clear()
        parts = launchers.attention_bwd(kernels, q, q, q, q, q, lse, ends, max_seqlen, *rest)
        assert bias is None or parts[3].shape == bias.shape
        return [grids.get(f"_attention_bwd_{name}_kernel") for name in ("dq", "dkdv", "dbias")]

    assert launched(16384, 32, 512) == [(128 + 1) * 12, (256 + 1) * 12, None]
    most = slots.RANKED + 1
    assert launched(4096, most, 512) == [(32 + most + 1) * 12, (64 + most + 1) * 12, None]
    monkeypatch.setattr(kernels.tuning, "device_of", lambda _: tuning.Device("GPU", (9, 0), 132))
    assert launched(16384, 32, 512, (32, 12, 512, 512))[2] == 32 * 12 * 8 * 8
    assert launched(16384, 32, 512, (1, 12, 512, 512))[2] == 12 * 8 * 8
    assert launched(16384, 32, 512, (32, 1, 1, 512))[2] == 32 * 8
    assert launched(16384, 32, 512, (1, 1, 1, 512))[2] == 8 * 33  # in 33 parts
    assert launched(300, 2, 200, (1, 12, 1, 1))[2] == 12 * 2  # at most one per sequence


@pytest.mark.sweep
def test_more_sequences_than_are_ranked(small_tiles, monkeypatch):
    g = torch.Generator().manual_seed(2)
    lengths = [*torch.randint(-20, 20, (34,), generator=g).clamp(min=0).tolist(), 0]
    args = backward_args(lengths, nheads=1, capacity=37, causal=True)
    ranked = run(args)
    assert_close(ranked, args)
    for module in (slots, makers):
        monkeypatch.setattr(module, "RANKED", len(lengths) - 1)
    assert_bit_equal(run(args), ranked)


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


H200 = tuning.Device("NVIDIA H200", (9, 0), 132)


def test_configs_fit_the_work():
    def high(headdim, seqlen, tokens, heads=12, extras=False, saved=False, device=H200, dtype=torch.bfloat16):
        buckets = tuning.bucket(seqlen), tuning.bucket(tokens * heads)
        configs = kernels.configs_for(headdim, dtype, extras, saved, *buckets, device)
        return configs.dq.block_m, configs.dkdv.block_n

    assert high(64, 512, 16384) == (64, 64)
    assert high(64, 512, 16384, extras=True) == (64, 64)
    assert high(64, 20, 16384) == (32, 32)
    assert high(64, 128, 128) == (32, 32)  # one sequence: more, lower tiles
    assert high(128, 512, 16384, extras=True) == (32, 32)
    assert high(64, 512, 16384, device=tuning.Device("NVIDIA A100", (8, 0), 108), extras=True) == (64, 32)
    assert high(64, 512, 16384, dtype=torch.float32) == (16, 16)


# --- fuzz ---------------------------------------------------------------------------------------------------


@st.composite
def fuzzed_cases(draw):
    case, dtype, seed = draw(attention_cases())
    case = dataclasses.replace(case, probs=False, lse=False)
    return case, dtype, seed, draw(st.sampled_from([None, *CUTS]))


def check_drawn(case, dtype, seed, tiles):
    with pytest.MonkeyPatch.context() as patch:
        if tiles is not None:
            patch.setattr(kernels, "configs_for", CUTS[tiles])
        check(case, dtype, seed, strict=False)


test_fuzz, test_fuzz_long = fuzz_tests(check_drawn, fuzzed_cases(), 2, 1000)


# --- the backend --------------------------------------------------------------------------------------------


def test_heads_wider_than_the_kernel_serves_go_to_aten(monkeypatch):
    from fastbert.kernels import attention as forward_kernels

    args = backward_args((9, 4), headdim=forward_kernels.MAX_HEADDIM + 8, gate=randn(2))
    monkeypatch.setattr(kernels, "launch", None)
    assert_close(launchers.attention_bwd(backend, *args.values()), args)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES if d != HALF[0])],
    ids=str,
)
def test_forward_and_backward_serve_after_their_check(monkeypatch, dtype):
    set_backends(monkeypatch, "attention", "triton", "aten", "reference")
    calls = counted(monkeypatch, backend, "attention_bwd")
    case = AttentionCase(
        (17, 0, 9), 2, 32, bias="sequence", masked=True, gate=True, dropout_p=0.1, capacity=3
    )
    inputs = case.inputs(dtype, DEVICE)
    names = ("q", "k", "v", "bias", "gate")
    for name in names:
        inputs[name].requires_grad_()
    out = case.call(**inputs)
    assert len(calls) >= len(SMALL)  # the self-check
    checks = len(calls)
    dout = randn(*out.shape, dtype=dtype)
    grads = torch.autograd.grad(out, [inputs[name] for name in names], dout)
    assert len(calls) == checks + 1
    with dispatch.use_backend("aten"):
        expected = torch.autograd.grad(case.call(**inputs), [inputs[name] for name in names], dout)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for name, a, e in zip(names, grads, expected, strict=True):
        assert a.dtype == e.dtype
        assert (a - e).abs().max().item() <= tolerance * e.abs().max().item(), name


def test_a_wrong_backward_does_not_serve(monkeypatch):
    set_backends(monkeypatch, "attention", "triton", "aten", "reference")
    original = backend.attention_bwd
    monkeypatch.setattr(backend, "attention_bwd", lambda *args: tuple(t * 1.01 for t in original(*args)))
    args = forward_args((5, 9))
    with pytest.warns(RuntimeWarning, match="triton kernel of 'attention' failed its self-check"):
        attention(args["q"], args["k"], args["v"], args["cu_seqlens"], args["max_seqlen"])
