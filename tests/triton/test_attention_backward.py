"""The Triton attention's backward: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert.backends import reference
from fastbert.backends import triton as backend
from fastbert.ops.attention_inputs import AttentionNeeds, Window
from tests.support import attention_gradients
from tests.support.attention_calls import Kernels
from tests.support.attention_gradients import *  # noqa: F403 (tests)
from tests.support.triton_attention_inputs import at_strides, far_bits, lazy, randn
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    HugeStrides,
    assert_bit_equal,
    kernels_of,
    needs_lazy_memory,
)

module = kernels_of("attention_backward")
slots = pytest.importorskip("fastbert.kernels.attention_slots")
tuning = pytest.importorskip("fastbert.kernels.tuning")
pytestmark = [pytest.mark.usefixtures("checked_memory"), pytest.mark.sweep]


def cut(*tiles: tuple[int, int], chunk: int | None = None):
    """A `configs_for` that always cuts like this: (queries, keys) of dq, of dk and dv, of dbias."""

    def configs_for(headdim, *_):
        block_d = max(16, 1 << (headdim - 1).bit_length())
        return module.Configs(*(module.Config(m, n, min(chunk or block_d, block_d), 4, 1) for m, n in tiles))

    return configs_for


# Small tiles, so that short sequences have many: high, wide, equal.
CUTS = {
    "high-wide": cut((32, 16), (16, 32), (16, 32)),
    "wide-high": cut((16, 32), (32, 16), (32, 16)),
    "chunks": cut((16, 16), (16, 16), (16, 16), chunk=16),
    "two-words": cut((16, 64), (16, 64), (16, 64)),
}


SLOW = ("wide-high", "two-words")
OURS = Kernels(module, 16, torch.float32, DEVICE, tile=32)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CUTS])
def kernels(request, monkeypatch):
    """Of the kernels, with each cut."""
    monkeypatch.setattr(module, "configs_for", CUTS[request.param])
    # chunks of 16 and of 8 dimensions
    return OURS._replace(headdim=24) if request.param == "chunks" else OURS


@pytest.fixture
def call(kernels):
    """Makes a `Call` of the kernels, with each cut."""
    return kernels.call


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "configs_for", CUTS["high-wide"])


SHAPES = itertools.product([1, 3], [1, 2], [1, 33], [1, 33])


# half of the shapes: any three sizes occur in every combination
@pytest.mark.parametrize("shape", [s for s in SHAPES if sum(n > 1 for n in s) % 2], ids=str)
def test_bias_broadcasts(small_tiles, monkeypatch, shape):
    """dbias in one part, and in one part per sequence and head that share it."""
    for multiprocessors in (0, 100) if shape == (1, 1, 1, 33) else (100,):
        device = tuning.Device("cpu", (0, 0), multiprocessors)
        monkeypatch.setattr(module.tuning, "device_of", lambda _, device=device: device)
        OURS.call((33, 3, 1), bias=randn(*shape), gate=randn(2), causal=shape[0] == 1).check()


@pytest.mark.parametrize("cut_", SLOW)
def test_bits_of_the_other_cuts(monkeypatch, cut_):
    monkeypatch.setattr(module, "configs_for", CUTS[cut_])
    attention_gradients.test_bits_that_are_not_defined_are_not_used(OURS)


@needs_lazy_memory
@pytest.mark.parametrize("cut_", ["high-wide", "two-words"])
def test_bits_beyond_2_to_31_words(monkeypatch, cut_):
    monkeypatch.setattr(module, "configs_for", CUTS[cut_])
    own = OURS.call((3, 1, 2), nheads=3, p=0.3, bias=randn(3, 3, 3, 3))
    expected, own.bits = own.run(), far_bits(own.bits)
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    assert_bit_equal(own.run(), expected)


def shared(own, nheads: int = 1):
    """The same call with the first heads of k and v alone."""
    return own.on(k=own.inputs.k[:, :nheads], v=own.inputs.v[:, :nheads])


# At the edges of tiles of 16 and of 32, and between; -1 is no limit.
@pytest.mark.parametrize("left", (-1, 0, 1, 15, 16, 17, 33))
def test_windows(call, left):
    for right in (-1, 0, 1, 14, 16, 31):
        own = call((50, 5), window=Window(left, right), capacity=3)
        (shared(own) if right % 2 else own).check()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 50), (2, 4, 50, 50), (1, 4, 50, 1)])
def test_windows_with_all_options(call, bias_shape, saved):
    bias = None if bias_shape is None else randn(*bias_shape)
    for window in (Window(20, 3), Window(2, 18), Window(33, -1)):
        options = {"window": window, "bias": bias, "gate": randn(4), "p": 0.3, "saved": saved}
        shared(call((50, 19), nheads=4, **options), 2).check()


def test_gradients_of_shared_heads_lie_as_their_inputs_do(small_tiles):
    own = OURS.call((20, 3), nheads=6)
    total, _, headdim = own.inputs.q.shape
    q, k, v = randn(total, 10, headdim).split((6, 2, 2), 1)
    dq, dk, dv, *_ = own.on(q=q, k=k, v=v).check()
    assert dq.stride() == dk.stride() == dv.stride() == q.stride()
    assert len({t.untyped_storage().data_ptr() for t in (dq, dk, dv)}) == 1


def test_a_nan_outside_the_window_stays_outside(call):
    own = call((200,), window=Window(5, 9))
    clean = own.run()
    for t in (*own.inputs[:3], own.dout, own.out):
        t[100] = float("nan")
    far = (torch.arange(200, device=DEVICE) - 100).abs() > 64 + 64 + 9
    for dirty, before in zip(own.run()[:3], clean[:3], strict=True):
        assert torch.equal(dirty[far], before[far])
        assert dirty[100].isnan().all()


# For every pair of gradients: both, one, and neither.
NEEDS = [(1, 1, 1, 1, 1), (1, 0, 0, 0, 1), (0, 1, 0, 1, 0), (0, 0, 1, 0, 1), (0, 0, 0, 1, 1), (1, 1, 0, 0, 0)]
NEEDS += [(0, 1, 1, 0, 0), (1, 0, 1, 1, 0), (0, 0, 1, 0, 0), (0, 0, 0, 0, 1)]


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "".join(map(str, needs)))
def test_what_backward_returns(small_tiles, monkeypatch, needs):
    dtype = DTYPES[NEEDS.index(needs) % 3]
    options = {"bias": randn(2, 1, 1, 20), "gate": randn(2), "capacity": 40, "p": 0.3 * needs[2]}
    own = OURS.call((20, 3), dtype=dtype, **options)
    own.inputs = own.inputs._replace(q=own.inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    every, launched, original = own.run(), [], module.launch
    monkeypatch.setattr(module, "launch", lambda *a, **k: (launched.append(a[0]), original(*a, **k)))
    own.need = AttentionNeeds(*map(bool, needs))
    grads = own.run()
    for need, a, every_a, e in zip(needs, grads, every, own.run(reference), strict=True):
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


@needs_lazy_memory
@pytest.mark.parametrize("far_heads", [False, True])
def test_offsets_beyond_2_to_31_elements(monkeypatch, far_heads):
    bias = randn(3, 3, 3, 3, dtype=torch.bfloat16)
    own = OURS.call((3, 1, 2), nheads=3, dtype=torch.bfloat16, bias=bias, gate=randn(3))
    expected, near, near_lse = own.run(), own.inputs, own.lse
    strides = (64, 2**30 + 64, 1) if far_heads else (2**30 + 64, 20, 1)
    bias_strides = (3, 2**30 + 7, 9, 1) if far_heads else (2**32 + 9, 64, 2**30 + 3, 7)
    far = {name: at_strides(getattr(near, name), *strides) for name in "qkv"}
    own.inputs = near._replace(**far, bias=at_strides(bias, *bias_strides))
    own.dout, own.out = (at_strides(t, *strides) for t in (own.dout, own.out))
    own.lse = at_strides(near_lse, 2**31 + 5, 1)

    class FarGradients(HugeStrides):
        def empty(self, shape, dtype, device):
            if len(shape) == 3 and shape[2] == 16:
                return lazy(shape, strides, dtype)
            return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(module, "torch", FarGradients())
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    actual = own.run()
    assert all(gradient.stride() == strides for gradient in actual[:3])
    assert_bit_equal(actual, expected)
    if far_heads:
        return
    keys = bias[:, :, :1]
    own.inputs = near._replace(bias=keys)
    expected_of_keys = own.run()
    own.inputs = near._replace(bias=at_strides(keys, 3, 9, 1, 2**30 + 3))
    assert_bit_equal(own.run(), expected_of_keys)
    own.inputs = near._replace(bias=at_strides(bias, 2**30 + 11, 9, 3, 1))
    assert_bit_equal(own.run(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_in_several_planes(small_tiles, monkeypatch, dtype):
    own = OURS.call((50, 3, 0, 7), dtype=dtype, capacity=40)
    expected = own.run()
    monkeypatch.setattr(slots, "_MOST_ON_AXIS", 4)
    assert slots.grid(slots.slots(32, 100, 4, 50), 2)[2] > 1
    assert_bit_equal(own.run(), expected)


def test_heads_wider_than_the_kernel_serves_go_to_aten(monkeypatch):
    from fastbert.kernels import attention as forward_kernels

    monkeypatch.setattr(module, "launch", None)
    wide = OURS._replace(backend=backend, headdim=forward_kernels.MAX_HEADDIM + 8)
    wide.call((9, 4), gate=randn(2)).check()
