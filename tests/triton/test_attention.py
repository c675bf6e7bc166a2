"""The Triton attention: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.backends import reference
from fastbert.backends import triton as backend
from fastbert.ops.attention_grid import keep_mask
from fastbert.ops.attention_inputs import EVERYWHERE, Window
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
    HugeStrides,
    assert_bit_equal,
    in_float64,
    kernels_of,
    needs_lazy_memory,
)

kernels = kernels_of("attention")
makers = kernels_of("attention_places")
slots = pytest.importorskip("fastbert.kernels.attention_slots")
tuning = pytest.importorskip("fastbert.kernels.tuning")
pytestmark = [pytest.mark.usefixtures("checked_memory"), pytest.mark.sweep]


def cut(block_m: int, block_n: int, split: bool, chunk: int | None = None):
    """A `config_for` that always cuts like this."""

    def config_for(headdim, *_):
        block_d = max(16, 1 << (headdim - 1).bit_length())
        return kernels.Config(block_m, block_n, min(chunk or block_d, block_d), split, 4, 1)

    return config_for


# Small tiles, so that short sequences have many: high, wide, equal; with a loop for masked blocks or without.
CUTS = {"32x16": cut(32, 16, True), "16x32": cut(16, 32, True), "16x16-one-loop": cut(16, 16, False, 16)}


@pytest.fixture(params=CUTS)
def tiles(request, monkeypatch):
    monkeypatch.setattr(kernels, "config_for", CUTS[request.param])
    # windows of a few tiles have a loop for whole tiles too
    monkeypatch.setattr(kernels, "_WHOLE", -4)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "config_for", CUTS["32x16"])


def run(args):
    """out, lse and probs."""
    *outputs, keep_bits = launchers.attention_fwd(kernels, *args.values())
    assert (keep_bits.numel() > 0) == args["save_bits"]
    return tuple(outputs)


def truth(args):
    return launchers.attention_fwd(reference, *in_float64(args).values())[:3]


def assert_close(actual, args, tolerance=2e-6):
    """All three outputs are close to the float64 reference's, with infinities in the same places."""
    for a, e in zip(actual, truth(args), strict=True):
        assert a.shape == e.shape
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance)


# --- masks, scales, extremes --------------------------------------------------------------------------------


def test_rows_without_an_allowed_key(tiles):
    bias = randn(2, 2, 40, 40)
    bias[0, 0, 3] = -INF
    bias[:, 1, :, :20] = -INF  # whole blocks of keys before the first allowed one
    bias[1, 0, :, 17:] = -INF
    bias[1, 1] = -INF
    bias[0, 1, :, 20:] -= 300  # exp of them is 0 if the maximum is taken for 0
    args = forward_args((40, 23), bias=bias, return_probs=True)
    out, lse, probs = run(args)
    assert_close((out, lse, probs), args, 1e-4)  # float32 scores of 300
    assert torch.equal(lse[0, 3], torch.tensor(-INF, device=DEVICE))
    assert (out[3, 0] == 0).all()
    assert (probs[0, 0, 3] == 0).all()
    assert (lse[1, 40:] == -INF).all()
    assert (out[40:, 1] == 0).all()


