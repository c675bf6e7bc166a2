"""A weight that changes counts in the next call: in native and accelerated models, also on 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastbert
from fastbert.runtime import prepared
from tests.support.accelerated_models import LAST, first_kept, stock, submodule
from tests.support.model_pairs import native

QUERY = f"{LAST}.attention.self.query"
# the options of accelerate; None: our own model
KINDS = {
    "native": None,
    "accelerated": {},
    "int8": {"dtype": "int8"},
    "int8, op by op": {"dtype": "int8", "layer_norm": False},
}


def made(kind: str) -> nn.Module:
    slow = stock("bert", num_hidden_layers=2)
    return native(slow) if KINDS[kind] is None else fastbert.accelerate(slow, **KINDS[kind])


def made_anew(kind: str, model: nn.Module) -> nn.Module:
    """A model with these weights, of which nothing is derived yet."""
    twin = copy.deepcopy(model)
    if KINDS[kind] is not None:
        return fastbert.accelerate(fastbert.restore(twin), **KINDS[kind])
    prepared.clear(twin)
    return twin


def stepped(model: nn.Module) -> None:
    weight = submodule(model, QUERY).weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()


def scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


def written_behind_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    model.eval()


def other_data(model: nn.Module) -> None:
    weight = submodule(model, QUERY).weight
    weight.data = -2 * weight.data


def other_state(model: nn.Module, **options: bool) -> None:
    state = {k: 0.9 * v if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state, **options)


CHANGES = {
    "a step": stepped,
    "all scaled": scaled,
    "written behind autograd": written_behind_autograd,
    "other data": other_data,
    "load_state_dict": other_state,
    "load_state_dict, assigned": lambda model: other_state(model, assign=True),
    "a weight": lambda model: submodule(model, QUERY).weight.mul_(-1.5),
    "a bias": lambda model: submodule(model, LAST).output.dense.bias.add_(1),
    "a norm": lambda model: submodule(model, LAST).output.LayerNorm.weight.mul_(2),
    "another module": lambda model: setattr(
        submodule(model, LAST).intermediate, "dense", nn.Linear(48, 80, dtype=model.dtype)
    ),
    "another parameter": lambda model: setattr(
        submodule(model, QUERY), "weight", nn.Parameter(torch.randn(48, 48, dtype=model.dtype))
    ),
    "dtype": lambda model: model.to(torch.float32 if model.dtype == torch.float64 else torch.float64),
    "frozen and scaled": lambda model: scaled(model.requires_grad_(False)),
}


@pytest.mark.parametrize("which", KINDS)
@torch.no_grad()
def test_a_changed_weight_counts_in_the_next_call(which):
    model, inputs = made(which), first_kept("bert")
    before = model(**inputs)[0]
    assert prepared.remembered(model)
    for what, change in [*CHANGES.items(), *list(CHANGES.items())[:2]]:
        change(model)
        after = model(**inputs)[0]
        assert after.dtype != before.dtype or not torch.equal(after, before), what
        assert torch.equal(after, made_anew(which, model)(**inputs)[0]), what
        before = after
