"""`feed_forward`: frozen inputs, what is saved, autocast, compilation, the layer's choice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastbert.layers import float_linear
from fastbert.layers.dense_norm import feed_forward_norm
from fastbert.ops import feed_forward as op
from fastbert.ops.feed_forward import feed_forward, feed_forward_ref, pays
from fastbert.runtime.table import HALF
from tests.support.ops import DTYPES, pinned, served

SERVED = served("feed_forward")


backend = pinned("feed_forward")


def inputs(rows=5, hidden=4, inner=7, out=3, dtype=torch.float32, grad=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (rows, hidden), (inner, hidden), (inner,), (out, inner)
    return [torch.randn(*s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def by_two(x, up_weight, up_bias, down_weight):
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias)), down_weight)


def test_reference_is_what_pytorch_defines():
    tensors = inputs(dtype=torch.float64)
    torch.testing.assert_close(feed_forward_ref(*tensors, "gelu"), by_two(*tensors))


def saved_bytes(function, *tensors):
    sizes = {}

    def keep(t):
        sizes[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        function(*tensors)
    given = {t.data_ptr() for t in tensors}
    return sum(size for at, size in sizes.items() if at not in given)


def test_backward_keeps_pre_and_its_activation_alone():
    tensors = inputs(rows=64, inner=16)
    assert saved_bytes(lambda *t: feed_forward(*t, "gelu"), *tensors) == 2 * 64 * 16 * 4
    tensors[3].requires_grad_(False)  # its gradient alone asks for the activation
    assert saved_bytes(lambda *t: feed_forward(*t, "gelu"), *tensors) == 64 * 16 * 4


def test_nothing_is_saved_without_gradients(backend):
    tensors = inputs(grad=False)
    y, pre, inner = op.feed_forward_fwd(*tensors, "gelu", None, False)
    assert (pre.shape, inner.shape) == ((0,), (0,))
    torch.testing.assert_close(y, by_two(*tensors))


def test_a_gate_is_two_calls_of_linear(backend):
    x, up, bias, down = inputs(inner=8, out=5)
    down = down[:, :4]
    y = feed_forward(x, up, bias, down, "silu", "second")
    left, right = F.linear(x, up, bias).chunk(2, dim=-1)
    expected = F.linear(left * F.silu(right), down)
    torch.testing.assert_close(y, expected)
    for a, e in zip(*(torch.autograd.grad(t.sum(), (x, up, bias)) for t in (y, expected)), strict=True):
        torch.testing.assert_close(a, e)


def test_no_bias(backend):
    x, up, _, down = inputs()
    y = feed_forward(x, up, None, down, "gelu")
    torch.testing.assert_close(y, by_two(x, up, None, down))
    grads = [torch.autograd.grad(f.sum(), [x, up, down]) for f in (y, by_two(x, up, None, down))]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_does(dtype):
    tensors = inputs(rows=40)
    with torch.autocast("cpu", dtype):
        y, expected = feed_forward(*tensors, "gelu"), by_two(*tensors)
    assert y.dtype == expected.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(y.float().sum(), tensors)
    assert [g.dtype for g in grads] == [torch.float32] * 4


# --- the layer's choice -------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch, noted):
    """As if a GPU's tokens came: which the layer gives to the op."""
    monkeypatch.setattr(float_linear, "pays", lambda x: x.dtype in HALF)
    return noted(float_linear, "feed_forward", lambda *args: args)


def block(dtype=torch.bfloat16):
    torch.manual_seed(0)
    modules = nn.Linear(8, 20), nn.Linear(20, 8), nn.LayerNorm(8)
    return [m.to(dtype) for m in modules], torch.randn(6, 8).to(dtype)


def weighted(y):
    """A loss whose gradient does not vanish behind a norm."""
    return (y.float() * torch.arange(y.numel()).view(y.shape).sin()).sum()


def fed(modules, x, activation="gelu"):
    return feed_forward_norm(*modules, x, activation, 0.0, None, 0)


def test_a_training_layer_calls_the_op(calls):
    modules, x = block()
    y = fed(modules, x)
    assert len(calls) == 1
    parameters = [p for m in modules for p in m.parameters()]
    grads = torch.autograd.grad(weighted(y), parameters)
    up, down, norm = modules
    expected = norm(x + down(F.gelu(up(x))))
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
    for a, e in zip(grads, torch.autograd.grad(weighted(expected), parameters), strict=True):
        assert (a.float() - e.float()).norm() <= 0.03 * e.float().norm()


def test_a_layer_that_is_not_trained_or_not_plain_does_not(calls):
    modules, x = block()
    with torch.no_grad():
        fed(modules, x)
    for module in modules:
        module.requires_grad_(False)
    fed(modules, x)
    assert calls == []
    fed(modules, x.clone().requires_grad_())  # what is before it is trained
    assert len(calls) == 1
    modules, x = block(torch.float32)
    fed(modules, x)
    for i in (0, 1):
        modules, x = block()
        seen = []
        modules[i].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        fed(modules, x)
        assert seen == [1]
    modules, x = block()
    fed([nn.Sequential(modules[0], nn.GELU()), *modules[1:]], x, None)
    assert len(calls) == 1


def test_pays_on_a_gpu_in_half_precision():
    assert not pays(torch.empty(3, 4, dtype=torch.bfloat16))
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        for dtype in DTYPES:
            x = torch.empty(3, 4, dtype=dtype, device="cuda")
            assert pays(x) == (dtype in HALF)
            assert not pays(x, "first")


def test_pays_by_the_dtype_that_autocast_chooses(monkeypatch):
    fake = torch._subclasses.FakeTensorMode()
    monkeypatch.setattr(op.checks, "autocast_dtype", lambda x: torch.bfloat16)
    with fake:
        assert pays(torch.empty(3, 4, device="cuda"))