def test_a_mask_of_the_lowest_number_is_not_minus_infinity(tiles):
    bias = torch.zeros(1, 1, 40, 40, device=DEVICE)
    bias[..., 4, :] = LOWEST  # eager PyTorch: uniform
    bias[..., 5, 1:] = LOWEST  # eager PyTorch: one key
    bias[..., 6, :30] = LOWEST
    args = forward_args((40, 33), bias=bias, return_probs=True)
    out, lse, probs = run(args)
    expected = launchers.attention_fwd(reference, *args.values())[:3]
    assert_bit_equal(tuple(t.isfinite() for t in (out, lse)), tuple(t.isfinite() for t in expected[:2]))
    torch.testing.assert_close(probs, expected[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(probs[0, 0, 4], torch.full((40,), 1 / 40, device=DEVICE))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.01, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_softmax_scale(tiles, scale, with_bias):
    bias = randn(1, 2, 37, 37) if with_bias else None
    args = forward_args((37, 9), softmax_scale=scale, bias=bias, return_probs=True)
    assert_close(run(args), args, 2e-5)


@pytest.mark.parametrize("order", [1, -1])
def test_large_scores_do_not_overflow(tiles, order):
    # maxima that grow or fall from block to block: exp of an unshifted score would be inf
    args = forward_args((60,), nheads=1, return_probs=True)
    args["q"] = torch.ones_like(args["q"])
    args["k"] = torch.arange(60.0, device=DEVICE).reshape(60, 1, 1).repeat(1, 1, 16)
    if order < 0:
        args["k"] = args["k"].flip(0)
    assert_close(run(args), args, 1e-4)
    assert_close(run(args | {"softmax_scale": -0.25}), args | {"softmax_scale": -0.25}, 1e-4)


@pytest.mark.parametrize("shape", list(itertools.product([1, 3], [1, 2], [1, 35], [1, 35])), ids=str)
def test_bias_broadcasts(small_tiles, shape):
    args = forward_args((35, 20, 1), bias=randn(*shape), return_probs=True)
    assert_close(run(args), args)


@pytest.mark.parametrize("bias_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_and_gate_in_another_dtype(small_tiles, bias_dtype):
    bias, gate = randn(1, 2, 20, 20).bfloat16().to(bias_dtype), randn(2).bfloat16().to(bias_dtype)
    args = forward_args((20, 7), dtype=torch.float32, bias=bias, gate=gate)
    same = args | {"bias": bias.float(), "gate": gate.float()}
    assert_bit_equal(run(args), run(same))


# --- windows and shared heads -------------------------------------------------------------------------------

# At the edges of tiles of 16 and of 32, and between; -1 is no limit.
SIDES = (-1, 0, 1, 15, 16, 17, 33)


@pytest.mark.parametrize("left", SIDES)
def test_windows(tiles, left):
    for right in SIDES:
        args = forward_args((50, 5), window=Window(left, right), return_probs=right % 2 == 1, slack=17)
        for name in "kv":
            args[name] = args[name][:, : 1 + right % 2]
        assert_close(run(args), args)


@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 50), (2, 4, 50, 50)])
def test_windows_with_all_options(tiles, bias_shape):
    bias = None if bias_shape is None else randn(*bias_shape)
    if bias is not None:
        bias[0, 0, 0, 11:19] = -INF
    dropped = {"dropout_p": 0.3, "seed": torch.tensor([7], device=DEVICE)}
    for window in (Window(20, 3), Window(2, 18), Window(33, -1)):
        args = forward_args((50, 19), nheads=4, window=window, bias=bias, gate=randn(4), return_probs=True)
        for name in "kv":
            args[name] = args[name][:, :2]
        for more in ({"softmax_scale": -0.3}, dropped):
            out, lse, probs = run(args | more)
            assert_close((out, lse, probs), args | more, 5e-6)


def test_a_nan_outside_the_window_stays_outside(tiles):
    args = forward_args((200,), window=Window(5, 9), return_probs=True)
    clean, sees = run(args), torch.zeros(200, dtype=torch.bool, device=DEVICE)
    sees[100 - 9 : 100 + 5 + 1] = True
    args["k"][100] = float("nan")
    out, lse, probs = run(args)
    for found in (out, lse.t(), probs[0].transpose(0, 1)):
        assert found[sees].isnan().any(-1).all()
        assert not found[~sees].isnan().any()
    assert torch.equal(out[~sees], clean[0][~sees])
    assert torch.equal(lse[:, ~sees], clean[1][:, ~sees])
    # 0 times a value that is NaN is NaN: only tiles that no query of a tile sees are not read
    args["k"][100], args["v"][100] = 0.0, float("nan")
    out, *_ = run(args)
    far = (torch.arange(200, device=DEVICE) - 100).abs() > 32 + 32 + 9
    assert torch.equal(out[far], clean[0][far])


def test_a_limit_beyond_every_sequence_is_none(monkeypatch, small_tiles):
    """Such a call runs the kernel of calls without a window, whatever the side's size."""
    launched, original = [], kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda *args, **k: (launched.append((args, k)), original(*args, **k))
    )

    def window(call):
        """(left, right) of a launch, whose first three arguments are not the kernel's."""
        first = 3 + call[0][0].arg_names.index("left")
        return call[0][first : first + 2]

    args = forward_args((40, 7))
    expected = run(args)
    for far in (39, 40, 2**40):
        assert_bit_equal(run(args | {"window": Window(far, far)}), expected)
        assert window(launched[-1]) == (None, None)
    assert_bit_equal(run(args | {"window": Window(2**40, 0)}), run(forward_args((40, 7), causal=True)))
    assert window(launched[-2]) == (None, None)
    assert launched[-2][1]["CAUSAL"]
    run(args | {"window": Window(38, 38)})
    assert window(launched[-1]) == (38, 38)


