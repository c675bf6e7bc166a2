"""Training under autocast: its bits are those of casts, and hooks see what they saw."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastbert.execution import eager
from fastbert.layers import float_linear, linear
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.ops import feed_forward, layer_norm
from fastbert.ops import linear as linear_op
from fastbert.runtime import dispatch
from tests.support.hf_models import hf_config

LAYERS, TOKENS, HIDDEN = 3, 24, 48


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 64}
    return AutoModel.from_config(EncoderConfig.from_hf(hf_config("bert", **sizes))).train()


def gradients(bert: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """The hidden states, and every parameter's gradient of a weighted sum of them, with dropout."""
    bert.zero_grad()
    torch.manual_seed(3)
    ids = torch.arange(TOKENS).reshape(2, -1) % bert.config.vocab_size
    with torch.autocast("cpu", dtype):
        states = bert(ids, output_hidden_states=True).hidden_states
    sum((state * torch.linspace(-1, 1, HIDDEN)).sum() for state in states).backward()
    parameters = [p.grad for p in bert.parameters() if p.grad is not None]
    return [t.clone() for t in (*(s.detach() for s in states), *parameters)]


def casts_of(out: torch.Tensor) -> int:
    """How many casts of hidden states backward passes through."""
    found, left, count = set(), [out.grad_fn], 0
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
            if node.name() == "ToCopyBackward0":
                count += tuple(node._input_metadata[0].shape) == (TOKENS, HIDDEN)
    return count


def gpu(monkeypatch) -> None:
    """Query, key and value are one product, both of a feed-forward block one op, as on a GPU."""
    monkeypatch.setattr(float_linear, "pays", lambda *_: True)
    kinds = linear.LINEAR_KINDS
    joins = kinds[torch.nn.Linear]._replace(joins=lambda x, modules: True)
    monkeypatch.setitem(kinds, torch.nn.Linear, joins)


@pytest.mark.parametrize("like_gpu", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_the_bits_are_those_of_casts(dtype, like_gpu, monkeypatch):
    bert = model()
    if like_gpu:
        gpu(monkeypatch)
    with dispatch.use_backend("aten"):
        ours = gradients(bert, dtype)
        monkeypatch.setattr(layer_norm, "_takes_both", lambda *_: False)
        monkeypatch.setattr(eager, "rounds_products", lambda *_: False)
        cast = gradients(bert, dtype)
    assert len(ours) == len(cast) > 16 * LAYERS
    for a, b in zip(ours, cast, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ("intermediate.dense", "attention.self.key", "attention.self", ""))
def test_a_hooked_layer_sees_what_it_saw(path, monkeypatch):
    """The products' input is handed over cast only where no code of a user's sees it."""
    bert, seen = model(), []
    gpu(monkeypatch)
    hooked = bert.encoder.layer[1].get_submodule(path)
    hooked.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    gradients(bert, torch.bfloat16)
    assert seen == [torch.float32]


def test_hidden_states_are_cast_once(monkeypatch):
    """A layer's two norms return what its products read; only the embeddings' output is cast."""
    bert, ids = model(), torch.arange(TOKENS).reshape(1, -1)
    gpu(monkeypatch)
    for rounds, count in ((eager.rounds_products, 1), (lambda *_: False, 2 * LAYERS)):
        monkeypatch.setattr(eager, "rounds_products", rounds)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = bert(ids).last_hidden_state
        assert casts_of(hidden) == count


@pytest.mark.parametrize("backend", ("aten", "reference"))
def test_gradients_of_weights_are_never_rounded(backend, monkeypatch):
    """They are sums in float32; all else has the same bits."""
    bert = model()
    gpu(monkeypatch)
    names = [name for name, p in bert.named_parameters() if "pooler" not in name]
    with dispatch.use_backend(backend):
        cast = gradients(bert, torch.bfloat16)
        for op in (linear_op, feed_forward):
            monkeypatch.setattr(op, "narrows", linear_op._is_trained_wide)
        ours = gradients(bert, torch.bfloat16)
    states = LAYERS + 1
    assert len(ours) == len(cast) == states + len(names)
    for a, b, name in zip(ours, cast, ["state"] * states + names, strict=True):
        if "layer" not in name or "LayerNorm" in name or name.endswith("bias"):
            assert torch.equal(a, b), name
            continue
        # these backends have no kernel for the gradient between the two products
        rounded = torch.equal(a, a.bfloat16().float())
        assert rounded == ("intermediate" in name), name
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("needs", [*itertools.product((True, False), repeat=3)])
def test_each_input_gets_its_gradient_and_no_other(needs, monkeypatch):
    """`linear` and `feed_forward`, also where a residual or an activation leaves the cast to autograd."""
    g = torch.Generator().manual_seed(0)
    sizes = (6, 8), (16, 8), (16,), (8, 16)
    tensors = [torch.randn(*size, generator=g) for size in sizes]
    x, up, bias, down = (t.requires_grad_(n) for t, n in zip(tensors, (*needs, needs[1]), strict=True))
    calls = (
        lambda: linear_op.linear(x, up, bias),
        lambda: linear_op.linear(x, up, bias, "gelu"),
        lambda: linear_op.linear(x, up, bias, residual=torch.ones(6, 16)),
        lambda: linear_op.linear(x, up, bias, residual=torch.ones(6, 16).bfloat16()),
        lambda: feed_forward.feed_forward(x, up, bias, down, "gelu"),
    )
    for call in calls:
        found = []
        for narrows in (lambda *_: False, linear_op._is_trained_wide):
            for op in (linear_op, feed_forward):
                monkeypatch.setattr(op, "narrows", narrows)
            with dispatch.use_backend("aten"), torch.autocast("cpu", torch.bfloat16):
                y = call()
            assert y.requires_grad == any(needs)
            if any(needs):
                inputs = [t for t in (x, up, bias, down) if t.requires_grad]
                found.append((y, *torch.autograd.grad(y.sum(), inputs, allow_unused=True)))
        for a, b in zip(*(found or [(), ()]), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=2**-6, atol=1e-2)


def test_checkpointing_reads_what_was_saved_once(monkeypatch):
    monkeypatch.setattr(linear_op, "narrows", linear_op._is_trained_wide)
    x, weight = (torch.ones(n, 8, requires_grad=True) for n in (6, 4))
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.utils.checkpoint.checkpoint(linear_op.linear, x, weight, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 8), 6.0))


def test_a_gpus_product_is_asked_for_float32_and_no_other():
    with FakeTensorMode():
        dy, x = (torch.empty(6, n, dtype=torch.bfloat16, device="cuda") for n in (4, 3))
        found = linear_op.wide_gradient(dy, x)
    assert (found.dtype, found.shape) == (torch.float32, (4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert not linear_op.narrows(torch.ones(6, 3), torch.ones(4, 3, requires_grad=True))


def test_layers_that_are_computed_again_have_the_same_bits(monkeypatch):
    bert = model()
    gpu(monkeypatch)
    with dispatch.use_backend("aten"):
        once = gradients(bert, torch.bfloat16)
        bert.checkpoint_every = 1
        again = gradients(bert, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
