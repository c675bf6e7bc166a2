"""nn.Linear and the 8-bit linear layer take the same calls: LINEAR_KINDS of fastbert/layers/linear.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastbert.layers import linear as layers
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.config import EncoderConfig
from fastbert.runtime import prepared

KINDS = {"float": layers.FLOAT, "int8": layers.INT8}


def three(kind: str, bias: bool = True) -> list[nn.Module]:
    torch.manual_seed(0)
    modules = [nn.Linear(24, 16, bias).eval().requires_grad_(False) for _ in range(3)]
    return modules if kind == "float" else [QuantizedLinear.from_linear(m) for m in modules]


def rows(count: int = 7) -> torch.Tensor:
    return torch.randn(count, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_several_as_one_product_give_what_each_gives(kind, count, activation):
    """With and without biases in turn, which are kept apart."""
    modules, x, owner = three(kind)[:count], rows(), nn.Identity()
    bare = copy.deepcopy(modules)
    for module in bare:
        module.bias = None
    for with_bias in (True, False, True):
        y = KINDS[kind].product(x, owner, modules, activation, with_bias)
        expected = [layers.apply_linear(m, x, activation) for m in (modules if with_bias else bare)]
        torch.testing.assert_close(y, torch.cat(expected, 1), atol=1e-6, rtol=1e-6)
    assert bool(prepared.remembered(owner)) is ((kind, count) != ("float", 1)), "joined weights are kept"


def test_the_joined_weights_of_floating_point_layers_get_their_gradients():
    modules, x, owner = three("float"), rows(), nn.Identity()
    for module in modules:
        module.requires_grad_(True)
    layers.FLOAT.product(x, owner, modules).square().sum().backward()
    for module in modules:
        weight, bias = module.weight.detach().requires_grad_(), module.bias.detach().requires_grad_()
        nn.functional.linear(x, weight, bias).square().sum().backward()
        torch.testing.assert_close(module.weight.grad, weight.grad)
        torch.testing.assert_close(module.bias.grad, bias.grad)
    assert not prepared.remembered(owner)


def as_fsdp(*_):
    """A hook that does not keep a layer from packed tokens."""


as_fsdp.__module__ = "torch.distributed.fsdp"


@pytest.mark.parametrize("where", ["attention.self.query", "output.dense", "attention.output.LayerNorm"])
def test_a_layer_has_a_kind_while_all_its_parts_are_plain(where):
    layer = EncoderLayer(EncoderConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24))
    assert layer.look(None).kind is layers.FLOAT
    hook = layer.get_submodule(where).register_forward_hook(as_fsdp)
    assert layer.look(None).kind is None
    hook.remove()
    assert layer.look(None).kind is layers.FLOAT
    layer.output.dense = QuantizedLinear(24, 16)
    assert layer.look(None).kind is None


def test_what_a_layer_has_looked_at_is_looked_at_again():
    layer = EncoderLayer(EncoderConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24))
    for _ in range(2):
        assert layer.look(None).rates == (0.1, 0.1, 0.1)
    assert layer.eval().look(None).rates == (0.0, 0.0, 0.0)
    layer.output.LayerNorm.weight = None
    assert "has no weight" in layer.look(None)