# --- dropout ------------------------------------------------------------------------------------------------


def dropped(lengths, p=0.3, seed=-7, **options):
    """Arguments with dropout whose bits are saved."""
    seed = torch.tensor([seed], device=DEVICE)
    return forward_args(lengths, dropout_p=p, seed=seed, save_bits=True, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_n", [16, 32, 64])  # half a word, one, two
def test_saved_bits_are_the_definitions(monkeypatch, block_n, causal):
    monkeypatch.setattr(kernels, "config_for", cut(16, block_n, block_n > 32))
    lengths = (40, 0, 9, 65)
    args = dropped(lengths, capacity=5, slack=20, causal=causal, offset=2**31 + 5)
    *outputs, keep_bits = launchers.attention_fwd(kernels, *args.values())
    assert_bit_equal(tuple(outputs), run(args | {"save_bits": False}))
    assert (keep_bits.dtype, tuple(keep_bits.shape)) == (torch.int32, (2, sum(lengths) + 5, 3))
    keep, start = keep_mask(args["seed"], 2**31 + 5, args["cu_seqlens"][:-1], 2, 65, 0.3), 0
    keys = torch.arange(65, device=DEVICE)
    for b, n in enumerate(lengths):
        saved = keep_bits[:, start : start + n, keys[:n] // 32] >> (keys[:n] % 32) & 1
        allowed = keys[:n] <= keys[:n, None] if causal else torch.ones(n, n, dtype=torch.bool, device=DEVICE)
        assert torch.equal(saved.bool() & allowed, keep[b, :, :n, :n] & allowed)
        start += n


def test_dropout_leaves_lse_and_probs_alone(small_tiles):
    args = forward_args((33, 5), return_probs=True)
    with_dropout = args | {"dropout_p": 0.5, "seed": torch.tensor([7], device=DEVICE)}
    plain, wet = run(args), run(with_dropout)
    assert_bit_equal(wet[1:], plain[1:])
    assert not torch.equal(wet[0], plain[0])
    assert_bit_equal(run(with_dropout | {"seed": with_dropout["seed"].clone()}), wet)
    assert_bit_equal(
        run(args | {"seed": with_dropout["seed"]}), plain
    )  # a seed without dropout changes nothing


# --- lengths and memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(0, 21, 0), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0), ()], ids=str)
@pytest.mark.parametrize("capacity", [0, 4, 150])
def test_empty_sequences_and_capacity(small_tiles, lengths, capacity):
    args = forward_args(lengths, capacity=capacity, return_probs=True)
    out, lse, probs = run(args)
    assert_close((out, lse, probs), args)
    end = sum(lengths)
    assert (out[end:] == 0).all()
    assert (lse[:, end:] == 0).all()


def test_no_rows():
    args = forward_args((0, 0), slack=3)
    assert [tuple(t.shape) for t in run(args)] == [(0, 2, 16), (2, 0), (0,)]
    probs = run(args | {"return_probs": True})[2]
    assert torch.equal(probs, torch.zeros(2, 2, 3, 3, device=DEVICE))


@pytest.mark.parametrize("return_probs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_forward_returns(dtype, return_probs):
    args = forward_args((4, 3), dtype=dtype, capacity=2, return_probs=return_probs)
    args["q"] = args["q"].transpose(0, 1).contiguous().transpose(0, 1)
    outputs = run(args)
    for a, e in zip(outputs, launchers.attention_fwd(reference, *args.values())[:3], strict=True):
        assert (a.dtype, a.shape, a.is_contiguous()) == (e.dtype, e.shape, True)
    assert len({t.untyped_storage().data_ptr() for t in outputs if t.numel()}) == 2 + return_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_with_poisoned_gaps(tiles, dtype):
    args = forward_args((20, 2, 17), headdim=24, dtype=dtype, bias=randn(3, 2, 20, 20), return_probs=True)
    expected = run(args)
    for name in "qkv":
        assert_bit_equal(run(args | {name: strided(args[name])}), expected)
    bias = args["bias"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert_bit_equal(run(args | {"bias": bias}), expected)
    ends = args["cu_seqlens"].repeat_interleave(2)
    ends[1::2] = 99
    assert_bit_equal(run(args | {"cu_seqlens": ends[::2]}), expected)
    assert_bit_equal(run(args | {name: args[name].contiguous() for name in "qkv"}), expected)


def test_neighbours_and_unused_cells_may_be_nan(tiles):
    nan = float("nan")
    args = forward_args((35, 7, 20), capacity=9, bias=randn(3, 2, 35, 35), return_probs=True)
    clean = run(args)
    poisoned = {name: args[name].clone() for name in ("q", "k", "v", "bias")}
    for name in "qkv":
        poisoned[name][35:42] = nan  # the sequence in the middle
        poisoned[name][62:] = nan
    poisoned["bias"][1] = nan
    poisoned["bias"][2, :, 20:] = nan
    poisoned["bias"][2, :, :, 20:] = nan
    dirty = run(args | poisoned)
    others = [*range(35), *range(42, 71)]
    assert torch.equal(dirty[0][others], clean[0][others])
    assert torch.equal(dirty[1][:, others], clean[1][:, others])
    assert torch.equal(dirty[2][[0, 2]], clean[2][[0, 2]])
    assert dirty[0][35:42].isnan().all()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_nan_stays_where_it_belongs(tiles, p):
    dropped = {"dropout_p": p, "seed": torch.tensor([9], device=DEVICE) if p else None}
    args = forward_args((35, 20), return_probs=True, **dropped)
    clean = run(args)
    args["q"][3, 1, 5] = float("nan")
    out, lse, probs = run(args)
    assert out[3, 1].isnan().all()
    assert lse[1, 3].isnan()
    assert probs[0, 1, 3].isnan().all()
    out[3, 1], lse[1, 3], probs[0, 1, 3] = clean[0][3, 1], clean[1][1, 3], clean[2][0, 1, 3]
    assert_bit_equal((out, lse, probs), clean)
    args = forward_args((35, 20), **dropped)
    args["k"][20, 0, 1] = float("nan")
    out, lse, _ = run(args)
    assert out[:35, 0].isnan().all()  # dropped or not: softmax's sum is NaN
    assert lse[0, :35].isnan().all()
    assert torch.equal(out[35:], clean[0][35:])
    assert torch.equal(out[:, 1], clean[0][:, 1])


class FarOutputs(HugeStrides):
    """`torch` for the launcher, whose outputs get strides beyond int32; `probs`: those of the 4-D output."""

    def empty(self, shape, dtype, device):
        if dtype == torch.int32 and len(shape) == 3:
            return far_bits(torch.zeros(shape, dtype=dtype))
        if len(shape) == 3:
            _, nheads, headdim = shape
            return lazy(shape, (2**30 + 16 * nheads, headdim + 1, 1), dtype)
        if len(shape) == 2:
            return lazy(shape, (2**31 + 5, 1), dtype)
        if len(shape) == 4:
            return lazy(shape, self.probs, dtype)
        return torch.empty(shape, dtype=dtype, device=device)


@needs_lazy_memory
def test_bits_beyond_2_to_31_words(monkeypatch):
    args = dropped((3, 1, 2), nheads=3)
    expected = launchers.attention_fwd(kernels, *args.values())[-1]
    monkeypatch.setattr(kernels, "torch", FarOutputs(probs=None))
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    actual = launchers.attention_fwd(kernels, *args.values())[-1]
    assert actual.stride(0) > 2**31
    assert torch.equal(actual[..., :1] & 7, expected & 7)  # three keys at most
    assert (actual[:, :3, :1] & 7 != 7).any()


@needs_lazy_memory
@pytest.mark.parametrize("far_heads", [False, True])
def test_offsets_beyond_2_to_31_elements(monkeypatch, far_heads):
    bias = randn(3, 3, 3, 3, dtype=torch.bfloat16)
    args = forward_args((3, 1, 2), nheads=3, dtype=torch.bfloat16, bias=bias)
    args["gate"] = randn(3)
    expected = run(args | {"return_probs": True})
    strides = (64, 2**30 + 64, 1) if far_heads else (2**30 + 64, 20, 1)
    far_args = args | {name: at_strides(args[name], *strides) for name in "qkv"}
    bias_strides = (3, 2**30 + 7, 9, 1) if far_heads else (2**32 + 9, 64, 2**30 + 3, 7)
    far_args["bias"] = at_strides(args["bias"], *bias_strides)
    probs_strides = (2**32 + 7, 2**30 + 64, 3, 1) if far_heads else (64, 16, 2**30 + 128, 1)
    monkeypatch.setattr(kernels, "torch", FarOutputs(probs=probs_strides))
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    actual = run(far_args)
    assert actual[0].stride(0) > 2**30
    assert_bit_equal(actual[:2], expected[:2])
    actual = run(far_args | {"return_probs": True})
    assert actual[2].stride() == probs_strides
    assert_bit_equal(actual, expected)
    key_far = at_strides(args["bias"][:, :, :1], 3, 9, 1, 2**30 + 3)
    keys = args | {"bias": args["bias"][:, :, :1]}
    assert_bit_equal(run(keys | {"bias": key_far})[:2], run(keys)[:2])
    batch_far = at_strides(bias, 2**30 + 11, 9, 3, 1)
    assert_bit_equal(run(args | {"bias": batch_far})[:2], expected[:2])


# --- the grid -----------------------------------------------------------------------------------------------


def test_the_grid_is_known_without_the_lengths(monkeypatch):
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **config: grids.append(grid))
    monkeypatch.setattr(kernels, "config_for", cut(128, 64, True))

    def grid(total, batch, max_seqlen, probs=False):
        q = torch.empty(total, 12, 64, device="meta", dtype=torch.bfloat16)
        ends = torch.empty(batch + 1, device="meta", dtype=torch.int32)  # meta: reading a value would raise
        places = torch.empty(slots.sections(total, batch, max_seqlen)[-1], 4, device="meta")
        rest = (0.125, EVERYWHERE, None, None, 0.0, None, 0, probs, False, places)
        launchers.attention_fwd(kernels, q, q, q, ends, max_seqlen, *rest)
        return grids.pop()

    assert grid(16384, 32, 512) == (12, 128 + 1, 1)  # full: no superfluous program except the tail's
    assert grid(5700, 32, 384) == (12, (5700 + 32 * 127) // 128 + 1, 1)
    assert grid(4096, slots.RANKED + 1, 512) == (12, 32 + slots.RANKED + 2, 1)
    heads, on_axis, planes = grid(2**22, 2**17, 512)
    assert (heads, planes) == (12, 3)
    assert on_axis <= 65535  # what the axis holds
    assert grid(600, 4, 512, probs=True) == (12, 4 * 5, 1)


@pytest.mark.parametrize(("capacity", "causal"), [(37, False), (0, True)])
def test_more_sequences_than_are_ranked(small_tiles, monkeypatch, capacity, causal):
    g = torch.Generator().manual_seed(2)
    lengths = [0, 0, *torch.randint(0, 40, (64,), generator=g).tolist(), 0]
    args = forward_args(lengths, nheads=1, capacity=capacity, causal=causal)
    ranked = run(args)
    assert_close(ranked, args)
    for module in (slots, makers):
        monkeypatch.setattr(module, "RANKED", len(lengths) - 1)
    assert_bit_equal(run(args), ranked)


@pytest.mark.parametrize("block_m", [16, 32])
def test_slots_in_several_planes(monkeypatch, block_m):
    monkeypatch.setattr(kernels, "config_for", cut(block_m, 16, True))
    args = forward_args((50, 3, 33, 0, 7), capacity=40)
    expected = run(args)
    monkeypatch.setattr(slots, "_MOST_ON_AXIS", 4)
    assert slots.grid(slots.slots(block_m, 133, 5, 50), 2)[2] > 1
    assert_bit_equal(run(args), expected)
    # 4 x 6 slots and one more at 16 rows
    monkeypatch.setattr(slots, "_MOST_ON_AXIS", 5)
    assert_bit_equal(run(args | {"return_probs": True})[:2], expected[:2])


def test_a_table_that_is_given_is_read(small_tiles, monkeypatch):
    args = forward_args((20, 7, 33), capacity=3)
    table = makers.attention_places(args["cu_seqlens"], 63, 33)
    expected = run(args)
    monkeypatch.setattr(kernels, "attention_places", None)
    *outputs, _ = launchers.attention_fwd(kernels, *args.values(), table)
    assert_bit_equal(tuple(outputs), expected)
    # With it alone: the places say where each sequence is.
    args["cu_seqlens"] = torch.zeros_like(args["cu_seqlens"])
    *outputs, _ = launchers.attention_fwd(kernels, *args.values(), table)
    assert_bit_equal(tuple(outputs), expected)


# --- the backend --------------------------------------------------------------------------------------------


def test_heads_wider_than_the_kernel_serves_go_to_aten(monkeypatch):
    args = forward_args((9, 4), headdim=kernels.MAX_HEADDIM + 8, return_probs=True)
    monkeypatch.setattr(kernels, "launch", None)
    assert_close(launchers.attention_fwd(backend, *args.values())[:3], args)
